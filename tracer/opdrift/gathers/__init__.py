"""What gathers and reshards of one run show to be wrong: contents held against the shards they came from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Final

from opdrift.gathers.changes import (
    Hidden,
    Lost,
    given_back,
    hidden_in,
    rebound,
    seen_changed,
    shard_changed,
    shard_exchanged,
    told_once,
    unexplained,
)
from opdrift.gathers.loading import loaded_on_some, random_parts
from opdrift.gathers.mismatches import Gathers, Wrong, folded
from opdrift.gathers.replicas import replicas_apart
from opdrift.gathers.wholes import loaded_apart
from opdrift.records import Finding, Mark
from opdrift.steps import Steps
from opdrift.tracefile.reader import Trace

__all__ = ["gather_findings", "random_parts", "seen_changed"]

#: Marks of integrations that say whether a content arrived as it was sent.
_TRANSFERS: Final = frozenset({"gather", "use", "cast"})


def gather_findings(traces: Sequence[Trace], *, each: bool = False) -> Iterator[Finding]:
    """Everything that is wrong with what was gathered and given back, in and between ranks.

    Args:
        traces: One a rank.
        each: Tell every change that was lost, not once what a line does to many parameters, again and again.
    """
    world = Gathers(traces)
    for trace in traces:
        steps = Steps(trace)
        wrong: list[Wrong] = []
        lost: list[Lost] = []
        hidden: list[Hidden] = []
        exchanged: set[str] = set()
        for mark, following in zip_longest(trace.marks, trace.marks[1:]):
            if mark.kind == "cast" and _is_moved(mark, following):
                continue  # one copy that casts and moves is told as the move
            if mark.kind in _TRANSFERS:
                found = world.mismatch(trace, mark, steps)
                wrong += [found] if found is not None else []
            elif mark.kind == "reshard" and mark.fields.get("intact") is False:
                lost += given_back(trace, mark, steps)
                yield from rebound(trace, mark, steps, exchanged)
            elif mark.kind == "shard-changed":
                hidden.append(hidden_in(trace, mark))
                yield from shard_changed(trace, mark, steps)
            elif mark.kind == "shard-exchanged":
                yield from shard_exchanged(trace, mark, steps)
        yield from folded(unexplained(wrong, [*lost, *hidden]))
        yield from (one.finding for one in lost) if each else told_once(lost)
    yield from replicas_apart(traces)
    yield from loaded_on_some(traces)
    yield from loaded_apart(traces)


def _is_moved(cast: Mark, following: Mark | None) -> bool:
    """Whether the mark after a cast is the same copy as a move, which is told by itself."""
    return (
        following is not None
        and following.kind == "move"
        and following.fields.get("intact") is False
        and (following.seq, following.fields.get("buffer")) == (cast.seq, cast.fields.get("buffer"))
    )
