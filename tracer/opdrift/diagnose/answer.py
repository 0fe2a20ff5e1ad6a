"""Put a diagnosis together: origins, their sizes and causes, the verdict, and what else is worth saying."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from heapq import merge
from itertools import islice
from typing import Final

import numpy as np

from opdrift.align import Maps
from opdrift.align.relation import InParts, in_parts, nothing_in_common
from opdrift.case import Case, build_case
from opdrift.causes import Evidence, Shared, causes_of
from opdrift.diagnose.batches import (
    check_lengths,
    differing_samples,
    in_words,
    uneven_inputs,
    unplaced,
)
from opdrift.diagnose.copies import copies_of_one_run
from opdrift.diagnose.divergences import divergence
from opdrift.diagnose.grouping import by_setting, grouped_leaves, without_types_that_follow
from opdrift.diagnose.growth import growth_of
from opdrift.diagnose.judged import Judged, where_taken
from opdrift.diagnose.noeffect import WithoutEffect
from opdrift.diagnose.one_sample import out_of_sight, rounding_at_results, with_effect
from opdrift.diagnose.portions import (
    NO_FELLOWS,
    Portions,
    Settled,
    is_weight,
    lengths_apart,
    portions_of,
    steps_made_otherwise,
)
from opdrift.diagnose.reach import reach_of
from opdrift.diagnose.reordered import settled
from opdrift.diagnose.stages import stage_of
from opdrift.diagnose.surroundings import (
    environment_of,
    notes_of,
    summary_of,
    unpaired_of,
    without_unused_seeds,
)
from opdrift.diagnose.unmatched import calls_without_counterpart
from opdrift.errors import IncomparableTracesError
from opdrift.flow import made_from
from opdrift.modelsettings import settings_differences
from opdrift.origins.compiled import astray, at_region, gaps, is_inside
from opdrift.origins.effects import lost_from_sight
from opdrift.origins.joints import narrowed
from opdrift.origins.model import Origin
from opdrift.origins.search import Found, find_origins
from opdrift.origins.single import own_settings, taking_padding
from opdrift.origins.updates import updated_otherwise
from opdrift.receivers import Received, amplifier, receive
from opdrift.records import (
    Alignment,
    Cause,
    Confidence,
    Diagnosis,
    Divergence,
    EnvironmentDifference,
    Sides,
    Verdict,
)
from opdrift.sizes import Tolerance, measure, size_of
from opdrift.steps import Steps
from opdrift.tracefile.reader import Trace

#: Origins whose way to the results is followed; each takes a walk through the run.
_FOLLOWED: Final = 4
_CONFIDENCES: Final[tuple[Confidence, ...]] = ("certain", "likely", "possible")


def untold(stage: str) -> None:
    """Tells nobody what is being done."""


def diagnose(
    left: Trace,
    right: Trace,
    *,
    samples: tuple[int, int] | None = None,
    tolerance: Tolerance | None = None,
    maps: Maps = (),
    unfinished: bool = False,
    fellows: Sides[Sequence[Trace]] = NO_FELLOWS,
    progress: Callable[[str], object] = untold,
) -> Diagnosis:
    """Compare two traces of one process each; `progress` is told what is being done.

    With `unfinished` they are compared as far as both go, though one is incomplete. `fellows` are the other ranks of each
    run, where the runs have other numbers of them and may share out what the other gives to one.

    Raises:
        IncomparableTracesError: See `opdrift.diff`.
    """
    if left.header.fingerprint != right.header.fingerprint:
        raise IncomparableTracesError(
            f"{left.path} has fingerprints of kind {left.header.fingerprint!r}, {right.path} of kind"
            f" {right.header.fingerprint!r}. Record both runs with the same version of opdrift."
        )
    if samples is not None:
        check_lengths(left, right, samples)
    progress("pairing ops")
    case = build_case(left, right, maps, samples=samples)
    if nothing_in_common(case.left.contents, case.right.contents, case.pairing):
        raise _unrelated(case)
    environment = (
        *without_unused_seeds(case, environment_of(left.header, right.header)),
        *settings_differences(left, right),
    )
    whole = left.complete and right.complete
    progress("looking for where differences begin")
    found = find_origins(case, whole=whole)
    stage = stage_of(case, fellows)
    if stage is not None:
        found = stage.judged(found)
    unknown = not whole and not unfinished
    if not found.origins and (unknown or (samples is not None and not found.sinks)):
        raise _nothing_found(left, right, case)
    portions = portions_of(case, found, fellows) if stage is None else None
    if portions is None and any(
        o.kind == "leaf" and o.leaf.left and o.leaf.left.kind == "input" for o in found.origins
    ):
        parts = in_parts(case.left.contents, case.right.contents)
        if parts is not None:
            raise _given_in_parts(case, parts)
    progress("looking for causes")
    sizes = receive(case, found.receivers)
    if portions is None:
        judged = _judge(case, found, sizes, environment, tolerance)
        longer = lengths_apart(case, fellows) if judged and _is_open(judged) else None
        if longer is not None:
            judged.append(Judged(longer.origin, longer.size, (longer.cause,)))
            judged.sort(key=lambda j: j.origin.order)
    else:
        judged = _in_portions(case, found, portions, environment, tolerance)
        if isinstance(portions, Settled) and portions.doubt and not _is_material(judged):
            raise portions.doubt
    # results of a batch and of its parts, or of one rank's, say nothing of each other
    finals = _finals(case, found, judged) if portions is None else [None] * len(judged)
    divergences = tuple(
        divergence(case, j.origin, j.size, j.causes[0], final)
        for j, final in zip(judged, finals, strict=True)
    )
    material = next((d for d in divergences if d.material), None)
    compared = portions is None and bool(divergences)
    reach = reach_of(case, finals[0]) if compared and material is None else None
    differing = None if samples is not None else differing_samples(left, right, found.sinks)
    unpaired = unpaired_of(case)
    return Diagnosis(
        verdict=_verdict(divergences),
        left=summary_of(left),
        right=summary_of(right),
        first=material or (divergences[0] if divergences else None),
        first_bitwise=divergences[0] if divergences else None,
        origins=divergences,
        amplifiers=tuple(amplifier(case, r) for r in sizes if r.amplifies and portions is None),
        causes=_ranked(judged),
        environment=environment,
        unpaired=unpaired,
        alignment=Alignment(
            paired=len(case.pairing.left),
            left_only=int(np.sum(case.pairing.right_of < 0)),
            right_only=int(np.sum(case.pairing.left_of < 0)),
            method=case.pairing.method,
            fallback_reason=_fallback(case, found),
        ),
        growth=growth_of(case, _origin_sizes(judged)) if compared else (),
        final_explained=reach.explained if reach is not None else None,
        notes=(
            *_step_of(case, material or (divergences[0] if divergences else None)),
            *((reach.sentence,) if reach is not None else ()),
            *((portions.sentence,) if isinstance(portions, Settled) else ()),
            *((stage.sentence,) if stage is not None else ()),
            *in_words(differing),
            *copies_of_one_run(unpaired),
            *(() if case.by_sample else calls_without_counterpart(case, found.sinks)),
            *notes_of(case, found, samples=samples),
        ),
        samples=differing,
    )


def _is_open(judged: Sequence[Judged]) -> bool:
    """Whether nothing differs by more than rounding explains of which more than a possible cause is known."""
    return all(not j.size.material or j.causes[0].confidence == "possible" for j in judged)


def _is_material(judged: Sequence[Judged]) -> bool:
    return any(j.size.material for j in judged)


def _unrelated(case: Case) -> IncomparableTracesError:
    left, right = case.left.trace, case.right.trace
    return IncomparableTracesError(
        f"{left.path} ({len(left.ops)} ops) and {right.path} ({len(right.ops)} ops) have nothing in common: no module,"
        f" no name of a weight, no content of a tensor, and {len(case.pairing.left)} ops that look alike."
        " Compare two runs of one model."
    )


def _step_of(case: Case, first: Divergence | None) -> list[str]:
    """In which step of the program the first difference lies, where the program marked its steps or trains in some."""
    if first is None:
        return []
    seqs = ("left", case.left, first.seq.left), ("right", case.right, first.seq.right)
    found = {}
    for name, side, seq in seqs:
        steps = Steps(side.trace)
        # a leaf is there before the op that reads it first: only the program can tell to which step it belongs
        step = steps.at(seq) if first.kind == "leaf" else steps.known_at(seq)
        if seq is not None and step is not None:
            found[name] = step
    if not found:
        return []
    same = len(set(found.values())) == 1
    told = (
        str(next(iter(found.values())))
        if same
        else " and ".join(f"{n} {s}" for n, s in found.items())
    )
    return [f"the first difference lies in step {told}"]


def _given_in_parts(case: Case, parts: InParts) -> IncomparableTracesError:
    whole, other = (case.left.trace, case.right.trace)[:: -1 if parts.number else 1]
    sizes = ", ".join(map(str, parts.sizes[:4])) + (", ..." if len(parts.sizes) > 4 else "")
    return IncomparableTracesError(
        f"{whole.path} gives all {sum(parts.sizes)} elements of {parts.name!r} to one call, {other.path} gives them in"
        f" {len(parts.sizes)} parts ({sizes}) to as many calls: one long call and cached steps, or a batch and its parts, have no"
        " ops in common that could be compared one by one. Record both runs in the same way, or compare their results."
    )


def _nothing_found(left: Trace, right: Trace, case: Case) -> IncomparableTracesError:
    """Nothing differs in what can be compared, and that is not all."""
    if left.complete and right.complete:
        hints = [*uneven_inputs(case), *unplaced(left), *unplaced(right)]
        return IncomparableTracesError(
            f"No result of {left.path} and {right.path} can be compared for one sample: each is made of all"
            " samples, or the sample could not be followed to it."
            + "".join(f" {hint}." for hint in hints)
            + " Let the model return a tensor that carries the batch, and record padded runs with"
            " batch=opdrift.Batch(size, lengths=...)."
        )
    which = " and ".join(f"{t.path} is {t.incomplete}" for t in (left, right) if not t.complete)
    return IncomparableTracesError(
        f"{which}. Nothing differs in the {len(case.pairing.left)} ops that both traces have, but what"
        " is missing may. Record the run again, and let it end by itself."
    )


def _judge(
    case: Case,
    found: Found,
    received: Sequence[Received],
    environment: tuple[EnvironmentDifference, ...],
    tolerance: Tolerance | None,
) -> list[Judged]:
    shared = Shared(case, environment)
    regions = shared.once(gaps)
    without_effect = WithoutEffect(case, found)

    def judge(origin: Origin) -> Judged:
        size = settled(case, origin, size_of(case, origin, tolerance))
        size = at_region(origin, out_of_sight(case, origin, size), regions)
        size = without_effect.sized(origin, size)
        part = narrowed(case, origin) if size.material else None
        if part is not None:
            origin, size = part, size_of(case, part, tolerance)
        causes = causes_of(Evidence(origin, size, shared))
        return Judged(where_taken(case, origin, causes[0]), size, causes)

    origins = [
        *grouped_leaves(found.origins, judge),
        *(judge(o) for o in found.origins if o.kind != "leaf"),
    ]
    origins = [j for j in origins if not _is_told_inside(case, j, origins)]
    origins = [j for n, j in enumerate(origins) if not _is_told_before(j, origins[:n])]

    def unexplained(known: Sequence[Judged]) -> Iterator[Judged]:
        # with a material origin upstream, a large difference further down is no news
        if not any(j.size.material for j in known):
            further = merge(
                _amplified(case, received),
                astray(case, regions),
                updated_otherwise(case),
                key=lambda o: o.order,
            )
            yield from map(judge, further)

    if case.by_sample:
        origins = with_effect(case, found, origins, judge=judge, unexplained=unexplained)
    else:
        origins += islice(unexplained(origins), 1)
    origins = without_types_that_follow(case, origins)

    def together(first: Judged, others: tuple[Origin, ...], ops: tuple[str, ...]) -> Judged:
        origin = replace(first.origin, also=others, alike=ops)
        return replace(first, origin=origin, causes=causes_of(Evidence(origin, first.size, shared)))

    return by_setting(case, origins, together)


def _is_told_inside(case: Case, judged: Judged, others: Sequence[Judged]) -> bool:
    """Whether an origin is a compiled region, and one that says more lies inside of it."""
    return any(
        is_inside(case, judged.origin, other.origin)
        for other in others
        if other.size.material or not judged.size.material
    )


def _is_told_before(judged: Judged, before: Sequence[Judged]) -> bool:
    """Whether an op that only one run has stands in an earlier stretch as well, which is material already."""
    own = judged.origin.region
    return judged.origin.story == "region" and any(
        other.size.material
        and other.origin.story == "region"
        and bool(
            set(own.left) & set(other.origin.region.left)
            or set(own.right) & set(other.origin.region.right)
        )
        for other in before
    )


def _in_portions(
    case: Case,
    found: Found,
    portions: Portions | Settled,
    environment: tuple[EnvironmentDifference, ...],
    tolerance: Tolerance | None,
) -> list[Judged]:
    """What of two runs can be compared of which one gives each batch in parts.

    Weights that differ from the start; what the parts of the batch come to; and the numbers of the optimizers, which come
    first if they may be all that differs.
    """
    begun = replace(found, origins=tuple(filter(is_weight, found.origins)))
    weights = _judge(case, begun, (), environment, tolerance) if begun.origins else []
    weights = [j for j in weights if is_weight(j.origin)]
    if isinstance(portions, Settled):
        return weights
    answer = Judged(portions.origin, portions.size, (portions.cause,))
    shared = Shared(case, environment)
    made = steps_made_otherwise(case, material=portions.size.material)
    sized = ((o, size_of(case, o, tolerance)) for o in made)
    steps = [Judged(o, size, causes_of(Evidence(o, size, shared))) for o, size in islice(sized, 1)]
    gradients = portions.step.what != "update" and not portions.step.agrees
    return [*weights, answer, *steps] if gradients else [*weights, *steps, answer]


def _origin_sizes(judged: Sequence[Judged]) -> dict[int, float]:
    """Left op index -> relative difference, of the origins that are ops."""
    found: dict[int, float] = {}
    for each in judged:
        op, gap = each.origin.op.left, each.size.difference
        size = gap.relative if gap is not None else None
        if each.origin.kind in ("op", "structure") and op is not None and size:
            found[op] = max(found.get(op, 0.0), size)
    return found


def _amplified(case: Case, received: Sequence[Received]) -> Iterator[Origin]:
    """Receivers whose inputs do not explain their output, in order, up to where one sample was lost from sight."""
    lost = None
    if case.by_sample:
        limit = rounding_at_results(case)
        lost = next(filter(None, (lost_from_sight(case, limit, r) for r in received)), None)
    outputs = case.compared.outputs
    for each in received:
        if not each.unexplained:
            continue
        i, j = int(case.pairing.left[each.row]), int(case.pairing.right[each.row])
        if lost is not None and lost.order < i:
            break
        place = np.flatnonzero((outputs.pair == each.row) & (outputs.position == each.slot))[0]
        origin = Origin(
            kind="op",
            story="amplified",
            op=Sides(i, j),
            row=each.row,
            values=Sides(int(outputs.left[place]), int(outputs.right[place])),
            slot=each.slot,
            order=float(i),
            settings=own_settings(case.settings(i, j)) if case.by_sample else (),
            inputs_match=False,
        )
        yield taking_padding(case, origin) if case.by_sample else origin
    if lost is not None:
        yield taking_padding(case, lost)


def _finals(case: Case, found: Found, judged: Sequence[Judged]) -> list[float | None]:
    """For each origin the relative difference of the first result that it has a part in.

    Outputs that a module returned go before other results. Where none is known to be made of what differs, and
    for origins after many, it is the first of all.
    """
    results = _results(case, found)
    finals: list[float | None] = [results[0][1] if results else None] * len(judged)
    if len(results) < 2:
        return finals
    for number, each in enumerate(judged[:_FOLLOWED]):
        value = each.origin.values.left
        if value is not None:
            made, _ = made_from(case.left.contents, [value])
            finals[number] = next((gap for v, gap in results if made[v]), finals[number])
    return finals


def _results(case: Case, found: Found) -> list[tuple[int, float]]:
    """Left values of results that differ, and by how much; other than outputs only where no output does."""
    for kinds in (("output", "compiled"), ("gradient", "parameter", "alive", "unread")):
        sized = [
            (s.left, gap.relative)
            for s in found.sinks
            if s.kind in kinds and s.differs and s.left is not None and s.right is not None
            if (gap := measure(case, s.left, s.right)) is not None and gap.relative is not None
        ]
        if sized:
            return sized
    return []


def _verdict(divergences: tuple[Divergence, ...]) -> Verdict:
    if not divergences:
        return "identical"
    return "diverged" if any(d.material for d in divergences) else "rounding"


def _ranked(judged: Sequence[Judged]) -> tuple[Cause, ...]:
    """All causes, likeliest first: those of the first material origin lead.

    What else explains that origin is told as well. Beside a certain cause it is only likely; where the
    cause itself is an interpretation of something wrong, the plain fact comes first.
    """
    order = sorted(judged, key=lambda j: not j.size.material)
    found: dict[tuple[str, str], Cause] = {}
    if order:
        lead, *further = order[0].causes
        if lead.confidence == "certain":
            further = [
                replace(c, confidence="likely") if c.confidence == "certain" else c for c in further
            ]
        told = [lead, *further]
        if lead.slug != "rounding":
            told.sort(key=lambda c: _CONFIDENCES.index(c.confidence))
        for each in told:
            found.setdefault((each.slug, each.summary), each)
    for other in order[1:]:
        found.setdefault((other.causes[0].slug, other.causes[0].summary), other.causes[0])
    return tuple(found.values())


def _fallback(case: Case, found: Found) -> str | None:
    reasons = [case.pairing.fallback_reason] if case.pairing.fallback_reason else []
    if found.stopped:
        reasons.append(
            "the search for origins stopped after many: the programs have little in common"
        )
    larger = max(len(case.left.trace.ops), len(case.right.trace.ops))
    if larger >= 10 and len(case.pairing.left) * 10 < larger and not _same_leaves(case):
        reasons.append(
            f"only {len(case.pairing.left)} of {larger} ops have a counterpart: the programs look unrelated"
        )
    return "; ".join(reasons) or None


def _same_leaves(case: Case) -> bool:
    """Whether the runs have weights of the same names, so that they are about the same model."""
    names = [
        {leaf.name for leaf in side.leaves.starts if leaf.kind in ("parameter", "buffer")}
        for side in (case.left, case.right)
    ]
    return bool(names[0] & names[1]) and len(names[0] & names[1]) * 2 >= max(map(len, names))
