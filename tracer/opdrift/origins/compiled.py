"""Hold each compiled region against what the other run did instead: what went in, what came out.

The kernels of a region are not seen, so no pair of ops tells where it goes wrong. Its boundary does: where its inputs
are equal, or nearly, its results must agree up to what rounding explains at the ops that it stands for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from opdrift.bounds import explained, gain_limit, grown
from opdrift.bounds.products import PRODUCT_OPS
from opdrift.bounds.view import TINY, base_name
from opdrift.case import Case, Side
from opdrift.compare import dtype_epsilon
from opdrift.origins.kinds import computes
from opdrift.origins.leaves import order_of
from opdrift.origins.model import Origin
from opdrift.records import Sides
from opdrift.regions import RegionCall
from opdrift.sinks import find_sinks
from opdrift.sizes import NARROW, Size, measure, rounding_of
from opdrift.tracefile.columns import Ints

#: Products of a layer, by which the depth of a region is counted (as for whole runs).
_PRODUCTS_A_LAYER: Final = 7
#: Beyond one layer rounding settles (`bounds.grown`), but is not less than this many times that of its worst op.
_WORST: Final = 3.0
#: All ops but so many of the worst, and so many of the last, count for that.
_FEW: Final = 0.9
_LAST: Final = 4
#: What an op of a kind that is not known may make of a difference.
_GAIN: Final = 4.0
#: So many results of a call, those that are furthest apart, are held against what rounding explains.
_RESULTS: Final = 4
#: What is smaller than the largest of a region's tensors by this much may be what is left where terms cancel (the gradient
#: of a bias before a norm, of keys before a softmax: zero in theory): its difference is held against so much of that.
_SMALL: Final = 1e-3
#: A walk back through the other run's ops stops after this many.
_WALK: Final = 20_000


@dataclass(frozen=True, slots=True)
class Gap:
    """A call of a compiled region beside what the other run has for it.

    Attributes:
        number: The run of the call: 0 for left, 1 for right.
        call: The call.
        before: The largest relative difference among its inputs that have a counterpart: 0 if all are equal bit for bit.
        known: All of them have one.
        after: The largest among its results that have a counterpart, small ones held against the larger ones.
        limit: The largest that rounding explains there.
        usual: What rounding usually grows to there; the limit where that is not known.
        values: That result, and what the other run has for it.
        others: Ops of the other run that make it of what the region was given, in order.
        nonfinite: One run's result has other NaN or infinite elements.
        narrowed: One run computes there in a type of 16 bits or less, and the other does not.
    """

    number: int
    call: RegionCall
    before: float
    known: bool
    after: float
    limit: float
    usual: float
    values: Sides[int]
    others: tuple[int, ...]
    nonfinite: bool
    narrowed: bool

    @property
    def is_material(self) -> bool:
        """Whether rounding does not explain what comes out of what went in."""
        return self.nonfinite or self.after > self.limit or (self.narrowed and self.after > 0)


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
        inputs_match=False if gap.before else gap.known or None,
        on_right=gap.number == 1,
    )


def _ops_of(call: RegionCall | None, op: int) -> list[int]:
    """An op, and of a compiled region what ran inside."""
    return [op] if call is None else [*call.inside, op]


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
        self._bounds: dict[tuple[bool, int], tuple[float, float] | None] = {}
        #: by op the difference of what a region of this run returned, where only others of it read that
        self._after: dict[int, float] = {}

    def gaps(self, calls: Sequence[RegionCall]) -> Iterator[Gap]:
        """Those calls that can be compared."""
        ops = self._side.trace.ops
        wanted = np.unique(
            np.concatenate([np.concatenate([ops.inputs[c.op], ops.outputs[c.op]]) for c in calls])
        )
        self._match(np.unique([*wanted, *map(self._root, wanted.tolist())]))
        for call in calls:
            found = self._gap(call)
            if found is None:
                continue
            self._after[call.op] = found.after
            if self._number == 1 or self._partner[call.op] < 0:
                yield found

    def _root(self, value: int) -> int:
        """What a view was taken of."""
        parents = self._side.contents.view_parent
        while parents[value] >= 0:
            value = int(parents[value])
        return value

    def _match(self, wanted: Ints) -> None:
        """Find what the other run has for values: results of both, and what an op that both have makes or reads."""
        case = self._case
        words = self._side.contents.by_lineage[wanted]
        self._shared = set(np.intersect1d(words, self._other.contents.by_lineage).tolist()) - {0}
        for sink in find_sinks(case.compared, case.left.leaves, case.right.leaves):
            pair = (sink.left, sink.right)[:: -1 if self._number else 1]
            if pair[0] is not None and pair[1] is not None:
                self._theirs.setdefault(pair[0], pair[1])
        for slots in (case.compared.outputs, case.compared.inputs):
            mine, theirs = (slots.left, slots.right)[:: -1 if self._number else 1]
            for k in np.flatnonzero(np.isin(mine, wanted)).tolist():
                # copies are paired in their order, and gradients come in another one in each run
                if computes(case.left, int(case.pairing.left[slots.pair[k]])):
                    self._theirs.setdefault(int(mine[k]), int(theirs[k]))

    def _gap(self, call: RegionCall) -> Gap | None:
        before, known = self._before(call)
        results = list(dict.fromkeys(self._side.trace.ops.outputs[call.op].tolist()))
        floor = self._floor(results)
        measured = [
            (gap[1], gap[0], value)
            for value in results
            if value in self._theirs
            and (gap := self._measured(value, self._theirs[value], floor)) is not None
        ]
        found = [
            replace(self._one(call, before, value, size, nonfinite=nonfinite), known=known)
            for nonfinite, size, value in sorted(measured, reverse=True)[:_RESULTS]
        ]
        return max(found, key=lambda g: (g.nonfinite, g.after / max(g.limit, TINY)), default=None)

    def _one(
        self, call: RegionCall, before: float, value: int, size: float, *, nonfinite: bool
    ) -> Gap:
        theirs = self._theirs[value]
        others = self._others(call, theirs)
        limit, usual = self._limit(call, others, theirs, before)
        return Gap(
            number=self._number,
            call=call,
            before=before,
            known=True,
            after=size,
            limit=limit,
            usual=usual,
            values=Sides(*((value, theirs)[:: -1 if self._number else 1])),
            others=others,
            nonfinite=nonfinite,
            narrowed=self._narrowed(call, others),
        )

    def _narrowed(self, call: RegionCall, others: Sequence[int]) -> bool:
        """Whether one run's types tell that it computes in fewer bits.

        Those of generated kernels do not show, so that compiled code may be the narrower one without a sign of it.
        """
        regions = self._other.regions
        theirs = [each for op in others for each in _ops_of(regions.at.get(op), op)]
        mine, other = (
            any(
                side.trace.meta(int(v)).dtype in NARROW
                for op in ops
                for v in side.trace.ops.outputs[op]
            )
            for side, ops in ((self._side, _ops_of(call, call.op)), (self._other, theirs))
        )
        compiled = all(op in regions.at for op in others)
        return (mine and not other) or (compiled and other and not mine)

    def _before(self, call: RegionCall) -> tuple[float, bool]:
        """The largest difference among what a call is given, and whether all of it could be compared.

        What could not is made of what the walk back through the other run's ops ends at, so that these ops bound it.
        """
        contents = self._side.contents
        largest, known = 0.0, True
        given = list(dict.fromkeys(self._side.trace.ops.inputs[call.op].tolist()))
        floor = self._floor(given)
        for value in given:
            if int(contents.by_lineage[value]) in self._shared:
                continue
            value = value if value in self._theirs else self._root(value)
            theirs = self._theirs.get(value)
            gap = None if theirs is None else self._measured(value, theirs, floor)
            if gap is not None:
                largest = max(largest, gap[0])
                continue
            made_by = int(contents.maker[value])
            if made_by >= 0 and contents.tokens.factory[made_by]:
                continue  # a constant, such as the gradient of a result that nobody used
            if self._is_number(value):
                continue
            # what one region leaves for another, as for the backward pass, differs as the rest of its results
            maker = self._after.get(made_by)
            known = known and maker is not None
            largest = max(largest, maker or 0.0)
        return largest, known

    def _is_number(self, value: int) -> bool:
        """Whether it is a number of the program, which compiled code takes as a tensor and eager code as an argument."""
        meta, rows = self._side.trace.meta(value), self._side.leaves.of(value)
        return (
            not meta.shape
            and meta.dtype in ("float64", "int64")
            and any(leaf.kind == "constant" and not leaf.name for leaf in rows)
        )

    def _measured(self, mine: int, theirs: int, floor: float) -> tuple[float, bool] | None:
        """The difference of two values, relative to their norm or to a floor, and whether it is of NaN or infinities."""
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
        norm = self._norm(mine)
        size = found.relative
        if norm is not None and 0 < norm < floor:
            size *= norm / floor
        return size, found.nonfinite_changed

    def _floor(self, values: Sequence[int]) -> float:
        """The norm that a tensor of a region is at least held against."""
        floats = [v for v in values if "float" in self._side.trace.meta(v).dtype]
        return _SMALL * max((norm for v in floats if (norm := self._norm(v))), default=0.0)

    def _norm(self, value: int) -> float | None:
        found = self._side.nearest_fingerprint(value)
        return None if found is None or not math.isfinite(found.ssq) else math.sqrt(found.ssq)

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

    def _limit(
        self, call: RegionCall, others: Sequence[int], value: int, before: float
    ) -> tuple[float, float]:
        """The largest difference that rounding explains of a result, given that of the inputs, and the usual one.

        The sum over the ops that the region stands for; behind several layers no more than rounding settles at, and
        than a multiple of that of all but the worst few and of the last: terms that cancel on the way to something
        small say little of the result. A difference that comes in may grow as at the op that magnifies most.
        """
        side, ops = self._other, others
        if not ops or all(op in side.regions.at for op in ops):  # compiled there, too
            side, ops = self._side, call.inside
        kernel = explained(self._side.views[call.op], 0).loose
        bounds = [kernel] * max(1, len(call.graph.kernels))
        known = [b for op in ops if (b := self._bound(side, op)) is not None]
        bounds += [loose for loose, _ in known if loose < 1]
        products = sum(base_name(side.name(op)) in PRODUCT_OPS for op in ops)
        ordered = sorted(bounds)
        worst = max(ordered[int(_FEW * (len(ordered) - 1))], *bounds[-_LAST:])
        unit = dtype_epsilon(self._other.trace.meta(value).dtype) / 2
        settled = grown(unit, -(-products // _PRODUCTS_A_LAYER))
        rounding = min(sum(bounds), max(settled, _WORST * worst))
        grew = max((gain for _, gain in known), default=_GAIN) * before
        return rounding + grew, (min(rounding, settled) if products else rounding) + grew

    def _bound(self, side: Side, op: int) -> tuple[float, float] | None:
        """What rounding explains at an op, and its gain; None for views and ops without a result."""
        key = (side is self._side, op)
        if key not in self._bounds:
            bound, gain = rounding_of(side, op), None
            if bound is not None:
                found = gain_limit(side.views[op])
                gain = bound.loose, min(found.formula, found.cap)
            self._bounds[key] = gain
        return self._bounds[key]
