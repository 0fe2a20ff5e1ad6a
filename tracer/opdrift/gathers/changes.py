"""What became of gathered parameters and of shards in between: changed in vain, exchanged, written past the dispatcher."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from opdrift import tfp1
from opdrift.gathers.mismatches import Wrong
from opdrift.gathers.words import LISTED, finding_at, unit_of
from opdrift.records import Cause, Finding, Leaf, Mark, Op
from opdrift.steps import Steps
from opdrift.tracefile.reader import Trace
from opdrift.wording import some

_SHARDS: Final = (
    "Write into the parameters while they are sharded, or inside summon_full_params(writeback=True): what is written"
    " into the gathered copy is thrown away with it."
)


@dataclass(frozen=True, slots=True)
class Lost:
    """A parameter that was changed while it was gathered, and the change is nowhere.

    Attributes:
        name: The parameter.
        by: Which ops changed it, and where in the program; only its name where none did.
        finding: What is said of it, at the first op that changed it, if any did.
        unit: What was gathered, and its buffer.
        since: The number of that op; where none did, of the op after which the parameter was gathered.
        until: The number of the op after which it was given back.
    """

    name: str
    by: tuple[tuple[str, str], ...]
    finding: Finding
    unit: tuple[str, ...]
    since: int
    until: int

    def explains(self, wrong: Wrong, name: str) -> bool:
        """Whether a parameter is not as its shard in a use because it had been changed since it was gathered."""
        return (
            wrong.used
            and wrong.key == self.unit
            and not wrong.stale
            and name == self.name
            and self.since <= wrong.seq <= self.until
        )


@dataclass(frozen=True, slots=True)
class Hidden:
    """A shard that changed with no op while what was gathered from it was still there, and is not to be blamed.

    Attributes:
        names: The parameters in it that changed.
        unit: What had been gathered, and its buffer.
        since: The number of the op after which that was seen.
        until: The same of the next gather.
    """

    names: frozenset[str]
    unit: tuple[str, ...]
    since: int
    until: float

    def explains(self, wrong: Wrong, name: str) -> bool:
        """Whether a use has another content than the shard because of this."""
        return (
            wrong.used
            and wrong.key == self.unit
            and name in self.names
            and self.since <= wrong.seq <= self.until
        )


def hidden_in(trace: Trace, mark: Mark) -> Hidden:
    """What a mark says to have changed in a shard, and until when what was gathered before does not show it."""
    marks = itertools.dropwhile(lambda each: each is not mark, trace.marks)
    later = (each.seq for each in marks if each.kind == "gather" and unit_of(each) == unit_of(mark))
    names = frozenset(str(part.get("parameter")) for part in mark.fields.get("mismatch") or ())
    return Hidden(names, unit_of(mark), mark.seq, next(later, math.inf))


def told_once(lost: Sequence[Lost]) -> Iterator[Finding]:
    """The first of what the same lines do again and again, with all parameters that they do it to."""
    groups: dict[tuple[tuple[str, str], ...], list[Lost]] = {}
    for each in lost:
        groups.setdefault(each.by, []).append(each)
    for group in groups.values():
        first, names = group[0].finding, Counter(each.name for each in group)
        cause = first.cause
        if len(names) > 1:
            said = f"{some(list(names))} were changed while they were gathered, and the changes were thrown away"
            cause = replace(cause, summary=said)
        again = max(names.values()) - 1
        if again:
            times = "once more" if again == 1 else f"{again} times more"
            line = f"the same happens {times}, last before op {group[-1].until}"
            cause = replace(cause, evidence=(*cause.evidence, line))
        yield replace(first, cause=cause, names=tuple(names))


def unexplained(wrong: Sequence[Wrong], changes: Sequence[Lost | Hidden]) -> list[Wrong]:
    """What is wrong with gathers, without uses that another finding explains: that of what changed in between."""
    return [
        each
        for each in wrong
        if not each.names or not all(any(one.explains(each, name) for one in changes) for name in each.names)
    ]  # fmt: skip


def given_back(trace: Trace, mark: Mark, steps: Steps) -> Iterator[Lost]:
    """Parameters that were changed while they were gathered, and the change is nowhere."""
    gathered = _gathered(trace, mark)
    since = 0 if gathered is None else gathered.seq
    for part in mark.fields.get("changed") or ():
        if part.get("written_back"):
            continue
        name = str(part.get("parameter"))
        ops = _writers(trace, name, since, mark.seq)
        if ops:
            by = ", ".join(f"{op.name} (op {op.seq}{_line(op)})" for op in ops[:LISTED])
            cause = Cause(
                "fsdp-gather",
                "certain",
                f"{name} was changed while it was gathered, and the change was thrown away",
                (f"written by {by}", "the shard does not have the change; the next gather brings back the old content"),
                _SHARDS,
            )  # fmt: skip
        else:
            cause = Cause(
                "race",
                "likely",
                f"{name}: the gathered content changed before it was given back, and no recorded op wrote it",
                (
                    f"gather {mark.fields.get('nth')} of buffer {mark.fields.get('buffer')} brought other content",
                    *_place(part),
                    "no op that was recorded wrote it in between",
                    *_over_steps(gathered, mark, steps),
                ),
                "Look for a write that the dispatcher cannot see: another thread, a copy that nobody waited for, numpy,"
                " a custom kernel. Wait for it before the parameters are gathered.",
            )
        op = ops[0] if ops else None
        places = tuple((each.name, str(each.source)) for each in ops) or ((name, ""),)
        finding = finding_at("gather", cause, trace, mark, steps, names=[name], op=op, since=since)
        changed = since if op is None else op.seq
        yield Lost(name, places, finding, unit_of(mark), changed, mark.seq)


def rebound(trace: Trace, mark: Mark, steps: Steps, told: set[str]) -> Iterator[Finding]:
    """Parameters that were exchanged while they were gathered, each of them once."""
    names = [str(name) for name in mark.fields.get("rebound") or () if str(name) not in told]
    told.update(names)
    if names:
        gathered = _gathered(trace, mark)
        cause = Cause(
            "fsdp-gather",
            "certain",
            f"{some(names)}: the module's tensor was exchanged for another while the parameters were gathered",
            (
                f"when buffer {mark.fields.get('buffer')} was given back, it was no part of what had been gathered",
                "the shard takes its place: the other content is lost",
                *_over_steps(gathered, mark, steps),
            ),
            "Do not assign .data or the attribute of a gathered parameter. " + _SHARDS,
        )
        since = 0 if gathered is None else gathered.seq
        yield finding_at("gather", cause, trace, mark, steps, names=names, since=since)


def shard_exchanged(trace: Trace, mark: Mark, steps: Steps) -> Iterator[Finding]:
    """Parameters whose shard in the model is another tensor than the one that is gathered."""
    names = [str(name) for name in mark.fields.get("exchanged") or ()]
    if names:
        cause = Cause(
            "fsdp-gather",
            "certain",
            f"{some(names)}: this rank's shard in the model was exchanged for another tensor, and the old one is gathered",
            (
                f"when buffer {mark.fields.get('buffer')} was sent, the model's tensor lay in other memory",
                "what was put in its place, and what an optimizer writes into it, never reaches the forward",
            ),
            "Write into the shard that is there (parameter.to_local().copy_(x), or load_state_dict); do not assign"
            " .data, _local_tensor or the module's attribute.",
        )
        yield finding_at("gather", cause, trace, mark, steps, names=names)


def _writers(trace: Trace, name: str, since: int, until: int) -> list[Op]:
    """Ops that wrote into a gathered parameter after the one with the first number, up to the other."""
    rows = [
        leaf for leaf in trace.leaves
        if leaf.name == name and leaf.kind == "parameter" and leaf.when == "gather" and leaf.seq <= until
    ]  # fmt: skip
    if not rows:
        return []
    # the storage is the same at every gather
    storage = int(trace.values.storage[rows[-1].value])
    outputs = trace.ops.outputs
    into = outputs.rows()[trace.values.storage[outputs.values] == storage]
    into = np.unique(into[(trace.ops.seq[into] > since) & (trace.ops.seq[into] <= until)])
    return [op for op in map(trace.op, into.tolist()) if op.mutated]


def _gathered(trace: Trace, mark: Mark) -> Mark | None:
    """The gather of what a mark says to be given back; None where it was before the recording."""
    before = itertools.takewhile(lambda each: each is not mark, trace.marks)
    found = [each for each in before if each.kind == "gather" and unit_of(each) == unit_of(mark)]
    return found[-1] if found else None


def _over_steps(gathered: Mark | None, mark: Mark, steps: Steps) -> Iterator[str]:
    """That a step ended between a gather and where it shows that what was gathered has changed."""
    began = None if gathered is None else steps.of(gathered)
    ended = steps.of(mark)
    if began is not None and ended is not None and began != ended:
        yield f"it was gathered in step {began} and given back in step {ended}: it changed somewhere between"


def _line(op: Op) -> str:
    return "" if op.source is None else f", {op.source}"


def shard_changed(trace: Trace, mark: Mark, steps: Steps) -> Iterator[Finding]:
    """Shards that something wrote with no op."""
    for part in mark.fields.get("mismatch") or ():
        before, now = part.get("before"), part.get("found")
        cause = Cause(
            "race",
            "likely",
            f"{part.get('parameter')}: this rank's shard changed, and no recorded op wrote it",
            (
                f"its digest was {before['raw']} when last known and is {now['raw']} where it is sent to be gathered",
                *_place(part),
                "no op that was recorded wrote it in between",
            ),
            "Look for a write that the dispatcher cannot see: another thread, a copy that nobody waited"
            " for, numpy, .data, a custom kernel. Wait for it before the parameters are gathered.",
        )
        yield finding_at(
            "hidden-write", cause, trace, mark, steps, names=[str(part.get("parameter"))]
        )


def seen_changed(marks: Sequence[Mark], leaf: Leaf) -> list[tuple[int, int]]:
    """Stretches of ops around a leaf that was read and found changed, in which marks show that its parameter changed."""
    found, gathered = [], {}
    for mark in marks:
        if mark.kind == "gather":
            gathered[unit_of(mark)] = mark.seq
        elif mark.kind == "shard-changed" and _is_among(leaf, mark.fields.get("mismatch")):
            found.append((min(mark.seq, leaf.seq), max(mark.seq, leaf.seq)))
        elif mark.kind == "reshard" and _is_among(leaf, mark.fields.get("changed")):
            since = gathered.get(unit_of(mark), 0)
            if since <= leaf.seq <= mark.seq:
                found.append((since, mark.seq))
    return found


def _is_among(leaf: Leaf, parts: Sequence[Mapping[str, Any]] | None) -> bool:
    return any(part.get("parameter") == leaf.name for part in parts or ())


def _place(part: Mapping[str, Any]) -> Iterator[str]:
    """The one element that differs, where the digests give it away."""
    before, now = part.get("before"), part.get("found")
    if before is None or now is None:
        return
    raws = int(before["raw"], 16), int(now["raw"], 16)
    element = tfp1.changed_element(*raws, before["n"], before["code"])
    if element is not None:
        yield f"one element differs: {int(part.get('offset', 0)) + element:,} of the parameter"
