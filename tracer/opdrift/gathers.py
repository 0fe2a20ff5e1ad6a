"""What gathers, moves and reshards of one run show to be wrong: contents held against the shards they came from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from opdrift import tfp1
from opdrift.provenance import Lineage
from opdrift.records import Cause, Finding, Leaf, Mark, Op
from opdrift.shards import GATHERS, names_of
from opdrift.steps import Steps
from opdrift.tfp1 import Code
from opdrift.tracefile.reader import Trace

#: Marks of integrations that say whether a content arrived as it was sent.
_TRANSFERS: Final = frozenset({"gather", "use", "cast"})
#: A content of fewer elements may be another's by chance.
_TELLING: Final = 4
#: So many names, ops or lines are listed.
_LISTED: Final = 4
_AGAIN: Final = (
    "Gather again after the shards change: reshard after forward and backward (reshard_after_forward=True,"
    " set_reshard_after_backward(True)), and write weights only while they are sharded."
)
_WAIT: Final = (
    "The gathered copy is stale, torn or wrongly cast: free it before the shards change (reshard after"
    " forward), and wait for the copy before it is used."
)
_HELD_BEFORE: Final = "that is what this shard held at"
_SHARDS: Final = (
    "Write into the parameters while they are sharded, or inside summon_full_params(writeback=True): what is written"
    " into the gathered copy is thrown away with it."
)


@dataclass(frozen=True, slots=True)
class _Held:
    """A piece of a shard as one rank had it at a gather."""

    rank: int
    parameter: str
    offset: int
    kind: str
    nth: int
    seq: int
    step: int | None

    @property
    def moment(self) -> str:
        """When that was, in words."""
        step = "" if self.step is None else f", step {self.step}"
        return f"{self.kind} {self.nth} (op {self.seq}{step})"


def gather_findings(traces: Sequence[Trace]) -> Iterator[Finding]:
    """Everything that is wrong with what was gathered, moved and given back, in and between ranks."""
    world = _World(traces)
    for trace in traces:
        steps = Steps(trace)
        wrong: list[_Wrong] = []
        exchanged: set[str] = set()
        for mark in trace.marks:
            if mark.kind in _TRANSFERS:
                found = world.mismatch(trace, mark, steps)
                wrong += [found] if found is not None else []
            elif mark.kind == "reshard" and mark.fields.get("intact") is False:
                yield from _given_back(trace, mark, steps)
                yield from _rebound(trace, mark, steps, exchanged)
            elif mark.kind == "shard-changed":
                yield from _shard_changed(trace, mark, steps)
        yield from _folded(wrong)
    yield from _loaded_on_some(traces)


@dataclass(frozen=True, slots=True)
class _Wrong:
    """A gather or cast whose content is not that of its source.

    Attributes:
        key: What was gathered.
        names: The parameters that are wrong.
        finding: What is said of it.
    """

    key: tuple[str, ...]
    names: tuple[str, ...]
    finding: Finding


def _folded(wrong: Sequence[_Wrong]) -> Iterator[Finding]:
    """The first of what is wrong with the same parameters again and again, and how often."""
    first: list[tuple[_Wrong, list[_Wrong]]] = []
    for each in wrong:
        for known, more in first:
            if known.key == each.key and set(known.names) & set(each.names):
                more.append(each)
                break
        else:
            first.append((each, []))
    for known, more in first:
        finding = known.finding
        if more:
            times = "once more" if len(more) == 1 else f"{len(more)} times more"
            line = f"the same is wrong {times}, last after op {more[-1].finding.seq}"
            cause = replace(finding.cause, evidence=(*finding.cause.evidence, line))
            finding = replace(finding, cause=cause)
        yield finding


class _World:
    """The gathers of all ranks."""

    def __init__(self, traces: Sequence[Trace]) -> None:
        #: (hash, elements) -> where a shard held that content
        self._held: dict[tuple[str, int], list[_Held]] = defaultdict(list)
        #: (ranks, unit, buffer, nth) -> number in the group -> (its trace, its mark)
        self._gathers: dict[tuple[Any, ...], dict[int, tuple[Trace, Mark]]] = defaultdict(dict)
        for trace in traces:
            steps = Steps(trace)
            for mark in trace.marks:
                if mark.kind in GATHERS:
                    self._learn(trace, mark, steps)

    def _learn(self, trace: Trace, mark: Mark, steps: Steps) -> None:
        fields = mark.fields
        rank = int(fields.get("rank", 0))
        names = names_of(fields)
        for part, offset, size, raw in fields.get("own") or ():
            if part is not None and size >= _TELLING and int(raw, 16):
                held = _Held(rank, names[part], offset, mark.kind, fields.get("nth", 0), mark.seq, _step(mark, steps))  # fmt: skip
                self._held[raw, size].append(held)
        if mark.kind == "gather" and isinstance(fields.get("segments"), list):
            self._gathers[_meeting(mark)][rank] = (trace, mark)

    def mismatch(self, trace: Trace, mark: Mark, steps: Steps) -> _Wrong | None:
        """What is wrong with a gather, a use or a cast; None if nothing is known to be."""
        lines, names, try_ = [], [], _WAIT
        own = mark.fields.get("intact") is False
        parts = (mark.fields.get("mismatch") or ()) if own else ()
        for number, part in enumerate(parts):
            names.append(str(part.get("parameter")))
            if number >= _LISTED:
                continue
            zeros = ", all zeros" if part.get("zeros") else ""
            count, are = part.get("numel"), "element" if part.get("numel") == 1 else "elements"
            lines.append(
                f"{part.get('parameter')}: {count:,} {are} from {part.get('offset'):,} on"
                f" {'is' if count == 1 else 'are'} not the shard's{zeros}"
            )
            known = self._known(part, mark)
            if known is not None:
                lines.append(known)
                try_ = _AGAIN if known.startswith(_HELD_BEFORE) else try_
        if len(parts) > _LISTED:
            lines.append(f"and so it is with parts of {len(parts) - _LISTED} more")
        others, theirs = self._of_others(trace, mark)
        if not own and not others:
            return None
        names = list(dict.fromkeys([*names, *theirs])) or names_of(mark.fields)
        finding = _transfer(trace, mark, steps, names, [*lines, *others], try_)
        key = tuple(str(mark.fields.get(field)) for field in ("unit", "buffer"))
        return _Wrong(key, tuple(names), finding)

    def _known(self, part: Mapping[str, Any], mark: Mark) -> str | None:
        """Where the content that is there in place of the shard's was seen."""
        found = part.get("found")
        if found is None:
            return None
        rank, name, offset = mark.fields.get("rank", 0), part.get("parameter"), part.get("offset")
        places = self._held.get((found["raw"], found["n"]), ())
        earlier = [p for p in places if (p.rank, p.parameter, p.offset) == (rank, name, offset)]
        this = mark.kind, mark.fields.get("nth", 0)
        earlier = [p for p in earlier if p.seq <= mark.seq and (p.kind, p.nth) != this]
        if earlier:
            return f"{_HELD_BEFORE} {earlier[-1].moment}"
        others = [p for p in places if (p.rank, p.parameter, p.offset) != (rank, name, offset)]
        if not others:
            return None
        other = next((place for place in others if place.rank == rank), others[0])
        whose = f"rank {other.rank}'s part of {other.parameter}"
        return f"that is {whose}, from element {other.offset:,} on"

    def _of_others(self, trace: Trace, mark: Mark) -> tuple[list[str], list[str]]:
        """Segments that are not what their owner's shard was at the same gather, in words; the parameters in them."""
        rank = int(mark.fields.get("rank", 0))
        group = self._gathers.get(_meeting(mark), {})
        lines: list[str] = []
        names: list[str] = []
        if group.get(rank, (None, None))[1] is not mark:
            return lines, names
        for owner, segment in enumerate(mark.fields["segments"]):
            sent = group[owner][1].fields.get("shard") if owner in group else None
            if owner == rank or segment is None or sent is None or segment == sent:
                continue
            wrong = _wrong_parameters(group, rank, owner)
            if wrong == []:
                continue  # they differ in what pads the parameters, which nobody reads
            names += wrong or []
            lines.append(f"the segment of rank {owner} is not what rank {owner} held")
            lines += [
                f"it is rank {other}'s shard"
                for other in group
                if other != owner and group[other][1].fields.get("shard") == segment
            ]
        return lines, names


def _meeting(mark: Mark) -> tuple[str, ...]:
    """The same for what all ranks of a group gather together."""
    return tuple(str(mark.fields.get(name)) for name in ("ranks", "unit", "buffer", "nth"))


def _wrong_parameters(
    group: Mapping[int, tuple[Trace, Mark]], rank: int, owner: int
) -> list[str] | None:
    """The parameters that a rank gathered otherwise than the ranks had them; None where that is not recorded."""
    fields = group[rank][1].fields
    wholes = fields.get("wholes")
    ranks = fields.get("ranks") or ()
    if wholes is None or any(number not in group for number in range(len(ranks))):
        return None
    names = names_of(fields)
    code = next(s["code"] for s in fields["segments"] if s is not None)
    pieces: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for number in range(len(ranks)):
        for part, _, size, raw in group[number][1].fields.get("own") or ():
            if part is not None:
                pieces[part].append((int(raw, 16), tfp1.digits(size, Code(code).bytes)))
    mine = {part for part, *_ in group[owner][1].fields.get("own") or () if part is not None}
    return [
        names[part]
        for part in sorted(mine)
        if wholes[part] is not None and tfp1.concat(pieces[part]) != int(wholes[part], 16)
    ]


def _transfer(
    trace: Trace,
    mark: Mark,
    steps: Steps,
    names: Sequence[str],
    evidence: Sequence[str],
    try_: str,
) -> Finding:
    fields = mark.fields
    unit = fields.get("unit") or ""
    what = {"use": "gather", "cast": "cast copy"}.get(mark.kind, mark.kind)
    said = f"{fields.get('library', 'a library')}, buffer {fields.get('buffer')}, {mark.kind} {fields.get('nth', '')}"
    cause = Cause(
        "fsdp-gather",
        "certain",
        f"a {what} in {unit or 'the root module'} does not hold what its source holds: {_some(names)}",
        (said.rstrip(), *evidence),
        try_,
    )
    return _finding("gather", cause, trace, mark, steps, name=names[0] if names else None)


# ---- giving back, writing past the dispatcher --------------------------------------------------------


def _given_back(trace: Trace, mark: Mark, steps: Steps) -> Iterator[Finding]:
    for part in mark.fields.get("changed") or ():
        if part.get("written_back"):
            continue
        name = str(part.get("parameter"))
        ops = _writers(trace, name, mark)
        if ops:
            by = ", ".join(f"{op.name} (op {op.seq}{_line(op)})" for op in ops[:_LISTED])
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
                ),
                "Look for a write that the dispatcher cannot see: another thread, a copy that nobody waited for, numpy,"
                " a custom kernel. Wait for it before the parameters are gathered.",
            )
        op = ops[0] if ops else None
        yield _finding("gather", cause, trace, mark, steps, name=name, op=op)


def _rebound(trace: Trace, mark: Mark, steps: Steps, told: set[str]) -> Iterator[Finding]:
    """Parameters that were exchanged while they were gathered, each of them once."""
    rebound = [str(name) for name in mark.fields.get("rebound") or () if str(name) not in told]
    told.update(rebound)
    if rebound:
        cause = Cause(
            "fsdp-gather",
            "certain",
            f"{_some(rebound)}: the module's tensor was exchanged for another while the parameters were gathered",
            (
                f"when buffer {mark.fields.get('buffer')} was given back, it was no part of what had been gathered",
                "the shard takes its place: the other content is lost",
            ),
            "Do not assign .data or the attribute of a gathered parameter. " + _SHARDS,
        )
        yield _finding("gather", cause, trace, mark, steps, name=rebound[0])


def _writers(trace: Trace, name: str, mark: Mark) -> list[Op]:
    """Ops that wrote into a gathered parameter since it was gathered last."""
    rows = [
        leaf for leaf in trace.leaves
        if leaf.name == name and leaf.kind == "parameter" and leaf.when == "gather" and leaf.seq <= mark.seq
    ]  # fmt: skip
    if not rows:
        return []
    # the storage is the same at every gather
    storage, since = int(trace.values.storage[rows[-1].value]), _gathered_at(trace, mark)
    outputs = trace.ops.outputs
    into = outputs.rows()[trace.values.storage[outputs.values] == storage]
    into = np.unique(into[(trace.ops.seq[into] > since) & (trace.ops.seq[into] <= mark.seq)])
    return [op for op in map(trace.op, into.tolist()) if op.mutated]


def _gathered_at(trace: Trace, mark: Mark) -> int:
    """The op after which what is given back was gathered last."""
    key = mark.fields.get("unit"), mark.fields.get("buffer")
    seqs = [
        each.seq
        for each in trace.marks
        if each.kind == "gather"
        and each.seq <= mark.seq
        and (each.fields.get("unit"), each.fields.get("buffer")) == key
    ]
    return max(seqs, default=0)


def _line(op: Op) -> str:
    return "" if op.source is None else f", {op.source}"


def _shard_changed(trace: Trace, mark: Mark, steps: Steps) -> Iterator[Finding]:
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
        yield _finding("hidden-write", cause, trace, mark, steps, name=part.get("parameter"))


def _place(part: Mapping[str, Any]) -> Iterator[str]:
    """The one element that differs, where the digests give it away."""
    before, now = part.get("before"), part.get("found")
    if before is None or now is None:
        return
    width = Code(before["code"]).bytes
    change = tfp1.locate_single_change(
        int(before["raw"], 16), int(now["raw"], 16), tfp1.digits(before["n"], width), width
    )
    if change is not None:
        yield f"one element differs: {int(part.get('offset', 0)) + change.index:,} of the parameter"


# ---- loading -----------------------------------------------------------------------------------------


def _loaded_on_some(traces: Sequence[Trace]) -> Iterator[Finding]:
    """Parts of one parameter that came from a copy on some ranks, and are drawn at random on others."""
    made: dict[str, dict[int, tuple[str, Leaf]]] = defaultdict(dict)
    for number, trace in enumerate(traces):
        lineage = None
        for leaf in trace.leaves:
            if leaf.kind == "shard" and leaf.when == "gather" and number not in made[leaf.name]:
                lineage = lineage or Lineage(trace)
                made[leaf.name][number] = lineage.of(leaf.value).kind, leaf
    odd: set[int] = set()
    for by_rank in made.values():
        kinds = {kind for kind, _ in by_rank.values()}
        if {"drawn", "copied"} <= kinds:
            odd |= {number for number, (kind, _) in by_rank.items() if kind == "drawn"}
    for number in sorted(odd):
        trace = traces[number]
        rows = [
            (name, by_rank[number][1])
            for name, by_rank in made.items()
            if number in by_rank and by_rank[number][0] == "drawn"
        ]
        names = [name for name, _ in rows]
        others = [str(t.header.rank) for t in traces if t is not trace]
        cause = Cause(
            "weights",
            "certain",
            f"rank {trace.header.rank} never loaded {_some(names)}",
            (
                f"its parts of {len(names)} parameters were last written by a random initialisation",
                f"rank {', '.join(others)} has parts that were copied: what is gathered is loaded in part, and random in part",
            ),
            "Load the checkpoint on every rank before the model is sharded, or broadcast it from one rank"
            " (sync_module_states=True; broadcast_from_rank0 with set_model_state_dict).",
        )
        first = rows[0][1]
        yield Finding(
            "weights", cause, names[0], None, names[0].rpartition(".")[0], first.seq or None,
            Steps(trace).at(first.seq), trace.header.rank,
        )  # fmt: skip


# ---- words -------------------------------------------------------------------------------------------


def _finding(
    kind: str,
    cause: Cause,
    trace: Trace,
    mark: Mark,
    steps: Steps,
    *,
    name: str | None,
    op: Op | None = None,
) -> Finding:
    return Finding(
        kind,
        cause,
        name,
        None if op is None else op.name,
        str(mark.fields.get("unit") or ""),
        mark.seq,
        _step(mark, steps),
        trace.header.rank,
    )


def _step(mark: Mark, steps: Steps) -> int | None:
    """The program's own step, or else how many steps of an optimizer were done."""
    named = steps.at(mark.seq)
    done = mark.fields.get("step")
    return named if named is not None else done if isinstance(done, int) else None


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more
