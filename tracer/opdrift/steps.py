"""Which step of the program an op belongs to."""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

import numpy as np
import numpy.typing as npt

from opdrift.tracefile.columns import Ints
from opdrift.tracefile.reader import Trace

#: Marks that say how many steps of an optimizer were done.
_COUNTING: Final = frozenset({"gather", "use", "reshard"})


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
        done = [(m.seq, m.fields.get("step")) for m in trace.marks if m.kind in _COUNTING]
        self._done = [(seq, number) for seq, number in done if isinstance(number, int)]

    def at(self, seq: int | None) -> int | None:
        """The step of an op; None before the first step, or where the program marked none."""
        position = 0 if seq is None else bisect_right(self._seqs, seq - 1)
        return self.numbers[position - 1] if position else None

    def known_at(self, seq: int | None) -> int | None:
        """The same, or else how many steps of an optimizer were done, as the last mark of a gather before it tells."""
        named = self.at(seq)
        if named is not None or seq is None:
            return named
        position = bisect_right(self._done, seq, key=lambda each: each[0])
        return self._done[position - 1][1] if position else None

    def between(self, seqs: Ints, first: int, last: int) -> npt.NDArray[np.bool_]:
        """Which of these ops are of the steps from `first` to `last`, both included."""
        position = np.searchsorted(np.array(self._seqs, np.int64), seqs - 1, side="right")
        chosen = np.array([False, *(first <= number <= last for number in self.numbers)])
        found: npt.NDArray[np.bool_] = chosen[position]
        return found
