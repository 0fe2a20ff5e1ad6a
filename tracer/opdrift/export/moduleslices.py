"""Module calls as slices of a timeline, each from its first op to its last."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from opdrift.export.tracks import Facts, Slice, Value
from opdrift.render.words import name
from opdrift.tracefile.columns import Ints
from opdrift.tracefile.reader import Trace


@dataclass(slots=True)
class _Open:
    """A call that is under way; where its slice belongs among those that are written."""

    call: int
    phase: int
    start: int
    slot: int


class ModuleSlices:
    """The module calls that ops of one process ran in, as slices."""

    def __init__(self, trace: Trace, clock: int) -> None:
        """Get ready.

        Args:
            trace: What was recorded.
            clock: What is to be added to a recorded time for one since 1970.
        """
        self._trace = trace
        self._clock = clock
        self._facts: dict[tuple[int, int, int, int], tuple[str, Facts]] = {}

    def of(self, ops: Ints, track: int) -> Iterator[Slice]:
        """Slices of the calls that these ops of one thread ran in; the ops in the order in which they began.

        In the backward pass, where autograd chooses the order, a call may come in several slices.
        """
        waiting: list[Slice | None] = []
        stack: list[_Open] = []
        for call, phase, start, ended in self._runs(ops):
            chain = self._chain(call)
            kept = 0
            while (
                kept < min(len(stack), len(chain))
                and (stack[kept].call, stack[kept].phase) == (chain[kept], phase)
            ):  # fmt: skip
                kept += 1
            while len(stack) > kept:
                self._close(stack.pop(), ended, track, waiting)
            if not stack:
                yield from filter(None, waiting)
                waiting.clear()
            for each in chain[kept:]:
                stack.append(_Open(each, phase, start, len(waiting)))
                waiting.append(None)
        yield from filter(None, waiting)

    def _runs(self, ops: Ints) -> Iterator[tuple[int, int, int, int]]:
        """Call and phase of each stretch of ops, when it begins, and when what was before it had ended.

        The last one is no call.
        """
        if not len(ops):
            return
        columns = self._trace.ops
        calls, phases = columns.call[ops], columns.phase[ops]
        starts = columns.start[ops]
        ends = np.maximum.accumulate(starts + columns.duration[ops])
        changes = np.flatnonzero((calls[1:] != calls[:-1]) | (phases[1:] != phases[:-1])) + 1
        firsts = np.concatenate([np.zeros(1, np.int64), changes])
        # an op may still run when the next begins in another module: it called that
        before = np.minimum(ends[firsts - 1], starts[firsts])
        yield from zip(
            calls[firsts].tolist(),
            phases[firsts].tolist(),
            starts[firsts].tolist(),
            before.tolist(),
            strict=True,
        )
        yield 0, 0, int(ends[-1]), int(ends[-1])

    def _chain(self, call: int) -> list[int]:
        """A call and those that it was made in, the outermost first; call 0 is none."""
        parents = self._trace.call_columns.parent
        found = []
        while call:
            found.append(call)
            call = int(parents[call])
        return found[::-1]

    def _close(self, call: _Open, end: int, track: int, waiting: list[Slice | None]) -> None:
        columns = self._trace.call_columns
        parent = int(columns.parent[call.call])
        key = (
            int(columns.path[call.call]),
            int(columns.path[parent]) if parent else -1,
            int(columns.source[call.call]),
            int(columns.training[call.call]),
        )
        known = self._facts.get(key)
        if known is None:
            known = self._facts[key] = self._learn(*key)
        phase = "backward" if call.phase else "forward"
        waiting[call.slot] = Slice(
            track,
            known[0],
            phase,
            call.start + self._clock,
            max(end - call.start, 0),
            known[1],
            (("call", int(columns.number[call.call])), ("phase", phase)),
        )

    def _learn(self, path: int, parent: int, source: int, training: int) -> tuple[str, Facts]:
        module, type_ = self._trace.call_name(path)
        above = "" if parent < 0 else self._trace.call_name(parent)[0]
        inner = module.removeprefix(f"{above}.") if above else module
        items: list[tuple[str, Value]] = [("module", module or "(root)"), ("type", type_)]
        line = self._trace.source(source)
        if line is not None:
            items.append(("called at", str(line)))
        items.append(("training", bool(training)))
        shown = f"{name(inner)} ({name(type_)})" if inner else name(type_) or "(root)"
        return shown, Facts(tuple(items))
