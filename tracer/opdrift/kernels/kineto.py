"""Which op launched which kernel, from the events of torch's profiler: plain data in, plain data out.

A device's runtime gives each launch a number, and what it launched carries the same one. The launch has a thread and a
time on the host; so do ops, since the recorder takes both when they begin and end. A kernel belongs to the innermost op
around its launch.

Kineto can also tell the host event that launched a kernel, but only while torch records an event for each op, and then
a profile may not end within an op: the op's end would write into memory that went with the profile (measured on
torch 2.13: the process ends). A dispatch mode never runs elsewhere.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

#: `launch` is a call of the device's runtime, on the host; on a device it ran a `kernel`, or a `copy` or fill.
Kind = Literal["launch", "kernel", "copy", "other"]

#: Kineto's names of activities (libkineto, ActivityType.cpp); ROCm's are called the same.
_KINDS: Final[dict[str, Kind]] = {
    "cuda_runtime": "launch",
    "cuda_driver": "launch",
    "kernel": "kernel",
    "gpu_memcpy": "copy",
    "gpu_memset": "copy",
}


@dataclass(frozen=True, slots=True)
class Interval:
    """When an op ran on the host.

    Attributes:
        seq: Its number.
        thread: The system's number of its thread.
        start: In ns since 1970, as kineto counts.
        end: Likewise.
    """

    seq: int
    thread: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a profile.

    Attributes:
        name: Of the runtime's function or the kernel.
        kind: What it is.
        start: In ns since 1970.
        number: Of the launch, and of what it launched.
        thread: The system's number of the thread; of launches.
        stream: Of what ran on a device.
        device: Index of the device; likewise.
    """

    name: str
    kind: Kind
    start: int
    number: int = 0
    thread: int = 0
    stream: int = 0
    device: int = 0


@dataclass(frozen=True, slots=True)
class Joined:
    """What a window's ops ran on devices.

    Attributes:
        ops: Number of an op -> what it launched, in the order in which it ran.
        between: How many ran that were launched outside every op: by the recorder, by a replayed graph.
        unknown: What no launch is known of.
    """

    ops: dict[int, list[Event]] = field(default_factory=dict[int, list[Event]])
    between: int = 0
    unknown: list[Event] = field(default_factory=list[Event])


def read_event(event: Any) -> Event:
    """An event of torch's (`_KinetoEvent`)."""
    kind = _KINDS.get(event.activity_type(), "other")
    resource, on_host = event.device_resource_id(), kind == "launch"
    return Event(
        event.name(),
        kind,
        event.start_ns(),
        event.correlation_id(),
        thread=resource if on_host else 0,
        stream=0 if on_host else resource,
        device=0 if on_host else event.device_index(),
    )


def join(events: Iterable[Event], intervals: Sequence[Interval]) -> Joined:
    """Give each device event to the op that launched it."""
    launched: dict[int, Event] = {}
    ran: list[Event] = []
    for event in events:
        if event.kind == "launch":
            launched[event.number] = event
        elif event.kind != "other":
            ran.append(event)
    find = _Ops(intervals)

    joined = Joined()
    between = 0
    for event in sorted(ran, key=lambda e: e.start):
        launch = launched.get(event.number)
        if launch is None:
            joined.unknown.append(event)
        elif (seq := find.around(launch)) is None:
            between += 1
        else:
            joined.ops.setdefault(seq, []).append(event)
    return Joined(joined.ops, between, joined.unknown)


class _Ops:
    """Finds the op around a moment of a thread."""

    def __init__(self, intervals: Sequence[Interval]) -> None:
        by_thread: dict[int, list[Interval]] = defaultdict(list)
        for interval in intervals:
            by_thread[interval.thread].append(interval)
        #: per thread the moments at which another op is the innermost one, and which is from then on
        self._changes = {thread: _innermost(found) for thread, found in by_thread.items()}

    def around(self, launch: Event) -> int | None:
        moments, ops = self._changes.get(launch.thread, ([], []))
        at = bisect_right(moments, launch.start)
        return ops[at - 1] if at else None


def _innermost(intervals: list[Interval]) -> tuple[list[int], list[int | None]]:
    """The moments at which the innermost op changes, and the op from then on; None between ops."""
    moments: list[int] = []
    ops: list[int | None] = []
    around: list[Interval] = []

    def leave_until(moment: int) -> None:
        while around and around[-1].end <= moment:
            moments.append(around.pop().end)
            ops.append(around[-1].seq if around else None)

    for interval in sorted(intervals, key=lambda i: (i.start, -i.end)):
        leave_until(interval.start)
        moments.append(interval.start)
        ops.append(interval.seq)
        around.append(interval)
    if around:
        leave_until(around[0].end)
    return moments, ops
