"""Leaves that differ before any op did anything to them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from opdrift.case import Case, Side
from opdrift.leaves import Use, match_rows
from opdrift.origins.model import NO_OPS, Origin
from opdrift.pairs import DIFFERENT, EQUAL
from opdrift.records import Leaf, Sides
from opdrift.shards import differently_sharded, parts_not_followed
from opdrift.starts import MADE_BEFORE_USE, Start


@dataclass(frozen=True, slots=True)
class LeafPair:
    """Rows of one name on both sides.

    Attributes:
        leaf: The rows, with the contents that count.
        writers: Per side, the ops that wrote these after the rows were met.
    """

    leaf: Sides[Leaf]
    writers: Sides[tuple[int, ...]] = NO_OPS


def leaf_pairs(case: Case) -> Iterator[LeafPair]:
    """Rows of leaves with the same name on both sides; of parameters and buffers first what the runs start from.

    A buffer that only one run replaced before its use (by a cast one) is paired with the other's as it is.
    """
    words = case.left.contents.by_place, case.right.contents.by_place
    apart = not_followed(case)
    for name, rows in case.left.leaves.by_name.items():
        others = case.right.leaves.by_name.get(name)
        if not others or name in apart:
            continue
        if len(rows) != len(others) and rows[-1].kind == others[-1].kind == "buffer":
            yield LeafPair(Sides(rows[-1], others[-1]))
        starts = case.left.starts.of(name), case.right.starts.of(name)
        if starts[0] is not None and starts[1] is not None:
            left, right = _of_one_type(case, starts[0], starts[1])
            yield LeafPair(Sides(left.leaf, right.leaf), Sides(left.loads, right.loads))
            rows, others = list(starts[0].later), list(starts[1].later)
        if rows and others:
            for a, b in match_rows(rows, others, words)[0]:
                yield LeafPair(Sides(a, b))


def _of_one_type(case: Case, left: Start, right: Start) -> tuple[Start, Start]:
    """What both start from, before a cast that one run alone makes."""
    types = (
        case.left.trace.meta(left.leaf.value).dtype,
        case.right.trace.meta(right.leaf.value).dtype,
    )
    if types[0] == types[1]:
        return left, right
    return left.source or left, right.source or right


def not_followed(case: Case) -> frozenset[str]:
    """Names of parameters that are parts in one run which nothing followed, and something else in the other."""
    left, right = case.left.trace, case.right.trace
    alone = {*parts_not_followed(left), *parts_not_followed(right)}
    return differently_sharded(left, right) & alone if alone else frozenset()


def differing(case: Case) -> list[LeafPair]:
    """Pairs of leaves of one name whose contents are not the same."""
    pairs = list(leaf_pairs(case))
    if not pairs:
        return []
    left = np.array([pair.leaf.left.value for pair in pairs], np.int64)
    right = np.array([pair.leaf.right.value for pair in pairs], np.int64)
    status = case.compared.status(left, right)
    return [pairs[k] for k in np.flatnonzero(status == DIFFERENT).tolist()]


def find(case: Case, live: Sides[bytearray | None]) -> tuple[list[Origin], list[Sides[Leaf]]]:
    """Origins among the leaves, and the pairs that differ but take no part in a result."""
    pairs = differing(case)
    states = case.left.contents.states.of, case.right.contents.states.of
    case.left.leaves.look_up(int(states[0][pair.leaf.left.value]) for pair in pairs)
    case.right.leaves.look_up(int(states[1][pair.leaf.right.value]) for pair in pairs)
    found: list[Origin] = []
    unused: list[Sides[Leaf]] = []
    seen: dict[tuple[int, int, int], list[LeafPair]] = {}
    for pair in pairs:
        a, b = pair.leaf.left, pair.leaf.right
        # inputs are often parts of one tensor, each read by a call of its own
        part = a.value if a.kind == "input" else 0
        key = int(states[0][a.value]), int(states[1][b.value]), part
        if key in seen:
            seen[key].append(pair)
        elif _starts(case.left, a) and _starts(case.right, b):
            seen[key] = [pair]
    for key, alike in seen.items():
        leaves = [pair.leaf for pair in alike]
        uses: tuple[Use | None, Use | None] = (None, None)
        if key[2]:
            uses = (
                case.left.leaves.first_use(key[0], live.left, only=leaves[0].left.value),
                case.right.leaves.first_use(key[1], live.right, only=leaves[0].right.value),
            )
        if None in uses:
            uses = (
                case.left.leaves.first_use(key[0], live.left),
                case.right.leaves.first_use(key[1], live.right),
            )
        if uses == (None, None):
            unused += leaves
        elif not _renamed(case, leaves, *uses):
            origin = _origin(case, leaves, *_same_use(case, key, uses, live))
            found.append(replace(origin, region=_written(alike)))
    return found, unused


Uses = tuple[Use | None, Use | None]


def _written(pairs: Sequence[LeafPair]) -> Sides[tuple[int, ...]]:
    """The ops that wrote what leaves hold after they were met."""
    left = {op for pair in pairs for op in pair.writers.left}
    right = {op for pair in pairs for op in pair.writers.right}
    return Sides(tuple(sorted(left)), tuple(sorted(right)))


def _same_use(
    case: Case, states: tuple[int, int, int], uses: Uses, live: Sides[bytearray | None]
) -> Uses:
    """The first uses that correspond: a parameter with two names in one run is read there by others first."""
    left, right = uses
    if left is None or right is None or int(case.pairing.right_of[left.op]) == right.op:
        return uses
    partner = int(case.pairing.left_of[right.op])
    if partner >= 0 and (other := case.left.leaves.use_at(states[0], partner, live.left)):
        return other, right
    partner = int(case.pairing.right_of[left.op])
    if partner >= 0 and (other := case.right.leaves.use_at(states[1], partner, live.right)):
        return left, other
    return uses


def _renamed(case: Case, leaves: list[Sides[Leaf]], left: Use | None, right: Use | None) -> bool:
    """Whether the ops that read two leaves of one name read the same as their counterparts do.

    Then the runs call the same contents by other names, such as layers that are counted from elsewhere. An
    op that only one run has says nothing, as long as the other run's is such an op, and so does one that reads
    another part of the same storage, as of a flat parameter that holds many.
    """
    slots, rows = case.compared.inputs, (case.compared.row_of_left, case.compared.row_of_right)
    alike = 0
    for number, (use, row_of, values) in enumerate(
        ((left, rows[0], slots.left), (right, rows[1], slots.right))
    ):
        row = int(row_of[use.op]) if use is not None else -1
        if use is None or row < 0:
            continue
        side = (case.left, case.right)[number]
        own = {_part(side, (m.left, m.right)[number].value) for m in leaves}
        # an input of one call may be a part of that of another, and stands for it
        if leaves[0].left.kind != "input" and _part(side, use.value) not in own:
            return False
        read = np.flatnonzero((slots.pair == row) & (values == use.value))
        if not len(read) or (slots.status[read] != EQUAL).any():
            return False
        alike += 1
    return alike > 0


def _part(side: Side, value: int) -> tuple[int, int]:
    """Which part of its storage a value is: where it begins and how many elements it has."""
    return int(side.trace.values.offset[value]), math.prod(side.trace.meta(value).shape)


def _starts(side: Side, leaf: Leaf) -> bool:
    """Whether a named value is what the run started from, not what the run computed.

    A model that is built while recording has parameters that ops made: drawn, filled, or copied from a
    checkpoint. They count; what an optimizer or a network computed does not.
    """
    writer = int(side.contents.states.writer[side.contents.states.of[leaf.value]])
    if writer < 0:
        return True
    if leaf.kind not in ("parameter", "buffer"):
        return False
    return side.lineage.of(leaf.value).kind in MADE_BEFORE_USE


def _origin(case: Case, leaves: list[Sides[Leaf]], left: Use | None, right: Use | None) -> Origin:
    """An origin at a leaf, under the name by which the first op that reads it knows it."""
    row = int(case.compared.row_of_left[left.op]) if left is not None else -1
    ops: Sides[int | None] = Sides(left.op if left else None, right.op if right else None)
    module = case.left.module(left.op) if left else case.right.module(right.op) if right else ""
    best = case.left.leaves.best(leaves[0].left.value, module)
    name = best.name if best is not None else leaves[0].left.name
    leaf = next((each for each in leaves if each.left.name == name), leaves[0])
    return Origin(
        kind="leaf",
        story="leaf",
        op=ops,
        row=row,
        values=Sides(leaf.left.value, leaf.right.value),
        slot=None,
        order=order_of(case, ops) + (left.seen if left else 0) * 1e-9,
        leaf=Sides(leaf.left, leaf.right),
        members=tuple(Sides(each.left, each.right) for each in leaves if each is not leaf),
    )


def order_of(case: Case, op: Sides[int | None]) -> float:
    """Where an op stands in the left run; a right-only op stands after the last pair before it."""
    if op.left is not None:
        return float(op.left)
    if op.right is None:
        return float(len(case.left.trace.ops))
    before = case.pairing.left_of[: op.right + 1]
    paired = before[before >= 0]
    return float(paired[-1]) + 0.5 if len(paired) else -0.5


def maker_ops(case: Case, origins: list[Origin]) -> Sides[set[int]]:
    """Ops that made the leaves of origins during the run: a draw, a fill, a copy; the leaf stands for them."""
    left = [leaf.left.value for o in origins for leaf in (o.leaf, *o.members) if leaf.left]
    right = [leaf.right.value for o in origins for leaf in (o.leaf, *o.members) if leaf.right]
    loads = Sides(
        {op for o in origins for op in o.region.left},
        {op for o in origins for op in o.region.right},
    )
    return Sides(loads.left | _makers(case.left, left), loads.right | _makers(case.right, right))


def _makers(side: Side, values: list[int]) -> set[int]:
    found = set()
    for value in values:
        made = side.lineage.of(value)
        for seq in (made.seq, made.first_seq):
            index = side.trace.index_of(seq) if seq is not None else None
            if index is not None:
                found.add(index)
    return found
