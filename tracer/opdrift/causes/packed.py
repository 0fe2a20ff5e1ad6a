"""Weights that one run holds one after another in a single tensor: packed projections of query, key and value."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from typing import Final

from opdrift.case import Side
from opdrift.causes.evidence import SIDES, Evidence, cause, some
from opdrift.compare import number
from opdrift.composition import joined, same
from opdrift.records import Cause, Leaf
from opdrift.tracefile.fingerprints import Fingerprint

#: More parts than this are not tried in every order.
_PARTS: Final = 4
#: Sums of squares of parts and of the whole, of the same numbers.
_SAME_SUM: Final = 1e-9


@dataclass(frozen=True, slots=True)
class Packed:
    """A parameter that is as long as several of the other run.

    Attributes:
        number: The side that has it: 0 left, 1 right.
        whole: Its leaf.
        parts: Leaves of the other side, in the order in which they are read.
        order: The same in the order in which they lie in it; None if it does not hold their numbers so.
    """

    number: int
    whole: Leaf
    parts: tuple[Leaf, ...]
    order: tuple[Leaf, ...] | None


def packed_in(e: Evidence) -> list[Packed]:
    """Parameters that only one run has, and that are as long as those together that only the other has."""
    sides = e.case.left, e.case.right
    apart = [_alone(sides[0], sides[1]), _alone(sides[1], sides[0])]
    read = [_read(side, e.ops_of(n)) for n, side in enumerate(sides)]
    found = []
    for n, own in enumerate(sides):
        other = sides[1 - n]
        for whole in apart[n]:
            if whole.value in read[n]:
                tried = _candidates(own, whole, other, apart[1 - n], read[1 - n])
                found += [
                    Packed(n, whole, parts, _order(own, whole, other, parts)) for parts in tried
                ][:1]
    return found


def _alone(side: Side, other: Side) -> list[Leaf]:
    """Parameters of names that the other run does not have, in the order of their first use."""
    names = other.leaves.by_name
    found = {
        leaf.name: leaf
        for leaf in side.leaves.starts
        if leaf.kind == "parameter" and leaf.name and leaf.name not in names
    }
    states = side.contents.states
    return sorted(found.values(), key=lambda leaf: int(states.first_read[states.of[leaf.value]]))


def _read(side: Side, ops: list[int]) -> set[int]:
    """Parameters that ops read, as the values of their leaves."""
    return {
        leaf.value
        for op in ops
        for value in side.trace.ops.inputs[op].tolist()
        for leaf in side.leaves.of(value)
        if leaf.kind == "parameter"
    }


def _candidates(
    own: Side, whole: Leaf, other: Side, alone: list[Leaf], read: set[int]
) -> Iterator[tuple[Leaf, ...]]:
    """Runs of parameters, used one after another, that have its number of dims and together its size."""
    shape = own.trace.meta(whole.value).shape
    alike = [leaf for leaf in alone if other.trace.meta(leaf.value).shape[1:] == shape[1:]]
    alike = [leaf for leaf in alike if len(other.trace.meta(leaf.value).shape) == len(shape)]
    for count in range(2, _PARTS + 1):
        for start in range(len(alike) - count + 1):
            parts = tuple(alike[start : start + count])
            sizes = [math.prod(other.trace.meta(leaf.value).shape) for leaf in parts]
            if sum(sizes) == math.prod(shape) and read & {leaf.value for leaf in parts}:
                yield parts


def _order(own: Side, whole: Leaf, other: Side, parts: tuple[Leaf, ...]) -> tuple[Leaf, ...] | None:
    held = own.fingerprint(whole.value)
    prints = {leaf.name: other.fingerprint(leaf.value) for leaf in parts}
    if held is None or None in prints.values():
        return None
    for order in permutations(parts):
        if len({p.code for p in prints.values() if p is not None} | {held.code}) == 1 and same(
            joined(p for leaf in order if (p := prints[leaf.name]) is not None), held
        ):
            return order
    return None


# ---- the cause -----------------------------------------------------------------------------------------


def packed_weights(e: Evidence) -> Cause | None:
    """One run multiplies by a packed weight, whose parts are not the other run's weights, or not where they are used."""
    if e.origin.story != "region" or not e.size.material or e.case.by_sample:
        return None
    found = packed_in(e)
    unlike = [each for each in found if each.order is None]
    if unlike:
        return _other_numbers(e, unlike[0])
    moved = [each for each in found if each.order is not None and each.order != each.parts]
    if moved:
        return _other_order(e, moved[0])
    return _used_otherwise(e, found[0]) if found else None


def _other_numbers(e: Evidence, found: Packed) -> Cause | None:
    own, other = (e.case.left, e.case.right) if found.number == 0 else (e.case.right, e.case.left)
    held = own.fingerprint(found.whole.value)
    prints = [other.fingerprint(leaf.value) for leaf in found.parts]
    if held is None or None in prints or any(p.code != held.code for p in prints if p is not None):
        return None
    known = [p for p in prints if p is not None]
    alike = _same_numbers(held, known)
    names = some([leaf.name for leaf in found.parts])
    apart = (
        "the same numbers in another order: rows of several heads that lie interleaved, say"
        if alike
        else f"other numbers: its norm is {number(math.sqrt(held.ssq))}, theirs together"
        f" {number(math.sqrt(sum(p.ssq for p in known)))}"
    )
    return cause(
        "weights",
        "likely",
        f"{found.whole.name} of the {SIDES[found.number]} run is as long as {names} of the {SIDES[1 - found.number]} one"
        f" together, and does not hold them one after another",
        [f"{found.whole.name} holds {apart}", *_readers(e, found)],
        f"Build {found.whole.name} anew: torch.cat of {names} along the first dim, in the order in which the program"
        " splits its result; compare the parts with the originals.",
    )


def _same_numbers(held: Fingerprint, parts: list[Fingerprint]) -> bool:
    return (
        math.isclose(held.ssq, sum(p.ssq for p in parts), rel_tol=_SAME_SUM)
        and held.min == min(p.min for p in parts)
        and held.max == max(p.max for p in parts)
    )


def _other_order(e: Evidence, found: Packed) -> Cause:
    assert found.order is not None
    held = ", ".join(leaf.name for leaf in found.order)
    used = ", ".join(leaf.name for leaf in found.parts)
    return cause(
        "weights",
        "likely",
        f"{found.whole.name} of the {SIDES[found.number]} run holds, one after another, {held}; the"
        f" {SIDES[1 - found.number]} run uses them as {used}",
        ["each part is equal bit for bit", *_readers(e, found)],
        "Compare the order in which the weights are put together with the order in which the program splits the result:"
        " query, key, value, or another.",
    )


def _used_otherwise(e: Evidence, found: Packed) -> Cause:
    held = ", ".join(leaf.name for leaf in found.parts)
    return cause(
        "structure",
        "likely",
        f"{found.whole.name} of the {SIDES[found.number]} run holds {held} one after another, and its product is taken apart"
        " or used otherwise than the products of the parts",
        ["each part is equal bit for bit", *_readers(e, found)],
        "Compare how the program splits the result with what it then does with each piece: which one is key or value, gate"
        " or up; whether heads lie interleaved.",
    )


def _readers(e: Evidence, found: Packed) -> list[str]:
    return [f"{name}: {side.place(op)}" for name, side, op in e.sides if op is not None] + [
        f"in the {SIDES[found.number]} run one product makes what the other run makes in {len(found.parts)}"
    ]
