"""Partial rows of one stream of one device: written in the stream's order, copied to the host now and then.

Nothing is read back for a tensor. Two halves take turns: one is written while the other is copied. The
host waits only where it is a whole half ahead of the device.
"""

from __future__ import annotations

from typing import Final, Protocol

from torch import Tensor

from opdrift.fingerprint.partials import PARTIAL, Partials, Rows, Ticket, finish

ROWS: Final = 8192
"""Partial rows of a half: as many small tensors, or sixteen large ones; 7 MB on each side."""

Batch = tuple[int, int, int]


class DoesNotFitError(Exception):
    """A tensor cannot be fingerprinted in this way, and no other way would do; the message says why."""


class Kernel(Protocol):
    """A way to write partial rows on a device."""

    @property
    def name(self) -> str:
        """For people."""

    def split(self, n: int) -> tuple[int, int]:
        """How many parts n components have, and how many components each part but the last has."""

    def write(self, data: Tensor, kind: int, batch: Batch, rows: Tensor, at: int) -> None:
        """Enqueue what writes the rows from `at` on, on the current stream; items in turn.

        `data` is contiguous, `batch` is (outer, items, inner): item b is `[:, b, :]` of its components.
        """


class Copy(Protocol):
    """A copy from the device to the host that may still be under way."""

    def query(self) -> bool:
        """Whether it is done."""
        ...

    def synchronize(self) -> None:
        """Wait until it is done."""


class Memory(Protocol):
    """The memory of one stream of one device."""

    def make_rows(self, count: int) -> tuple[Tensor, Tensor]:
        """Rows of int64 words on the device, and as many on the host."""
        ...

    def copy(self, source: Tensor, target: Tensor, count: int) -> Copy:
        """Enqueue the copy of the first rows to the host, in the stream's order."""
        ...


class _Half:
    """Rows on both sides, and what they hold."""

    def __init__(self, memory: Memory, count: int) -> None:
        self.device, self.host = memory.make_rows(count)
        self.partials: Partials = self.host.numpy().view(PARTIAL)[:, 0]
        self.tickets: list[Ticket] = []
        self.used = 0
        self.copy: Copy | None = None

    def clear(self) -> None:
        self.tickets, self.used, self.copy = [], 0, None


class Ring:
    """Takes tensors of one stream, and gives their fingerprints later. Not thread-safe.

    Args:
        memory: Where the stream's rows are.
        rows: Partial rows of each half.
    """

    def __init__(self, memory: Memory, rows: int = ROWS) -> None:
        self._memory = memory
        self._capacity = rows
        self._now = _Half(memory, rows)
        self._other = _Half(memory, rows)
        self._ready: list[Rows] = []

    def put(self, kernel: Kernel, data: Tensor, kind: int, batch: Batch, value: int) -> None:
        """Enqueue the fingerprint of a tensor on the current stream, which must be the ring's.

        Args:
            kernel: What writes the rows. If it raises, the ring is as before.
            data: Contiguous memory on the device; it may be changed or freed in the stream's order.
            kind: What it holds; see `tensors.kinds_by_dtype`.
            batch: (outer, items, inner) in components.
            value: The id of the rows.

        Raises:
            DoesNotFitError: There are more parts than rows.
        """
        outer, items, inner = batch
        n = outer * inner
        parts, span = kernel.split(n)
        needed = parts * items
        if needed > self._capacity:
            raise DoesNotFitError(
                f"{items} items of {n} components need {needed} rows, and there are {self._capacity}"
            )
        if self._now.used + needed > self._capacity:
            self._change_halves()
        half = self._now
        kernel.write(data, kind, batch, half.device, half.used)
        half.tickets.append(Ticket(value, kind, n, items, parts, span))
        half.used += needed

    def start(self) -> None:
        """Begin to copy what was written, unless an earlier copy is still under way."""
        self._collect()
        if self._now.used and self._other.copy is None:
            self._change_halves()

    def take(self) -> list[Rows]:
        """The fingerprints that have arrived since the last call."""
        self._collect()
        taken, self._ready = self._ready, []
        return taken

    def finish(self) -> list[Rows]:
        """All fingerprints that are left; waits for the device."""
        self._settle(self._other)
        if self._now.used:
            self._change_halves()
            self._settle(self._other)
        return self.take()

    def _change_halves(self) -> None:
        self._settle(self._other)
        half = self._now
        half.copy = self._memory.copy(half.device, half.host, half.used)
        self._now, self._other = self._other, half

    def _collect(self) -> None:
        if self._other.copy is not None and self._other.copy.query():
            self._settle(self._other)

    def _settle(self, half: _Half) -> None:
        """Wait for a half's copy, and free the half."""
        if half.copy is None:
            return
        try:
            half.copy.synchronize()
            self._ready.append(finish(half.partials[: half.used], half.tickets))
        finally:
            half.clear()
