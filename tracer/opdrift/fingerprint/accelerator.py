"""Streams and memory of one device, through what torch has for every accelerator."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
from torch import Tensor

from opdrift.fingerprint.partials import WORDS

_AS_IT_IS: Final = nullcontext()


class Accelerator:
    """One device.

    Args:
        device: With its index.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._only_one = torch.accelerator.device_count() == 1
        # asked for by name: a backend without streams or graphs has none of them
        self._raw_stream: Callable[[int], int] | None = getattr(
            torch._C, f"_{device.type}_getCurrentRawStream", None
        )
        self._is_capturing: Callable[[], bool] = getattr(
            torch._C, f"_{device.type}_isCurrentStreamCapturing", _never
        )

    def current(self) -> AbstractContextManager[Any]:
        """Makes the device the current one inside."""
        index = self._device.index
        if self._only_one or torch.accelerator.current_device_index() == index:
            return _AS_IT_IS
        return torch.accelerator.device_index(index)

    def is_capturing(self) -> bool:
        """Whether what is enqueued now becomes part of a graph instead of being run.

        Querying an event or copying to the host would then end the capture with an error.
        """
        return self._is_capturing()

    def stream(self) -> int:
        """What tells the current stream from others of the device."""
        if self._raw_stream is not None:
            return self._raw_stream(self._device.index)
        return int(torch.accelerator.current_stream(self._device).stream_id)

    def mark(self) -> torch.Event | None:
        """An event behind what the current stream was given; None while it is captured."""
        with self.current():
            if self.is_capturing():
                return None
            event = torch.Event(self._device.type)
            event.record()
            return event

    def memory(self) -> StreamMemory:
        """Memory that belongs to the current stream."""
        return StreamMemory(self._device)


class StreamMemory:
    """Memory of the stream that is current when this is made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.accelerator.current_stream(device)

    def make_rows(self, count: int) -> tuple[Tensor, Tensor]:
        """Rows on the device, and pinned ones on the host, to which copies need not be waited for."""
        # inference tensors could not be written to outside of inference mode
        with torch._C._DisableTorchDispatch(), torch.inference_mode(mode=False):
            return (
                torch.zeros(count, WORDS, dtype=torch.int64, device=self._device),
                torch.zeros(count, WORDS, dtype=torch.int64, pin_memory=True),
            )

    def copy(self, source: Tensor, target: Tensor, count: int) -> torch.Event:
        """Enqueue the copy of the first rows, and an event behind it."""
        with torch._C._DisableTorchDispatch(), torch.no_grad(), self._stream:
            target[:count].copy_(source[:count], non_blocking=True)
            event = torch.Event(self._device.type)
            event.record()
        return event


def _never() -> bool:
    return False
