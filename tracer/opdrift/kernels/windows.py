"""Kernel names of ops on CUDA and ROCm devices, by profiling one window of ops after the other.

A window ends between two ops, after the devices have finished: then every kernel in it has its op. What is kept of
a window are names; its events are dropped (notes: kernels, 6).
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import time_ns as now
from typing import Any, Final, Protocol

import torch
from torch._C._profiler import (
    ProfilerActivity,
    ProfilerConfig,
    ProfilerState,
    RecordScope,
    _ExperimentalConfig,
)

from opdrift.kernels import profilers
from opdrift.kernels.kineto import Event, Interval, join, read_event
from opdrift.kernels.observed import ObservedOps
from opdrift.kernels.profilers import ProgramsProfiler

log = logging.getLogger("opdrift")

#: Ops of one window: a few MB of events.
WINDOW: Final = 2000
#: Host events that are asked for, which nothing makes: a profile that ends within one ends the process (kineto).
_NO_HOST_EVENTS: Final = frozenset({RecordScope.STATIC_RUNTIME_MODEL})
#: So far may a launch lie outside its window before the clocks are said to differ.
_SLACK_NS: Final = 1_000_000
#: Kernels without a launch that a window names, the commonest first.
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

    activities = frozenset({ProfilerActivity.CUDA})

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
        self._off = self._said = False
        self._logged: set[str] = set()
        #: when the present window was opened; 0 while there is none
        self._opened = 0
        self._intervals: list[Interval] = []
        #: ops of the present window that have not returned: number -> thread, start
        self._running: dict[int, tuple[int, int]] = {}
        self._me = _Thread()

    # ---- around ops ------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Begin to look on; the first window opens with the first op that finds a device at work."""
        if not self._programs.attach():
            self._off = True
            self._refuse("another recorder of this process records them, and there can be only one")

    def begin(self, seq: int, name: str, /) -> None:
        """The op with this number runs next on this thread, whatever its name."""
        try:
            if self._is_ours():
                self._enter(seq)
        except Exception as error:
            self._give_up(error)

    def end(self, seq: int, /) -> None:
        """It has returned, or raised."""
        ended = now()
        if not self._is_ours():
            return
        with self._lock:
            began = self._running.pop(seq, None)
            if began is not None:  # else its window was over before it
                self._intervals.append(Interval(seq, *began, ended))

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

    def _enter(self, seq: int) -> None:
        """Note when an op begins, if a window is open or can be opened."""
        with self._lock:
            if self._off:
                return
            full = len(self._intervals) >= self._size and not self._running
            if full and self._device.is_ready():
                self._finish()
            if self._opened or self._start():
                self._running[seq] = self._me.ident, now()

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
        opening = now()
        with _quiet():
            profilers.prepare(self._config, set(self._device.activities))
            profilers.start(self._config, set(self._device.activities), set(_NO_HOST_EVENTS))
        self._opened, self._said = opening, False
        return True

    def _finish(self) -> None:
        """End the window, and note what its ops ran."""
        if not self._opened:
            self._observed.write()
            return
        opened, self._opened = self._opened, 0
        intervals, self._intervals = self._intervals, []
        cut, self._running = self._running, {}
        try:
            if self._device.is_ready():
                self._device.synchronize()
        finally:
            result = profilers.end()
        if result is None:
            self._refuse("torch's profiler has lost its events")
            return
        closed = now()
        intervals += [Interval(seq, *began, closed) for seq, began in cut.items()]
        events = list(self._read(result.events()))
        for event in events:
            early, late = opened - _SLACK_NS - event.start, event.start - closed - _SLACK_NS
            if event.kind == "launch" and max(early, late) > 0:
                self._off = True
                self._refuse(f"the profiler's clock is {max(early, late)} ns off the system's")
                return
        self._note(events, sorted(intervals, key=lambda each: each.seq), cut)

    def _note(
        self, events: list[Event], intervals: list[Interval], cut: Mapping[int, object]
    ) -> None:
        found = join(events, intervals)
        for seq in (interval.seq for interval in intervals):
            names = [event.name for event in found.ops.get(seq, ())]
            self._observed.add(seq, names, ambiguous=seq in cut)
        if intervals and found.unknown:
            self._observed.add(intervals[-1].seq, raw=_told(found.unknown))
        self._observed.write()

    def _make_way(self) -> None:
        """The program's own profiler is about to start."""
        if not self._is_ours():
            return
        with self._lock:
            try:
                if self._opened:
                    self._finish()
                    self._refuse("the program started its own profiler, and there can be only one")
            except Exception as error:
                self._give_up(error)

    def _refuse(self, why: str) -> None:
        """Say why ops are not watched: in the trace for each stretch of them, in the log once."""
        if self._said:
            return
        self._said = True
        self._observed.refuse(why)
        if why in self._logged:
            return  # a profiler with a schedule comes and goes
        self._logged.add(why)
        log.warning(
            "opdrift records no kernel names from here on: %s. The run is not affected%s.",
            why,
            "" if self._off else "; names are recorded again when that is over",
        )

    def _give_up(self, error: BaseException) -> None:
        """Leave the profiler alone from now on."""
        with self._lock:
            self._off = True
            if self._opened:
                self._opened = 0
                profilers.end()
        self._failed("kernel names", error)


class _Thread(threading.local):
    """The current thread, as kineto numbers it."""

    def __init__(self) -> None:
        self.ident = threading.get_native_id()


def _told(events: Sequence[Event]) -> list[str]:
    """`3 times NAME, launched by nothing that the profiler saw`."""
    why = "launched by nothing that the profiler saw"
    counts = Counter(event.name for event in events)
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
