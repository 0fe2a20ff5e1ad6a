"""Gathered contents that are not what their shards are, within a rank and between ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from opdrift import tfp1
from opdrift.gathers.words import LISTED, finding_at, unit_of
from opdrift.records import Cause, Finding, Mark
from opdrift.shards import GATHERS, names_of
from opdrift.steps import Steps
from opdrift.tfp1 import Code
from opdrift.tracefile.reader import Trace
from opdrift.wording import some

#: A content of fewer elements may be another's by chance.
_TELLING: Final = 4
_AGAIN: Final = (
    "Gather again after the shards change: reshard after forward and backward (reshard_after_forward=True,"
    " set_reshard_after_backward(True)), and write weights only while they are sharded."
)
_WAIT: Final = (
    "The gathered copy is stale, torn or wrongly cast: free it before the shards change (reshard after"
    " forward), and wait for the copy before it is used."
)
_HELD_BEFORE: Final = "that is what this shard held at"


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


@dataclass(frozen=True, slots=True)
class Wrong:
    """A gather or cast whose content is not that of its source.

    Attributes:
        key: What was gathered.
        names: The parameters that are wrong.
        finding: What is said of it.
        seq: The number of the op after which it was gathered or used.
        stale: Whether it is what a shard held before.
        used: Whether it was still there, and not gathered just then.
    """

    key: tuple[str, ...]
    names: tuple[str, ...]
    finding: Finding
    seq: int
    stale: bool
    used: bool


def folded(wrong: Sequence[Wrong]) -> Iterator[Finding]:
    """The first of what is wrong with the same parameters again and again, and how often."""
    first: list[tuple[Wrong, list[Wrong]]] = []
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


class Gathers:
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
                held = _Held(rank, names[part], offset, mark.kind, fields.get("nth", 0), mark.seq, steps.of(mark))  # fmt: skip
                self._held[raw, size].append(held)
        if mark.kind == "gather" and isinstance(fields.get("segments"), list):
            self._gathers[_meeting(mark)][rank] = (trace, mark)

    def mismatch(self, trace: Trace, mark: Mark, steps: Steps) -> Wrong | None:
        """What is wrong with a gather, a use or a cast; None if nothing is known to be."""
        lines, names, stale = [], [], False
        own = mark.fields.get("intact") is False
        parts = (mark.fields.get("mismatch") or ()) if own else ()
        for number, part in enumerate(parts):
            names.append(str(part.get("parameter")))
            if number >= LISTED:
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
                stale = stale or known.startswith(_HELD_BEFORE)
        if len(parts) > LISTED:
            lines.append(f"and so it is with parts of {len(parts) - LISTED} more")
        others, theirs = self._of_others(trace, mark)
        if not own and not others:
            return None
        names = list(dict.fromkeys([*names, *theirs])) or names_of(mark.fields)
        finding = _transfer(trace, mark, steps, names, [*lines, *others], stale=stale)
        return Wrong(unit_of(mark), tuple(names), finding, mark.seq, stale, mark.kind == "use")

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
    *,
    stale: bool,
) -> Finding:
    fields = mark.fields
    unit = fields.get("unit") or ""
    what = {"use": "gather", "cast": "cast copy"}.get(mark.kind, mark.kind)
    said = f"{fields.get('library', 'a library')}, buffer {fields.get('buffer')}, {mark.kind} {fields.get('nth', '')}"
    cause = Cause(
        "fsdp-gather",
        "certain",
        f"stale parameters in {unit or 'the root module'}: {some(names)} were used as their shards had been before"
        if stale
        else f"a {what} in {unit or 'the root module'} does not hold what its source holds: {some(names)}",
        (said.rstrip(), *evidence),
        _AGAIN if stale else _WAIT,
    )
    return finding_at("gather", cause, trace, mark, steps, names=names)
