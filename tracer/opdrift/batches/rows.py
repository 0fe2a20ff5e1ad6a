"""Write down what each sample of a tensor holds, and where the axes lie in it."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor

from opdrift.batches.lengths import Lengths
from opdrift.neutral import silent
from opdrift.tracefile.axes import (
    BATCH,
    MIXED,
    UNKNOWN,
    Factor,
    Position,
    factor,
    outer_inner,
    valid_part,
)
from opdrift.tracefile.schema import RECORDED_SAMPLES
from opdrift.tracefile.writer import int_list_column, sample_columns

if TYPE_CHECKING:
    from opdrift.fingerprint.devices import Devices
    from opdrift.fingerprint.engine import Engine
    from opdrift.tracefile.writer import TraceWriter

#: From so many rows on, 5 MB, they should be written.
ROWS: Final = 8192
_MAX_SHAPES: Final = 65536


@dataclass(frozen=True, slots=True)
class Cut:
    """How a tensor of one shape, in which the axes lie in one way, falls into samples.

    Attributes:
        batch: Its places of the batch, as the table `axes` has them.
        length: The same of padded lengths.
        outer: Elements before the batch, if the samples can be read all at once; else 0.
        padded: A sample has padding in it.
        factors: How to cut out a sample; None if that cannot be done.
    """

    batch: tuple[int, ...]
    length: tuple[int, ...]
    outer: int
    padded: bool
    factors: Sequence[Factor] | None


class SampleRows:
    """Rows of the tables `samples` and `axes` that wait for the next flush; threads may add at once.

    Args:
        engine: Computes the fingerprints.
        size: Samples of the batch.
        lengths: The extents of padded axes.
        devices: Computes those of tensors outside the host's memory.
        is_elsewhere: Whether a tensor is one of those.
    """

    def __init__(
        self,
        engine: Engine,
        size: int,
        lengths: Lengths,
        *,
        devices: Devices | None = None,
        is_elsewhere: Callable[[Tensor], bool] = lambda tensor: False,
    ) -> None:
        self._engine = engine
        self._devices = devices
        self._is_elsewhere = is_elsewhere
        self._size = size
        self._recorded = min(size, RECORDED_SAMPLES)
        self._lengths = lengths
        self._cuts: dict[tuple[object, ...], Cut] = {}
        self._axes: deque[tuple[int, int, tuple[int, ...], tuple[int, ...]]] = deque()
        # rows are filled under the lock, so that another thread's flush sees whole ones only
        self._lock = threading.Lock()
        self._rows = np.empty((ROWS + size, engine.ROW_BYTES), np.uint8)
        self._at: int = self._rows.ctypes.data
        self._used = 0
        self._full: list[Any] = []

    @property
    def is_full(self) -> bool:
        """Whether so many rows wait that they should be written."""
        return self._used + sum(map(len, self._full)) >= ROWS

    def add(
        self,
        tensor: Tensor,
        value: int,
        positions: tuple[Position, ...],
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
        key = (positions, tensor.shape)
        cut = self._cuts.get(key)
        if cut is None:
            if len(self._cuts) >= _MAX_SHAPES:
                self._cuts.clear()
            cut = self._cuts[key] = self._cut(positions, tensor.shape)
        self._axes.append((value, flags, cut.batch, cut.length))
        if not tensor.numel() or (not cut.batch and flags & (MIXED | UNKNOWN)):
            return  # it is no sample's own
        factors = cut.factors if cut.padded or alone else None
        if self._devices is not None and self._is_elsewhere(tensor):
            self._add_elsewhere(self._devices, tensor, value, cut.outer, factors)
        elif cut.outer:
            self._add_batch(tensor, value, cut.outer)
        elif factors is not None:
            self._add_parts(tensor, value, factors)

    def _cut(self, positions: Sequence[Position], shape: Sequence[int]) -> Cut:
        batch = [p for p in positions if p.axis == BATCH]
        lengths = [p for p in positions if p.axis > BATCH]
        padded = any(
            self._lengths[p.axis].is_padded(sample) for p in lengths for sample in range(self._size)
        )
        outer, factors = 0, None
        if len(batch) == 1 and not padded:
            outer = outer_inner(shape, batch[0])[0]
        elif len(batch) < 2 and lengths:
            factors = factor(shape, [*batch, *lengths])
        return Cut(
            tuple(n for p in batch for n in (p.dim, p.outer, p.inner)),
            tuple(n for p in lengths for n in (p.dim, p.outer, p.inner, p.axis)),
            outer,
            padded,
            factors,
        )

    def _add_batch(self, tensor: Tensor, value: int, outer: int) -> None:
        """All samples at once, where nothing is padded."""
        ready, kind = self._ready(tensor)
        # an element may be several components, or several elements one
        inner, rest = divmod(ready.numel(), outer * self._size)
        if rest:
            return
        with self._lock:
            self._engine.put_batch(
                self._row(self._size), ready.data_ptr(), outer, self._size, inner, kind, value
            )
            self._used += self._recorded

    def _add_parts(self, tensor: Tensor, value: int, factors: Sequence[Factor]) -> None:
        """Sample by sample, its valid part only."""
        ready, kind = self._ready(tensor)
        if ready.numel() % tensor.numel():
            return
        data = _memory(ready)
        with self._lock:
            for sample in range(self._recorded):
                part = valid_part(data, factors, sample, self._lengths.known)
                if part is None:
                    continue
                part = np.ascontiguousarray(part)
                put = self._engine.put if part.size < self._engine.LARGE else self._engine.put_large
                put(self._row(1), part.ctypes.data, part.size, kind, value)
                self._rows[self._used].view(self._engine.ROW)["item"] = sample
                self._used += 1

    def _add_elsewhere(
        self,
        devices: Devices,
        tensor: Tensor,
        value: int,
        outer: int,
        factors: Sequence[Factor] | None,
    ) -> None:
        """Let a tensor's device compute the rows; they arrive later."""
        if outer:
            batch = outer, self._size, tensor.numel() // (outer * self._size)
            devices.probe(tensor, partial(self._arrived, value, None), batch=batch)
        elif factors is not None:
            with silent(), torch.no_grad():
                for sample in range(self._recorded):
                    part = valid_part(tensor.detach(), factors, sample, self._lengths.known)
                    if part is not None:
                        devices.probe(part, partial(self._arrived, value, sample))

    def _arrived(self, value: int, sample: int | None, rows: Any) -> None:
        """Rows of a device: of all samples, or of one."""
        rows = rows[: self._recorded].copy()
        rows["value"] = value
        if sample is not None:
            rows["item"] = sample
        with self._lock:
            self._full.append(rows.view(np.uint8).reshape(len(rows), self._engine.ROW_BYTES))

    def _row(self, count: int) -> int:
        """The address of the next rows."""
        if self._used + count > len(self._rows):  # an op with many outputs
            self._full.append(self._rows[: self._used].copy())
            self._used = 0
        return self._at + self._used * self._engine.ROW_BYTES

    def _ready(self, tensor: Tensor) -> tuple[Tensor, int]:
        kind = self._engine.kinds.get(tensor.dtype)
        if (
            kind is None
            or not tensor.is_cpu
            or not tensor.is_contiguous()
            or tensor.is_neg()
            or not tensor.data_ptr()
        ):
            tensor = self._engine.plain(tensor)
            kind = self._engine.kinds[tensor.dtype]
        return tensor, kind

    def write(self, writer: TraceWriter) -> None:
        """Append what waits to the trace; the caller holds the lock of the writer."""
        with self._lock:
            rows = np.concatenate([*self._full, self._rows[: self._used]])
            self._full, self._used = [], 0
        axes = [self._axes.popleft() for _ in range(len(self._axes))]
        if len(rows):
            writer.append("samples", sample_columns(rows.reshape(-1).view(self._engine.ROW)))
        if axes:
            values, flags, batch, length = zip(*axes, strict=True)
            writer.append("axes", [values, flags, int_list_column(batch), int_list_column(length)])


def _memory(ready: Tensor) -> Any:
    """A contiguous tensor on the CPU as an array of its components' bits."""
    size = ready.numel() * ready.element_size()
    held = (ctypes.c_uint8 * size).from_address(ready.data_ptr())
    return np.frombuffer(memoryview(held), f"<u{ready.element_size()}")
