"""Stretches that only one run has: what they consist of, and which op stands for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from opdrift.case import Case, Side
from opdrift.flow import ancestry
from opdrift.origins.kinds import computes, draws, makes_infinite, makes_nan
from opdrift.pairs import EQUAL
from opdrift.records import COMPILED, Sides
from opdrift.tokens import base

#: Ops that add a product to something, and what does the same in steps.
_SUMS: Final = frozenset({"addmm", "addmv", "addbmm", "baddbmm", "addr", "linear"})
_STEPS: Final = frozenset(
    {"mm", "mv", "bmm", "matmul", "dot", "ger", "outer", "sum", "mul", "add", "add_"}
)
#: Ops that hand numbers on in another type.
_CASTING: Final = frozenset({"_to_copy", "to"})
#: Parts of the names of ops that do a whole attention.
_FUSED: Final = ("scaled_dot_product", "multi_head_attention", "encoder_layer_fwd")


@dataclass(frozen=True, slots=True)
class Region:
    """What two corresponding values were made of, back to what the runs have in common.

    Attributes:
        ops: Ops without a counterpart, per side, in order.
        boundary: Values at the other end, per side.
    """

    ops: Sides[tuple[int, ...]]
    boundary: Sides[tuple[int, ...]]

    @property
    def empty(self) -> bool:
        """Whether neither side has an op of its own here."""
        return not self.ops.left and not self.ops.right


def region_of(case: Case, left: int, right: int, *, since_agreed: bool = False) -> Region:
    """The region behind two values that no one pair made; `since_agreed` ends it where both last read the same."""
    agreed = case.compared.agreed if since_agreed else (None, None)
    a = ancestry(case.left.contents, left, case.pairing.right_of, agreed[0])
    b = ancestry(case.right.contents, right, case.pairing.left_of, agreed[1])
    return Region(Sides(a.ops, b.ops), Sides(a.boundary, b.boundary))


def representative(
    case: Case, region: Region, consumer: Sides[int | None], *, nonfinite: bool
) -> Sides[int | None]:
    """The op that stands for a region.

    The first that repeats an op of its own run and returns something else; else the first that makes NaN
    or infinities, if those are what differs; else the first random draw; else the first op that computes on the side that has fewer of them (there the fused attention, if it is
    one of them; beside a product with a sum in one, the last op that does them apart); else the op that reads what comes out, if it
    makes infinities of it, or if one side alone casts; else, if one side alone computes, the first op that does so with what the other
    hands on as it is, or the last of all; else the last ops, if both sides take or move elements; else the op that reads what
    comes out.
    """
    sides = ((case.left, region.ops.left), (case.right, region.ops.right))
    for number, (side, ops) in enumerate(sides):
        again = case.pairing.repeats[number]
        first = next(
            (op for op in ops if again[op] >= 0 and _strays(side, op, int(again[op]))), None
        )
        if first is not None:
            return _on(number, first)
    for makes in (makes_nan, makes_infinite) if nonfinite else ():
        for number, (side, ops) in enumerate(sides):
            first = next((op for op in ops if makes(side, op)), None)
            if first is not None:
                return _on(number, first)
    for number, (side, ops) in enumerate(sides):
        first = next((op for op in ops if draws(side, op)), None)
        if first is not None:
            return _on(number, first)
    computing = [_computing(side, ops) for side, ops in sides]
    if len(computing[0]) == len(computing[1]) == 1:
        return Sides(computing[0][0], computing[1][0])
    fewer = 0 if len(computing[0]) <= len(computing[1]) else 1
    if computing[fewer]:
        side = sides[fewer][0]
        if _is_sum_of(sides[fewer][0], computing[fewer], sides[1 - fewer][0], computing[1 - fewer]):
            pair = computing[fewer][0], computing[1 - fewer][-1]
            return Sides(*(pair if fewer == 0 else pair[::-1]))
        fused = (op for op in computing[fewer] if any(f in side.name(op) for f in _FUSED))
        return _on(fewer, next(fused, computing[fewer][0]))
    other = computing[1 - fewer]
    readers = ((case.left, consumer.left), (case.right, consumer.right))
    if any(op is not None and makes_infinite(side, op) for side, op in readers):
        return consumer  # what an epsilon that is missing would have kept from it
    if other and consumer == Sides(None, None):
        return _on(1 - fewer, other[0])
    if other:
        if all(base(sides[1 - fewer][0].name(op)) in _CASTING for op in other):
            return consumer  # what computes in the other type
        departing = _departing(case, region, 1 - fewer)
        return _on(1 - fewer, other[-1] if departing is None else departing)
    if all(ops and not side.contents.tokens.factory[ops[-1]] for side, ops in sides):
        return Sides(region.ops.left[-1], region.ops.right[-1])
    return consumer


def _departing(case: Case, region: Region, number: int) -> int | None:
    """The first op that computes with what the other run hands on as it is, or with a view of it.

    A mask that is made for it, say, is made before, and is none of what the runs have in common.
    """
    side, ops = ((case.left, region.ops.left), (case.right, region.ops.right))[number]
    mine, theirs = (region.boundary.left, region.boundary.right)[:: 1 if number == 0 else -1]
    of, trace = side.contents.states.of, side.trace
    common = {int(of[v]) for v in mine if any(_same(case, number, v, other) for other in theirs)}
    for op in ops:
        if common.isdisjoint(of[trace.ops.inputs[op]].tolist()):
            continue
        if computes(side, op):
            return op
        common.update(of[trace.ops.outputs[op]].tolist())
    return None


def _same(case: Case, number: int, mine: int, theirs: int) -> bool:
    """Whether values of one run (0 or 1) and the other are known to be equal."""
    pair = (mine, theirs) if number == 0 else (theirs, mine)
    status = case.compared.status(np.array(pair[:1]), np.array(pair[1:]))
    return int(status[0]) == EQUAL


def is_sum(side: Side, op: int) -> bool:
    """Whether an op adds a product to something."""
    return base(side.name(op)) in _SUMS


def _is_sum_of(side: Side, one: Sequence[int], other: Side, steps: Sequence[int]) -> bool:
    """Whether one side does in one op what the other does in several: a product, and then a sum."""
    names = {base(other.name(op)) for op in steps}
    return len(one) == 1 and is_sum(side, one[0]) and len(names) > 1 and names <= _STEPS


def _strays(side: Side, op: int, before: int) -> bool:
    """Whether an op returns something else of the same inputs than an earlier op of its run."""
    ops, content = side.trace.ops, side.contents.by_lineage
    inputs = content[ops.inputs[op]], content[ops.inputs[before]]
    outputs = content[ops.outputs[op]], content[ops.outputs[before]]
    return np.array_equal(*inputs) and not np.array_equal(*outputs)


def _computing(side: Side, ops: Sequence[int]) -> list[int]:
    return [op for op in ops if computes(side, op)]


def _on(side: int, op: int) -> Sides[int | None]:
    return Sides(op, None) if side == 0 else Sides(None, op)


def unseen_results(case: Case, region: Region, left: int, right: int) -> Region:
    """Add the compiled region of whose kernels a value came, which no op made.

    Where its boundary was not recorded, it is whatever compiled code ran without counterpart.
    """
    ops = [region.ops.left, region.ops.right]
    for number, (side, value, partner) in enumerate(
        ((case.left, left, case.pairing.right_of), (case.right, right, case.pairing.left_of))
    ):
        states = side.contents.states
        state = int(states.of[value])
        if ops[number] or states.writer[state] >= 0 or side.leaves.of(value):
            continue
        call = side.regions.around.get(int(states.first_read[state]))
        if call is not None:
            ops[number] = (call.op,)
            continue
        compiled = (side.trace.ops.flags & COMPILED != 0) & (partner < 0)
        compiled[np.array(list(side.regions.at), np.int64)] = False
        ops[number] = tuple(np.flatnonzero(compiled).tolist())
    return Region(Sides(ops[0], ops[1]), region.boundary)
