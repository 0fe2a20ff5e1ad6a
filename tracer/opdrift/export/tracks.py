"""What a timeline viewer draws: tracks with slices, instants, counters and arrows between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from opdrift.records import Header
from opdrift.tracefile.columns import Ints

#: What an argument of a slice may be: JSON's types.
Value = None | bool | int | float | str | Sequence["Value"] | Mapping[str, "Value"]
Items = tuple[tuple[str, Value], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Facts:
    """Arguments that many slices share; a writer may keep what it made of them, by identity."""

    items: Items


#: Of what has no arguments.
NO_FACTS = Facts(())


@dataclass(frozen=True, slots=True)
class Track:
    """A row of the timeline. What lies on it nests or does not overlap.

    Attributes:
        id: Unique within its process, from 1, in the order from top to bottom.
        name: As it is shown.
        unit: "bytes" for a counter; None for slices and instants.
    """

    id: int
    name: str
    unit: Literal["bytes"] | None = None


class Slice(NamedTuple):
    """Something that took time; slices of a track come in the order in which they began, outer ones first.

    Attributes:
        track: The track's id.
        category: What kind of thing it is, or what a comparison says of it.
        start: In nanoseconds since 1970.
        own: Arguments besides `facts`.
        arrows_out: Ids of arrows that begin here.
        arrows_in: Ids of arrows that end here.
    """

    track: int
    name: str
    category: str
    start: int
    duration: int
    facts: Facts = NO_FACTS
    own: Items = ()
    arrows_out: tuple[int, ...] = ()
    arrows_in: tuple[int, ...] = ()


class Instant(NamedTuple):
    """Something that happened at one moment."""

    track: int
    name: str
    category: str
    time: int
    own: Items = ()


class Level(NamedTuple):
    """What a counter shows from a moment on."""

    track: int
    time: int
    value: int


Event = Slice | Instant | Level


@dataclass(frozen=True, slots=True)
class Timeline:
    """One process of a run, ready to be drawn.

    Attributes:
        header: Of its trace.
        number: Of the process among those of the run; not 0.
        name: As it is shown.
        tracks: From top to bottom.
        events: Track by track; to be gone through once.
        count: About how many events there are.
    """

    header: Header
    number: int
    name: str
    tracks: Sequence[Track]
    events: Iterator[Event]
    count: int


def lanes(starts: Ints, ends: Ints) -> Ints:
    """The row of each slice, from 0, such that slices of one row nest or do not overlap.

    Viewers drop what overlaps on one track, or close it where it does not end.

    Args:
        starts: In ascending order; of those that start together, the longest first.
        ends: Not before their starts.
    """
    found = np.zeros(len(starts), np.int64)
    if np.all(starts[1:] >= np.maximum.accumulate(ends)[:-1]):
        return found  # one after the other, as nearly always
    rows: list[list[int]] = []  # per row, the ends of what is open
    for i, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
        row = next((n for n, ends_ in enumerate(rows) if _takes(ends_, start, end)), len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(end)
        found[i] = row
    return found


def _takes(is_open: list[int], start: int, end: int) -> bool:
    """Whether a slice nests in what is open on a row when it starts."""
    while is_open and is_open[-1] <= start:
        is_open.pop()
    return not is_open or end <= is_open[-1]


def in_order(starts: Ints, ends: Ints) -> Ints:
    """Positions by start; of what starts together, the longest first."""
    return np.lexsort((-ends, starts))
