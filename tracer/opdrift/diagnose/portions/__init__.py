"""One batch in one run, its parts in several calls or on several ranks of the other: the first step is compared.

The forward passes then have other sizes and cannot be held against each other op by op. The sum of what the
parts give is what the optimizer reads, in both runs the same parameter's gradient; what it makes of the parameter is
the same as well.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from opdrift.case import Case
from opdrift.causes.gradients import updated_at
from opdrift.causes.structure import end_of
from opdrift.compare import difference
from opdrift.diagnose.portions.norms import Norms, by_norms, norms_of
from opdrift.diagnose.portions.results import Results, put_together
from opdrift.diagnose.portions.split import Split, split_of
from opdrift.diagnose.portions.step import SAYS_NOTHING, FirstStep, first_step
from opdrift.diagnose.portions.words import End, cause_of, cause_of_lengths, given_in
from opdrift.errors import IncomparableTracesError
from opdrift.origins.model import Origin
from opdrift.origins.search import Found, called_otherwise
from opdrift.origins.updates import gathered_parameter, updated_otherwise
from opdrift.records import Cause, Sides
from opdrift.sizes import Size, measure
from opdrift.steps import optimizer_steps
from opdrift.tracefile.fingerprints import Fingerprint
from opdrift.tracefile.reader import Trace

NO_FELLOWS: Sides[Sequence[Trace]] = Sides((), ())


@dataclass(frozen=True, slots=True)
class Portions:
    """The answer: where what is compared is read first, how far apart it is, what that comes to, and why."""

    origin: Origin
    size: Size
    step: FirstStep
    cause: Cause


@dataclass(frozen=True, slots=True)
class Settled:
    """The answer where no step of a training can be compared: weights that differ, and else nothing differs.

    Attributes:
        sentence: What was compared.
        doubt: Why that is not enough, where no weight differs by more than rounding.
    """

    sentence: str
    doubt: IncomparableTracesError | None = None


def portions_of(
    case: Case, found: Found, fellows: Sides[Sequence[Trace]] = NO_FELLOWS
) -> Portions | Settled | None:
    """The answer for two runs of which one gives each batch in parts; None where that is not seen.

    Args:
        case: Both runs, or one rank of each.
        found: The origins between them.
        fellows: The traces of the other ranks, where the runs have other numbers of ranks.

    Raises:
        IncomparableTracesError: Ranks share each batch, and nothing that both runs have is of all of it.
    """
    split = split_of(case, fellows) if found.origins and not case.by_sample else None
    if split is None:
        return None
    step = first_step(case, split)
    # where the optimizer divides gradients by their size, how long they are tells more than what it makes of them
    if step is None or (step.what == "update" and (step.agrees or step.noise)):
        norms = norms_of(case, fellows)
        if norms is not None and _behind_the_first(case, split, norms):
            step = by_norms(norms, step)
    if step is None:
        if any(map(is_weight, found.origins)):
            doubt = _nothing_of_all(case, split, None)
            return Settled(f"{given_in(split)}: weights were compared, and nothing else", doubt)
        return _by_results(case, split, fellows)
    ends = _ends(case, found, step) or _last_read(case, step)
    material = not step.agrees or any(end.relative > end.explained for end in ends)
    size = _size(step, material=material)
    why = cause_of(case, split, step, ends, material=material)
    return Portions(_origin(step), size, step, why)


def _behind_the_first(case: Case, split: Split, norms: Norms) -> bool:
    """Whether both runs read gradients of the first batch, and of all of it."""
    return split.done(case.left.seq(norms.op.left), case.right.seq(norms.op.right)) == 1


def lengths_apart(case: Case, fellows: Sides[Sequence[Trace]]) -> Portions | None:
    """Gradients of the same batch that are longer in one run, where ranks hold parts of them; None where none is.

    Args:
        case: One rank of each run.
        fellows: The traces of the other ranks.
    """
    norms = None if case.by_sample else norms_of(case, fellows)
    step = None if norms is None else by_norms(norms, None)
    if step is None:
        return None
    return Portions(_origin(step), _size(step), step, cause_of_lengths(case, step))


def _origin(step: FirstStep) -> Origin:
    return Origin(
        kind="structure",
        story="region",
        op=step.op,
        row=step.row,
        values=step.values,
        slot=None,
        order=float(step.op.left or 0),
    )


def _size(step: FirstStep, *, material: bool = True) -> Size:
    return Size(step.gap, None, step.limit, material)


def is_weight(origin: Origin) -> bool:
    """Whether a parameter or buffer differs before the run changed it."""
    leaf = origin.leaf.left
    return origin.kind == "leaf" and leaf is not None and leaf.kind in ("parameter", "buffer")


def steps_made_otherwise(case: Case, *, material: bool) -> Iterator[Origin]:
    """Ops of an optimizer's step, or updates of a sharded parameter, that are called with other numbers.

    Where what comes of them differs, updates of which one run calls other ops as well.
    """
    ops, left = case.left.trace.ops, case.pairing.left
    behind = left > np.argmax(ops.phase == 1)
    outside = behind & (ops.phase[left] == 0) & (ops.call[left] == 0)
    for row in np.flatnonzero(outside & case.compared.settings_differ).tolist():
        origin = called_otherwise(case, row)
        if origin is not None and updated_at(case, origin) is not None:
            yield origin
    yield from updated_otherwise(case, numbers=not material)


def _ends(case: Case, found: Found, step: FirstStep) -> list[End]:
    """The parameters and gradients that both runs ended with, all of a kind together."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for sink in found.sinks:
        if sink.kind not in ("parameter", "gradient") or sink.left is None or sink.right is None:
            continue
        gap = measure(case, sink.left, sink.right)
        a = case.left.nearest_fingerprint(sink.left)
        if gap is not None and gap.absolute_l2 is not None and a is not None:
            sums[sink.kind][0] += gap.absolute_l2**2
            sums[sink.kind][1] += a.ssq
            sums[sink.kind][2] += (step.noise.get(sink.name, 0.0) * _moved(case, sink.name, a)) ** 2
    return [
        End(kind, math.sqrt(apart / total), step.limit + math.sqrt(noise / total))
        for kind, (apart, total, noise) in sums.items()
        if total
    ]


def _last_read(case: Case, step: FirstStep) -> list[End]:
    """What all steps together added to the parameters that no run ends with whole, as far as both read them last.

    Held against how far they moved: of a weight's own size, rounding would explain whole steps.
    """
    inputs, pairing = case.compared.inputs, case.pairing
    done = [each.end for each in optimizer_steps(case.left.trace)]
    seen: set[str] = set()
    apart = way = 0.0
    steps = 1
    for slot in np.argsort(pairing.left[inputs.pair], kind="stable")[::-1].tolist():
        values = int(inputs.left[slot]), int(inputs.right[slot])
        leaf = gathered_parameter(case, *values)
        if leaf is None or leaf.left is None or leaf.left.name in seen:
            continue
        seen.add(leaf.left.name)
        gap, end = measure(case, *values), case.left.nearest_fingerprint(values[0])
        if gap is not None and gap.absolute_l2 is not None and end is not None:
            apart += gap.absolute_l2**2
            way += _moved(case, leaf.left.name, end) ** 2
            reader = case.left.seq(int(pairing.left[inputs.pair[slot]]))
            steps = max(steps, bisect_left(done, reader))
    explained = step.limit * steps
    if not way or explained > SAYS_NOTHING:
        return []
    return [End("all updates of parameter", math.sqrt(apart / way), explained)]


def _moved(case: Case, name: str, end: Fingerprint) -> float:
    """How far a parameter moved from where it was when the left run began."""
    rows = case.left.leaves.by_name.get(name)
    start = case.left.nearest_fingerprint(rows[0].value) if rows else None
    return 0.0 if start is None else difference(start, end).absolute_l2 or 0.0


def _by_results(case: Case, split: Split, fellows: Sides[Sequence[Trace]]) -> Settled | None:
    """What the results say where no training step does."""
    trained = any((side.trace.ops.phase == 1).any() for side in (case.left, case.right))
    results = None if trained else put_together(case, split, fellows)
    if results is not None and results.equal:
        return Settled(
            f"{given_in(split)}; what it returns, put end to end, is equal bit for bit, and nothing else was compared"
        )
    if split.ranks.left != split.ranks.right:
        raise _nothing_of_all(case, split, results)
    return None


def _nothing_of_all(case: Case, split: Split, results: Results | None) -> IncomparableTracesError:
    left, right = case.left.trace.path, case.right.trace.path
    seen = (
        f" Put end to end, what the model returns has the norm {results.norms.left:.9g} in the left run and"
        f" {results.norms.right:.9g} in the right one, and other bits."
        if results is not None
        else ""
    )
    footers = (("left", case.left.trace.footer), ("right", case.right.trace.footer))
    ended = "".join(
        f" Note that {end_of(name, footer)}."
        for name, footer in footers
        if footer is not None and footer.exception
    )
    return IncomparableTracesError(
        f"{left} and {right}: {given_in(split)}.{ended} No op of a forward pass can be compared then, and the recordings hold no"
        f" gradient or updated parameter that both runs read whole and of which rounding (as in bfloat16) leaves something to compare.{seen} Record a training step and the beginning of the next"
        " forward, or give the single process the part of one rank; with batch=opdrift.Batch(...) single samples can be"
        " compared (--samples)."
    )
