"""Facts about the layouts of a trace's values, looked up by value: size, extent, order in memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from opdrift.records import TensorMeta
from opdrift.tokens import word
from opdrift.tracefile.columns import Ints
from opdrift.tracefile.reader import Trace


class Layouts:
    """Tables over the layouts of one trace; each is indexed by value ids.

    Layouts are few and values many, so no table is as long as the values.

    Attributes:
        size: Number of elements.
        span: How many elements of memory the value reaches over.
        dense: It uses each of them exactly once.
        row_major: Its elements lie in memory in their order, without gaps.
        dtype: Its dtype as a word.
        geometry: Its shape, strides and dtype as a word.
    """

    def __init__(self, trace: Trace) -> None:
        self.size: Final = _Table(trace, lambda meta: math.prod(meta.shape), np.int64)
        self.span: Final = _Table(trace, _span, np.int64)
        self.dense: Final = _Table(
            trace, lambda meta: _span(meta) == math.prod(meta.shape), np.bool_
        )
        self.row_major: Final = _Table(trace, _is_row_major, np.bool_)
        self.dtype: Final = _Table(trace, lambda meta: word(meta.dtype), np.uint64)
        self.geometry: Final = _Table(
            trace, lambda meta: word(f"{meta.dtype}{meta.shape}{meta.stride}"), np.uint64
        )


class _Table:
    """What is asked of each layout; zero for "none"."""

    def __init__(
        self, trace: Trace, of: Callable[[TensorMeta], object], dtype: type[np.generic]
    ) -> None:
        self._metas = trace.values.meta
        used = np.unique(self._metas)
        self._answers = np.zeros(int(used.max(initial=0)) + 1, dtype)
        for ident in used[used > 0].tolist():
            self._answers[ident] = of(trace.meta_of(ident))

    def __getitem__(self, values: Ints) -> npt.NDArray[Any]:
        found: npt.NDArray[Any] = self._answers[self._metas[values]]
        return found

    def at(self, value: int) -> Any:
        """The answer for one value."""
        return self._answers[self._metas[value]].item()


def _span(meta: TensorMeta) -> int:
    if math.prod(meta.shape) == 0:
        return 0
    return 1 + sum((n - 1) * abs(s) for n, s in zip(meta.shape, meta.stride, strict=False))


def _is_row_major(meta: TensorMeta) -> bool:
    step = 1
    for size, stride in zip(reversed(meta.shape), reversed(meta.stride), strict=False):
        if size != 1 and stride != step:
            return False
        step *= size
    return True
