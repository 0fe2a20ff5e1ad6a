"""Hold each compiled region against what the other run did instead: what went in, what came out.

The kernels of a region are not seen, so no pair of ops tells where it goes wrong. Its boundary does: where its inputs
are equal, or nearly, its results must agree up to what rounding explains at the ops that it stands for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from opdrift.bounds import explained, gain_limit, grown
from opdrift.bounds.products import PRODUCT_OPS
from opdrift.bounds.view import base_name
from opdrift.case import Case
from opdrift.compare import dtype_epsilon
from opdrift.origins.leaves import order_of
from opdrift.origins.model import Origin
from opdrift.records import Sides
from opdrift.regions import RegionCall
from opdrift.sinks import find_sinks
from opdrift.sizes import Size, measure, rounding_of
from opdrift.tracefile.columns import Ints

#: Products of a layer, by which the depth of a region is counted (as for whole runs).
_PRODUCTS_A_LAYER: Final = 7
#: Beyond one layer rounding settles (`bounds.grown`), but is not less than this many times that of its worst op.
_WORST: Final = 3.0
#: A walk back through the other run's ops stops after this many.
_WALK: Final = 20_000


@dataclass(frozen=True, slots=True)
class Gap:
    """A call of a compiled region beside what the other run has for it.

    Attributes:
        number: The run of the call: 0 for left, 1 for right.
        call: The call.
        before: The largest relative difference among its inputs: 0 if all are equal bit for bit.
        after: The largest among its results that have a counterpart.
        limit: The largest that rounding explains there.
        values: That result, and what the other run has for it.
        others: Ops of the other run that make it of what the region was given, in order.
        nonfinite: One run's result has other NaN or infinite elements.
    """

    number: int
    call: RegionCall
    before: float
    after: float
    limit: float
    values: Sides[int]
    others: tuple[int, ...]
    nonfinite: bool

    @property
    def is_material(self) -> bool:
        """Whether rounding does not explain what comes out of what went in."""
        return self.nonfinite or self.after > self.limit


def gaps(case: Case) -> tuple[Gap, ...]:
    """Every call of a compiled region whose inputs and results can be compared; of a pair of them, the right one."""
    if case.by_sample:
        return ()
    found: list[Gap] = []
    for number in (0, 1):
        calls = (case.left, case.right)[number].regions.calls
        if calls:
            found += _Boundary(case, number).gaps(calls)
    return tuple(found)


def astray(case: Case, found: Sequence[Gap]) -> Iterator[Origin]:
    """Calls whose results rounding does not explain, in the order of the left run."""
    origins = [_origin(case, gap) for gap in found if gap.is_material]
    yield from sorted(origins, key=lambda origin: origin.order)


def at_region(origin: Origin, size: Size, found: Sequence[Gap]) -> Size:
    """The size of an origin, by the rule of regions if it is a call of one."""
    gap = gap_of(origin, found)
    if gap is None or origin.story not in ("op", "compiled"):
        return size
    return replace(size, bound=None, limit=gap.limit, material=gap.is_material)


def gap_of(origin: Origin, found: Sequence[Gap]) -> Gap | None:
    """The call of a region that an origin is, or that is a part of what only one run does there."""
    ops = (origin.op.left, *origin.region.left), (origin.op.right, *origin.region.right)
    return next((gap for gap in found if gap.call.op in ops[gap.number]), None)


def is_inside(case: Case, outer: Origin, inner: Origin) -> bool:
    """Whether an origin lies inside of a compiled region that is another one."""
    for side, a, b in (
        (case.left, outer.op.left, inner.op.left),
        (case.right, outer.op.right, inner.op.right),
    ):
        if a is not None and b is not None:
            call = side.regions.at.get(a)
            if call is not None and b in call.inside:
                return True
    return False


def _origin(case: Case, gap: Gap) -> Origin:
    own = gap.call.op
    partner = int((case.pairing.right_of, case.pairing.left_of)[gap.number][own])
    other = partner if partner >= 0 else None
    op: Sides[int | None] = Sides(own, other) if gap.number == 0 else Sides(other, own)
    mine, theirs = ((own,), gap.others) if gap.number == 0 else (gap.others, (own,))
    # where the other run has many ops for it, its last one says when the region's result was due
    due = gap.others[-1] if gap.others else None
    order = float(due) + 0.5 if gap.number and due is not None else order_of(case, op)
    return Origin(
        kind="op",
        story="compiled",
        op=op,
        row=-1 if other is None else int(case.compared.row_of_left[op.left or 0]),
        values=Sides(gap.values.left, gap.values.right),
        slot=None,
        order=order,
        region=Sides(mine, theirs) if other is None else Sides((), ()),
        inputs_match=gap.before == 0,
        on_right=gap.number == 1,
    )


class _Boundary:
    """Compares the values at the boundaries of one run's regions."""

    def __init__(self, case: Case, number: int) -> None:
        self._case = case
        self._number = number
        sides = (case.left, case.right)
        self._side, self._other = sides[number], sides[1 - number]
        self._partner = (case.pairing.right_of, case.pairing.left_of)[number]
        self._theirs: dict[int, int] = {}
        #: words of contents at the boundaries that the other run has, too
        self._shared: set[int] = set()
        #: by op the difference of what a region of this run returned, where only others of it read that
        self._after: dict[int, float] = {}

    def gaps(self, calls: Sequence[RegionCall]) -> Iterator[Gap]:
        """Those calls that can be compared."""
        ops = self._side.trace.ops
        wanted = np.unique(
            np.concatenate([np.concatenate([ops.inputs[c.op], ops.outputs[c.op]]) for c in calls])
        )
        self._match(wanted)
        for call in calls:
            found = self._gap(call)
            if found is None:
                continue
            self._after[call.op] = found.after
            if self._number == 1 or self._partner[call.op] < 0:
                yield found

    def _match(self, wanted: Ints) -> None:
        """Find what the other run has for values: what an op that both have reads, or a result of both."""
        case = self._case
        words = self._side.contents.by_lineage[wanted]
        self._shared = set(np.intersect1d(words, self._other.contents.by_lineage).tolist()) - {0}
        for slots in (case.compared.outputs, case.compared.inputs):
            mine, theirs = (slots.left, slots.right)[:: -1 if self._number else 1]
            for k in np.flatnonzero(np.isin(mine, wanted)).tolist():
                self._theirs.setdefault(int(mine[k]), int(theirs[k]))
        for sink in find_sinks(case.compared, case.left.leaves, case.right.leaves):
            pair = (sink.left, sink.right)[:: -1 if self._number else 1]
            if pair[0] is not None and pair[1] is not None:
                self._theirs.setdefault(pair[0], pair[1])

    def _gap(self, call: RegionCall) -> Gap | None:
        before = self._before(call)
        if before is None:
            return None
        trace = self._side.trace
        worst: Gap | None = None
        for value in dict.fromkeys(trace.ops.outputs[call.op].tolist()):
            theirs = self._theirs.get(value)
            gap = None if theirs is None else self._measured(value, theirs)
            if theirs is None or gap is None:
                continue
            size, nonfinite = gap
            if worst is not None and (worst.nonfinite, worst.after) >= (nonfinite, size):
                continue
            others = self._others(call, theirs)
            limit = self._limit(call, others, theirs, before)
            pair = (value, theirs)[:: -1 if self._number else 1]
            worst = Gap(self._number, call, before, size, limit, Sides(*pair), others, nonfinite)
        return worst

    def _before(self, call: RegionCall) -> float | None:
        """The largest difference among what a call is given; None where that is not known."""
        trace, contents = self._side.trace, self._side.contents
        largest = 0.0
        for value in dict.fromkeys(trace.ops.inputs[call.op].tolist()):
            if int(contents.by_lineage[value]) in self._shared:
                continue
            theirs = self._theirs.get(value)
            gap = None if theirs is None else self._measured(value, theirs)
            if gap is not None:
                largest = max(largest, gap[0])
                continue
            # what one region leaves for another, as for the backward pass, differs as the rest of its results
            maker = self._after.get(int(contents.maker[value]))
            if maker is None:
                return None
            largest = max(largest, maker)
        return largest

    def _measured(self, mine: int, theirs: int) -> tuple[float, bool] | None:
        left, right = (mine, theirs)[:: -1 if self._number else 1]
        words = (
            self._case.left.contents.by_lineage[left],
            self._case.right.contents.by_lineage[right],
        )
        if words[0] and words[0] == words[1]:
            return 0.0, False
        found = measure(self._case, left, right)
        if found is None or not found.comparable or found.relative is None:
            return None
        return found.relative, found.nonfinite_changed

    def _others(self, call: RegionCall, value: int) -> tuple[int, ...]:
        """What the other run makes a value with, back to what the region was given."""
        contents, trace = self._other.contents, self._other.trace
        given = self._side.trace.ops.inputs[call.op].tolist()
        words = {int(w) for w in self._side.contents.by_lineage[given] if w}
        ends = {self._theirs[v] for v in given if v in self._theirs}
        ops: set[int] = set()
        stack, seen = [value], {value}
        while stack and len(ops) < _WALK:
            current = stack.pop()
            op = int(contents.maker[current])
            if op < 0 or (current != value and current in ends):
                continue
            if current != value and int(contents.by_lineage[current]) in words:
                continue
            if op not in ops:
                ops.add(op)
                more = [v for v in trace.ops.inputs[op].tolist() if v not in seen]
                seen.update(more)
                stack += more
        return tuple(sorted(ops))

    def _limit(self, call: RegionCall, others: Sequence[int], value: int, before: float) -> float:
        """The largest difference that rounding explains of a result, given that of the inputs.

        The sum over the ops that the region stands for; behind several layers no more than rounding settles at.
        A difference that comes in may grow as at the op that magnifies most.
        """
        side, ops = self._other, others
        if not ops or all(op in side.regions.at for op in ops):  # compiled there, too
            side, ops = self._side, call.inside
        bounds = [b.loose for op in ops if (b := rounding_of(side, op)) and not b.cannot_judge]
        products = sum(base_name(side.name(op)) in PRODUCT_OPS for op in ops)
        kernel = explained(self._side.views[call.op], 0).loose
        bounds += [kernel] * max(1, len(call.graph.kernels))
        unit = dtype_epsilon(self._other.trace.meta(value).dtype) / 2
        settled = grown(unit, -(-products // _PRODUCTS_A_LAYER))
        rounding = min(sum(bounds), max(settled, _WORST * max(bounds)))
        gains = [gain_limit(side.views[op]) for op in ops if rounding_of(side, op) is not None]
        largest = max((min(g.formula, g.cap) for g in gains), default=4.0)
        return rounding + largest * before
