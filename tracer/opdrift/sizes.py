"""How large an origin is, what rounding explains there, and whether it is material."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from opdrift.bounds import Bound, explained, precision_of
from opdrift.case import Case, Side
from opdrift.compare import Difference, difference, dtype_epsilon
from opdrift.openmasks import only_open_masks
from opdrift.orders import same_order
from opdrift.origins.kinds import draws
from opdrift.origins.model import Origin
from opdrift.origins.updates import change_of, contents_of, unlike
from opdrift.tracefile.fingerprints import Fingerprint

#: Ops of a region whose bounds are added up.
_REGION: Final = 500
#: Stories that rounding does not tell.
_MATERIAL: Final = (
    "written",
    "other-source",
    "settings",
    "nonfinite",
    "factory",
    "amplified",
    "padding",
    "compiled",
)
_WHOLE_NUMBERS: Final = ("int", "uint", "bool")


@dataclass(frozen=True, slots=True)
class Tolerance:
    """A difference that the user allows: atol + rtol * the largest magnitude, as in torch.allclose."""

    rtol: float = 0.0
    atol: float = 0.0

    def allows(self, found: Difference, largest: float) -> bool:
        """Whether a difference stays within it."""
        return found.max_abs is not None and found.max_abs <= self.atol + self.rtol * largest


@dataclass(frozen=True, slots=True)
class Size:
    """An origin's size.

    Attributes:
        difference: Between its values, None where they cannot be compared.
        bound: What rounding explains at its op.
        limit: The largest relative difference that counts as rounding.
        material: Not explained by rounding.
        same_kernel: Both sides are known to have run the same kernel.
    """

    difference: Difference | None
    bound: Bound | None
    limit: float | None
    material: bool
    same_kernel: bool = False


def size_of(case: Case, origin: Origin, tolerance: Tolerance | None) -> Size:
    """The size of an origin."""
    found = _difference(case, origin)
    limit = _computing_precision(case, origin)
    if limit is not None and found is not None and found.relative is not None:
        return Size(found, None, limit, found.relative > limit or found.nonfinite_changed)
    if origin.kind in ("leaf", "hidden-write"):
        return Size(found, None, None, not _tolerated(case, origin, found, tolerance))
    if tolerance is not None and _tolerated(case, origin, found, tolerance):
        return Size(found, None, None, material=False)
    if origin.story == "cancelled":
        return Size(found, _bound(case, origin), None, material=False)
    if origin.story in _MATERIAL:
        bound = _bound(case, origin) if origin.story in ("settings", "amplified") else None
        return Size(found, bound, bound.loose if bound else None, material=True)
    if origin.story == "gathered":
        return _updated(case, origin, _region_size(case, origin, found))
    if origin.story == "region":
        return _region_size(case, origin, found)
    return _op_size(case, origin, found)


def _difference(case: Case, origin: Origin) -> Difference | None:
    left, right = origin.values.left, origin.values.right
    if left is None or right is None:
        return None
    if origin.story == "gathered":
        held = contents_of(case, origin)
        if held.left is not None and held.right is not None:
            return difference(held.left, held.right)
    return measure(case, left, right)


def measure(case: Case, left: int, right: int) -> Difference | None:
    """The difference of two values, None where one of them was not fingerprinted."""
    prints = prints_of(case, left, right)
    return None if prints is None else difference(*prints)


def prints_of(case: Case, left: int, right: int) -> tuple[Fingerprint, Fingerprint] | None:
    """Fingerprints of all elements of two values, in one order for both; None where none are known."""
    a, b = case.left.fingerprint(left), case.right.fingerprint(right)
    if a is None or b is None:
        both = None
        if not case.by_sample:  # the whole batch's fingerprint says nothing of one sample
            both = same_order(case.left.contents, left, case.right.contents, right)
        if both is not None:
            return both
        # two views that lie alike in storages whose contents are known: the storages' difference
        a, b = case.left.nearest_fingerprint(left), case.right.nearest_fingerprint(right)
        alike = case.left.contents.lies(left) == case.right.contents.lies(right)
        if a is None or b is None or a.n != b.n or not alike:
            return None
    return a, b


def _computing_precision(case: Case, origin: Origin) -> float | None:
    """What rounding explains of parameters that one run keeps in the other's dtype and casts to compute.

    That is mixed precision: a library says so by its marks. A cast for good, or one that no mark tells of,
    is not explained so.
    """
    left, right = origin.values.left, origin.values.right
    if origin.kind != "leaf" or left is None or right is None:
        return None
    a, b = case.left.trace.meta(left).dtype, case.right.trace.meta(right).dtype
    for side, held, computing in ((case.right, a, b), (case.left, b, a)):
        if computing in _ROUNDOFF and set(origin.names) <= _cast_to_compute(side, held, computing):
            return _ROUNDOFF[computing]
    return None


def _cast_to_compute(side: Side, held: str, computing: str) -> set[str]:
    """Names of the parameters that a library cast from one dtype to another, keeping the original."""
    found: set[str] = set()
    for mark in side.trace.marks:
        fields = mark.fields
        if mark.kind != "cast" or fields.get("what") != "shard" or not fields.get("intact"):
            continue
        if (fields.get("source_dtype"), fields.get("destination_dtype")) == (held, computing):
            found.update(name for name, *_ in fields.get("parameters", ()))
            found.update(name for name, _ in fields.get("tied", ()))
    return found


def _tolerated(
    case: Case, origin: Origin, found: Difference | None, tolerance: Tolerance | None
) -> bool:
    if tolerance is None or found is None or origin.values.left is None:
        return False
    left = case.left.nearest_fingerprint(origin.values.left)
    return left is not None and not found.nonfinite_changed and tolerance.allows(found, left.absmax)


# ---- ops -----------------------------------------------------------------------------------------------


def _op_size(case: Case, origin: Origin, found: Difference | None) -> Size:
    op = origin.op
    assert op.left is not None
    assert op.right is not None
    bound = _bound(case, origin)
    # one sample of batches of other sizes: shapes and masks are other arguments without being other work
    set_otherwise = bool(origin.settings) and not case.by_sample
    set_otherwise = set_otherwise and not only_open_masks(case, op.left, op.right, origin.settings)
    if set_otherwise or draws(case.left, op.left) or draws(case.right, op.right):
        return Size(found, bound, bound.loose if bound else None, material=True)
    if found is None or bound is None or not found.comparable or found.relative is None:
        return Size(found, bound, None, material=True)
    if found.nonfinite_changed or _whole_numbers(case.left, origin.values.left):
        return Size(found, bound, 0.0, material=True)
    same = same_kernel(case, op.left, op.right)
    limit = bound.limit(same_kernel=same, few=found.few)
    if bound.cannot_judge:
        return Size(found, bound, limit, material=False, same_kernel=same)
    return Size(found, bound, limit, found.relative > limit, same)


def _bound(case: Case, origin: Origin) -> Bound | None:
    """The wider of both sides' bounds; the narrower where only one may round the factors of its products.

    That is a setting, TF32 or bfloat16 on one side only, and no rounding.
    """
    bounds = []
    for side, op in ((case.left, origin.op.left), (case.right, origin.op.right)):
        if op is not None and len(side.trace.ops.outputs[op]):
            slot = min(origin.slot or 0, len(side.trace.ops.outputs[op]) - 1)
            slot = slot if origin.story != "factory" else 0
            view = side.views[op]
            bounds.append((explained(view, slot), precision_of(view, slot)))
    if not bounds:
        return None
    alike = len({precision for _, precision in bounds}) == 1
    return (max if alike else min)((bound for bound, _ in bounds), key=lambda b: b.loose)


def _whole_numbers(side: Side, value: int | None) -> bool:
    return value is not None and side.trace.meta(value).dtype.startswith(_WHOLE_NUMBERS)


def same_kernel(case: Case, left: int, right: int) -> bool:
    """Whether both sides were seen to run the same kernels, on the same sizes and number of threads."""
    a, b = case.left.pick(left), case.right.pick(right)
    if (
        a is None
        or b is None
        or not a.observed
        or not {a.source, b.source} <= {"verbose", "profiler"}
    ):
        return False
    return (a.name, a.library, sorted(a.observed)) == (
        b.name,
        b.library,
        sorted(b.observed),
    ) and threads(case.left, left) == threads(case.right, right)


def threads(side: Side, op: int) -> object:
    """On how many threads an op ran, as far as the trace says."""
    return side.settings.before(side.seq(op))("num_threads", None)


# ---- regions ---------------------------------------------------------------------------------------------


def _region_size(case: Case, origin: Origin, found: Difference | None) -> Size:
    """Rounding explains the sum of what it explains at the ops that one side has, and at the reader."""
    total = 0.0
    widest: Bound | None = None
    judged = False
    for side, ops in ((case.left, origin.region.left), (case.right, origin.region.right)):
        for op in ops[:_REGION]:
            bound = rounding_of(side, op)
            if bound is None:
                continue
            if not bound.cannot_judge:
                total += bound.loose
                judged = True
            if widest is None or bound.loose > widest.loose:
                widest = bound
    nonfinite = found is not None and found.nonfinite_changed
    if found is None and origin.row >= 0:
        found, reader = at_reader(case, origin.row)
        total += reader
        judged = judged or reader > 0.0  # what differs was measured there
        nonfinite = nonfinite or (found is not None and found.nonfinite_changed)
    if found is None or not found.comparable or found.relative is None or nonfinite:
        return Size(found, widest, None, material=True)
    if _whole_numbers(case.left, origin.values.left) or not judged:
        return Size(found, widest, total, material=True)
    if _narrowed(case, origin):
        return Size(found, widest, total, material=True)
    return Size(found, widest, total, found.relative > total)


def _updated(case: Case, origin: Origin, size: Size) -> Size:
    """The size of a parameter that each run updated by itself: an update changes little of it.

    So what rounding explains is a part of the update, beside what is lost where it is added; a narrower type in which one
    run reduced the gradient counts as in mixed precision, which keeps the original.
    """
    other = unlike(case, origin)
    if other.renumbered or bool(other.only.left) != bool(other.only.right):
        return replace(size, material=True)
    change = change_of(case, origin)
    found = size.difference
    if change is None or size.limit is None or found is None or found.relative is None:
        return size
    assert origin.values.left is not None
    added = 2 * dtype_epsilon(case.left.trace.meta(origin.values.left).dtype)
    part = max([_REARRANGED, *(_CASTS * _ROUNDOFF.get(t, 1.0) for t in narrowed_to(case, origin))])
    limit = min(size.limit, added + part * change)
    return replace(size, limit=limit, material=found.relative > limit or found.nonfinite_changed)


def narrowed_to(case: Case, origin: Origin) -> list[str]:
    """The narrower types that only one run computes a region in."""
    left, right = _narrow_types(case, origin)
    return sorted(left ^ right) if bool(left) != bool(right) else []


def rounding_of(side: Side, op: int) -> Bound | None:
    """What rounding explains at an op of a region; None for views and ops without a result."""
    if side.contents.tokens.view[op] or not len(side.trace.ops.outputs[op]):
        return None
    return explained(side.views[op], 0)


def at_reader(case: Case, row: int) -> tuple[Difference | None, float]:
    """The difference of what the reader of a region returns, and what rounding explains there."""
    i, j = int(case.pairing.left[row]), int(case.pairing.right[row])
    outputs = case.compared.outputs
    for place in np.flatnonzero(outputs.pair == row).tolist():
        found = measure(case, int(outputs.left[place]), int(outputs.right[place]))
        if found is not None:
            bounds = explained(case.left.views[i], 0), explained(case.right.views[j], 0)
            limits = [b.loose for b in bounds if math.isfinite(b.loose)]
            return found, max(limits, default=0.0)
    return None, 0.0


def _narrowed(case: Case, origin: Origin) -> bool:
    """Whether one side computes the region in a narrower type than the other: a choice, no rounding.

    Code that was compiled stands for more than the ops that only one run has: what it computes in says nothing of them.
    """
    if any(op in case.left.regions.at for op in origin.region.left) or any(
        op in case.right.regions.at for op in origin.region.right
    ):
        return False
    left, right = _narrow_types(case, origin)
    return bool(left) != bool(right)


def _narrow_types(case: Case, origin: Origin) -> tuple[set[str], set[str]]:
    """The types of 16 bits and less that each run's own ops of an origin return."""
    left, right = (
        {
            side.trace.meta(int(v)).dtype
            for op in ops
            if not side.contents.tokens.view[op]
            for v in side.trace.ops.outputs[op]
        }
        & NARROW
        for side, ops in ((case.left, origin.region.left), (case.right, origin.region.right))
    )
    return left, right


#: Unit roundoff, 2^-p for p bits of significand: the largest relative error of one rounding.
_ROUNDOFF: Final = {"float16": 2.0**-11, "bfloat16": 2.0**-8}

#: Part of an update that gradients summed in another order explain: an optimizer may divide small ones by small ones.
_REARRANGED: Final = 1e-3
#: Casts of a gradient on its way through a reduction, each in every rank.
_CASTS: Final = 4

#: Types of 16 bits and less.
NARROW: Final = frozenset(
    ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]
)
