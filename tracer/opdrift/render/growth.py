"""The growth of a difference in few rows: neighbouring stretches that tell the same are put together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from opdrift.records import GrowthPoint
from opdrift.render.words import cell, size

#: A training run passes each module many times; more rows than this are no longer read.
ROWS: Final = 15
#: Modules that a row names one by one; of more, the first and the last.
_NAMED: Final = 3
#: What joins the first and the last module, here and in the diagnosis.
_TO: Final = " ... "
#: Below this a difference is as good as none, in powers of ten: the last bit of fp64.
_NONE: Final = -16.0


@dataclass(frozen=True, slots=True)
class Stretch:
    """A row: neighbouring points of the diagnosis.

    Attributes:
        place: The modules, ready to print.
        ops: How many ops.
        differing: How many of them differ.
        largest: The largest relative difference, None where none is known.
        unpaired: How many only the left run has.
    """

    place: str
    ops: int
    differing: int
    largest: float | None
    unpaired: int = 0

    @property
    def said(self) -> str:
        """The largest difference in words."""
        if self.differing:
            return "unknown" if self.largest is None else size(self.largest)
        if self.unpaired:  # what ops without a counterpart computed was compared with nothing
            return "rest equal" if self.unpaired < self.ops else "left only"
        return "equal"


def stretches(points: Sequence[GrowthPoint]) -> list[Stretch]:
    """At most `ROWS` rows: the two neighbours that differ least are merged, until they are few.

    Sizes are compared by their logarithm, as the bars are drawn; of pairs that are equally alike,
    the one with the fewest ops is merged.
    """
    groups = [[point] for point in points]
    while len(groups) > ROWS:
        at = min(
            range(len(groups) - 1),
            key=lambda i: (_step(groups[i], groups[i + 1]), _ops(groups[i]) + _ops(groups[i + 1])),
        )
        groups[at : at + 2] = [groups[at] + groups[at + 1]]
    return [
        Stretch(
            _place(group),
            _ops(group),
            sum(p.differing for p in group),
            _largest(group),
            sum(p.unpaired for p in group),
        )
        for group in groups
    ]


def _ops(group: Sequence[GrowthPoint]) -> int:
    return sum(p.ops for p in group)


def _largest(group: Sequence[GrowthPoint]) -> float | None:
    known = [
        p.relative_difference for p in group if p.differing and p.relative_difference is not None
    ]
    return max(known, key=lambda d: math.inf if math.isnan(d) else d, default=None)


def _step(before: Sequence[GrowthPoint], after: Sequence[GrowthPoint]) -> float:
    """How much a row would hide that held both; of an unknown size nothing is hidden by a known one."""
    levels: list[float | None] = []
    for group in (before, after):
        largest = _largest(group)
        if largest is None and any(p.differing for p in group):
            levels.append(None)
        else:
            levels.append(_level(largest or 0.0))
    left, right = levels
    if left is not None and right is not None:
        return abs(left - right)
    other = right if left is None else left
    # that a stretch differs at all must not vanish in one that is equal
    return -_NONE if other == _NONE else 0.0


def _level(difference: float) -> float:
    if not math.isfinite(difference):
        return 1.0
    return max(_NONE, math.log10(difference)) if difference > 0 else _NONE


def _place(group: Sequence[GrowthPoint]) -> str:
    """The modules in the order in which they ran; the root's own ops only where there are no others."""
    names = list(dict.fromkeys(name for p in group for name in p.module.split(_TO)))
    named = [n for n in names if n] or names
    whole = not any(_TO in p.module for p in group)  # else the diagnosis left some out already
    if whole and len(named) <= _NAMED:
        return ", ".join(cell(n) for n in named)
    ends = named if len(named) > 1 else names
    return f"{cell(ends[0])}{_TO}{cell(ends[-1])}"
