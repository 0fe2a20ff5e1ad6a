"""Which differences between two runs a rank only receives: another rank gave something else to a collective or a message.

A collective's inputs are those of all its ranks. Where a rank's own are equal in both runs and what it got is not,
the rank by itself looks like the origin; the ranks that gave something else are nearer to it (notes: integrity 4).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from opdrift.contents import Contents
from opdrift.flow import made_from
from opdrift.records import Divergence, Sides
from opdrift.tracefile.reader import Trace
from opdrift.world.carried import in_words, parameters_of
from opdrift.world.collectives import Meeting, World
from opdrift.world.handed import given
from opdrift.world.messages import Message
from opdrift.world.parts import Parts
from opdrift.world.passed import WrongMessage, contents_sent, wrong_messages

#: Before a content that arrived late so many views are passed.
_VIEWS = 8
_WAIT = "_c10d_functional.wait_tensor"


@dataclass(frozen=True, slots=True)
class Received:
    """What a rank was handed by others.

    Attributes:
        place: The collective, as in the left run, or as in the right one where only that has any; or this rank's part in a
            message. In words: `all_reduce 3 of group 0`.
        seq: Its op's number on the rank that got it, in that run.
        givers: Ranks that gave something else to it than in the other run.
        carried: What it carries, in words: `gradients of a.weight and 5 more`; empty where nothing tells.
        sent: Of a message: the numbers of the op that sent it, in the left run and in the right one; None of a collective.
        seen: Whether both runs have the collective, so that what was given to it is known to differ; else what one rank
            gave is made of what differs there.
    """

    place: str
    seq: int
    givers: tuple[int, ...]
    carried: str = ""
    seen: bool = True
    sent: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class Arrived:
    """A message whose sender gave the same in both runs, and whose receiver got something else.

    Attributes:
        sent: The sender's part in the left run.
        received: The receiver's there.
        wrong: In which run it did not arrive as it was sent, as a word, and how; None where nothing shows that.
    """

    sent: Message
    received: Message
    wrong: tuple[str, WrongMessage] | None


class Exchanges:
    """The collectives of two runs of the same ranks, side by side."""

    def __init__(self, left: Mapping[int, Trace], right: Mapping[int, Trace]) -> None:
        self._worlds = Sides(World(left.values()), World(right.values()))
        self.parts = Parts(left, right)
        self._spread: dict[tuple[int, int, int], set[int]] = {}

    @property
    def one_sided(self) -> bool:
        """Whether only one of the runs has collectives."""
        return bool(self._worlds.left.meetings) != bool(self._worlds.right.meetings)

    def _have(self, rank: int) -> bool:
        """Whether both runs have a rank: one process that is compared with each of many has but one."""
        return rank in self._worlds.left.traces and rank in self._worlds.right.traces

    def received(self, rank: int, origin: Divergence) -> Received | None:
        """The collective that handed a rank what differs at an op, if others gave something else to it."""
        left, right = self._worlds.left, self._worlds.right
        if origin.seq.left is None or origin.seq.right is None or not self._have(rank):
            return None
        behind = zip(
            _collectives_behind(left, rank, origin.seq.left),
            _collectives_behind(right, rank, origin.seq.right),
            strict=False,
        )
        for one, other in behind:
            if _key(one) != _key(other):
                continue
            givers = tuple(
                r for r in one.members if r != rank and self._gave_another(r, one, other)
            )
            if givers and not self._gave_another(rank, one, other):
                return self._received(left, rank, one, givers, seen=True)
        for mine, theirs in self._messages_behind(rank, origin):
            if _sent_another(left, right, mine, theirs):
                sent, received = mine
                seqs = sent.seq, theirs[0].seq
                return Received(received.place, received.seq, (sent.rank,), sent=seqs)
        return None

    def arrived(self, rank: int, origin: Divergence) -> Arrived | None:
        """The message that an origin is, or reads, if its sender is known to have given the same in both runs."""
        left, right = self._worlds.left, self._worlds.right
        for one, other in self._messages_behind(rank, origin):
            if _sent_another(left, right, one, other) is False:
                return Arrived(*one, self._wrong(one[1], other[1]))
        return None

    def _wrong(self, one: Message, other: Message) -> tuple[str, WrongMessage] | None:
        """In which run a message did not arrive as it was sent."""
        wrong = self._wrong_messages
        if (one.rank, one.seq) in wrong.left:
            return "left", wrong.left[one.rank, one.seq]
        if (other.rank, other.seq) in wrong.right:
            return "right", wrong.right[other.rank, other.seq]
        return None

    @cached_property
    def _wrong_messages(self) -> Sides[Mapping[tuple[int, int], WrongMessage]]:
        def of(world: World) -> Mapping[tuple[int, int], WrongMessage]:
            return {(w.received.rank, w.received.seq): w for w in wrong_messages(world)}

        return Sides(of(self._worlds.left), of(self._worlds.right))

    def _messages_behind(
        self, rank: int, origin: Divergence
    ) -> Iterator[tuple[tuple[Message, Message], tuple[Message, Message]]]:
        """Messages that an origin is, or reads the content of, as (sender's, receiver's) in the left run and in the right one."""
        left, right = self._worlds.left, self._worlds.right
        if origin.seq.left is None or origin.seq.right is None or not self._have(rank):
            return
        found = zip(
            _messages_behind(left, rank, origin.seq.left),
            _messages_behind(right, rank, origin.seq.right),
            strict=False,
        )
        for one, other in found:
            if (one[1].line, one[1].number) == (other[1].line, other[1].number):
                yield one, other

    def from_wrong(
        self, rank: int, origin: Divergence, others: Mapping[int, Divergence]
    ) -> Received | None:
        """The same where one run has no collectives: another rank's own difference goes into one before this rank's.

        Args:
            rank: The rank.
            origin: What differs there.
            others: What differs first on the other ranks.
        """
        left, right = self._worlds.left, self._worlds.right
        if not self.one_sided:
            return None
        number, world = (0, left) if left.meetings else (1, right)
        until = (origin.seq.left, origin.seq.right)[number]
        if until is None or rank not in world.traces:
            return None
        before = sorted(
            (m for m in world.meetings if rank in m.members and m.members[rank].seq <= until),
            key=lambda m: m.members[rank].seq,
        )
        for other, first in others.items():
            start = (first.seq.left, first.seq.right)[number]
            if other == rank or start is None or other not in world.traces:
                continue
            spread = self._made_from(number, other, start)
            for meeting in before:
                part = meeting.members.get(other)
                if part is None or part.index is None or part.seq <= start:
                    continue
                if not spread.isdisjoint(world.traces[other].ops.inputs[part.index].tolist()):
                    return self._received(world, rank, meeting, (other,), seen=False)
        return None

    def _made_from(self, number: int, rank: int, seq: int) -> set[int]:
        """Which values of a rank are made of what an op of it returns."""
        key = number, rank, seq
        if key not in self._spread:
            trace = (self._worlds.left, self._worlds.right)[number].traces[rank]
            index = trace.index_of(seq)
            made = [] if index is None else trace.ops.outputs[index].tolist()
            contents = Contents(trace)
            _, states = made_from(contents, made)
            flags = np.frombuffer(states, np.uint8)[contents.states.of]
            self._spread[key] = set(np.flatnonzero(flags).tolist())
        return self._spread[key]

    def _received(
        self, world: World, rank: int, meeting: Meeting, givers: tuple[int, ...], *, seen: bool
    ) -> Received:
        part = meeting.members[rank]
        carried = in_words(part, parameters_of(world.traces[rank], part))
        return Received(part.place, part.seq, givers, carried, seen)

    def before(self, rank: int, origin: Divergence) -> int:
        """How many collectives a rank had issued before an op: where it stands among the ops of all ranks."""
        seq = origin.seq.left
        if origin.kind == "leaf" or seq is None:
            return 0
        issued = self._worlds.left.collectives.get(rank, ())
        if not issued:  # a run without ranks: where the other one stands
            issued, seq = self._worlds.right.collectives.get(rank, ()), origin.seq.right or 0
        return sum(each.seq < seq for each in issued)

    def _gave_another(self, rank: int, one: Meeting, other: Meeting) -> bool:
        """Whether a rank is known to have given other contents in the right run than in the left one."""
        if rank not in other.members:
            return False
        pairs = zip(
            given(self._worlds.left, one.members[rank]),
            given(self._worlds.right, other.members[rank]),
            strict=False,
        )
        return any(a is not None and b is not None and a.key != b.key for a, b in pairs)


def _sent_another(
    left: World, right: World, one: tuple[Message, Message], other: tuple[Message, Message]
) -> bool | None:
    """Whether the sender of a message gave other contents in the right run than in the left one; None if that is not known."""
    gave = contents_sent(left, one[0]), contents_sent(right, other[0])
    if not all(gave) or any(part is None for side in gave for part in side):
        return None
    return gave[0] != gave[1]


def _messages_behind(world: World, rank: int, seq: int) -> Iterator[tuple[Message, Message]]:
    """The messages that an op receives, or reads the content of, through views."""
    trace, received = world.traces[rank], world.messages.by_receiver
    index = trace.index_of(seq)
    if index is None:
        return
    if (rank, seq) in received:
        yield received[rank, seq]
        return
    for value in trace.ops.inputs[index].tolist():
        for writer in _writers(trace, value):
            at = rank, int(trace.ops.seq[writer])
            if at in received:
                yield received[at]
                break


def _key(meeting: Meeting) -> object:
    return meeting.group, meeting.ranks, meeting.what


def _collectives_behind(world: World, rank: int, seq: int) -> Iterator[Meeting]:
    """The collectives that an op is, waits for, or reads the result of, through views."""
    trace = world.traces[rank]
    index = trace.index_of(seq)
    if index is None:
        return
    own = world.by_op.get((rank, seq))
    if own is not None:
        yield own
        return
    for value in trace.ops.inputs[index].tolist():
        for writer in _writers(trace, value):
            found = world.by_op.get((rank, int(trace.ops.seq[writer])))
            if found is None and trace.op(writer).name.startswith(_WAIT):
                found = next(_collectives_behind(world, rank, int(trace.ops.seq[writer])), None)
            if found is not None:
                yield found
                break


def _writers(trace: Trace, value: int) -> Iterator[int]:
    """The ops that made a value, or wrote the content of its storage, nearest first; views are passed."""
    columns, outputs = trace.values, trace.ops.outputs
    same = (columns.storage == columns.storage[value]) & (columns.write == columns.write[value])
    ops = np.unique(outputs.rows()[np.isin(outputs.values, np.flatnonzero(same))])
    yield from ops[:_VIEWS].tolist()
