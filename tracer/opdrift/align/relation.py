"""Say whether two traces are of runs that can be held against each other at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from opdrift import tfp1
from opdrift.align import Pairing
from opdrift.contents import Contents
from opdrift.tokens import Words
from opdrift.tracefile.fingerprints import Fingerprint
from opdrift.tracefile.reader import Trace

#: Where fewer ops than this part of the longer run are paired, they are paired by chance.
_PAIRED_SHARE: Final = 0.1
_WEIGHTS: Final = frozenset({"parameter", "buffer"})


def nothing_in_common(left: Contents, right: Contents, pairing: Pairing) -> bool:
    """Whether two runs share no module, no name of a weight, no content, and hardly an op."""
    longer = max(len(left.trace.ops), len(right.trace.ops))
    if not len(left.trace.ops) or not len(right.trace.ops):
        return False
    if len(pairing.left) >= _PAIRED_SHARE * longer:
        return False
    if _modules(left.trace) & _modules(right.trace) or _weights(left.trace) & _weights(right.trace):
        return False
    return not len(np.intersect1d(_contents(left), _contents(right)))


def _modules(trace: Trace) -> set[tuple[str, str]]:
    """Paths with the types of their modules: in many models something is called 0."""
    return {(path, type_) for path, type_ in trace.module_types.items() if path}


def _weights(trace: Trace) -> set[str]:
    return {leaf.name for leaf in trace.leaves if leaf.kind in _WEIGHTS} - {""}


def _contents(contents: Contents) -> Words:
    """The contents of values; all zeros, all ones and the like are in every program."""
    prints = contents.trace.fingerprints
    values = prints.value[prints.number("min") < prints.number("max")]
    found: Words = np.unique(contents.by_place[values])
    return found


@dataclass(frozen=True, slots=True)
class InParts:
    """An input that one run gives to one call, and the other, piece by piece, to several.

    Attributes:
        name: Of the input.
        number: 0 where the right run gives it in parts, 1 where the left one does.
        sizes: Elements of each part.
    """

    name: str
    number: int
    sizes: tuple[int, ...]


def in_parts(left: Contents, right: Contents) -> InParts | None:
    """The first input that is, digest for digest, the inputs of several calls of the other run in a row.

    That is one long call against a prefill and cached steps. A digest tells it where the parts lie one after
    another in memory, as the tokens of one sequence do; so nothing is taken for a part that is none.
    """
    inputs = _inputs(left.trace), _inputs(right.trace)
    for name in inputs[0].keys() & inputs[1].keys():
        for number, (whole, parts) in enumerate((inputs, inputs[::-1])):
            found = _composed(whole[name][0], parts[name])
            if found is not None:
                return InParts(name, number, found)
    return None


def _inputs(trace: Trace) -> dict[str, list[Fingerprint]]:
    found: dict[str, list[Fingerprint]] = {}
    for leaf in trace.leaves:
        fingerprint = trace.fingerprint(leaf.value) if leaf.kind == "input" and leaf.name else None
        if fingerprint is not None:
            found.setdefault(leaf.name, []).append(fingerprint)
    return found


def _composed(whole: Fingerprint, parts: Sequence[Fingerprint]) -> tuple[int, ...] | None:
    """Sizes of the first parts, two at least, that together are the whole; None if they are not."""
    width = tfp1.Code(whole.code).bytes
    if any(part.key == whole.key for part in parts):
        return None  # the other run gives all of it to a call, too
    taken: list[tuple[int, int]] = []
    sizes: list[int] = []
    for part in parts:
        if part.code != whole.code or sum(sizes) >= whole.n:
            break
        taken.append((part.raw, tfp1.digits(part.n, width)))
        sizes.append(part.n)
    if len(sizes) < 2 or sum(sizes) != whole.n or tfp1.concat(taken) != whole.raw:
        return None
    return tuple(sizes)
