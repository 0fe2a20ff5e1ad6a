"""What the reports say about a divergence, line by line; text and Markdown only lay it out."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from textwrap import shorten
from typing import Final, Literal

from opdrift.records import (
    ACROSS_RANKS,
    OUTSIDE,
    RANK_ENDED,
    Cause,
    Diagnosis,
    Divergence,
    Pick,
    Sides,
    TraceSummary,
)
from opdrift.render.words import count, name, ordinal, plural, readable, scope, side, size

Tone = Literal["plain", "strong", "good", "bad", "quiet"]

_SIDES = ("left", "right")
#: More members than these are counted, not listed.
_MEMBERS_SHOWN = 4
#: Of why a rank ended so much is quoted in the headline; the cause has all of it.
_LONGEST_END = 160
#: Causes of random draws: how far two draws are apart says nothing.
_DRAWS = ("rng", "dropout")
#: Beyond this, units in the last place say nothing: elements near zero reach millions by rounding
#: alone (notes: diagnosis, 1.2).
_TELLING_ULP = 1000


@dataclass(frozen=True, slots=True)
class Field:
    """A label and what stands beside it, one entry a line."""

    label: str
    lines: tuple[str, ...]
    tone: Tone = "plain"


#: What a leaf is called that has no name.
NAMELESS: Final = "a tensor without a name"


def headline(diagnosis: Diagnosis) -> str:
    """The verdict and the place, in one sentence."""
    if diagnosis.verdict == "identical" and diagnosis.alignment.method == ACROSS_RANKS:
        checks = plural(diagnosis.alignment.paired, "check")
        return f"identical: what should be equal on all ranks is equal ({checks})"
    if diagnosis.verdict == "identical" and not diagnosis.exact:
        return f"no difference seen: {_counts(diagnosis)}; every hash is equal, which does not prove that every tensor is"
    if diagnosis.verdict == "identical":
        return f"identical: {_counts(diagnosis)}; all that reaches the outputs is equal bit for bit"
    shown = focus(diagnosis)
    place = (
        _place(shown, diagnosis.left, diagnosis.right) if shown is not None else "at the outputs"
    )
    ranks = f" ({_rank(diagnosis)})" if diagnosis.ranks else ""
    if shown is not None and shown.ranks is not None:
        ranks = f" ({_between(shown.ranks)})"
    if diagnosis.verdict == "rounding":
        final = shown.final_relative_difference if shown is not None else None
        reach = f", {size(final)} at the output" if final is not None else ""
        return f"rounding only: the runs first differ {place}{ranks}{reach}"
    return f"diverged: {place}{ranks}"


def _rank(diagnosis: Diagnosis) -> str:
    """`rank 1 of 2`: of the distributed run, where the other one is a single process."""
    sides = (diagnosis.left, diagnosis.right)
    size, rank = max((one.world_size or 1, one.rank or 0) for one in sides)
    return f"rank {rank} of {size}"


def _between(ranks: Sides[tuple[int, ...]]) -> str:
    """`rank 1 against ranks 0, 2`."""
    if not ranks.left or set(ranks.left) == set(ranks.right):
        return f"rank {', '.join(map(str, ranks.right))}"
    return f"rank {', '.join(map(str, ranks.right))} against {', '.join(map(str, ranks.left))}"


def _counts(diagnosis: Diagnosis) -> str:
    paired = diagnosis.alignment
    said = f"{plural(paired.paired, 'op')} paired"
    extra = [
        f"{count(n)} only {s}"
        for n, s in ((paired.left_only, "left"), (paired.right_only, "right"))
        if n
    ]
    return ", ".join([said, *extra])


def focus(diagnosis: Diagnosis) -> Divergence | None:
    """The divergence that the report opens with."""
    return diagnosis.first or diagnosis.first_bitwise


def _place(first: Divergence, left: TraceSummary, right: TraceSummary) -> str:
    what = name(first.op or first.name or "op")
    if (
        first.kind == "leaf" and first.how in _HASHED
    ):  # a log names no leaf: where it is read is what is known
        return f"at op {at(first.seq, left, right)}: {what if first.name is None else name(first.name)} in {scope(first.module)} differs"
    if first.kind == "leaf":
        more = f" and {count(len(first.members))} more" if first.members else ""
        verb = "differ" if more else "differs"
        # an input of a later call came when ops had run already
        late = first.call > 0 and first.cause.slug == "input"
        where = f"at op {at(first.seq, left, right)}" if late else "before the first op"
        if first.ranks is not None and first.seq.right is not None:
            where = f"at op {count(first.seq.right)} of rank {first.ranks.right[0]}"
        return f"{where}: {name(first.name or NAMELESS)}{more} {verb}"
    # an optimizer's step is neither forward nor backward
    phase = None if first.outside and first.phase == "forward" else first.phase
    where = f"at op {at(first.seq, left, right, phase=phase)}"
    if first.kind == "hidden-write":
        content = first.name or first.content or NAMELESS
        return f"{where}: {name(content)} changed, and no recorded op wrote it"
    if first.kind == "structure":
        if first.cause.slug == RANK_ENDED:
            return readable(shorten(first.cause.summary, _LONGEST_END, placeholder=" ..."))
        if first.ranks is not None:
            return f"{where}: the ranks do different things in {_scope(first)}"
        if not first.material:
            return f"{where}: {_scope(first)} is computed in two ways"
        return f"{where}: the runs do different things in {_scope(first)}"
    return f"{where}: {what} in {_scope(first)}"


def _scope(first: Divergence) -> str:
    return OUTSIDE if first.outside else scope(first.module)


def at(
    seq: Sides[int | None], left: TraceSummary, right: TraceSummary, *, phase: str | None = None
) -> str:
    """Where an op is: "41,370 of 100,000 (forward)"; the right side's number if only that run has it."""
    notes = [phase] if phase is not None else []
    number, ops = seq.left, left.ops
    if number is None:
        number, ops = seq.right, right.ops
        notes.insert(0, "right only")
    where = "unknown"
    if number is not None:  # of a rank that died in an op, the ops before it may be lost
        where = f"{count(number)} of {count(ops)}" if number <= ops else count(number)
    return f"{where} ({', '.join(notes)})" if notes else where


def card(first: Divergence, *, module_type: str | None = None) -> list[Field]:
    """Everything known of one divergence: where, what, how large, why, what to try."""
    fields = [_where(first, module_type), *why(first.cause)]
    if first.members:
        fields.append(_with(first))
    if (first.kind == "op" and first.ranks is None) or (
        first.kind == "structure" and first.inputs_match
    ):
        fields.append(_inputs(first))
    if not _is_of_ranks(first):
        label = {"op": "output", "structure": "result"}.get(first.kind, "value")
        fields.append(Field(label, tuple(_difference(first)), _tone(first)))
    fields.extend(_kernels(first))
    if first.arguments:
        lines = [
            f"{name(a.name)}: left {side(a.left)}, right {side(a.right)}" for a in first.arguments
        ]
        fields.append(Field("arguments", tuple(lines), "bad"))
    return fields


def _is_of_ranks(first: Divergence) -> bool:
    """Whether it is about what ranks do or leave undone, which has no result of its own."""
    told = first.ranks is not None or first.cause.slug == RANK_ENDED
    return first.kind == "structure" and told and first.tensors == Sides(None, None)


def _tone(first: Divergence) -> Tone:
    return "bad" if first.material else "plain"


def _where(first: Divergence, module_type: str | None) -> Field:
    kind = f" ({name(module_type)})" if module_type and not first.outside else ""
    module = f"{_scope(first)}{kind}"
    call = f", {ordinal(first.call)} call" if first.call else ""
    if first.name is not None and first.kind in ("leaf", "hidden-write"):
        verb = "first used" if first.kind == "leaf" else "read"
        used = [f"{verb} by {name(first.op)} in {module}{call}"] if first.op else []
        lines = [name(first.name or NAMELESS), *used]
    elif first.content is not None:
        used = [f"read by {name(first.op)}{_seqs(first.seq)} in {module}{call}"] if first.op else []
        lines = [name(first.content), *used]
    else:
        lines = [f"{module}{call}", *([f"{name(first.op)}{_seqs(first.seq)}"] if first.op else [])]
    if first.source:
        lines.append(readable(first.source))
    return Field("where", tuple(lines), "strong")


def _seqs(seq: Sides[int | None]) -> str:
    if seq.left == seq.right or seq.left is None or seq.right is None:
        return ""
    return f" (op {count(seq.left)} left, {count(seq.right)} right)"


def _with(first: Divergence) -> Field:
    shown = ", ".join(name(m) for m in first.members[:_MEMBERS_SHOWN])
    rest = len(first.members) - _MEMBERS_SHOWN
    more = f" and {count(rest)} more" if rest > 0 else ""
    return Field("also", (f"{plural(len(first.members), 'other')}: {shown}{more}",))


#: How sizes of logs of other tools were obtained: a hash leaves open whether two tensors are equal.
_HASHED = ("norms", "hashes")
_HASHED_INPUTS = {
    None: "not known: not all of them were hashed",
    True: "equal hashes, which do not prove equal inputs",
    False: "already differ, by their hashes",
}


#: Of an op that reads a constant, or a part of a tensor, that was made with other arguments.
_MADE_OTHERWISE = (
    "one is made, or taken, with other arguments; what it is made or taken from is equal"
)


def _inputs(first: Divergence) -> Field:
    if first.how in _HASHED:
        return Field("inputs", (_HASHED_INPUTS[first.inputs_match],))
    if first.inputs_match is None:
        return Field("inputs", ("not all known: some were not fingerprinted",))
    if first.inputs_match:
        return Field("inputs", ("equal, bit for bit: the difference begins here",), "good")
    if first.made_otherwise:
        return Field("inputs", (_MADE_OTHERWISE,))
    if not first.material:
        return Field(
            "inputs", ("not all known to be equal; the difference is small enough for rounding",)
        )
    return Field(
        "inputs", ("already differ: this op makes the difference larger than they explain",)
    )


def _difference(first: Divergence) -> Iterator[str]:
    which = f"output {first.output}: " if first.output else ""
    layout = first.tensors
    if first.relative_difference is None and (layout.left is None) != (layout.right is None):
        only = "left" if layout.right is None else "right"
        yield f"{which}only the {only} run has it: {side(layout.left or layout.right)}"
        return
    if first.relative_difference is None and layout.left != layout.right:
        yield f"{which}another layout: left {side(layout.left)}, right {side(layout.right)}"
        yield from _details(first)
        return
    if first.nonfinite.left != first.nonfinite.right:
        # what is finite on both sides may lie close together: that must not come first
        yield f"{which}NaN or infinite: left {side(first.nonfinite.left)}, right {side(first.nonfinite.right)}"
        yield f"where both are finite: {_relative(first)}"
    else:
        yield which + _relative(first)
    details = list(_details(first))
    if details:
        yield "; ".join(details)
    if layout.left is not None and layout.left == layout.right:
        yield name(layout.left)
    elif layout.left is not None or layout.right is not None:
        yield f"left {side(layout.left)}, right {side(layout.right)}"


_HOW = {
    "sketch": "from sketches",
    "sample": "from samples",
    "statistics": "from statistics",
    "exact": "exact",
}


def _relative(first: Divergence) -> str:
    if first.relative_difference is None:
        return "differs; how far is not known"
    if first.how in _HASHED:
        return _norms(first.relative_difference, first.explained)
    how = _HOW.get(first.how or "")
    said = f"relative difference {size(first.relative_difference)}" + (f" ({how})" if how else "")
    bound = first.explained
    if bound is None or first.kind in ("leaf", "hidden-write") or first.cause.slug in _DRAWS:
        return said
    if bound == 0:
        return f"{said}; rounding explains none of it" + (
            ", this op is exact" if first.kind == "op" else ""
        )
    if bound >= 1:
        return f"{said}; cancellation: size tells nothing here"
    within = f" in {first.arithmetic}" if first.arithmetic else ""
    if not first.material:
        return f"{said}; rounding explains up to {size(bound)}{within}"
    if first.relative_difference > bound:
        return f"{said}; rounding explains only {size(bound)}{within}"
    return f"{said}; small enough for rounding (up to {size(bound)}{within}), but see the cause"


def _norms(distance: float, bound: float | None) -> str:
    """How far two norms are apart, from a log that holds no more."""
    if distance == 0:
        return "the hashes differ; how far is not known"
    if not math.isfinite(distance):
        return "the norm is zero, infinite or NaN in one run alone"
    said = f"the norms are {size(distance)} apart, relatively; the tensors at least as far"
    if bound is None:
        return said
    return (
        f"{said}; rounding explains up to {size(bound)}"
        if distance <= bound
        else f"{said}; rounding explains only {size(bound)}"
    )


def _details(first: Divergence) -> Iterator[str]:
    if first.max_abs_difference:
        small = first.ulp is not None and first.ulp <= _TELLING_ULP
        ulp = f" ({size(first.ulp)} ulp)" if small and first.ulp is not None else ""
        yield f"largest {size(first.max_abs_difference)}{ulp}" + (
            "" if first.how == "exact" else " in the samples"
        )
    nonfinite = first.nonfinite
    if nonfinite.left and nonfinite.left == nonfinite.right:
        yield f"NaN or infinite: left {side(nonfinite.left)}, right {side(nonfinite.right)}"
    if first.final_relative_difference is not None:
        yield f"becomes {size(first.final_relative_difference)} at the run's output"


_UNKNOWN_PICKS = 'unknown on both sides; opdrift.record(kernels="full") records what ran'


def _kernels(first: Divergence) -> Iterator[Field]:
    left, right, op = first.kernel.left, first.kernel.right, first.op
    if left is None and right is None:
        if first.kind == "op" and first.conditioning is not None:
            yield Field("kernel", (_UNKNOWN_PICKS,))
        return
    if (
        left is not None
        and right is not None
        and (left.name, left.backend) == (right.name, right.backend)
    ):
        lines = [f"same on both sides: {pick(left, op)}"]
        if Counter(left.observed) == Counter(right.observed):
            lines += ran(left)
        else:
            lines += [f"left {each}" for each in ran(left)]
            lines += [f"right {each}" for each in ran(right)]
        yield Field("kernel", tuple(lines))
        return
    lines = []
    for word, chosen in zip(_SIDES, (left, right), strict=True):
        lines.append(f"{word} {pick(chosen, op) if chosen is not None else 'not known'}")
        if chosen is not None:
            lines += [f"  {each}" for each in ran(chosen)]
            refused = {b: why for b, why in chosen.refused.items() if why != chosen.reason}
            lines += [
                f"  not {name(backend)}: {readable(reason)}" for backend, reason in refused.items()
            ]
    yield Field("kernel", tuple(lines), _tone(first))


def pick(chosen: Pick, op: str | None = None) -> str:
    """A kernel in one line: backend, name, library, reason; without the name where it is the op's."""
    parts = [name(chosen.backend)] if chosen.backend else []
    if chosen.name != op or not parts:
        parts.append(name(chosen.name))
    if chosen.library:
        parts.append(f"[{name(chosen.library)}]")
    return " ".join(parts) + (f": {readable(chosen.reason)}" if chosen.reason else "")


def ran(chosen: Pick) -> list[str]:
    """What was seen to run, a line a call; many are cut short."""
    calls = [f"ran {readable(call)}" for call in chosen.calls]
    return calls if len(calls) <= 4 else [*calls[:3], f"ran {len(calls) - 3} other calls"]


def why(cause: Cause) -> Iterator[Field]:
    """The cause, what speaks for it, and what to try."""
    lines = (
        f"{cause.slug} ({cause.confidence}): {readable(cause.summary)}",
        *(f"- {readable(e)}" for e in cause.evidence),
    )
    yield Field("cause", lines, "strong")
    if cause.try_:
        yield Field("try", (readable(cause.try_),), "good")


@dataclass(frozen=True, slots=True)
class OriginGroup:
    """Origins that differ only by numbers in their path: one line for twelve layers."""

    place: str
    op: str
    number: int
    first_seq: int | None
    largest: float | None
    slug: str
    material: bool


_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def other_origins(diagnosis: Diagnosis) -> list[OriginGroup]:
    """Origins that the card has not said, grouped; material ones first, then by order."""
    shown = focus(diagnosis)
    groups: dict[tuple[str, str, str, bool], list[Divergence]] = {}
    for origin in diagnosis.origins:
        if origin in (shown, diagnosis.first_bitwise):  # the card has said these
            continue
        place = _NUMBER.sub("*", _exact(origin))
        groups.setdefault((place, origin.op or "", origin.cause.slug, origin.material), []).append(
            origin
        )
    made = [_group(key, members) for key, members in groups.items()]
    return sorted(made, key=lambda g: not g.material)


def _exact(origin: Divergence) -> str:
    if origin.name is not None:
        return origin.name
    return OUTSIDE if origin.outside else origin.module


def _group(key: tuple[str, str, str, bool], members: Sequence[Divergence]) -> OriginGroup:
    _, op, slug, material = key
    sizes = [m.relative_difference for m in members if m.relative_difference is not None]
    only = members[0]
    place = _exact(only) if len(members) == 1 else key[0]
    first_seq = only.seq.left if only.seq.left is not None else only.seq.right
    return OriginGroup(
        scope(place), name(op), len(members), first_seq, max(sizes, default=None), slug, material
    )


@dataclass(frozen=True, slots=True)
class LoneOps:
    """Ops that only one run has, those of twelve layers in one line."""

    side: str
    op: str
    place: str
    number: int


def lone_ops(diagnosis: Diagnosis) -> list[LoneOps]:
    """Ops that only one run has, grouped; in the order in which they first ran."""
    counts: dict[tuple[str, str, str], int] = {}
    modules: dict[tuple[str, str, str], set[str]] = {}
    for word, groups in zip(
        _SIDES, (diagnosis.unpaired.left, diagnosis.unpaired.right), strict=True
    ):
        for group in groups:
            key = (word, group.op, _NUMBER.sub("*", group.module))
            counts[key] = counts.get(key, 0) + group.count
            modules.setdefault(key, set()).add(group.module)
    return [
        LoneOps(word, op, next(iter(modules[key])) if len(modules[key]) == 1 else place, number)
        for key, number in counts.items()
        for word, op, place in (key,)
    ]


def earlier(diagnosis: Diagnosis) -> str | None:
    """The first bitwise difference in a sentence, where it is not the one that the card shows."""
    harmless, shown = diagnosis.first_bitwise, focus(diagnosis)
    if harmless is None or (shown is not None and _spot(harmless) == _spot(shown)):
        return None
    seq = harmless.seq.left if harmless.seq.left is not None else harmless.seq.right
    where = f"op {count(seq)}, " if seq is not None else ""
    what = name(harmless.name if harmless.name is not None else harmless.op or "an op")
    return f"{where}{what} in {scope(harmless.module)}, already differs{_by(harmless)}"


def _by(harmless: Divergence) -> str:
    """How far a difference goes that the card does not show, to be said behind it."""
    tensors, by = harmless.tensors, ""
    if harmless.relative_difference:
        by = f" by {size(harmless.relative_difference)}"
    elif harmless.relative_difference is not None and tensors.left != tensors.right:
        return f", as {tensors.left} against {tensors.right} with the same numbers"
    return by if harmless.material else f"{by}, which rounding explains"


def _spot(divergence: Divergence) -> tuple[object, ...]:
    """What and where a divergence is; what is said of it may have been added to on one copy."""
    each = divergence
    return each.kind, each.name, each.op, each.module, each.call, each.seq, each.output


def other_causes(diagnosis: Diagnosis) -> list[Cause]:
    """Causes of the whole comparison that the card has not said yet.

    Further guesses about the same divergence only distract where its cause is more than one, and a rounding
    before it has a line of its own.
    """
    shown = focus(diagnosis)
    if shown is None:
        return list(diagnosis.causes)
    elsewhere = {
        o.cause.slug for o in diagnosis.origins if o not in (shown, diagnosis.first_bitwise)
    }
    return [
        c
        for c in diagnosis.causes
        if c.slug != shown.cause.slug
        and (c.slug in elsewhere or not (_redundant(c, shown) or c.slug == "rounding"))
    ]


def _redundant(further: Cause, shown: Divergence) -> bool:
    """That the runs do something different is what every other cause explains; a guess adds nothing to more."""
    if further.slug == "structure":
        return True
    return further.confidence == "possible" and shown.cause.confidence != "possible"
