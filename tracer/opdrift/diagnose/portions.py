"""One batch in one run, its parts in several calls of the other: what is compared is the gradient of the first step.

The forward passes then have other sizes and cannot be held against each other op by op. The sum of what the
parts give is what the optimizer reads, in both runs the same parameter's gradient.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from opdrift.bounds import grown, precision_of
from opdrift.bounds.precision import ROUNDOFF
from opdrift.bounds.products import PRODUCT_OPS
from opdrift.bounds.view import base_name
from opdrift.case import Case, Side
from opdrift.causes.evidence import cause, counted
from opdrift.compare import Difference, dtype_epsilon, number
from opdrift.origins.model import Origin
from opdrift.origins.search import Found
from opdrift.records import Cause, Sides
from opdrift.sizes import Size, measure
from opdrift.tracefile.fingerprints import Fingerprint

#: One factor explains gradients that are so near to it, each of them: rounding leaves 1e-6 in float32, 1e-2 in bfloat16.
_SAME_FACTOR: Final = 1e-3
#: Less than this part of all gradients together, squared, is what rounding leaves of a zero.
_SMALL: Final = 1e-10
#: A pass through a layer and back.
_TWICE: Final = 2
_SIDES: Final = ("left", "right")


@dataclass(frozen=True, slots=True)
class Portions:
    """The answer: where the gradients are read first, how far apart they are, and why."""

    origin: Origin
    size: Size
    cause: Cause


@dataclass(frozen=True, slots=True)
class _Gradients:
    """The first gradients that an optimizer reads, and how the right ones are related to the left ones.

    Attributes:
        rows: Row and (left value, right value) of each pair.
        relative: ||left - right|| / ||left|| of all together.
        factor: The one number that turns the left ones into the right ones; None if there is none.
        worst: Which is the furthest apart, in parts of all.
    """

    rows: tuple[tuple[int, int, int], ...]
    relative: float
    factor: float | None
    worst: int
    gap: Difference


def portions_of(case: Case, found: Found) -> Portions | None:
    """The answer for two runs of which one gives each batch in parts; None where that is not seen."""
    counts = _parts(case) if found.origins and not case.by_sample else None
    if counts is None:
        return None
    read = _first_gradients(case, 0 if counts.left < counts.right else 1)
    if read is None:
        return None
    row, left, right = read.rows[read.worst]
    op: Sides[int | None] = Sides(int(case.pairing.left[row]), int(case.pairing.right[row]))
    if (
        _returned(case.left, op.left) * counts.right
        != _returned(case.right, op.right) * counts.left
    ):
        return None  # a step for each part: smaller batches, not parts of one
    limit = _limit(case, read)
    ends = _ends(case, found)
    agree = read.relative <= limit
    later = max((relative for _, relative in ends), default=0.0)
    material = not agree or later > limit
    origin = Origin(
        kind="structure",
        story="region",
        op=op,
        row=row,
        values=Sides(left, right),
        slot=None,
        order=float(case.pairing.left[row]),
    )
    size = Size(read.gap, None, limit, material)
    return Portions(origin, size, _cause(case, counts, read, ends, limit, agree, material, op))


# ---- are there parts -----------------------------------------------------------------------------------


def _parts(case: Case) -> Sides[int] | None:
    """Parts of each batch per side, one of which is 1: what the model returned, in order, has as many rows together."""
    if not all((side.trace.ops.phase == 1).any() for side in (case.left, case.right)):
        return None
    outputs = _outputs(case.left), _outputs(case.right)
    for name in outputs[0].keys() & outputs[1].keys():
        left, right = outputs[0][name], outputs[1][name]
        few, many = sorted((left, right), key=len)
        if not few or len(few) == len(many) or len(many) % len(few):
            continue
        parts = len(many) // len(few)
        if all(
            _put_together(whole, many[i * parts : (i + 1) * parts]) for i, whole in enumerate(few)
        ):
            return Sides(1, parts) if few is left else Sides(parts, 1)
    return None


def _outputs(side: Side) -> dict[str, list[tuple[int, ...]]]:
    found: dict[str, list[tuple[int, ...]]] = defaultdict(list)
    for leaf in side.leaves.outputs:
        if leaf.kind == "output":
            found[leaf.name].append(side.trace.meta(leaf.value).shape)
    return found


def _returned(side: Side, op: int | None) -> int:
    """How many results of the model there are before an op."""
    assert op is not None
    end = side.seq(op)
    return sum(leaf.kind == "output" and leaf.seq <= end for leaf in side.leaves.outputs)


def _put_together(whole: tuple[int, ...], parts: Sequence[tuple[int, ...]]) -> bool:
    return bool(
        whole
        and all(part and part[1:] == whole[1:] for part in parts)
        and sum(part[0] for part in parts) == whole[0]
    )


# ---- the gradients -------------------------------------------------------------------------------------


def _first_gradients(case: Case, whole: int) -> _Gradients | None:
    """What the first ops outside modules behind the first backward pass read of it, on both sides.

    Args:
        case: Both runs.
        whole: The side that is given the batch as a whole: what it reads, a backward op made.
    """
    side = (case.left, case.right)[whole]
    phase, states = side.trace.ops.phase, side.contents.states
    begin = int(np.argmax(phase == 1))
    after = [
        i
        for i in range(begin, len(phase))
        if not phase[i] and side.call(i).id  # the next forward
    ]
    end = after[0] if after else len(phase)
    inputs = case.compared.inputs
    taken: dict[int, tuple[int, int, int]] = {}
    for row in range(len(case.pairing.left)):
        ops = int(case.pairing.left[row]), int(case.pairing.right[row])
        op = ops[whole]
        if not begin < op < end or phase[op] or side.call(op).id:
            continue
        for place in case.compared.inputs_of(row):
            pair = int(inputs.left[place]), int(inputs.right[place])
            state = int(states.of[pair[whole]])
            writer = int(states.writer[state])
            if writer < 0 or not phase[writer] or state in taken:
                continue
            metas = case.left.trace.meta(pair[0]), case.right.trace.meta(pair[1])
            if metas[0].shape == metas[1].shape and metas[0].dtype == metas[1].dtype:
                taken[state] = (row, *pair)
    return _related(case, tuple(taken.values()))


def _related(case: Case, rows: tuple[tuple[int, int, int], ...]) -> _Gradients | None:
    gaps: list[tuple[float, Difference]] = []
    prints: list[tuple[Fingerprint, Fingerprint]] = []
    for _, left, right in rows:
        gap = measure(case, left, right)
        a, b = case.left.nearest_fingerprint(left), case.right.nearest_fingerprint(right)
        if gap is None or a is None or b is None or gap.absolute_l2 is None or a.nonfinite:
            return None
        gaps.append((gap.absolute_l2, gap))
        prints.append((a, b))
    total = sum(a.ssq for a, _ in prints)
    if not total:
        return None
    distance = math.sqrt(sum(d * d for d, _ in gaps) / total)
    worst = max(range(len(gaps)), key=lambda k: gaps[k][0])
    return _Gradients(rows, distance, _factor(prints), worst, gaps[worst][1])


def _factor(prints: Sequence[tuple[Fingerprint, Fingerprint]]) -> float | None:
    """The factor f of right = f left.

    Sketches are linear, so those of the right gradients are f times those of the left ones, bucket for bucket;
    norms are f times as long where there is no sketch.
    """
    dots = np.zeros(2)
    for a, b in prints:
        if a.sketch is not None and b.sketch is not None:
            dots += float(a.sketch @ b.sketch), float(a.sketch @ a.sketch)
    if not dots[1] or dots[0] <= 0:
        return None
    factor = float(dots[0] / dots[1])
    total = sum(a.ssq for a, _ in prints)
    for a, b in prints:
        if a.ssq < total * _SMALL:
            continue
        if not math.isclose(math.sqrt(b.ssq / a.ssq), factor, rel_tol=_SAME_FACTOR):
            return None
        if a.sketch is not None and b.sketch is not None:
            rest = b.sketch - factor * a.sketch
            if rest @ rest > _SAME_FACTOR**2 * float(b.sketch @ b.sketch):
                return None
    return factor


def _limit(case: Case, read: _Gradients) -> float:
    """What rounding explains of a gradient: twice the depth of the model, in the coarsest arithmetic of its products."""
    unit = max(dtype_epsilon(case.left.trace.meta(left).dtype) / 2 for _, left, _ in read.rows)
    for side in (case.left, case.right):
        signatures = side.trace.ops.signature
        _, first = np.unique(signatures, return_index=True)  # one op of each kind is enough
        for op in first.tolist():
            if base_name(side.name(op)) not in PRODUCT_OPS:
                continue
            view = side.views[op]
            narrow = precision_of(view, view.mutated)
            dtype = view.output_metas[view.mutated].dtype
            unit = max(unit, dtype_epsilon(dtype) / 2 if narrow == "ieee" else ROUNDOFF[narrow])
    return grown(unit, _TWICE * len(read.rows))


def _ends(case: Case, found: Found) -> list[tuple[str, float]]:
    """The parameters and gradients that both runs ended with: kind, and how far apart all of that kind are."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for sink in found.sinks:
        if sink.kind not in ("parameter", "gradient") or sink.left is None or sink.right is None:
            continue
        gap = measure(case, sink.left, sink.right)
        a = case.left.nearest_fingerprint(sink.left)
        if gap is not None and gap.absolute_l2 is not None and a is not None:
            sums[sink.kind][0] += gap.absolute_l2**2
            sums[sink.kind][1] += a.ssq
    return [
        (kind, math.sqrt(distance / total)) for kind, (distance, total) in sums.items() if total
    ]


# ---- words -----------------------------------------------------------------------------------------------


def _cause(
    case: Case,
    counts: Sides[int],
    read: _Gradients,
    ends: Sequence[tuple[str, float]],
    limit: float,
    agree: bool,
    material: bool,
    op: Sides[int | None],
) -> Cause:
    few, many = ("left", "right") if counts.left < counts.right else ("right", "left")
    parts = max(counts.left, counts.right)
    given = f"each batch goes through the model whole in the {few} run and in {counted(parts, 'part')} in the {many} one"
    size = number(read.relative)
    evidence = [
        f"first step: {counted(len(read.rows), 'gradient')}, relative difference {size}; rounding explains {number(limit)}",
        *(f"end of the run: {kind}s, relative difference {number(far)}" for kind, far in ends),
        *(
            f"{name}: {side.place(i)} reads them first"
            for name, side, i in zip(
                _SIDES, (case.left, case.right), (op.left, op.right), strict=True
            )
            if i is not None
        ),
        "outputs and losses of a batch and of its parts have other sizes, so they are not compared",
    ]
    if not material:
        return cause(
            "rounding",
            "likely",
            f"{given}; the gradients agree to {size}",
            evidence,
            "Nothing is wrong: sums over parts are rounded in another order. For equal bits give both runs the same parts.",
        )
    if agree:
        return cause(
            "structure",
            "possible",
            f"{given}; the gradients of the first step agree to {size}, and what the runs end with does not",
            evidence,
            "Record one step of each run: what differs lies behind the first optimizer step, or rounding grew in the later ones.",
        )
    if read.factor is None:
        return cause(
            "structure",
            "likely",
            f"{given}; the gradients of the first step differ by {size}, and by no single factor",
            evidence,
            "Check that the parts hold the same samples as the batch, that each part's loss is weighted by its size (a mean"
            " over parts of unequal length is not the mean of the batch), and that no layer looks at the whole batch"
            " (BatchNorm in training, dropout).",
        )
    relation = read.factor if few == "left" else 1 / read.factor
    times = f"{relation:.4g}"
    undivided = math.isclose(relation, parts, rel_tol=_SAME_FACTOR)
    return cause(
        "structure",
        "likely",
        f"{given}; the gradients of the {many} run are {times} times as large"
        + (
            ", as if the loss of a part were not divided by the number of parts"
            if undivided
            else ""
        ),
        [f"one factor explains all gradients of the first step: {times}", *evidence],
        f"Divide the loss of each part by {parts} before backward() in the {many} run, as for a mean over the batch."
        if undivided
        else "Compare how the runs scale the loss before backward(), and the gradients before the step.",
    )
