"""Which step of the program an op belongs to."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from opdrift.records import Mark
from opdrift.tracefile.columns import Ints
from opdrift.tracefile.reader import Trace

#: Marks that say how many steps of an optimizer were done.
_COUNTING: Final = frozenset({"gather", "use", "reshard"})
#: Ops by which torch tells a profiler of a stretch of the program; every optimizer of torch does so of its step.
_ENTER: Final = "profiler._record_function_enter_new.default"
_EXIT: Final = "profiler._record_function_exit._RecordFunction"
_STEP: Final = "Optimizer.step#"


class Steps:
    """Which step of the program an op belongs to, from its "step" marks.

    Attributes:
        numbers: The number of each step, in the order in which they began.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
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
        """The same, or else how many steps of an optimizer were done: by the last mark of a gather before, or by its ops."""
        named = self.at(seq)
        if named is not None or seq is None:
            return named
        if self._done:
            position = bisect_right(self._done, seq, key=lambda each: each[0])
            return self._done[position - 1][1] if position else None
        return bisect_left(self._ended, seq) if self._ended else None

    def of(self, mark: Mark) -> int | None:
        """The step of one of the trace's marks; between it and the one that began the step there may be no op."""
        named = self._of_marks[id(mark)]
        done = mark.fields.get("step")
        return named if named is not None else done if isinstance(done, int) else None

    @cached_property
    def _of_marks(self) -> dict[int, int | None]:
        """The step of each mark, by the identity of the mark, which the trace keeps."""
        found: dict[int, int | None] = {}
        begun, step = 0, None
        for mark in self._trace.marks:
            if mark.kind == "step":
                step = self.numbers[begun]
                begun += 1
            found[id(mark)] = step
        return found

    @cached_property
    def _ended(self) -> list[int]:
        """The ops with which steps of an optimizer ended."""
        return [step.end for step in _optimizer_steps(self._trace)]

    def between(self, seqs: Ints, first: int, last: int) -> npt.NDArray[np.bool_]:
        """Which of these ops are of the steps from `first` to `last`, both included."""
        position = np.searchsorted(np.array(self._seqs, np.int64), seqs - 1, side="right")
        chosen = np.array([False, *(first <= number <= last for number in self.numbers)])
        found: npt.NDArray[np.bool_] = chosen[position]
        return found


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """One step of an optimizer.

    Attributes:
        optimizer: The name of its class.
        begin: The number of the op that began it.
        end: Of the one that ended it.
    """

    optimizer: str
    begin: int
    end: int


def optimizer_steps(trace: Trace) -> list[OptimizerStep]:
    """The steps of optimizers, by their beginnings: torch tells a profiler of each."""
    return sorted(_optimizer_steps(trace), key=lambda step: step.begin)


def _optimizer_steps(trace: Trace) -> Iterator[OptimizerStep]:
    """The same in the order in which they ended; such stretches lie within each other, on each thread."""
    used = np.flatnonzero(np.bincount(trace.ops.signature))
    names = {number: trace.op_info(number).name for number in used.tolist()}
    told = np.isin(trace.ops.signature, [n for n, name in names.items() if name in (_ENTER, _EXIT)])
    begun: dict[int, list[tuple[str | None, int]]] = {}
    for index in np.flatnonzero(told).tolist():
        number, seq = int(trace.ops.signature[index]), int(trace.ops.seq[index])
        stretches = begun.setdefault(int(trace.ops.thread[index]), [])
        if names[number] == _ENTER:
            stretches.append((_optimizer(trace, number), seq))
        elif stretches:
            optimizer, begin = stretches.pop()
            if optimizer is not None:
                yield OptimizerStep(optimizer, begin, seq)


def _optimizer(trace: Trace, signature: int) -> str | None:
    """The class of the optimizer whose step a stretch is; None of other stretches."""
    name = str(dict(trace.signature(signature).arguments).get("name", ""))
    return name.removeprefix(_STEP).removesuffix(".step") if name.startswith(_STEP) else None
