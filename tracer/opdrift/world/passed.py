"""What one rank hands to another as it is must arrive as it was: messages, gather, scatter, all_to_all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from opdrift import composition
from opdrift.compare import describe, difference
from opdrift.composition import Content
from opdrift.world.collectives import Collective, Meeting, World
from opdrift.world.handed import Handed, given, got
from opdrift.world.messages import Line, Message

_Part = TypeVar("_Part")

#: Messages that were under way when the recording of one rank began may be so many.
_UNDER_WAY: Final = 3


@dataclass(frozen=True, slots=True)
class WrongMessage:
    """A message that did not arrive as it was sent, and how many more of its line did not."""

    sent: Message
    received: Message
    evidence: tuple[str, ...]
    more: int = 0


@dataclass(slots=True)
class _Exchanged:
    """The messages of a line whose contents are known on both sides, in order."""

    parts: list[tuple[Message, Message]] = field(default_factory=list)
    gave: list[Content | None] = field(default_factory=list)
    took: list[Handed | None] = field(default_factory=list)


def wrong_messages(world: World) -> Iterator[WrongMessage]:
    """The first of each line whose receiver got something else than what was sent."""
    lines: dict[Line, _Exchanged] = {}
    for sent, received in world.messages.met:
        if sent.tensors != received.tensors:
            continue  # told by itself
        line = lines.setdefault(sent.line, _Exchanged())
        line.parts.append((sent, received))
        line.gave.append(_at(contents_sent(world, sent), 0))
        line.took.append(_at(got(world, received), 0))
    for line in lines.values():
        wrong = [k for k in range(len(line.parts)) if _differ(line.gave[k], line.took[k])]
        if wrong and not _is_shifted(line):
            first = wrong[0]
            said = _how(world, *line.parts[first], line.took[first])
            yield WrongMessage(*line.parts[first], said, len(wrong) - 1)


def wrong_parts(
    world: World, meeting: Meeting, outputs: Mapping[int, Sequence[Handed | None]]
) -> tuple[int, tuple[str, ...]] | None:
    """A rank that was handed something else by gather, scatter or all_to_all than what others gave it, and by whom."""
    gave = {rank: contents_sent(world, part) for rank, part in meeting.members.items()}
    for place, rank in enumerate(meeting.ranks):
        pieces = outputs.get(rank, ())
        if meeting.what == "scatter":
            wanted = {root: _at(gave.get(root, ()), place) for root in _roots(meeting)}
        elif meeting.what == "gather":
            wanted = {owner: _at(gave.get(owner, ()), 0) for owner in meeting.ranks}
        else:
            wanted = {owner: _at(gave.get(owner, ()), place) for owner in meeting.ranks}
        if meeting.what == "gather" and rank not in _roots(meeting):
            continue
        wrong = _wrong(wanted, pieces)
        if wrong:
            said = tuple(
                f"on rank {rank}, what came from rank {owner} is not what rank {owner} gave"
                for owner in wrong
            )
            return rank, said
    return None


def _roots(meeting: Meeting) -> list[int]:
    root = next(iter(meeting.members.values())).root
    return [] if root is None else [root]


def _wrong(wanted: Mapping[int, Content | None], pieces: Sequence[Handed | None]) -> list[int]:
    """The ranks whose parts are not what they gave: a piece each, or all of them end to end."""
    if len(pieces) >= len(wanted) and len(wanted) > 0 and (len(wanted) > 1 or len(pieces) == 1):
        return [o for (o, gave), p in zip(wanted.items(), pieces, strict=False) if _differ(gave, p)]
    known = [part for part in wanted.values() if part is not None]
    whole = _at(pieces, 0)
    if len(pieces) != 1 or whole is None or not known or len(known) < len(wanted):
        return []
    if composition.is_gathered(whole.digest, known):
        return []
    return list(wanted)


def contents_sent(world: World, part: Collective | Message) -> Sequence[Content | None]:
    """What a rank handed over, as it was read then; else what was known of it."""
    if part.sent and None not in part.sent:
        return part.sent
    return [None if each is None else each.digest for each in given(world, part)]


def _at(items: Sequence[_Part | None], place: int) -> _Part | None:
    return items[place] if place < len(items) else None


def _differ(gave: Content | None, took: Handed | None) -> bool:
    return gave is not None and took is not None and not composition.same(gave, took.digest)


def _is_shifted(line: _Exchanged) -> bool:
    """Whether the receiver takes each message for another one: some were under way when a recording began."""
    gave, took = line.gave, line.took

    def fits(by: int) -> int:
        pairs = zip(gave[max(-by, 0) :], took[max(by, 0) :], strict=False)
        return sum(g is not None and t is not None and not _differ(g, t) for g, t in pairs)

    return any(fits(by) > fits(0) for by in range(-_UNDER_WAY, _UNDER_WAY + 1) if by)


def _how(world: World, sent: Message, received: Message, took: Handed | None) -> tuple[str, ...]:
    """How far what arrived is from what was sent, as far as that is known."""
    before = _at(given(world, sent), 0)
    now = None if took is None else took.whole
    was = None if before is None else before.whole
    if was is None or now is None or was.key == now.key:
        return ()
    return (f"what arrived against what was sent: {describe(difference(was, now))}",)
