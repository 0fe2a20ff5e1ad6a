"""How the ranks of a run ended: which end has no other rank for its reason, and which ends follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from opdrift.tracefile.reader import Trace
from opdrift.world.collectives import Collective, World
from opdrift.world.messages import Message

#: Types of what a communication library raises when another rank is gone.
_COMMUNICATION: Final = frozenset(
    {"RuntimeError", "DistError", "DistBackendError", "DistNetworkError", "DistStoreError"}
)


@dataclass(frozen=True, slots=True)
class End:
    """How a rank's trace ends.

    Attributes:
        rank: Which rank.
        how: "closed" if the recording ended by itself, "raised" if an exception left it, "lost" if nothing closed the
            trace: the process was killed, died, or still runs.
        issued: How many collectives it had issued.
        waited_in: A collective that it issued and other ranks never did, or a message that its peer had no part in.
        waited_for: Those ranks.
    """

    rank: int
    how: Literal["closed", "raised", "lost"]
    issued: int
    waited_in: Collective | Message | None
    waited_for: tuple[int, ...]

    @property
    def follows(self) -> bool:
        """Whether another rank is the reason: this one waited for it, and ended in that."""
        return self.how != "closed" and self.waited_in is not None


def ends(world: World) -> Mapping[int, End]:
    """Rank -> how it ended."""
    waited: dict[int, tuple[Collective | Message, tuple[int, ...]]] = {}
    for each in world.disagreements:
        if each.about == "missing":
            for rank, part in each.members.items():
                if not _has_passed(world.traces[rank], part):
                    waited.setdefault(rank, (part, each.absent))
    for message in world.messages.alone:
        if not _has_passed(world.traces[message.rank], message):
            waited.setdefault(message.rank, (message, (message.peer,)))
    found = {}
    for rank, trace in world.traces.items():
        waited_in, waited_for = waited.get(rank, (None, ()))
        found[rank] = End(rank, _how(trace), len(world.collectives[rank]), waited_in, waited_for)
    return found


def first_ends(world: World) -> tuple[End, ...]:
    """Ranks that were lost or raised by themselves while others were in need of them, the likeliest reason first.

    An exception counts if another rank waited for this one, or came to the end of the run without one, or was lost too
    and the exception is none that lost ranks leave behind: a launcher kills the others when one fails.
    """
    found = ends(world)
    missed = {rank for end in found.values() for rank in end.waited_for}
    alone = [end for end in found.values() if end.how != "closed" and not end.follows]
    lost = any(end.how == "lost" for end in alone)
    closed = any(end.how == "closed" for end in found.values())
    told = [
        end
        for end in alone
        if end.how == "lost"
        or end.rank in missed
        or (closed and _failed(world.traces[end.rank]))
        or (lost and _type_raised(world.traces[end.rank]) not in _COMMUNICATION)
    ]
    return tuple(sorted(told, key=lambda end: (end.how == "lost", end.issued, end.rank)))


def _has_passed(trace: Trace, part: Collective | Message) -> bool:
    """Whether a rank went on from what it issued without a wait, and ended in something else."""
    went_on = len(trace.ops) > 0 and int(trace.ops.seq[-1]) > part.seq
    if isinstance(part, Message) and went_on and trace.footer is None:
        return True
    return went_on and _how(trace) == "raised" and _type_raised(trace) not in _COMMUNICATION


def _how(trace: Trace) -> Literal["closed", "raised", "lost"]:
    if trace.footer is None:
        return "lost"
    return "raised" if trace.footer.ended == "raised" else "closed"


def _failed(trace: Trace) -> bool:
    return trace.footer is not None and trace.footer.failed


def _type_raised(trace: Trace) -> str:
    said = trace.footer.exception if trace.footer is not None else None
    return (said or "").partition(":")[0]
