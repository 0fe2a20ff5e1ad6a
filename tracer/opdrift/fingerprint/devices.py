"""Fingerprints of tensors outside the host's memory: by a kernel, else by torch ops, else through the host.

No op is waited for: rows arrive some thousand ops later (`device_ring`). What cannot be had is said once,
with the reason, and the next best is used; the run goes on in any case.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch import Tensor

from opdrift.fingerprint.accelerator import Accelerator
from opdrift.fingerprint.device_ring import Batch, DoesNotFitError, Kernel, Ring
from opdrift.fingerprint.partials import Rows
from opdrift.fingerprint.row import ROW
from opdrift.fingerprint.tensors import can_fingerprint, kinds_by_dtype, plain, plain_on_device
from opdrift.fingerprint.torch_ops import TorchOps

if TYPE_CHECKING:
    from opdrift.fingerprint.engine import Engine

CAPTURED: Final = "they were captured into a CUDA graph, whose replays compute them anew"
_THROUGH_HOST: Final = "copies to the host"
_KINDS: Final = kinds_by_dtype()
#: Tensors whose content is their storage's, without further questions.
_PLAIN: Final = frozenset({Tensor, torch.nn.Parameter, torch.nn.Buffer})

Maker = Callable[[torch.device], Kernel]
Then = Callable[[Rows], None]
"""What to do with the rows of a value once they have arrived. It may give them another value: they are kept then."""


class _Place:
    """One device: its rings by stream, and what fingerprints its tensors."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.accelerator = Accelerator(device)
        self.rings: dict[int, Ring] = {}
        self.kernel: Kernel | None = None
        self.said = False
        #: why it has no faster one
        self.why: list[str] = []
        self._makers = iter(kernels_for(device))
        self.next_kernel()

    def next_kernel(self, why: Exception | None = None) -> None:
        """Take the next best kernel; None is left when there is no other: through the host."""
        self.said = False
        while True:
            if why is not None:
                self.why.append(_in_one_line(why))
            maker = next(self._makers, None)
            try:
                self.kernel = maker(self.device) if maker is not None else None
            except Exception as error:
                why = error
            else:
                return

    def ring(self) -> Ring:
        """The ring of the current stream."""
        stream = self.accelerator.stream()
        found = self.rings.get(stream)
        if found is None:
            found = self.rings[stream] = Ring(self.accelerator.memory())
        return found


class Devices:
    """Fingerprints the tensors of every device of one recording. Threads may share it.

    Args:
        engine: For what has to be copied to the host.
        say: Told which implementation a device has, and why it is not a faster one:
            (device, implementation, reasons). Called when it changes, under a lock: it must not call back.
        failed: Told of rows that were lost: (where, error).
    """

    def __init__(
        self,
        engine: Engine,
        *,
        say: Callable[[str, str, Sequence[str]], None],
        failed: Callable[[str, BaseException], None],
    ) -> None:
        self._engine = engine
        self._say = say
        self._failed = failed
        self._lock = threading.RLock()
        self._places: dict[torch.device, _Place] = {}
        self._ready: list[Rows] = []
        self._then: dict[int, Then] = {}
        self._probes = itertools.count(-1, -1)

    def put(
        self, tensor: Tensor, value: int, *, batch: Batch | None = None, then: Then | None = None
    ) -> str | None:
        """Enqueue the fingerprint of a tensor's present content; it comes with a later `take`.

        To be called on the thread and stream that the content was made on, before anything else is
        enqueued there: then neither a later write nor a reuse of the memory can come before it.

        Args:
            tensor: Any tensor; its memory may be freed as soon as this returns.
            value: The id of the rows; below 0 they are given to `then` only.
            batch: (outer, items, inner) in elements, for a row for each item `[:, b, :]`.
            then: Called with the rows when they have arrived, by whoever takes them.

        Returns:
            Why there will be no row, or None.
        """
        with self._lock:
            place = self._places.get(tensor.device)
            if place is None:
                reason = can_fingerprint(tensor)
                if reason is not None:
                    return reason
                place = self._places[tensor.device] = _Place(tensor.device)
            with place.accelerator.current():
                if place.accelerator.is_capturing():
                    return CAPTURED
                reason = self._enqueue(place, tensor, batch, value)
            if reason is not None:
                return reason
            if then is not None:
                self._then[value] = then
            if not place.said:
                place.said = True
                name = place.kernel.name if place.kernel is not None else _THROUGH_HOST
                self._say(str(place.device), name, place.why)
            return None

    def _enqueue(
        self, place: _Place, tensor: Tensor, batch: Batch | None, value: int
    ) -> str | None:
        if batch is not None and batch[1] == 0:
            return "it is a batch without items"
        simple = _is_simple(tensor)
        if not simple:
            reason = can_fingerprint(tensor)
            if reason is not None:
                return reason
        while place.kernel is not None:
            try:
                data = tensor if simple else plain_on_device(tensor)
                components = _in_components(batch, tensor, data)
                place.ring().put(place.kernel, data, _KINDS[data.dtype], components, value)
            except DoesNotFitError as error:
                return str(error)
            except torch.OutOfMemoryError:
                return f"{place.device} had no memory left for it"
            except Exception as error:  # whatever a compiler or a driver raises
                place.next_kernel(error)
            else:
                return None
        try:
            self._ready.append(self._through_host(tensor, batch, value))
        except DoesNotFitError as error:
            return str(error)
        return None

    def _through_host(self, tensor: Tensor, batch: Batch | None, value: int) -> Rows:
        data = plain(tensor)
        outer, items, inner = _in_components(batch, tensor, data)
        rows = np.zeros(items, ROW)
        self._engine.put_batch(
            rows.ctypes.data, data.data_ptr(), outer, items, inner, _KINDS[data.dtype], value
        )
        return rows

    def take(self) -> list[Rows]:
        """The rows that have arrived, and begin to fetch the others; waits for nothing.

        Nothing is done while the current stream is captured.
        """
        return self._gather(_start_and_take)

    def finish(self) -> list[Rows]:
        """All rows that are left; waits for the devices."""
        return self._gather(Ring.finish)

    def release(self) -> None:
        """Give the memory on the devices back; what has not been taken is dropped."""
        with self._lock:
            self._places.clear()
            self._ready.clear()
            self._then.clear()

    def now(self, tensor: Tensor) -> np.void | None:
        """The row of a tensor's present content; waits for its device. None if it cannot be read now."""
        found: list[Rows] = []
        if self.probe(tensor, found.append) is not None:
            return None
        self.settle(tensor.device)
        row: np.void | None = found[0][0] if found else None
        return row

    def settle(self, device: torch.device) -> None:
        """Wait for the rows that are under way on a device; they are given out with the next `take`."""
        rows = self._gather(Ring.finish, device)
        with self._lock:
            self._ready = rows + self._ready

    def probe(self, tensor: Tensor, then: Then, *, batch: Batch | None = None) -> str | None:
        """As `put`, for rows that nobody but `then` is given."""
        return self.put(tensor, next(self._probes), batch=batch, then=then)

    def _gather(
        self, gather: Callable[[Ring], list[Rows]], device: torch.device | None = None
    ) -> list[Rows]:
        with self._lock:
            for place in self._places.values():
                if device is not None and place.device != device:
                    continue
                with place.accelerator.current():
                    if place.accelerator.is_capturing():
                        continue
                    for ring in place.rings.values():
                        try:
                            self._ready += gather(ring)
                        except Exception as error:  # the program's own failures show up here, too
                            self._failed(f"fingerprints of {place.device}", error)
            taken, self._ready = self._ready, []
            wanted = [(self._then.pop(value), rows) for value, rows in _of(taken, self._then)]
        for then, rows in wanted:  # without the lock: this may record something
            then(rows)
        kept = [rows[rows["value"] >= 0] for rows in taken]
        return [rows for rows in kept if len(rows)]


def kernels_for(device: torch.device) -> tuple[Maker, ...]:
    """What can fingerprint on a device without waiting for it, best first; making one may fail."""
    return (_make_triton if device.type == "cuda" else _no_kernel, TorchOps)


def _no_kernel(device: torch.device) -> Kernel:
    raise NotImplementedError(f"no kernel was written for {device.type}")


def _make_triton(device: torch.device) -> Kernel:
    # 0.5 s and a library that is not there everywhere
    from opdrift.fingerprint.triton_launch import TritonKernel  # noqa: PLC0415

    return TritonKernel(device)


def _start_and_take(ring: Ring) -> list[Rows]:
    ring.start()
    return ring.take()


def _is_simple(tensor: Tensor) -> bool:
    """Whether a tensor's memory can be read as it is."""
    if type(tensor) not in _PLAIN or tensor.dtype not in _KINDS:
        return False
    if not tensor.is_contiguous() or tensor.is_neg():
        return False
    end = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    return bool(tensor.numel() == 0 or end <= tensor.untyped_storage().nbytes())


def _in_components(batch: Batch | None, tensor: Tensor, data: Tensor) -> Batch:
    """A batch of elements as one of components: complex elements have two."""
    if batch is None:
        return 1, 1, data.numel()
    outer, items, inner = batch
    elements = tensor.numel()
    if elements and data.numel() % elements:
        raise DoesNotFitError(
            "several of its elements share a byte, and an item may begin within one"
        )
    return outer, items, inner * (data.numel() // elements) if elements else inner


def _of(taken: Sequence[Rows], wanted: Mapping[int, Then]) -> Iterator[tuple[int, Rows]]:
    """The rows of each wanted value; they lie side by side."""
    if not wanted:
        return
    for rows in taken:
        edges = np.flatnonzero(np.diff(rows["value"], prepend=rows["value"][:1] - 1))
        for start, end in zip(edges.tolist(), [*edges[1:].tolist(), len(rows)], strict=True):
            value = int(rows["value"][start])
            if value in wanted:
                yield value, rows[start:end]


def _in_one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
