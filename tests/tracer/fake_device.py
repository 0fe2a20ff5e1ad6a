"""A device that is not there: it does what it was told when a test lets it, in the order of each stream."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from opdrift.fingerprint.device_ring import Batch
from opdrift.fingerprint.partials import WORDS
from opdrift.fingerprint.torch_ops import TorchOps


class FakeStream:
    """A queue of work; memory and kernel of a ring. What was enqueued is noted by name in `log`."""

    def __init__(self, span: int = 4096) -> None:
        self.queue: deque[Callable[[], None]] = deque()
        self.log: list[str] = []
        self.waits = 0
        self.fail: Exception | None = None
        self._ops = TorchOps(torch.device("cpu"), span=span)

    def enqueue(self, name: str, work: Callable[[], None]) -> None:
        self.log.append(name)
        self.queue.append(work)

    def run(self, count: int | None = None) -> None:
        """Do the next `count` pieces of work, or all."""
        while self.queue and count != 0:
            self.queue.popleft()()
            count = None if count is None else count - 1

    # ---- device_ring.Memory --------------------------------------------------------------------------

    def make_rows(self, count: int) -> tuple[Tensor, Tensor]:
        self.log.append(f"make {count}")
        return (
            torch.full((count, WORDS), -1, dtype=torch.int64),
            torch.full((count, WORDS), -1, dtype=torch.int64),
        )

    def copy(self, source: Tensor, target: Tensor, count: int) -> FakeCopy:
        copy = FakeCopy(self, self.fail)

        def work() -> None:
            target[:count] = source[:count]
            copy.done = True

        self.enqueue(f"copy {count}", work)
        return copy

    # ---- device_ring.Kernel --------------------------------------------------------------------------

    name = "a fake kernel"

    def split(self, n: int) -> tuple[int, int]:
        return self._ops.split(n)

    def write(self, data: Tensor, kind: int, batch: Batch, rows: Tensor, at: int) -> None:
        if self.fail is not None:
            raise self.fail
        work = lambda: self._ops.write(data, kind, batch, rows, at)  # noqa: E731
        self.enqueue(f"write {at}", work)


class FakeCopy:
    """A copy in a fake stream."""

    def __init__(self, stream: FakeStream, fail: Exception | None) -> None:
        self.done = False
        self._stream = stream
        self._fail = fail

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        if self._fail is not None:
            raise self._fail
        if not self.done:
            self._stream.waits += 1
        while not self.done:
            self._stream.run(1)


class FakeAccelerator:
    """A device with several streams, for `devices.Accelerator`; tensors are the host's in disguise."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.streams: dict[int, FakeStream] = {}
        self.now = 0
        self.capturing = False
        self.entered = 0

    @contextmanager
    def current(self) -> Iterator[None]:
        self.entered += 1
        yield

    def is_capturing(self) -> bool:
        return self.capturing

    def stream(self) -> int:
        return self.now

    def memory(self) -> FakeStream:
        return self.streams.setdefault(self.now, FakeStream())


class FakeKernel:
    """Writes through whatever stream is current."""

    def __init__(self, accelerator: FakeAccelerator, name: str = "a fake kernel") -> None:
        self.name = name
        self.fail: Exception | None = None
        self._accelerator = accelerator

    def split(self, n: int) -> tuple[int, int]:
        return self._accelerator.memory().split(n)

    def write(self, data: Tensor, kind: int, batch: Batch, rows: Tensor, at: int) -> None:
        if self.fail is not None:
            raise self.fail
        self._accelerator.memory().write(data, kind, batch, rows, at)


class HostAccelerator:
    """The host as a device that does everything at once, for `devices.Accelerator` and as its memory."""

    def __init__(self, device: torch.device) -> None:
        self.capturing = False

    def current(self) -> AbstractContextManager[None]:
        return nullcontext()

    def is_capturing(self) -> bool:
        return self.capturing

    def stream(self) -> int:
        return 0

    def memory(self) -> HostAccelerator:
        return self

    def make_rows(self, count: int) -> tuple[Tensor, Tensor]:
        with torch._C._DisableTorchDispatch(), torch.inference_mode(mode=False):
            words = torch.zeros(2, count, WORDS, dtype=torch.int64)
        return words[0], words[1]

    def copy(self, source: Tensor, target: Tensor, count: int) -> Done:
        with torch._C._DisableTorchDispatch(), torch.no_grad():
            target[:count].copy_(source[:count])
        return Done()


class Done:
    """A copy that is done."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Nothing is under way."""
