"""Queries that have no key to attend to: padding, mostly. What attention returns for them means nothing, and differs.

Fused kernels return zeros for them; a softmax over scores that are all very low returns an average over what is hidden.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from opdrift import components, tfp1
from opdrift.case import Case, Side
from opdrift.causes.evidence import SIDES, Evidence, cause, scope, some
from opdrift.causes.masking import both_shown
from opdrift.causes.shown import same
from opdrift.compare import Difference, difference, number
from opdrift.leaves import LeafTable
from opdrift.origins.model import Origin
from opdrift.records import Cause
from opdrift.sinks import Sink, find_sinks
from opdrift.sizes import measure, prints_of
from opdrift.tracefile.fingerprints import Fingerprint

_FUSED: Final = "scaled_dot_product"
#: Deviations of a size from the sketches that are allowed.
_SURE: Final = 4.0
#: Sampled elements that are closer than this part of the largest one count as equal.
_CLOSE: Final = 1e-3
#: Sampled elements of queries that have keys are closer than this, or than so many roundings of the largest.
_ROUNDED: Final = 1e-5
_ROUNDINGS: Final = 4
#: So many of them must be there.
_ENOUGH: Final = 6
#: Positions of one sample that are listed.
_LISTED: Final = 6


@dataclass(frozen=True, slots=True)
class Keyless:
    """Queries without a key.

    Attributes:
        number: The side whose fused op returns zeros for them: 0 left, 1 right.
        op: That op.
        queries: How many there are, of all heads together one for each position.
        total: How many queries there are.
        seen: Some of them, as (sample, position).
    """

    number: int
    op: int
    queries: int
    total: int
    seen: tuple[tuple[int, int], ...]


def keyless(case: Case, origin: Origin) -> Keyless | None:
    """Whether two ways of attention differ in nothing but queries for which one of them returns zeros."""
    left, right = origin.values.left, origin.values.right
    if origin.story != "region" or case.by_sample or left is None or right is None:
        return None
    found = _zeroed(case, origin)
    if found is None:
        return None
    prints = prints_of(case, left, right)
    if prints is None:
        return None
    gap = difference(*prints)
    zeroed, other = prints[:: -1 if found.number else 1]
    confined = gap.comparable and not gap.nonfinite_changed and _is_confined(gap, zeroed, other)
    return found if confined else None


def _zeroed(case: Case, origin: Origin) -> Keyless | None:
    """The one fused attention of a region, if it returns whole rows of zeros, and the other side has none."""
    fused = [
        (n, op)
        for n, (side, ops) in enumerate(
            ((case.left, origin.region.left), (case.right, origin.region.right))
        )
        for op in ops
        if _FUSED in side.name(op) and "backward" not in side.name(op)
    ]
    if len(fused) != 1:
        return None
    ((n, op),) = fused
    side = case.sides()
    own: Side = (side.left, side.right)[n]
    value = int(own.trace.ops.outputs[op][0])
    print_, shape = own.fingerprint(value), own.trace.meta(value).shape
    if print_ is None or len(shape) != 4 or not print_.zero:
        return None
    batch, heads, length, size = shape
    rows, rest = divmod(print_.zero, heads * size)
    if rest or not 0 < rows < batch * length:
        return None
    return Keyless(n, op, rows, batch * length, tuple(sorted(set(_zero_rows(print_, shape)))))


def _zero_rows(print_: Fingerprint, shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Sample and position of the sampled elements that are zero."""
    sampled = components.numbers(print_)
    if sampled is None:
        return
    for index, element in zip(tfp1.sample_positions(print_.n), sampled.tolist(), strict=True):
        if element == 0:
            batch, _, position, _ = np.unravel_index(index, shape)
            yield int(batch), int(position)


def _is_confined(gap: Difference, zeroed: Fingerprint, other: Fingerprint) -> bool:
    """Whether what one side has in place of the other's zeros is all of the difference.

    If b is a wherever a is not 0, then ||a - b||^2 = ||b||^2 - ||a||^2. The sampled elements must say so, too.
    """
    a, delta = components.numbers(zeroed), components.deltas(zeroed, other)
    if a is None or delta is None or np.count_nonzero(a) < _ENOUGH:
        return False
    close = max(_ROUNDED, _ROUNDINGS * max(components.spacing(zeroed), components.spacing(other)))
    if np.abs(delta[a != 0]).max() > close * zeroed.absmax:
        return False
    if gap.absolute_l2 is None or not gap.relative or gap.uncertainty is None:
        return False
    if gap.how not in ("sketch", "exact"):
        return False
    beyond = other.ssq - zeroed.ssq
    if beyond <= 0:
        return False
    allowed = _SURE * gap.uncertainty / gap.relative + _CLOSE
    return abs(gap.absolute_l2 - math.sqrt(beyond)) <= allowed * math.sqrt(beyond)


# ---- what depends on them ------------------------------------------------------------------------------


def results_of(case: Case) -> tuple[tuple[Sink, Difference], ...]:
    """The results of both runs that differ, and by how much, as far as that is known."""
    left, right = LeafTable(case.left.contents), LeafTable(case.right.contents)
    return tuple(
        (sink, gap)
        for sink in find_sinks(case.compared, left, right)
        if sink.differs and sink.left is not None and sink.right is not None
        if (gap := measure(case, sink.left, sink.right)) is not None
    )


def _rows_that_differ(
    case: Case, sink: Sink
) -> tuple[set[tuple[int, int]], set[tuple[int, int]]] | None:
    """Sample and position of a result's sampled elements: of those that differ, and of those that do not."""
    assert sink.left is not None
    assert sink.right is not None
    prints = prints_of(case, sink.left, sink.right)
    shape = case.left.trace.meta(sink.left).shape
    if prints is None or len(shape) < 3 or not math.prod(shape) == prints[0].n == prints[1].n:
        return None
    a, b = prints
    delta = components.deltas(a, b)
    if delta is None:
        return None
    rows: tuple[set[tuple[int, int]], set[tuple[int, int]]] = set(), set()
    for index, size in zip(tfp1.sample_positions(a.n), np.abs(delta).tolist(), strict=True):
        batch, position, *_ = np.unravel_index(index, shape)
        rows[size <= _CLOSE * a.absmax].add((int(batch), int(position)))
    return rows


def _listed(rows: set[tuple[int, int]]) -> str:
    """Rows in words: `sample 1 at 4, 7; sample 2 at 9`."""
    positions: dict[int, list[str]] = defaultdict(list)
    for batch, position in sorted(rows):
        positions[batch].append(str(position))
    return "; ".join(
        f"sample {batch} at {some(each, _LISTED)}" for batch, each in positions.items()
    )


# ---- the cause -----------------------------------------------------------------------------------------


def no_key(e: Evidence) -> Cause | None:
    """Attention differs for queries that have no key, and for no others."""
    found = keyless(e.case, e.origin)
    if found is None:
        return None
    zeroed, other = SIDES[found.number], SIDES[1 - found.number]
    side = e.sides[found.number][1]
    masks = both_shown(e)
    where = scope(side.module(found.op))
    return cause(
        "mask",
        "likely",
        f"{found.queries} of {found.total} queries in {where} have no key to attend to; what attention returns for them means"
        f" nothing: zeros in the {zeroed} run, an average over what is hidden in the {other} one",
        [
            f"{zeroed}: {side.place(found.op)} returns zeros for {found.queries} of {found.total} positions, in every head",
            f"among the sampled elements these are {_listed(set(found.seen))}"
            if found.seen
            else "",
            f"that is all of the difference: it is as large as what the {other} run has there",
            "both masks are made of the same truth values" if masks and same(*masks) else "",
            *_downstream(e),
        ],
        "Nothing is wrong if these positions are padding and are read by nobody: leave them out of what you compare and of"
        " the loss. For equal numbers let every query see a key, itself for instance, or use one attention in both runs.",
    )


def _downstream(e: Evidence) -> Iterator[str]:
    """What of the results differs, where they have a place for each position."""
    results = e.shared.once(results_of)
    if not e.size.material:
        largest = max((gap.relative or 0.0 for _, gap in results), default=0.0)
        yield (
            "no result is made of them: what the runs return differs by no more than rounding"
            f" ({number(largest)})"
        )
        return
    for sink, gap in results:
        rows = _rows_that_differ(e.case, sink) if sink.kind == "output" else None
        if rows is None or not rows[0] or gap.relative is None:
            continue
        agree = rows[1] - rows[0]
        yield (
            f"{sink.name or 'the result'} differs by {number(gap.relative)}: of its sampled elements at {_listed(rows[0])}"
            + (f"; it agrees at {_listed(agree)}" if agree else "")
        )
        return
