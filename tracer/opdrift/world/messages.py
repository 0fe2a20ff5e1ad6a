"""Messages between two ranks of a run: the k-th that one sends to another meets the k-th that it receives.

Messages are told apart by their process group, sender, receiver and tag; those of one kind keep their order, others
may overtake them. A receiver that takes what comes from any rank says not whose message it took: into such a rank
messages with that tag are not matched.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from opdrift.records import Mark
from opdrift.tracefile.reader import Trace
from opdrift.world.tensors import Sent, Tensors, in_words, sent_of, tensors_of

#: (group, its ranks, sender, receiver, tag)
Line = tuple[str, tuple[int, ...], int, int, int]


@dataclass(frozen=True, slots=True)
class Message:
    """One rank's part in a message.

    Attributes:
        rank: Which rank.
        seq: Number of its op in that rank's trace.
        what: `send` or `recv`.
        op: The op's name.
        line: Group, ranks, sender, receiver and tag.
        number: Which of the line this is on this rank, from 1.
        tensors: What is sent, or room for what is received; None where that is not known.
        sent: The content of what is sent as it was handed over; none where it was not read.
        index: Index of the op; None where the process ended in it.
        source: The line of the program.
        module: The module's path.
    """

    rank: int
    seq: int
    what: str
    op: str
    line: Line
    number: int
    tensors: Tensors | None
    sent: Sent
    index: int | None
    source: str | None
    module: str

    @property
    def peer(self) -> int:
        """The other rank."""
        _, _, sender, receiver, _ = self.line
        return receiver if self.what == "send" else sender

    @property
    def place(self) -> str:
        """In words: `send 2 to rank 1 in group 0 (tag 5)`."""
        way = "to" if self.what == "send" else "from"
        tag = self.line[4]
        return f"{self.what} {self.number} {way} rank {self.peer} in group {self.line[0]}" + (
            f" (tag {tag})" if tag else ""
        )

    @property
    def asked(self) -> str:
        """What this rank asked for, in words: `send of float32[8]`."""
        return f"{self.what} of {in_words(self.tensors)}" if self.tensors else self.what


@dataclass(frozen=True)
class Messages:
    """The messages of a run.

    Attributes:
        met: Those that both ranks are known to have had a part in: (sender's, receiver's).
        alone: Those of which only one rank's part was recorded.
    """

    met: Sequence[tuple[Message, Message]] = ()
    alone: Sequence[Message] = ()

    @cached_property
    def by_receiver(self) -> Mapping[tuple[int, int], tuple[Message, Message]]:
        """(receiver, number of its op) -> both parts of the message."""
        return {(received.rank, received.seq): (sent, received) for sent, received in self.met}


@dataclass(slots=True)
class _Ends:
    """The two ends of a line."""

    sent: list[Message] = field(default_factory=list)
    received: list[Message] = field(default_factory=list)


def messages_of(traces: Mapping[int, Trace]) -> Messages:
    """Match the messages of all ranks; those with a rank that was not recorded are left out."""
    lines: dict[Line, _Ends] = {}
    anything: set[tuple[str, tuple[int, ...], int, int]] = set()
    for rank, trace in traces.items():
        for mark in trace.marks:
            if mark.kind != "collective" or mark.fields.get("what") not in ("send", "recv"):
                continue
            line = _line(rank, mark.fields)
            if line is None:
                ranks = tuple(mark.fields["ranks"])
                anything.add((mark.fields["group"], ranks, rank, mark.fields.get("tag") or 0))
                continue
            ends = lines.setdefault(line, _Ends())
            known = ends.sent if mark.fields["what"] == "send" else ends.received
            known.append(_message(rank, trace, mark, line, len(known) + 1))
    met: list[tuple[Message, Message]] = []
    alone: list[Message] = []
    for line, ends in lines.items():
        group, ranks, sender, receiver, tag = line
        if {sender, receiver} <= traces.keys() and (group, ranks, receiver, tag) not in anything:
            met += zip(ends.sent, ends.received, strict=False)
            both = min(len(ends.sent), len(ends.received))
            alone += [*ends.sent[both:], *ends.received[both:]]
    return Messages(met, alone)


def disagreements(found: Messages) -> Iterator[tuple[Message, Message]]:
    """The first message of each line whose ranks do not agree about what it holds."""
    told: set[Line] = set()
    for sent, received in found.met:
        known = sent.tensors is not None and received.tensors is not None
        if known and sent.tensors != received.tensors and sent.line not in told:
            told.add(sent.line)
            yield sent, received


def _line(rank: int, fields: Mapping[str, Any]) -> Line | None:
    """None where a rank receives from any other."""
    ranks, peer = tuple(fields["ranks"]), fields.get("peer")
    if not isinstance(peer, int) or not 0 <= peer < len(ranks):
        return None
    ends = (rank, ranks[peer]) if fields["what"] == "send" else (ranks[peer], rank)
    return fields["group"], ranks, *ends, fields.get("tag") or 0


def _message(rank: int, trace: Trace, mark: Mark, line: Line, number: int) -> Message:
    fields = mark.fields
    return Message(
        rank=rank,
        seq=mark.seq,
        what=fields["what"],
        op=fields["op"],
        line=line,
        number=number,
        tensors=tensors_of(fields.get("given") or fields.get("got")),
        sent=sent_of(fields.get("sent")),
        index=trace.index_of(mark.seq),
        source=fields.get("source"),
        # of a process that ended here, the call may not have reached the disk
        module=trace.calls[mark.call].path if mark.call < len(trace.calls) else "",
    )
