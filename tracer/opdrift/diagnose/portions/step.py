"""What a first training step comes to in two runs: the gradients that an optimizer reads, or what it makes of parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from opdrift import components
from opdrift.bounds import grown, precision_of
from opdrift.bounds.precision import ROUNDOFF
from opdrift.bounds.products import PRODUCT_OPS
from opdrift.bounds.view import base_name
from opdrift.case import Case, Side
from opdrift.compare import Difference, dtype_epsilon
from opdrift.diagnose.portions.noise import divides_by_size, noise_of_steps
from opdrift.diagnose.portions.split import Split
from opdrift.origins.updates import before_of, contents_of, gathered_origin, gathered_parameter
from opdrift.records import Sides
from opdrift.sizes import measure
from opdrift.tracefile.fingerprints import Fingerprint

#: One factor explains what is so near to it, each of it: rounding leaves 1e-6 in float32, 1e-2 in bfloat16. Of one that is
#: nearly 1 it has to explain nine tenths of the difference.
SAME_FACTOR: Final = 1e-3
#: Less than this part of all together, squared, is what rounding leaves of a zero.
_SMALL: Final = 1e-10
#: An update of which rounding the parameter leaves no more is not asked for a factor.
_LOST: Final = 0.1
#: Where rounding explains so much of what is compared, the comparison says nothing: parameters in bfloat16 hide a step's update.
SAYS_NOTHING: Final = 0.5
#: A pass through a layer and back.
_TWICE: Final = 2

Vector = npt.NDArray[np.float64]
#: A pair of ops, and the left and the right value.
Row = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class FirstStep:
    """What the first step comes to, and how that of the right run is related to that of the left one.

    Attributes:
        what: "gradient", its "norm", or "update" of a parameter.
        count: How many.
        relative: ||left - right|| / ||left|| of all together.
        factor: The one number that turns the left ones into the right ones; None if there is none.
        row: The pair of ops that read what is the furthest apart, in parts of all; -1 where it is not one pair.
        op: These ops.
        values: What they read.
        gap: How far that is apart.
        limit: What rounding explains of `relative`.
        noise: By parameter what rounding explains of its step, in parts of it; none where the optimizer does not divide
            gradients by their size, or they are not known.
        apart: Names of the parameters of those that rounding does not explain, by themselves, the furthest first; "" where
            it is not known whose one is.
        lengths: How far the norms of the gradients are apart, beside updates; None where they are not known.
        updates: How far the updates are apart, beside the norms of gradients; None where they are not known.
    """

    what: str
    count: int
    relative: float
    factor: float | None
    row: int
    op: Sides[int | None]
    values: Sides[int | None]
    gap: Difference
    limit: float
    noise: Mapping[str, float]
    apart: tuple[str, ...]
    lengths: float | None = None
    updates: float | None = None

    @property
    def agrees(self) -> bool:
        """Whether rounding explains all of the difference."""
        return self.relative <= self.limit


@dataclass(frozen=True, slots=True)
class _Term:
    """One gradient or update of both runs.

    Attributes:
        name: Of the parameter; "" where that is not known.
        row: Where it is read.
        gap: How far apart the values there are.
        absolute: ||left - right||.
        ssq: ||left||^2 and ||right||^2.
        sketches: Those of both, where recorded.
        lost: What rounding leaves of an update, beside that of the gradient, in parts of it.
    """

    name: str
    row: Row
    gap: Difference
    absolute: float
    ssq: tuple[float, float]
    sketches: tuple[Vector, Vector] | None
    lost: float = 0.0


def first_step(case: Case, split: Split) -> FirstStep | None:
    """What the first step comes to; None where the runs have nothing of it that both hold whole."""
    whole = 0 if split.parts.left <= split.parts.right else 1
    gradients = _gradients(case, split, whole)
    if gradients:
        known = {t.name: t.row[1 + whole] for t in gradients}
        return _related(case, "gradient", gradients, _noise(case, whole, known, len(gradients)))
    updates = list(_updates(case, split))
    if not updates:
        return None
    known = _whole_gradients((case.left, case.right)[whole])
    noise = _noise(case, whole, known, len(updates))
    updates = [replace(t, lost=t.lost + noise.get(t.name, 0.0)) for t in updates]
    return _related(case, "update", updates, noise)


def _noise(case: Case, whole: int, gradients: Mapping[str, int], depth: int) -> dict[str, float]:
    """What rounding explains of each parameter's step, from the gradients of one run, where its optimizer divides them."""
    side = (case.left, case.right)[whole]
    if not divides_by_size(side):
        return {}
    prints = {n: side.nearest_fingerprint(v) for n, v in gradients.items() if n}
    known = {name: content for name, content in prints.items() if content is not None}
    units = [dtype_epsilon(side.trace.meta(v).dtype) / 2 for v in gradients.values()]
    return noise_of_steps(known, rounding_of_gradients(case, max(units, default=0.0), depth))


def _whole_gradients(side: Side) -> dict[str, int]:
    """By parameter the gradient that ops outside modules read first behind the first backward pass."""
    ops, states = side.trace.ops, side.contents.states
    begin, end = _between(side)
    found: dict[str, int] = {}
    seen: set[int] = set()
    for op in range(begin, end):
        if ops.phase[op] or side.call(op).id:
            continue
        for value in ops.inputs[op].tolist():
            state = int(states.of[value])
            writer = int(states.writer[state])
            if writer >= 0 and ops.phase[writer] and state not in seen:
                seen.add(state)
                found.setdefault(_name(side, value), value)
    return found


# ---- the gradients -------------------------------------------------------------------------------------


def _gradients(case: Case, split: Split, whole: int) -> list[_Term]:
    """What the first ops outside modules behind the first backward pass read of it, on both sides.

    Args:
        case: Both runs.
        split: How they divide batches.
        whole: The side that divides them less: what it reads, a backward op made.
    """
    side = (case.left, case.right)[whole]
    phase, states = side.trace.ops.phase, side.contents.states
    begin, end = _between(side)
    inputs = case.compared.inputs
    taken: dict[int, Row] = {}
    for row in range(len(case.pairing.left)):
        op = int((case.pairing.left, case.pairing.right)[whole][row])
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
    terms = [_gradient(case, row) for row in taken.values()]
    found = [term for term in terms if term is not None]
    known = len(found) == len(terms) and all(_done(case, split, t.row[0]) == 1 for t in found)
    return found if known else []


def _between(side: Side) -> tuple[int, int]:
    """The first op of the first backward pass, and the first of the forward after it, or the end."""
    phase = side.trace.ops.phase
    begin = int(np.argmax(phase == 1))
    after = (i for i in range(begin, len(phase)) if not phase[i] and side.call(i).id)
    return begin, next(after, len(phase))


def _gradient(case: Case, row: Row) -> _Term | None:
    _, left, right = row
    gap = measure(case, left, right)
    a, b = case.left.nearest_fingerprint(left), case.right.nearest_fingerprint(right)
    if gap is None or a is None or b is None or gap.absolute_l2 is None or a.nonfinite:
        return None
    vectors = _vector(a), _vector(b)
    sketches = None if vectors[0] is None or vectors[1] is None else (vectors[0], vectors[1])
    return _Term(
        _name(case.left, left),
        row,
        gap,
        gap.absolute_l2,
        (a.ssq, b.ssq),
        sketches,
    )


def _name(side: Side, gradient: int) -> str:
    """The parameter that a gradient updates; "" where it may be one of several."""
    updated = side.gradients.of([gradient])
    return updated.names[0] if updated is not None and len(updated.names) == 1 else ""


def _done(case: Case, split: Split, row: int) -> int | None:
    """How many batches were done before a pair of ops; None where one run steps for each part."""
    left, right = int(case.pairing.left[row]), int(case.pairing.right[row])
    return split.done(case.left.seq(left), case.right.seq(right))


# ---- what the optimizer makes of parameters ---------------------------------------------------------------


def _updates(case: Case, split: Split) -> Iterator[_Term]:
    """What the first step added to each parameter, where it is read next."""
    inputs, pairing = case.compared.inputs, case.pairing
    seen: set[str] = set()
    for slot in np.lexsort((inputs.position, pairing.left[inputs.pair])).tolist():
        row = int(inputs.pair[slot])
        if _done(case, split, row) != 1:
            continue
        values = int(inputs.left[slot]), int(inputs.right[slot])
        leaf = gathered_parameter(case, *values)
        if leaf is None or leaf.left is None or leaf.left.name in seen:
            continue
        found = _update(case, slot, (row, *values), leaf.left.name)
        if found is not None:
            seen.add(leaf.left.name)
            yield found


def _update(case: Case, slot: int, row: Row, name: str) -> _Term | None:
    origin = gathered_origin(case, slot)
    gap = measure(case, row[1], row[2])
    if origin is None or gap is None:
        return None
    now, before = contents_of(case, origin), before_of(case, origin)
    # where the runs began with other weights, that is told as such
    then = before.left or before.right
    if now.left is None or now.right is None or then is None:
        return None
    start, ends = _vector(then), (_vector(now.left), _vector(now.right))
    if start is None or ends[0] is None or ends[1] is None:
        return None
    if not start.shape == ends[0].shape == ends[1].shape:
        return None  # sketches of other types
    left, right = ends[0] - start, ends[1] - start
    ssq = float(left @ left), float(right @ right)
    size = math.sqrt(float((left - right) @ (left - right)))
    # the parameter is rounded to its type after the step
    dtypes = case.left.trace.meta(row[1]).dtype, case.right.trace.meta(row[2]).dtype
    unit = max(map(dtype_epsilon, dtypes)) / 2
    lost = _TWICE * unit * math.sqrt(now.left.ssq / ssq[0]) if ssq[0] else 0.0
    return _Term(name, row, gap, size, ssq, (left, right), lost)


def _vector(content: Fingerprint | None) -> Vector | None:
    """A content as numbers that add as its elements do: its sketch, or all elements where they are few."""
    if content is None or content.sketch is not None:
        return None if content is None else content.sketch
    found = components.numbers(content)
    return found if found is not None and len(found) == content.n else None


# ---- how they are related -----------------------------------------------------------------------------------


def _related(
    case: Case, what: str, terms: Sequence[_Term], noise: Mapping[str, float]
) -> FirstStep | None:
    """Both runs' gradients or updates together."""
    total = sum(term.ssq[0] for term in terms)
    if not total:
        return None
    terms = sorted(terms, key=lambda term: -term.absolute)
    unit = max(dtype_epsilon(case.left.trace.meta(t.row[1]).dtype) / 2 for t in terms)
    limit = rounding_of_gradients(case, unit, len(terms))
    lost = sum(t.lost**2 * t.ssq[0] for t in terms if t.ssq[0])
    limit_of_all = limit + math.sqrt(lost / total)
    if limit_of_all > SAYS_NOTHING:
        return None
    row, *values = terms[0].row
    return FirstStep(
        what=what,
        count=len(terms),
        relative=math.sqrt(sum(t.absolute**2 for t in terms) / total),
        factor=_factor(terms),
        row=row,
        op=Sides(int(case.pairing.left[row]), int(case.pairing.right[row])),
        values=Sides(*values),
        gap=terms[0].gap,
        limit=limit_of_all,
        noise=noise,
        apart=tuple(
            t.name
            for t in terms
            if t.absolute > (limit + t.lost) * math.sqrt(t.ssq[0])
            and t.absolute > limit * math.sqrt(total)
        ),
    )


def _factor(terms: Sequence[_Term]) -> float | None:
    """The factor f of right = f left.

    Sketches are linear, so those of the right terms are f times those of the left ones, bucket for bucket;
    norms are f times as long where there is no sketch.
    """
    dots = np.zeros(2)
    for term in terms:
        if term.sketches is not None:
            a, b = term.sketches
            dots += float(a @ b), float(a @ a)
    if not dots[1] or dots[0] <= 0:
        return None
    factor = float(dots[0] / dots[1])
    total = sum(term.ssq[0] for term in terms)
    nearest = min(SAME_FACTOR, abs(factor - 1) / 10)
    for term in terms:
        left, right = term.ssq
        if max(left, right) < total * _SMALL or term.lost > _LOST:
            continue
        near = nearest + _TWICE * term.lost
        if not left or not math.isclose(math.sqrt(right / left), factor, rel_tol=near):
            return None
        if term.sketches is not None:
            a, b = term.sketches
            rest = b - factor * a
            if rest @ rest > near**2 * float(b @ b):
                return None
    return factor


def rounding_of_gradients(case: Case, unit: float, depth: int) -> float:
    """What rounding explains of a gradient: twice the depth of the model, in the coarsest arithmetic of its products."""
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
    return grown(unit, _TWICE * depth)
