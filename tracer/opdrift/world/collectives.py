"""Put the collectives of all ranks together: one collective is one node across its ranks.

No rank knows of another while it records. The k-th collective that a rank issues in a process group meets the
k-th that every other rank of the group issues in it; that is what the library itself goes by (notes: integrity 4).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from opdrift.neighbours import Neighbours
from opdrift.records import Mark
from opdrift.tracefile.reader import Trace
from opdrift.world.messages import Messages, messages_of
from opdrift.world.tensors import Sent, Tensors, in_words, sent_of, tensors_of

#: Between two ranks of a group: these are no collectives of the whole group.
_PEER_TO_PEER: Final = frozenset({"send", "recv"})
#: Each rank may give and get another number of elements.
_UNEVEN: Final = frozenset({"all_to_all", "scatter", "gather"})


@dataclass(frozen=True, slots=True)
class Collective:
    """One rank's part in a collective.

    Attributes:
        rank: Which rank.
        seq: Number of its op in that rank's trace.
        what: `all_reduce`, `all_gather`, `reduce_scatter`, `broadcast`, `barrier`, ...
        op: The op's name.
        group: Name of the process group.
        ranks: Global ranks of the group, in its order.
        number: Which collective of the group this is on this rank, from 1.
        given: What the rank gives; None where that is not known.
        got: What the rank gets; None where that is not known.
        sent: The content of what it hands to each rank as it was handed over; none where it was not read.
        reduction: `SUM`, `MAX`, ...; None where nothing told it (DDP asks in C++).
        root: Global rank that a broadcast starts from, or a reduce goes to; None for others.
        index: Index of the op; None where the process ended in it.
        source: The line of the program.
        module: The module's path.
    """

    rank: int
    seq: int
    what: str
    op: str
    group: str
    ranks: tuple[int, ...]
    number: int
    given: Tensors | None
    got: Tensors | None
    sent: Sent
    reduction: str | None
    root: int | None
    index: int | None
    source: str | None
    module: str

    @property
    def place(self) -> str:
        """In words: `all_reduce 3 of group 0`."""
        return f"{self.what} {self.number} of group {self.group}"

    @property
    def asked(self) -> str:
        """What this rank asked for, in words: `all_reduce of float32[64] by SUM`."""
        said = self.what
        if self.given:
            said += f" of {in_words(self.given)}"
        if self.reduction is not None:
            said += f" by {self.reduction}"
        if self.root is not None:
            said += (
                f" from rank {self.root}" if self.what == "broadcast" else f" to rank {self.root}"
            )
        return said


@dataclass(frozen=True, slots=True)
class Meeting:
    """A collective of all ranks of a group that were recorded: rank -> its part; they agree about it."""

    group: str
    ranks: tuple[int, ...]
    number: int
    members: Mapping[int, Collective]

    @property
    def what(self) -> str:
        """`all_reduce` and so on."""
        return next(iter(self.members.values())).what

    @property
    def is_whole(self) -> bool:
        """Whether the parts of all ranks are known."""
        return len(self.members) == len(self.ranks)


@dataclass(frozen=True, slots=True)
class Disagreement:
    """The first collective of a group about which its ranks do not agree; what follows in the group is not matched.

    Attributes:
        number: Which of the group.
        members: The parts of those ranks that issued one of this number.
        absent: Ranks whose trace goes on, or ends, without one.
        about: What differs: "operation", "dtype", "size", "reduction", "root"; "missing" where ranks lack it.
    """

    group: str
    ranks: tuple[int, ...]
    number: int
    members: Mapping[int, Collective]
    absent: tuple[int, ...]
    about: str


class World:
    """The ranks of one distributed run.

    Args:
        traces: One trace a rank.
    """

    def __init__(self, traces: Iterable[Trace]) -> None:
        self.traces: dict[int, Trace] = {
            trace.header.rank or 0: trace
            for trace in sorted(traces, key=lambda t: t.header.rank or 0)
        }
        self._neighbours: dict[int, Neighbours] = {}
        self._gathers: dict[int, list[Mark]] = {}

    def neighbours(self, rank: int) -> Neighbours:
        """Which values of a rank lie together."""
        if rank not in self._neighbours:
            self._neighbours[rank] = Neighbours(self.traces[rank])
        return self._neighbours[rank]

    def gathers(self, rank: int) -> Sequence[Mark]:
        """What an integration checked of a rank's gathers, in order."""
        if rank not in self._gathers:
            self._gathers[rank] = [m for m in self.traces[rank].marks if m.kind == "gather"]
        return self._gathers[rank]

    @property
    def size(self) -> int:
        """How many ranks the run had."""
        sizes = [t.header.world_size or 1 for t in self.traces.values()]
        return max(sizes, default=0)

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks of the run that have no trace here."""
        return tuple(rank for rank in range(self.size) if rank not in self.traces)

    @cached_property
    def collectives(self) -> Mapping[int, Sequence[Collective]]:
        """Rank -> its collectives, in order."""
        return {rank: tuple(_collectives(rank, trace)) for rank, trace in self.traces.items()}

    @cached_property
    def ended_early(self) -> frozenset[int]:
        """Ranks that did not come to the end of the run, or of which not all is there: killed, raised, left alone."""
        broken = {
            rank
            for rank, trace in self.traces.items()
            if not trace.complete or trace.footer is None or trace.footer.ended != "ok"
        }
        left = (rank for each in self.disagreements for rank in each.absent)
        return frozenset(broken.union(left))

    @cached_property
    def by_op(self) -> Mapping[tuple[int, int], Meeting]:
        """(rank, seq of a collective's op) -> the meeting that it is a part of."""
        return {(rank, c.seq): m for m in self.meetings for rank, c in m.members.items()}

    @cached_property
    def messages(self) -> Messages:
        """What two ranks sent each other."""
        return messages_of(self.traces)

    @property
    def meetings(self) -> Sequence[Meeting]:
        """Collectives that at least two recorded ranks were in, and agree about; by group and order."""
        return self._matched[0]

    @property
    def disagreements(self) -> Sequence[Disagreement]:
        """The first of each group about which its ranks do not agree."""
        return self._matched[1]

    @cached_property
    def _matched(self) -> tuple[Sequence[Meeting], Sequence[Disagreement]]:
        groups: dict[tuple[str, tuple[int, ...]], dict[int, list[Collective]]] = {}
        for rank, found in self.collectives.items():
            for each in found:
                key = (each.group, each.ranks)
                groups.setdefault(key, {}).setdefault(rank, []).append(each)
        meetings: list[Meeting] = []
        wrong: list[Disagreement] = []
        for (name, ranks), members in groups.items():
            recorded = {r: members.get(r, []) for r in ranks if r in self.traces}
            if len(recorded) < 2:
                continue
            good, bad = _match(name, ranks, recorded)
            meetings += good
            wrong += [] if bad is None else [bad]
        return meetings, wrong


def _match(
    name: str, ranks: tuple[int, ...], found: Mapping[int, Sequence[Collective]]
) -> tuple[list[Meeting], Disagreement | None]:
    meetings: list[Meeting] = []
    for number in range(max(map(len, found.values()))):
        members = {r: each[number] for r, each in found.items() if number < len(each)}
        absent = tuple(r for r in found if r not in members)
        about = "missing" if absent else _differs(list(members.values()))
        if about is not None:
            return meetings, Disagreement(name, ranks, number + 1, members, absent, about)
        meetings.append(Meeting(name, ranks, number + 1, members))
    return meetings, None


def _differs(members: Sequence[Collective]) -> str | None:
    """What the ranks do not agree about."""
    if len({c.what for c in members}) > 1:
        return "operation"
    reductions = {c.reduction for c in members} - {None}
    if len(reductions) > 1:
        return "reduction"
    if len({c.root for c in members}) > 1:
        return "root"
    told = [c.given for c in members if c.given]  # a scatter's receivers give nothing
    if len({tuple(dtype for dtype, _ in given) for given in told}) > 1:
        return "dtype" if len({len(given) for given in told}) == 1 else "size"
    if members[0].what not in _UNEVEN and len(set(told)) > 1:
        return "size"
    return None


def _collectives(rank: int, trace: Trace) -> Iterator[Collective]:
    numbers: dict[tuple[str, tuple[int, ...]], int] = {}
    for mark in trace.marks:
        if mark.kind != "collective" or mark.fields.get("what") in _PEER_TO_PEER:
            continue
        ranks = tuple(mark.fields["ranks"])
        key = (mark.fields["group"], ranks)
        numbers[key] = numbers.get(key, 0) + 1
        yield _collective(rank, trace, mark, ranks, numbers[key])


def _collective(
    rank: int, trace: Trace, mark: Mark, ranks: tuple[int, ...], number: int
) -> Collective:
    fields = mark.fields
    return Collective(
        rank=rank,
        seq=mark.seq,
        what=fields["what"],
        op=fields["op"],
        group=fields["group"],
        ranks=ranks,
        number=number,
        given=tensors_of(fields.get("given")),
        got=tensors_of(fields.get("got")),
        sent=sent_of(fields.get("sent")),
        reduction=fields.get("reduction"),
        root=fields.get("root"),
        index=trace.index_of(mark.seq),
        source=fields.get("source"),
        # of a process that ended here, the call may not have reached the disk
        module=trace.calls[mark.call].path if mark.call < len(trace.calls) else "",
    )
