"""A process of a run as a timeline: its tracks, and what lies on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from opdrift.export.divergences import arrows, marked
from opdrift.export.livebytes import Curve, live_bytes
from opdrift.export.markevents import Piece, Row, pieces
from opdrift.export.moduleslices import ModuleSlices
from opdrift.export.opslices import LOOKED_UP, Dialect, OpSlices
from opdrift.export.tracks import Event, Level, Timeline, Track, in_order, lanes
from opdrift.plugins import Export, Process
from opdrift.records import Header
from opdrift.render.words import count, name, plural
from opdrift.tracefile.columns import Ints

#: The rows of what is no op, from top to bottom, and what they are called; the first two stand above the modules.
_ROWS: Final[dict[Row, str]] = {
    "steps": "steps and phases",
    "gathers": "gathers and moves",
    "collectives": "collectives",
    "compilations": "compilations",
    "others": "marks",
}
#: The number of rank 0: viewers write it behind the name, where "rank 1 train 2" would be read as another rank.
_FIRST: Final = 1000


def timeline(process: Process, dialect: Dialect) -> Timeline:
    """What a viewer draws of one process.

    Args:
        process: What is exported.
        dialect: How the format tells of ops.
    """
    return _Drawing(process, dialect).timeline()


def written(
    export: Export,
    dialect: Dialect,
    write: Callable[[Timeline, Callable[[float], None]], int],
) -> str:
    """Write all processes of an export, and say how much that is.

    Args:
        export: What is exported.
        dialect: How the format tells of ops.
        write: Writes one process and returns the number of events; it reports which share is done.
    """
    processes, ops, events, cut = len(export.processes), 0, 0, False
    for number in range(processes):
        process = export.processes[number]

        def report(share: float, number: int = number) -> None:
            export.progress(int(1000 * (number + share)), 1000 * processes)

        events += write(timeline(process, dialect), report)
        ops += len(process.ops)
        cut |= len(process.ops) > LOOKED_UP
        del process  # before the next one is read
    told = f"wrote {plural(ops, 'op')}" + (f" of {processes} ranks" if processes > 1 else "")
    looked_up = f" (kernels of the first {count(LOOKED_UP)})" if cut else ""
    return f"{told}{looked_up}, {plural(events, 'event')} in all"


@dataclass(frozen=True, slots=True)
class _Thread:
    """The ops of one thread as they began, and the row of each."""

    number: int
    ops: Ints
    rows: Ints


class _Drawing:
    """A timeline that is being put together."""

    def __init__(self, process: Process, dialect: Dialect) -> None:
        header = process.trace.header
        self._process = process
        self._dialect = dialect
        self._clock = header.start_unix_ns - header.start_ns
        self._arrows = arrows(process)
        self._tracks: list[Track] = []

    def timeline(self) -> Timeline:
        found = list(
            pieces(self._process.trace, self._clock, self._process.ops, self._dialect.step)
        )
        threads = self._threads()
        curves = list(live_bytes(self._process.trace)) if self._process.whole else []
        parts: list[Iterator[Event]] = [self._row("steps", found)]
        if self._process.comparison is not None:
            track = self._track("divergences")
            parts.append(marked(self._process, track, self._clock))
        parts += [self._modules(thread, len(threads)) for thread in threads]
        parts += [self._ops(thread, len(threads)) for thread in threads]
        parts += [self._row(row, found) for row in _ROWS if row != "steps"]
        parts += [self._curve(curve) for curve in curves]
        header = self._process.trace.header
        expected = len(self._process.ops) + len(found) + sum(len(curve.times) for curve in curves)
        return Timeline(
            header,
            _FIRST + (header.rank or 0),
            _title(header),
            self._tracks,
            (event for part in parts for event in part),
            expected,
        )

    def _track(self, title: str) -> int:
        self._tracks.append(Track(len(self._tracks) + 1, title))
        return len(self._tracks)

    def _threads(self) -> list[_Thread]:
        columns, ops = self._process.trace.ops, self._process.ops
        found = []
        for number in np.unique(columns.thread[ops]).tolist():
            own = ops[columns.thread[ops] == number]
            starts = columns.start[own]
            own = own[in_order(starts, starts + columns.duration[own])]
            starts = columns.start[own]
            found.append(_Thread(number, own, lanes(starts, starts + columns.duration[own])))
        return found

    def _modules(self, thread: _Thread, threads: int) -> Iterator[Event]:
        track = self._track("modules" + _of_thread(thread, threads))
        return ModuleSlices(self._process.trace, self._clock).of(thread.ops, track)

    def _ops(self, thread: _Thread, threads: int) -> Iterator[Event]:
        title = "ops" + _of_thread(thread, threads)
        tracks = self._several(title, int(thread.rows.max(initial=0)) + 1)
        drawn = OpSlices(self._process, self._dialect, self._clock, self._arrows)
        return drawn.of(thread.ops, tracks[thread.rows])

    def _several(self, title: str, rows: int) -> Ints:
        """Ids of as many tracks: what overlaps lies on further ones."""
        return np.array(
            [
                self._track(title if not row else f"{title} (overlapping {row})")
                for row in range(rows)
            ],
            np.int64,
        )

    def _row(self, row: Row, found: Sequence[Piece]) -> Iterator[Event]:
        """Tracks for what is of this row: slices, and on one of its own what took no time."""
        mine = [piece for piece in found if piece.row == row]
        if not mine:
            return iter(())
        long = [piece for piece in mine if piece.duration is not None]
        starts = np.array([piece.start for piece in long], np.int64)
        ends = starts + np.array([piece.duration for piece in long], np.int64)
        order = in_order(starts, ends)
        placed = lanes(starts[order], ends[order])
        tracks = self._several(_ROWS[row], int(placed.max(initial=-1)) + 1)
        events: list[Event] = [
            long[i].slice(track)
            for i, track in zip(order.tolist(), tracks[placed].tolist(), strict=True)
        ]
        short = [piece for piece in mine if piece.duration is None]
        if short:
            track = self._track(f"{_ROWS[row]}, moments" if long else _ROWS[row])
            events += [piece.instant(track) for piece in short]
        return iter(events)

    def _curve(self, curve: Curve) -> Iterator[Event]:
        self._tracks.append(
            Track(len(self._tracks) + 1, f"live bytes, {name(curve.device)}", "bytes")
        )
        track = len(self._tracks)
        times = (curve.times + self._clock).tolist()
        return (
            Level(track, time, level)
            for time, level in zip(times, curve.bytes.tolist(), strict=True)
        )


def _of_thread(thread: _Thread, threads: int) -> str:
    return f", thread {thread.number}" if threads > 1 else ""


def _title(header: Header) -> str:
    """The rank, and what the run was called or what ran."""
    words = [] if header.rank is None else [f"rank {header.rank}"]
    # the interpreter is the first word of a command line, its options follow
    said = [word for word in header.program[1:] if not word.startswith("-")] or header.program[:1]
    called = header.label or (said[0].replace("\\", "/").rpartition("/")[2] if said else "")
    return name(" ".join([*words, called])) or "run"
