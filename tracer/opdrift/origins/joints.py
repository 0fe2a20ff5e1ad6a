"""Cut a stretch in which the runs go different ways where both return from the same module call.

Three fused encoder layers against the unfused ones have no op in common, but each layer returns the same on
both sides: what the calls return is compared, and the first stretch that is more than rounding is the place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from opdrift.case import Case, Side
from opdrift.origins.leaves import order_of
from opdrift.origins.model import Origin
from opdrift.origins.regions import Region, representative
from opdrift.records import Sides
from opdrift.sizes import measure, rounding_of
from opdrift.tracefile.columns import Ints


@dataclass(frozen=True, slots=True)
class Joint:
    """What both runs returned from the same module call inside of a region.

    Attributes:
        value: Left and right value.
        op: The ops that made them.
        explained: Whether they are of one type, and rounding in the region up to there explains their difference.
    """

    value: tuple[int, int]
    op: tuple[int, int]
    explained: bool


def narrowed(case: Case, origin: Origin) -> Origin | None:
    """The part of a region, too different for rounding, behind which the runs do not come together again.

    None where no module call inside of it returns anything that can be compared.
    """
    regions = origin.region.left, origin.region.right
    if origin.story != "region" or case.by_sample or not all(regions):
        return None
    if origin.values.left is None or origin.values.right is None:
        return None
    joints = _joints(case, origin)
    if not joints:
        return None
    after = max((k + 1 for k, joint in enumerate(joints) if joint.explained), default=0)
    start = joints[after - 1] if after else None
    end = joints[after] if after < len(joints) else None
    ops = [
        tuple(
            op
            for op in regions[number]
            if (start is None or op > start.op[number]) and (end is None or op <= end.op[number])
        )
        for number in (0, 1)
    ]
    if not any(ops) or (start is None and end is None):
        return None
    boundary = origin.boundary
    if start is not None:
        boundary = Sides((start.value[0],), (start.value[1],))
    region = Region(Sides(ops[0], ops[1]), boundary)
    values = end.value if end else (origin.values.left, origin.values.right)
    row = -1 if end else origin.row
    reader = _pair(case, row)
    nonfinite = case.left.nonfinite(values[0]) != case.right.nonfinite(values[1])
    stands = representative(case, region, reader, nonfinite=nonfinite)
    return replace(
        origin,
        op=stands,
        row=row,
        values=Sides(*values),
        slot=origin.slot if row >= 0 else None,
        order=order_of(case, stands),
        region=region.ops,
        boundary=region.boundary,
    )


def _pair(case: Case, row: int) -> Sides[int | None]:
    if row < 0:
        return Sides(None, None)
    return Sides(int(case.pairing.left[row]), int(case.pairing.right[row]))


def _joints(case: Case, origin: Origin) -> list[Joint]:
    """Joints of a region in the order in which both runs come to them."""
    reader = _pair(case, origin.row)
    assert origin.values.left is not None
    assert origin.values.right is not None
    returned = (
        _returned(case.left, origin.region.left, reader.left, origin.values.left),
        _returned(case.right, origin.region.right, reader.right, origin.values.right),
    )
    partner: Ints = case.pairing.calls[0]
    found: list[tuple[tuple[int, int], tuple[int, int]]] = []
    for call, left in returned[0].items():
        right = returned[1].get(int(partner[call]))
        if right is None:
            continue
        ops = int(case.left.contents.maker[left]), int(case.right.contents.maker[right])
        found.append((ops, (left, right)))
    joints: list[Joint] = []
    for ops, values in sorted(set(found)):
        if joints and not (ops[0] > joints[-1].op[0] and ops[1] > joints[-1].op[1]):
            continue  # calls that run in another order, or within one another
        gap = measure(case, *values)
        if gap is None or not gap.comparable or gap.relative is None:
            continue
        limit = sum(_explained(case, origin, ops))
        metas = case.left.trace.meta(values[0]), case.right.trace.meta(values[1])
        close = gap.relative <= limit and not gap.nonfinite_changed
        # runs that return other types go on in other types: they have not come together
        joints.append(Joint(values, ops, close and metas[0].dtype == metas[1].dtype))
    return joints


def _explained(case: Case, origin: Origin, until: tuple[int, int]) -> Iterator[float]:
    """What rounding explains at each op of a region up to one op of either side."""
    for side, ops, last in zip(
        (case.left, case.right), (origin.region.left, origin.region.right), until, strict=True
    ):
        for op in ops:
            bound = rounding_of(side, op) if op <= last else None
            if bound is not None and not bound.cannot_judge:
                yield bound.loose


def _returned(side: Side, ops: Sequence[int], reader: int | None, result: int) -> dict[int, int]:
    """Per module call, the one value that ops of a region made within it and others read; no views."""
    contents, trace = side.contents, side.trace
    mine = set(ops)
    leaving: dict[int, set[int]] = defaultdict(set)
    reads: list[tuple[frozenset[int], Sequence[int]]] = [
        (_calls(side, op), trace.ops.inputs[op].tolist()) for op in ops
    ]
    reads.append((_calls(side, reader) if reader is not None else frozenset(), [result]))
    for readers_calls, values in reads:
        for value in values:
            maker = int(contents.maker[value])
            while maker in mine and contents.tokens.view[maker]:
                value = int(trace.ops.inputs[maker][0])
                maker = int(contents.maker[value])
            if maker not in mine:
                continue
            for call in _calls(side, maker) - readers_calls:
                leaving[call].add(int(contents.states.of[value]))
    found = {}
    for call, states in leaving.items():
        value = int(contents.states.base[next(iter(states))]) if len(states) == 1 else -1
        if value >= 0:
            found[call] = value
    return found


def _calls(side: Side, op: int) -> frozenset[int]:
    """The module call that an op ran in, and those around it."""
    found = set()
    call = int(side.home[op])
    while call > 0:
        found.add(call)
        call = int(side.trace.call_columns.parent[call])
    return frozenset(found)
