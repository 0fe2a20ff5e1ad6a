"""What became of a checkpoint, in sentences: for a comparison, and as a finding of one run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

from opdrift.checkpoints.answer import Check, check
from opdrift.checkpoints.stored import StoredCheckpoint, from_mark
from opdrift.errors import CheckpointError
from opdrift.records import Cause, Diagnosis, Divergence, Finding, Mark, Sides
from opdrift.tracefile.reader import Trace
from opdrift.wording import listed, some

#: So many names are listed in a sentence.
_LISTED: Final = 3


def sentence(found: Check) -> str:
    """How much of a checkpoint reached the model."""
    unknown = f"; {len(found.unknown)} cannot be judged" if found.unknown else ""
    if found.missing:
        return f"{'; '.join(_unreached(found))}{unknown}"
    if found.exchanged:
        one, other = next(iter(found.exchanged.items()))
        return (
            f"{len(found.exchanged)} of {found.tensors} tensors of {found.source} are in the model under another"
            f" name, such as {one} as {other}"
        )
    casts = "".join(f", {n} of them cast to {dtype}" for dtype, n in found.casts.items())
    return (
        f"{len(found.arrived)} of {found.tensors} tensors of {found.source} are in the"
        f" model{casts}{_rounded(found)}{unknown}"
    )


def _unreached(found: Check) -> Iterator[str]:
    """Of those that no rank holds, and of those that some ranks lack, how many and which."""
    kinds: dict[tuple[tuple[int, ...], tuple[int, ...]], list[str]] = {}
    for missing in found.missing:
        where = (missing.reached, missing.lacking if missing.reached else ())
        kinds.setdefault(where, []).append(missing.own or missing.name)
    of = f" of {found.tensors} tensors of {found.source}"
    for reached, lacking in sorted(kinds):
        names = kinds[reached, lacking]
        where_to = "reached the model on" if reached else "never reached the model"
        on = f" {listed(reached)}, not on {listed(lacking)}" if reached else ""
        yield f"{len(names)}{of} {where_to}{on}: {some(names, _LISTED)}"
        of = ""


def _rounded(found: Check) -> str:
    """How many were cast before they were saved, or before they were loaded."""
    said = ""
    for each, number in Counter(found.rounded.values()).items():
        where = "for the file" if each.side == "file" else "before they came into the model"
        said += f", {number} of them cast to {each.dtype} {where} (judged by 32 elements of each)"
    return said


def instead(found: Check) -> str | None:
    """Where the contents came from that the model has in place of the checkpoint's; None if that is not known."""
    origins = Counter(missing.origin for missing in found.missing if missing.origin)
    if not origins:
        return None
    said = ", ".join(f"{number} {origin}" for origin, number in origins.most_common())
    return f"what the model holds in their place: {said}"


def reasons(found: Check) -> list[str]:
    """What else is known of the tensors that never reached the model."""
    return [why for why in (in_parts(found), instead(found)) if why is not None]


def in_parts(found: Check) -> str | None:
    """Of how many of those a part is the checkpoint's; None if of none."""
    parts = [
        (missing.own or missing.name, missing.part) for missing in found.missing if missing.part
    ]
    if not parts:
        return None
    name, part = parts[0]
    return f"of {len(parts)} of them a part reached it: of {name}, {part}"


def compared(diagnosis: Diagnosis, traces: Sides[Trace], checkpoint: StoredCheckpoint) -> Diagnosis:
    """A diagnosis that also says how much of a checkpoint reached the model of each run.

    Raises:
        CheckpointError: The checkpoint is of another model than one of the traces.
    """
    sides = (("left", check(traces.left, checkpoint)), ("right", check(traces.right, checkpoint)))
    said = tuple(f"{side}: {sentence(found)}" for side, found in sides)
    whys = [f"{side}: {why}" for side, found in sides for why in reasons(found)]
    old = diagnosis.first
    first = None if old is None else _explained(old, said, whys)
    if old is None or first is None or first is old:
        return replace(diagnosis, notes=(*diagnosis.notes, *said))
    return replace(
        diagnosis,
        first=first,
        origins=tuple(first if each == old else each for each in diagnosis.origins),
        causes=tuple(first.cause if cause == old.cause else cause for cause in diagnosis.causes),
    )


def _explained(divergence: Divergence, said: tuple[str, ...], whys: list[str]) -> Divergence:
    """The sentences as evidence, where weights are what differs."""
    if divergence.cause.slug != "weights":
        return divergence
    cause = divergence.cause
    return replace(divergence, cause=replace(cause, evidence=(*cause.evidence, *said, *whys)))


def dropped(trace: Trace, step_at: Callable[[int | None], int | None]) -> Iterator[Finding]:
    """Checkpoints that the program read and whose tensors never reached a model: known from the trace alone."""
    for mark in trace.marks:
        if mark.kind != "checkpoint":
            continue
        source = f"what {mark.fields.get('source')} read"
        try:
            found = check(trace, StoredCheckpoint(source, from_mark(mark.fields)))
        except CheckpointError:
            continue  # it was read and not used, or nothing was recorded of the model that it is of
        if found.missing:
            yield _finding(trace, mark, found, step_at)


def _finding(
    trace: Trace, mark: Mark, found: Check, step_at: Callable[[int | None], int | None]
) -> Finding:
    said = [
        other.fields
        for other in trace.marks
        if other.kind == "checkpoint-dropped"
        and other.fields.get("source") == mark.fields.get("source")
    ]
    evidence = [str(fields.get("summary")) for fields in said]
    evidence += reasons(found)
    return Finding(
        "checkpoint",
        Cause(
            "weights",
            "certain",
            sentence(found),
            tuple(evidence),
            str(said[0].get("try"))
            if said
            else "Load the state dict, and look at what load_state_dict returns: names that are missing or unexpected.",
        ),
        next((missing.own for missing in found.missing if missing.own), None),
        None,
        "",
        mark.seq,
        step_at(mark.seq),
        trace.header.rank,
    )
