"""What the sections of gpu_check.py share: the device, and a stand-in for one."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity

from opdrift import recorder, values
from opdrift.fingerprint import Engine, devices, load_engine
from opdrift.fingerprint.partials import WORDS
from opdrift.fingerprint.tensors import kinds_by_dtype
from opdrift.fingerprint.torch_ops import TorchOps
from opdrift.kernels import full
from opdrift.kernels.answers import Answers
from opdrift.kernels.observed import ObservedOps
from opdrift.kernels.windows import Windows

ENGINE: Engine = load_engine()
KINDS = kinds_by_dtype()


class Immediate:
    """A copy that is done."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Nothing is under way."""


class Host:
    """The CPU as a device, for rehearsals: what fingerprints, holds memory and is profiled at once."""

    activities = frozenset({ProfilerActivity.CPU})

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def current(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def is_capturing(self) -> bool:
        return False

    def is_ready(self) -> bool:
        return True

    def synchronize(self) -> None:
        """The host is always done."""

    def stream(self) -> int:
        return 0

    def memory(self) -> Host:
        return self

    def make_rows(self, count: int) -> tuple[Tensor, Tensor]:
        with torch.inference_mode(mode=False), torch._C._DisableTorchDispatch():
            return (
                torch.zeros(count, WORDS, dtype=torch.int64),
                torch.zeros(count, WORDS, dtype=torch.int64),
            )

    def copy(self, source: Tensor, target: Tensor, count: int) -> Immediate:
        with torch._C._DisableTorchDispatch(), torch.no_grad():
            target[:count].copy_(source[:count])
        return Immediate()


def rehearse() -> None:
    """Let the host stand for a device, in this process."""
    devices.Accelerator = Host  # type: ignore[assignment,misc]
    devices.kernels_for = lambda device: (TorchOps,)  # type: ignore[assignment]
    values.Values.is_elsewhere = staticmethod(lambda tensor: True)  # type: ignore[method-assign]
    recorder.load_engine = lambda: dataclasses.replace(ENGINE, kinds={})  # type: ignore[attr-defined]
    recorder.Answers = partial(Answers, device="cpu")  # type: ignore[attr-defined,misc,assignment]
    full.watch_devices = lambda write_mark, failed: Windows(  # type: ignore[assignment]
        ObservedOps("profiler", write_mark), Host(torch.device("cpu")), failed=failed
    )


@dataclasses.dataclass
class Check:
    """What the sections share: the device, what was said, what was wrong."""

    device: torch.device
    quick: bool
    wrong: list[str] = dataclasses.field(default_factory=list)
    said: list[str] = dataclasses.field(default_factory=list)

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    def expect(self, holds: bool, what: str) -> bool:
        if not holds:
            self.wrong.append(what)
            print(f"  WRONG: {what}")
        return holds

    def make_devices(self) -> devices.Devices:
        return devices.Devices(
            ENGINE,
            say=lambda device, by, why: self.said.append(
                f"{device}: {by}" + (f" because {'; '.join(why)}" if why else "")
            ),
            failed=lambda where, error: self.wrong.append(f"{where}: {error!r}"),
        )

    def synchronize(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize(self.device)


def device_seconds(check: Check, call: Callable[[], object], repeats: int) -> float:
    """Seconds a call takes on the device; the best of five series."""
    best = math.inf
    for _ in range(5 if check.is_gpu else 1):
        if check.is_gpu:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(repeats):
                call()
            end.record()
            end.synchronize()
            best = min(best, start.elapsed_time(end) / 1e3 / repeats)
        else:
            begun = time.perf_counter()
            call()
            best = min(best, time.perf_counter() - begun)
    return best


def host_seconds(check: Check, call: Callable[[], object], repeats: int) -> float:
    """Seconds a call keeps the host busy; the median of series that the device keeps up with."""
    series = []
    for _ in range(9):
        check.synchronize()
        begun = time.perf_counter()
        for _ in range(repeats):
            call()
        series.append((time.perf_counter() - begun) / repeats)
    check.synchronize()
    return statistics.median(series)
