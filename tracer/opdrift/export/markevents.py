"""What is no op on a timeline: steps and phases, gathers and moves, collectives, compilations, settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Literal

import numpy as np

from opdrift.export.tracks import Facts, Instant, Items, Slice
from opdrift.records import Mark
from opdrift.render.words import name
from opdrift.tracefile.columns import Ints
from opdrift.tracefile.reader import Trace

Row = Literal["steps", "gathers", "collectives", "compilations", "others"]

#: Marks of integrations about parameters: what became of them.
_PARAMETERS: Final = frozenset(
    {
        "gather",
        "use",
        "cast",
        "move",
        "reshard",
        "free",
        "views",
        "shard-changed",
        "shard-exchanged",
        "buffer-cast",
    }
)
#: Told otherwise: with the ops (`kernels`, `can-use`, `fast-path`), or by slices.
_ELSEWHERE: Final = frozenset({"step", "kernels", "can-use", "fast-path", "collective", "compile"})


@dataclass(frozen=True, slots=True)
class Piece:
    """A slice or an instant that has no track yet: an instant has no duration."""

    row: Row
    name: str
    category: str
    start: int
    duration: int | None
    own: Items

    def slice(self, track: int) -> Slice:
        """It as a slice."""
        return Slice(
            track, self.name, self.category, self.start, self.duration or 0, Facts(self.own)
        )

    def instant(self, track: int) -> Instant:
        """It as an instant."""
        return Instant(track, self.name, self.category, self.start, self.own)


def pieces(trace: Trace, clock: int, ops: Ints, step: str) -> Iterator[Piece]:
    """All that marks tell, and phases.

    Args:
        trace: What was recorded.
        clock: What is to be added to a recorded time for one since 1970.
        ops: Those that were asked for; marks before the first and after the last of them are left out.
        step: What a step is called, with "{}" for its number.
    """
    end = _end(trace) + clock
    if len(ops):
        yield from _steps(trace, clock, ops, step)
    marks = _near(trace, ops)
    yield from _collectives(trace, clock, marks)
    yield from _compilations(marks, clock, end)
    yield from _gathered(marks, clock, end)
    for mark in marks:
        if mark.kind not in _ELSEWHERE:
            row: Row = "gathers" if mark.kind in _PARAMETERS else "others"
            yield Piece(row, _title(mark), mark.kind, mark.time_ns + clock, None, _fields(mark))


def _near(trace: Trace, ops: Ints) -> list[Mark]:
    if len(ops) == len(trace.ops):
        return list(trace.marks)
    if not len(ops):
        return []
    first, last = int(trace.ops.seq[ops[0]]) - 1, int(trace.ops.seq[ops[-1]])
    return [mark for mark in trace.marks if first <= mark.seq <= last]


def _end(trace: Trace) -> int:
    """When the last thing happened that was recorded."""
    ops = trace.ops
    last = int((ops.start + ops.duration).max()) if len(ops) else trace.header.start_ns
    return max(last, *(mark.time_ns for mark in trace.marks), trace.header.start_ns)


# ---- steps and phases -----------------------------------------------------------------------------------


def _steps(trace: Trace, clock: int, ops: Ints, words: str) -> Iterator[Piece]:
    """Steps as the program marked them, and within them stretches of forward and of backward ops.

    A step without any of the ops is a moment.
    """
    columns = trace.ops
    marks = [mark for mark in trace.marks if mark.kind == "step"]
    begun = np.array([mark.seq for mark in marks], np.int64)
    step = np.searchsorted(begun, columns.seq[ops], side="left")  # 0: before the first
    phase = columns.phase[ops]
    starts = columns.start[ops] + clock
    ends = np.maximum.accumulate(starts + columns.duration[ops])
    for first, after in _stretches(step):
        stop = int(ends[after - 1])
        if after < len(ops):
            stop = _begin(marks[int(step[after]) - 1], clock, int(starts[after]))
        if step[first]:
            at = int(step[first]) - 1
            begin = _begin(marks[at], clock, int(starts[first]))
            title = _step(marks[at], at, words)
            yield Piece("steps", title, "step", begin, max(stop - begin, 0), _fields(marks[at]))
        for one, other in _stretches(phase[first:after]):
            begin = int(starts[first + one])
            following = int(starts[first + other]) if first + other < after else stop
            length = min(int(ends[first + other - 1]), following) - begin
            word = "backward" if phase[first + one] else "forward"
            own: Items = (("ops", other - one),)
            yield Piece("steps", word, "phase", begin, max(length, 0), own)
    seqs = columns.seq[ops]
    for at in np.setdiff1d(np.arange(len(marks)), step - 1).tolist():
        if int(seqs[0]) - 1 <= marks[at].seq <= int(seqs[-1]):
            title = _step(marks[at], at, words)
            yield Piece("steps", title, "step", marks[at].time_ns + clock, None, _fields(marks[at]))


def _step(mark: Mark, at: int, words: str) -> str:
    return name(words.format(mark.fields.get("step", at)))


def _begin(mark: Mark, clock: int, start: int) -> int:
    """When a step began: at its mark, and before its first op."""
    return min(mark.time_ns + clock, start)


def _stretches(numbers: Ints) -> list[tuple[int, int]]:
    """Where each stretch of equal numbers starts, and where the next does."""
    edges = np.flatnonzero(numbers[1:] != numbers[:-1]) + 1
    bounds = [0, *edges.tolist(), len(numbers)]
    return list(pairwise(bounds))


# ---- marks -------------------------------------------------------------------------------------------------


def _collectives(trace: Trace, clock: int, marks: Sequence[Mark]) -> Iterator[Piece]:
    """A collective's mark names it, its op says how long the call took."""
    columns = trace.ops
    for mark in marks:
        if mark.kind != "collective":
            continue
        index = trace.index_of(mark.seq)
        start, duration = mark.time_ns, None
        if index is not None:
            start, duration = int(columns.start[index]), int(columns.duration[index])
        what = name(str(mark.fields.get("what", "collective")))
        yield Piece("collectives", what, "collective", start + clock, duration, _fields(mark))


def _compilations(marks: Sequence[Mark], clock: int, end: int) -> Iterator[Piece]:
    """From the mark of a compilation's start to that of its end."""
    begun: dict[str, Mark] = {}
    for mark in marks:
        if mark.kind != "compile":
            continue
        ident = str(mark.fields.get("id"))
        if mark.fields.get("event") == "start":
            begun[ident] = mark
        elif ident in begun:
            yield _spanning(
                begun.pop(ident), "compilations", f"compile {ident}", clock, mark.time_ns + clock
            )
    for ident, mark in begun.items():
        yield _spanning(mark, "compilations", f"compile {ident}", clock, end)


def _gathered(marks: Sequence[Mark], clock: int, end: int) -> Iterator[Piece]:
    """How long each unit's parameters were together: from their gather until they were given back.

    Where a library tells that (`reshard`), a `free` is of something else, such as the shard that was sent.
    """
    told = {_key(mark) for mark in marks if mark.kind == "reshard"}
    held: dict[tuple[str, str], Mark] = {}
    for mark in marks:
        unit = _key(mark)
        if mark.kind == "gather" and unit not in held:
            held[unit] = mark
        elif unit in held and mark.kind == ("reshard" if unit in told else "free"):
            since = held.pop(unit)
            yield _spanning(since, "gathers", _held(since), clock, mark.time_ns + clock)
    for mark in held.values():
        yield _spanning(mark, "gathers", _held(mark), clock, end)


def _key(mark: Mark) -> tuple[str, str]:
    return str(mark.fields.get("library")), str(mark.fields.get("unit"))


def _spanning(mark: Mark, row: Row, title: str, clock: int, end: int) -> Piece:
    start = mark.time_ns + clock
    return Piece(row, title, mark.kind, start, max(end - start, 0), _fields(mark))


def _held(mark: Mark) -> str:
    return f"{_unit(mark.fields)} gathered"


def _title(mark: Mark) -> str:
    """The kind, and what tells it from others of its kind."""
    fields = mark.fields
    words = [mark.kind]
    if mark.kind in _PARAMETERS:
        if isinstance(direction := fields.get("direction"), str):
            words = [direction]
        words.append(
            _unit(fields) if fields.get("unit") is not None else str(fields.get("name", ""))
        )
        if fields.get("intact") is False:
            words.append("NOT INTACT")
    elif mark.kind == "flags":
        words += sorted(map(str, fields))
    return name(" ".join(filter(None, words)))


def _unit(fields: Mapping[str, Any]) -> str:
    return name(str(fields.get("unit"))) or "(root)"


def _fields(mark: Mark) -> Items:
    return (("after op", mark.seq), *mark.fields.items())
