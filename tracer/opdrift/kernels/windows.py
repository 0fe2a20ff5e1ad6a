"""Kernel names of ops on CUDA and ROCm devices, by profiling one window of ops after the other.

A window ends between two ops, after the devices have finished: then every kernel in it has its op. What is kept of
a window are names; its events, eight for each op and 20 to 30 us to collect, are dropped (notes: kernels, 6).
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, Protocol

import torch
from torch._C._profiler import (
    ProfilerActivity,
    ProfilerConfig,
    ProfilerState,
    _ExperimentalConfig,
    _RecordFunctionFast,
)

from opdrift.kernels import profilers
from opdrift.kernels.kineto import ANNOTATION, Event, Launch, join, read_event
from opdrift.kernels.observed import ObservedOps
from opdrift.kernels.profilers import ProgramsProfiler

log = logging.getLogger("opdrift")

#: Ops of one window: some 10 MB of events.
WINDOW: Final = 2000
#: Kernels outside ops that are named at one place, the commonest first.
_NAMED: Final = 20
_LOG_LEVEL: Final = "KINETO_LOG_LEVEL"


class Device(Protocol):
    """What is profiled."""

    activities: frozenset[ProfilerActivity]

    def is_ready(self) -> bool:
        """Whether a profile may start or end now: it has begun to work, and captures no graph."""
        ...

    def synchronize(self) -> None:
        """Wait until it has done what was asked of it so far."""
        ...


class Cuda:
    """All CUDA or ROCm devices of the process."""

    activities = frozenset({ProfilerActivity.CPU, ProfilerActivity.CUDA})

    def is_ready(self) -> bool:
        """As the protocol says; a program that has not touched a device yet is left alone."""
        return torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing()

    def synchronize(self) -> None:
        """As the protocol says; devices without a context are not given one."""
        present = torch.cuda.current_device()
        for index in range(torch.cuda.device_count()):
            if index == present or torch._C._cuda_hasPrimaryContext(index):  # type: ignore[attr-defined]
                torch.cuda.synchronize(index)


def watch_devices(
    write_mark: Callable[[Mapping[str, Any]], None],
    failed: Callable[[str, BaseException], None],
) -> Windows | None:
    """What watches the kernels of this process's devices; None where torch was built for none.

    Args:
        write_mark: Writes a mark of kind `kernels` with these fields.
        failed: Notes a failure of the tracer itself.
    """
    # whether there is a device is not asked: that alone breaks a program that forks before it uses one
    if not torch.backends.cuda.is_built():
        return None
    return Windows(ObservedOps("profiler", write_mark), Cuda(), failed=failed)


class Windows:
    """Profiles ops in windows. A `Watch` (see `opdrift.kernels`); threads may share it.

    Args:
        observed: Where what was seen goes.
        device: What is profiled.
        failed: Notes a failure of the tracer itself.
        read: Events of kineto's.
        size: Ops of a window.
    """

    def __init__(
        self,
        observed: ObservedOps,
        device: Device,
        *,
        failed: Callable[[str, BaseException], None],
        read: Callable[[Sequence[Any]], Iterable[Event]] = lambda found: map(read_event, found),
        size: int = WINDOW,
    ) -> None:
        self._observed = observed
        self._device = device
        self._failed = failed
        self._read = read
        self._size = size
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._programs = ProgramsProfiler(self._make_way)
        self._config = ProfilerConfig(
            ProfilerState.KINETO,
            False,
            False,
            False,
            False,
            False,
            # autograd's threads, too, and a window may end on any of them
            _ExperimentalConfig(profile_all_threads=True),
        )
        self._open = self._off = self._said = False
        #: numbers of the ops of this window, and of those of them that have not returned
        self._ops: list[int] = []
        self._running: set[int] = set()
        self._annotations = threading.local()

    # ---- around ops ------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Begin to look on; the first window opens with the first op that finds a device at work."""
        if not self._programs.attach():
            self._off = True
            self._refuse("another recorder of this process records them, and there can be only one")

    def begin(self, seq: int, name: str = "", /) -> None:
        """The op with this number runs next on this thread, whatever its name."""
        annotation = None
        try:
            if self._is_ours() and self._enter(seq):
                annotation = _RecordFunctionFast(f"{ANNOTATION}{seq}")
                annotation.__enter__()
        except Exception as error:
            self._give_up(error)
        stack = getattr(self._annotations, "stack", None)
        if stack is None:
            stack = self._annotations.stack = []
        stack.append(annotation)

    def end(self, seq: int) -> None:
        """It has returned, or raised."""
        annotation = self._annotations.stack.pop()
        if annotation is None:
            return
        try:
            annotation.__exit__(None, None, None)
            with self._lock:
                self._running.discard(seq)
        except Exception as error:
            self._give_up(error)

    def close(self) -> None:
        """Write what was seen, and leave torch as it was."""
        self._programs.detach()
        if not self._is_ours():
            return
        with self._lock:
            try:
                self._finish()
            except Exception as error:
                self._give_up(error)
            self._off = True

    def _enter(self, seq: int) -> bool:
        """Make sure that a window is open, and count an op in it; False if it cannot be watched."""
        with self._lock:
            if self._off:
                return False
            if len(self._ops) >= self._size and not self._running and self._device.is_ready():
                self._finish()
            if not self._open and not self._start():
                return False
            self._ops.append(seq)
            self._running.add(seq)
            return True

    def _is_ours(self) -> bool:
        """A forked child has no profiler: the threads that work for it were not forked."""
        return os.getpid() == self._pid

    # ---- windows -----------------------------------------------------------------------------------------

    def _start(self) -> bool:
        if not self._device.is_ready():
            return False
        if self._programs.runs:
            self._refuse("the program's own profiler runs, and there can be only one")
            return False
        if not self._device.activities <= torch._C._autograd._supported_activities():
            self._off = True
            self._refuse("this build of torch has no profiler for the device (CUPTI or roctracer)")
            return False
        self._programs.we_profile()
        with _quiet():
            profilers.prepare(self._config, set(self._device.activities))
            profilers.start(self._config, set(self._device.activities))
        self._open, self._said = True, False
        return True

    def _finish(self) -> None:
        """End the window, and note what its ops ran."""
        if not self._open:
            self._observed.write()
            return
        self._open = False
        ops, self._ops = self._ops, []
        cut, self._running = self._running, set()
        try:
            if self._device.is_ready():
                self._device.synchronize()
        finally:
            result = profilers.end()
        if result is None:
            self._refuse("torch's profiler has lost its events")
            return
        found = join(self._read(result.events()))
        for seq in ops:
            names = [launch.name for launch in found.ops.get(seq, ())]
            own = _told(found.after.get(seq, ()), "launched after this op by the program itself")
            self._observed.add(seq, names, raw=own, ambiguous=seq in cut)
        if ops and found.unknown:
            self._observed.add(
                ops[-1], raw=_told(found.unknown, "launched by nothing that the profiler saw")
            )
        self._observed.write()

    def _make_way(self) -> None:
        """The program's own profiler is about to start."""
        if not self._is_ours():
            return
        with self._lock:
            try:
                if self._open:
                    self._finish()
                    self._refuse("the program started its own profiler, and there can be only one")
            except Exception as error:
                self._give_up(error)

    def _refuse(self, why: str) -> None:
        """Say once for each stretch of ops why they are not watched."""
        if self._said:
            return
        self._said = True
        self._observed.refuse(why)
        log.warning(
            "opdrift records no kernel names from here on: %s. The run is not affected%s.",
            why,
            "" if self._off else "; names are recorded again when that is over",
        )

    def _give_up(self, error: BaseException) -> None:
        """Leave the profiler alone from now on."""
        with self._lock:
            self._off = True
            self._open = False
        self._failed("kernel names", error)


def _told(launches: Sequence[Launch], why: str) -> list[str]:
    """`3 times NAME, launched outside every op`."""
    counts = Counter(launch.name for launch in launches)
    words = [
        f"{f'{count} times ' if count > 1 else ''}{name}, {why}"
        for name, count in counts.most_common(_NAMED)
    ]
    if len(counts) > _NAMED:
        words.append(f"{len(counts) - _NAMED} other kernels, {why}")
    return words


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep kineto from printing two lines for each window; it reads its level when it first starts."""
    if _LOG_LEVEL in os.environ:
        yield
        return
    os.environ[_LOG_LEVEL] = "99"
    try:
        yield
    finally:
        del os.environ[_LOG_LEVEL]
