"""How long the gradients of the first step are, as the optimizer reads them, where ranks hold parts of them.

No rank has such a gradient whole, but squares of norms add up over parts. What an optimizer makes of it does not tell its length:
Adam divides gradients by their own size, so one that is summed where the mean is meant, or clipped by the norm of a part,
moves parameters almost alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final
from weakref import WeakKeyDictionary

import numpy as np

from opdrift.case import Case
from opdrift.compare import Difference, dtype_epsilon
from opdrift.contents import Contents
from opdrift.diagnose.portions.step import FirstStep, rounding_of_gradients
from opdrift.flow import is_collective
from opdrift.gradients import Gradients, hands_on
from opdrift.records import Sides
from opdrift.tracefile.reader import Trace

#: Ratios of norms that are as near to each other as this, or as rounding leaves them, are one factor.
_SAME: Final = 1e-3
#: The same gradients are not told apart by more padding than this, in parts of them.
_PADDED: Final = 2
#: A reduction's result is taken out of its buffer, cast, and moved to where the optimizer is.
_COPIES: Final = 4

Names = frozenset[str]


@dataclass(frozen=True, slots=True)
class Norms:
    """The gradients of the first step of two runs, by their norms.

    Attributes:
        count: Of how many parameters.
        relative: The root of the sum of (||right|| - ||left||)^2 over ||left|| of all: at least so far are they apart.
        factor: The one number by which all of the right run are longer; None if there is none.
        apart: Names of the parameters whose gradients rounding does not explain, by themselves.
        limit: What rounding explains of `relative`.
        op: Where each run reads the first of them last before its step.
    """

    count: int
    relative: float
    factor: float | None
    apart: tuple[str, ...]
    limit: float
    op: Sides[int]

    @property
    def agree(self) -> bool:
        """Whether rounding explains how far they are apart."""
        return self.relative <= self.limit


@dataclass(slots=True)
class _Length:
    """Of the gradients of some parameters: ||.||^2, and of how many elements."""

    ssq: float = 0.0
    n: int = 0


@dataclass(frozen=True, slots=True)
class _Read:
    """What a rank's optimizer reads: lengths as the gradients are read first, before a clipping, and last."""

    lengths: tuple[Mapping[Names, _Length], Mapping[Names, _Length]]
    unit: float
    first: int


def norms_of(case: Case, fellows: Sides[Sequence[Trace]]) -> Norms | None:
    """The norms of both runs' gradients; None where they are not known, or not of the same parameters, or no rank has others beside it.

    Args:
        case: Both runs, or one rank of each.
        fellows: The traces of the other ranks.
    """
    if not (fellows.left or fellows.right):
        return None
    sides = ((case.left, fellows.left), (case.right, fellows.right))
    if any(1 + len(others) != (side.trace.header.world_size or 1) for side, others in sides):
        return None
    all_read = [[_read_by(side.contents), *map(_read_by, others)] for side, others in sides]
    read = [[each for each in side if each is not None] for side in all_read]
    if any(len(known) < len(side) for known, side in zip(read, all_read, strict=True)):
        return None
    clipped = _compared(case, read, 1)
    whole = _compared(case, read, 0)
    return clipped if whole is None or whole.agree else whole


def _compared(case: Case, read: Sequence[Sequence[_Read]], moment: int) -> Norms | None:
    """The norms as they are read first (0) or last (1)."""
    groups = _together(names for side in read for each in side for names in each.lengths[moment])
    pairs = [_both(read, group, moment) for group in groups]
    known = [(group, *pair) for group, pair in zip(groups, pairs, strict=True) if pair is not None]
    total = math.sqrt(sum(left**2 for _, left, _ in known))
    if len(known) < len(pairs) or not total:
        return None
    count = sum(map(len, groups))
    unit = max(each.unit for side in read for each in side)
    limit = rounding_of_gradients(case, unit, count)
    gaps = {group: abs(right - left) for group, left, right in known}
    return Norms(
        count=count,
        relative=math.sqrt(sum(gap**2 for gap in gaps.values())) / total,
        factor=_factor([(left, right) for _, left, right in known], total, limit),
        apart=tuple(
            name
            for group, left, _ in sorted(known, key=lambda each: -gaps[each[0]])
            if gaps[group] > limit * max(left, total)
            for name in sorted(group)
        ),
        limit=limit,
        op=Sides(*(side[0].first for side in read)),
    )


def by_norms(norms: Norms, updates: FirstStep | None) -> FirstStep | None:
    """The first step as the norms of its gradients tell it, where they do not agree; else what is known, and that they do.

    Args:
        norms: Of the gradients.
        updates: What is known of the step without them.
    """
    if norms.agree:
        return None if updates is None else replace(updates, lengths=norms.relative)
    gap = Difference(
        False, True, Sides(0, 0), Sides(0, 0),
        norms.relative, None, None, None, None, None, None, "statistics", math.inf, 0,
    )  # fmt: skip
    return FirstStep(
        what="norm",
        count=norms.count,
        relative=norms.relative,
        factor=norms.factor,
        row=-1,
        op=Sides(norms.op.left, norms.op.right),
        values=Sides(None, None),
        gap=gap,
        limit=norms.limit,
        noise={},
        apart=norms.apart,
        updates=None if updates is None else updates.relative,
    )


def _factor(pairs: Sequence[tuple[float, float]], total: float, limit: float) -> float | None:
    told = [(left, right) for left, right in pairs if max(left, right) > _SAME * total]
    squares = [sum(pair[n] ** 2 for pair in told) for n in (0, 1)]
    factor = math.sqrt(squares[1] / squares[0]) if all(squares) else 0.0
    near = min(max(_SAME, limit), abs(factor - 1) / 10)
    alike = all(left and math.isclose(right / left, factor, rel_tol=near) for left, right in told)
    return factor if factor and alike else None


def _together(sets: Iterable[Names]) -> list[Names]:
    """Sets of parameters, those that have one in common as one: a buffer holds parts of several."""
    found: list[Names] = []
    for names in sets:
        joined = [each for each in found if each & names]
        found = [each for each in found if not each & names]
        found.append(names.union(*joined))
    return found


def _both(read: Sequence[Sequence[_Read]], group: Names, moment: int) -> tuple[float, float] | None:
    """The norms of some parameters' gradients in both runs; None where one holds others, or how often is not known."""
    sums = [
        [
            length
            for each in side
            for names, length in each.lengths[moment].items()
            if names <= group
        ]
        for side in read
    ]
    sizes = [sum(length.n for length in side) for side in sums]
    least = min(sizes)
    times = [_times(size, least) for size in sizes] if least else [None]
    if None in times:
        return None
    norms = [
        math.sqrt(sum(length.ssq for length in side) / (number or 1))
        for side, number in zip(sums, times, strict=True)
    ]
    return norms[0], norms[1]


def _times(size: int, least: int) -> int | None:
    """How often ranks hold the same: parts may be padded, replicas are not."""
    if size % least == 0:
        return size // least
    return 1 if size < _PADDED * least else None


#: What each rank reads is the same whichever rank of the other run it is held against.
_known: Final[WeakKeyDictionary[Trace, _Read | None]] = WeakKeyDictionary()


def _read_by(rank: Contents | Trace) -> _Read | None:
    """What a rank reads, worked out once."""
    trace = rank.trace if isinstance(rank, Contents) else rank
    if trace not in _known:
        _known[trace] = _read(rank if isinstance(rank, Contents) else Contents(trace))
    return _known[trace]


def _read(contents: Contents) -> _Read | None:
    """The gradients that the first step of an optimizer reads; None where one is not known."""
    gradients = Gradients(contents)
    ops = _first_step(contents.trace, gradients)
    begun: dict[tuple[int, ...], int] = {}
    last: dict[tuple[int, ...], int] = {}
    first = -1
    for op in ops:
        if hands_on(contents.trace.op_info(int(contents.trace.ops.signature[op]))):
            continue  # on the way to a reduction
        for value in contents.trace.ops.inputs[op].tolist():
            if value > 0 and _is_reduced(contents, value):
                place = _place(contents, value)
                begun.setdefault(place, value)
                last[place] = value
                first = op if first < 0 else first
    if _overlap(last):
        return None  # what is read whole here and in parts there would count twice
    lengths = tuple(_lengths(contents, gradients, values.values()) for values in (begun, last))
    if lengths[0] is None or lengths[1] is None:
        return None
    return _Read((lengths[0], lengths[1]), _unit(contents.trace, last.values()), first)


def _lengths(
    contents: Contents, gradients: Gradients, values: Iterable[int]
) -> dict[Names, _Length] | None:
    """How long gradients are, by the parameters that they update; None where one is not known, or there is none."""
    held: dict[int, set[str]] = {}
    for value in values:
        updated = gradients.of([value])
        if updated is not None:
            held.setdefault(_told_by(contents, value), set()).update(updated.names)
    found: dict[Names, _Length] = {}
    for value, names in held.items():
        fingerprint = contents.trace.fingerprint(value) if value >= 0 else None
        if fingerprint is None or fingerprint.nonfinite:
            return None
        length = found.setdefault(frozenset(names), _Length())
        length.ssq += fingerprint.ssq
        length.n += fingerprint.n
    return found or None


def _unit(trace: Trace, gradients: Iterable[int]) -> float:
    """By how much of itself the coarsest type rounds in which gradients are added up, or read."""
    units = (dtype_epsilon(trace.meta(value).dtype) / 2 for value in gradients)
    return max((_unit_of_reductions(trace), *units))


def _unit_of_reductions(trace: Trace) -> float:
    """By how much of itself the coarsest type rounds in which gradients are added up over ranks."""
    _, first = np.unique(trace.ops.signature, return_index=True)  # one op of each kind is enough
    dtypes = [
        trace.meta(value).dtype
        for op in first.tolist()
        if "reduce" in (name := trace.op_info(int(trace.ops.signature[op])).name)
        and is_collective(name)
        for value in trace.ops.inputs[op].tolist()
        if value > 0
    ]
    return max((dtype_epsilon(dtype) / 2 for dtype in dtypes), default=0.0)


def _first_step(trace: Trace, gradients: Gradients) -> list[int]:
    """The ops between the first backward pass whose gradients change a parameter and the forward pass after it."""
    ops = trace.ops
    forward = (ops.call != 0) & (ops.phase == 0)
    after = np.arange(len(ops)) > (int(np.argmax(ops.phase)) if ops.phase.any() else len(ops))
    passes = np.cumsum(forward)
    outside = np.flatnonzero(after & (ops.call == 0) & (ops.phase == 0))
    for op in outside.tolist():
        info = trace.op_info(int(ops.signature[op]))
        if info.mutates and any(map(gradients.held, ops.outputs[op].tolist())):
            found: list[int] = outside[passes[outside] == passes[op]].tolist()
            return found
    return []


def _is_reduced(contents: Contents, value: int, copies: int = _COPIES) -> bool:
    """Whether what a value holds, a backward pass made, or a reduction that leaves each rank a part; or it is a copy of such."""
    states, trace = contents.states, contents.trace
    state = int(states.of[value])
    while state >= 0:
        writer = int(states.writer[state])
        if writer >= 0:
            info = trace.op_info(int(trace.ops.signature[writer]))
            if trace.ops.phase[writer] or (
                is_collective(info.name) and "reduce_scatter" in info.name
            ):
                return True
            given = trace.ops.inputs[writer].tolist()[-1:]
            if (
                copies
                and hands_on(info)
                and any(_is_reduced(contents, v, copies - 1) for v in given)
            ):
                return True
        state = int(states.before[state])
    return False


def _place(contents: Contents, value: int) -> tuple[int, ...]:
    columns = contents.trace.values
    span = int(contents.layouts.span.at(value))
    return int(columns.storage[value]), int(columns.offset[value]), span


def _overlap(places: Iterable[tuple[int, ...]]) -> bool:
    """Whether tensors at two of these places have elements in common, as far as the first and last of each tell."""
    ordered = sorted(places)
    return any(
        one[0] == other[0] and other[1] < one[1] + one[2] for one, other in pairwise(ordered)
    )


def _told_by(contents: Contents, value: int) -> int:
    """The value whose fingerprint holds this one: itself, or all that lies in its buffer; -1 where none is known."""
    if contents.trace.fingerprint(value) is not None:
        return value
    base = int(contents.states.base[contents.states.of[value]])
    return base if base >= 0 and contents.trace.fingerprint(base) is not None else -1
