"""Which step of the program an op belongs to."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np
import numpy.typing as npt

from opdrift.tracefile.columns import Ints
from opdrift.tracefile.reader import Trace


class Steps:
    """Which step of the program an op belongs to, from its "step" marks.

    Attributes:
        numbers: The number of each step, in the order in which they began.
    """

    def __init__(self, trace: Trace) -> None:
        marks = [m for m in trace.marks if m.kind == "step"]
        self._seqs = [m.seq for m in marks]
        named = [m.fields.get("step") for m in marks]
        self.numbers = [n if isinstance(n, int) else i for i, n in enumerate(named)]

    def at(self, seq: int | None) -> int | None:
        """The step of an op; None before the first step, or where the program marked none."""
        position = 0 if seq is None else bisect_right(self._seqs, seq - 1)
        return self.numbers[position - 1] if position else None

    def between(self, seqs: Ints, first: int, last: int) -> npt.NDArray[np.bool_]:
        """Which of these ops are of the steps from `first` to `last`, both included."""
        position = np.searchsorted(np.array(self._seqs, np.int64), seqs - 1, side="right")
        chosen = np.array([False, *(first <= number <= last for number in self.numbers)])
        found: npt.NDArray[np.bool_] = chosen[position]
        return found
