"""Which spans a process has, and how they nest: run, steps, module calls, gathers and moves, ops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from opdrift.plugins import OP_STATUSES, Process
from opdrift.records import RAISED, Mark
from opdrift.tracefile.columns import Ints
from opdrift_integrations.otlp.identity import Kind, span_id, span_ids, trace_id

_NEVER: Final = np.iinfo(np.int64).max
_EQUAL: Final = OP_STATUSES.index("equal")
_UNKNOWN: Final = OP_STATUSES.index("unknown")


@dataclass(frozen=True, slots=True)
class Step:
    """A step of the program, from its mark to the next one's."""

    number: int
    start: int
    end: int
    ident: bytes


class Tree:
    """The spans of one process, on the trace's own clock.

    Attributes:
        trace_id: Of all of them.
        run: Id of the root.
        start: When the run began.
        end: When the last of it was seen.
        steps: Those that hold something.
        calls: Ids of the module calls that hold an op; the others have no time.
        call_starts: When each call began, by its id.
        call_ends: When it ended.
        differing: How many ops in each call are not equal, by its id; of call 0 those of the whole run.
        marks: The gathers and moves.
        ops: Indices of the ops that are spans.
    """

    def __init__(self, process: Process, level: str) -> None:
        trace = process.trace
        self._process = process
        self.trace_id = trace_id(trace.header)
        self.run: bytes = span_id(self.trace_id, Kind.RUN)
        starts, ends = self._op_times(process.ops)
        self._set_calls(starts, ends)
        marks = trace.marks
        times = [mark.time_ns for mark in marks] if process.whole else []
        self.start = min([trace.header.start_ns, *starts[:1].tolist(), *times])
        self.end = max([self.start, int(ends.max(initial=self.start)), *times])
        steps = [mark for mark in marks if mark.kind == "step"]
        self._step_seqs = np.array([mark.seq for mark in steps], np.int64)
        self._all_steps = self._steps(steps)
        self.marks = [
            mark for mark in marks if mark.kind in ("gather", "move") and self._holds(mark)
        ]
        self.steps = self._used_steps()
        self.ops = self._chosen(level)
        self._call_ids: dict[int, bytes] = dict(
            zip(self.calls.tolist(), span_ids(self.trace_id, Kind.CALL, self.calls), strict=True)
        )

    def __len__(self) -> int:
        return 1 + len(self.steps) + len(self.calls) + len(self.marks) + len(self.ops)

    # ---- parents -------------------------------------------------------------------------------------

    def call_id(self, call: int) -> bytes:
        """Id of a call's span."""
        return self._call_ids[call]

    def parents(self, calls: list[int], seqs: Ints) -> list[bytes]:
        """Ids of the spans that ops lie in: the call that one ran in, else the step, else the run."""
        outside = [self.run, *(step.ident for step in self._all_steps)]
        known, places = self._call_ids, self._places(seqs).tolist()
        return [
            known.get(call) or outside[place] for call, place in zip(calls, places, strict=True)
        ]

    def _places(self, seqs: Ints) -> Ints:
        """How many steps had begun when these ops ran; a step's mark has the number of the op before it."""
        found: Ints = np.searchsorted(self._step_seqs, seqs - 1, side="right")
        return found

    def call_parent(self, call: int) -> bytes:
        """Id of the span that a module call lies in."""
        parent = int(self._process.trace.call_columns.parent[call])
        return self.parents([parent], self._call_seqs[call : call + 1])[0]

    def mark_parent(self, mark: Mark) -> bytes:
        """Id of the span that a gather or move lies in."""
        # what is marked at op N comes after that op, as the next one does
        return self.parents([mark.call], np.array([mark.seq + 1], np.int64))[0]

    # ---- parts ---------------------------------------------------------------------------------------

    def _op_times(self, ops: Ints) -> tuple[Ints, Ints]:
        columns = self._process.trace.ops
        starts = columns.start[ops]
        return starts, starts + columns.duration[ops]

    def _set_calls(self, starts: Ints, ends: Ints) -> None:
        """A call lasts from its first op to its last, those of the calls in it included."""
        process = self._process
        columns = process.trace.call_columns
        calls = process.trace.ops.call[process.ops]
        first = np.full(len(columns), _NEVER, np.int64)
        seqs = np.full(len(columns), _NEVER, np.int64)
        last = np.zeros(len(columns), np.int64)
        differing = np.zeros(len(columns), np.int64)
        np.minimum.at(first, calls, starts)
        np.minimum.at(seqs, calls, process.trace.ops.seq[process.ops])
        np.maximum.at(last, calls, ends)
        np.add.at(differing, calls, self.differs(process.ops))
        for call in range(len(columns) - 1, 0, -1):  # a call has a higher id than the one around it
            if first[call] == _NEVER:
                continue
            parent = columns.parent[call]
            first[parent] = min(first[parent], first[call])
            seqs[parent] = min(seqs[parent], seqs[call])
            last[parent] = max(last[parent], last[call])
            differing[parent] += differing[call]
        self.call_starts, self.call_ends, self.differing = first, last, differing
        self._call_seqs = seqs
        self.calls: Ints = np.flatnonzero(first[1:] < _NEVER) + 1

    def differs(self, ops: Ints) -> npt.NDArray[np.bool_]:
        """Which of these ops are known not to be as in the other run."""
        comparison = self._process.comparison
        if comparison is None:
            return np.zeros(len(ops), np.bool_)
        status = comparison.status[ops]
        found: npt.NDArray[np.bool_] = (status != _EQUAL) & (status != _UNKNOWN)
        return found

    def _steps(self, marks: list[Mark]) -> list[Step]:
        ids = span_ids(self.trace_id, Kind.STEP, np.arange(len(marks), dtype=np.int64))
        ends = [*(mark.time_ns for mark in marks[1:]), self.end][: len(marks)]
        numbers = [mark.fields.get("step") for mark in marks]
        return [
            Step(n if isinstance(n, int) else i, mark.time_ns, max(end, mark.time_ns), ident)
            for i, (n, mark, end, ident) in enumerate(zip(numbers, marks, ends, ids, strict=True))
        ]

    def _used_steps(self) -> list[Step]:
        """All of them, or those that hold an op of a part that was asked for."""
        if self._process.whole:
            return self._all_steps
        places = set(self._places(self._process.trace.ops.seq[self._process.ops]).tolist())
        return [step for i, step in enumerate(self._all_steps, 1) if i in places]

    def _holds(self, mark: Mark) -> bool:
        return self._process.whole or bool(self.call_starts[mark.call] < _NEVER and mark.call)

    def _chosen(self, level: str) -> Ints:
        ops = self._process.ops
        if level == "all":
            return ops
        if level == "module":
            return ops[:0]
        raised = (self._process.trace.ops.flags[ops] & RAISED) != 0
        chosen: Ints = ops[self.differs(ops) | raised]
        return chosen
