"""Write down what each sample of a tensor holds, and where the axes lie in it."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from torch import Tensor

from opdrift.batches.lengths import Lengths
from opdrift.tracefile.axes import BATCH, Factor, Position, factor, outer_inner, valid_part
from opdrift.tracefile.writer import int_list_column, sample_columns

if TYPE_CHECKING:
    from opdrift.fingerprint.engine import Engine
    from opdrift.tracefile.writer import TraceWriter

#: Samples from this number on have no records: a row costs about a microsecond.
MOST_SAMPLES: Final = 1024
#: Rows are handed on to be written from so many bytes on.
FULL_BYTES: Final = 1 << 23


class SampleRows:
    """Rows of the tables `samples` and `axes` that wait for the next flush; threads may add at once.

    Args:
        engine: Computes the fingerprints.
        size: Samples of the batch.
        lengths: The extents of padded axes.
    """

    def __init__(self, engine: Engine, size: int, lengths: Lengths) -> None:
        self._engine = engine
        self._size = size
        self._lengths = lengths
        self._samples: deque[Any] = deque()
        self._axes: deque[tuple[int, int, tuple[int, ...], tuple[int, ...]]] = deque()
        self.bytes = 0

    def add(
        self,
        tensor: Tensor,
        value: int,
        positions: Sequence[Position],
        flags: int,
        *,
        alone: bool,
    ) -> None:
        """Record a value.

        Args:
            tensor: Its content, readable.
            value: Its id.
            positions: Where the axes lie in it.
            flags: As in the table `axes`.
            alone: It has no fingerprint of its own, so a batch of one needs a record, too.
        """
        batch = [p for p in positions if p.axis == BATCH]
        lengths = [p for p in positions if p.axis != BATCH]
        self._axes.append(
            (
                value,
                flags,
                tuple(n for p in batch for n in (p.dim, p.outer, p.inner)),
                tuple(n for p in lengths for n in (p.dim, p.outer, p.inner, p.axis)),
            )
        )
        if len(batch) > 1 or not positions or not tensor.numel():
            return
        padded = any(
            self._lengths[p.axis].is_padded(sample) for p in lengths for sample in range(self._size)
        )
        if padded or not batch:
            if padded or alone:
                self._add_parts(tensor, value, positions)
        else:
            self._add_batch(tensor, value, batch[0])

    def _add_batch(self, tensor: Tensor, value: int, position: Position) -> None:
        """All samples at once, where nothing is padded."""
        ready, kind = self._ready(tensor)
        outer, inner = outer_inner(tensor.shape, position)
        # an element may be several components
        components = ready.numel() // (outer * self._size)
        if components % inner:
            return  # several elements share a byte, and this sample begins inside one
        rows = np.empty(self._size, self._engine.ROW)
        self._engine.put_batch(
            rows.ctypes.data, ready.data_ptr(), outer, self._size, components, kind, value
        )
        self._append(rows[:MOST_SAMPLES])

    def _add_parts(self, tensor: Tensor, value: int, positions: Sequence[Position]) -> None:
        """Sample by sample, its valid part only."""
        factors = factor(tensor.shape, positions)
        if factors is None:
            return
        ready, kind = self._ready(tensor)
        if ready.numel() % tensor.numel():
            return
        data = _memory(ready)
        rows = np.empty(min(self._size, MOST_SAMPLES), self._engine.ROW)
        count = 0
        for sample in range(len(rows)):
            if self._add_part(rows[count : count + 1], data, factors, sample, kind, value):
                count += 1
        self._append(rows[:count])

    def _add_part(
        self, row: Any, data: Any, factors: Sequence[Factor], sample: int, kind: int, value: int
    ) -> bool:
        part = valid_part(data, factors, sample, self._lengths.known)
        if part is None:
            return False
        part = np.ascontiguousarray(part)
        put = self._engine.put if part.size < self._engine.LARGE else self._engine.put_large
        put(row.ctypes.data, part.ctypes.data, part.size, kind, value)
        row["item"] = sample
        return True

    def _ready(self, tensor: Tensor) -> tuple[Tensor, int]:
        ready = self._engine.plain(tensor)
        return ready, self._engine.kinds[ready.dtype]

    def _append(self, rows: Any) -> None:
        if len(rows):
            self._samples.append(rows)
            self.bytes += rows.nbytes

    def write(self, writer: TraceWriter) -> None:
        """Append what waits to the trace; the caller holds the lock of the writer."""
        samples, axes = _taken(self._samples), _taken(self._axes)
        self.bytes = 0
        if samples:
            writer.append("samples", sample_columns(np.concatenate(samples)))
        if axes:
            values, flags, batch, length = zip(*axes, strict=True)
            writer.append("axes", [values, flags, int_list_column(batch), int_list_column(length)])


def _taken(rows: deque[Any]) -> list[Any]:
    return [rows.popleft() for _ in range(len(rows))]


def _memory(ready: Tensor) -> Any:
    """A contiguous tensor on the CPU as an array of its components' bits."""
    size = ready.numel() * ready.element_size()
    held = (ctypes.c_uint8 * size).from_address(ready.data_ptr())
    return np.frombuffer(memoryview(held), f"<u{ready.element_size()}")
