"""Which step of the program an op belongs to."""

from __future__ import annotations

from bisect import bisect_right

from opdrift.tracefile.reader import Trace


class Steps:
    """Which step of the program an op belongs to, from its "step" marks."""

    def __init__(self, trace: Trace) -> None:
        marks = [m for m in trace.marks if m.kind == "step"]
        self._seqs = [m.seq for m in marks]
        named = [m.fields.get("step") for m in marks]
        self._numbers = [n if isinstance(n, int) else i for i, n in enumerate(named)]

    def at(self, seq: int | None) -> int | None:
        """The step of an op; None before the first step, or where the program marked none."""
        position = 0 if seq is None else bisect_right(self._seqs, seq - 1)
        return self._numbers[position - 1] if position else None
