"""Which op launched which kernel, from the events of torch's profiler: plain data in, plain data out.

While a window is profiled every op runs inside an annotation that carries its number. In kineto's result a host
event has an external id, a thread, a start and an end; what ran on a device links to the external id of the innermost
host event that launched it. So host events are nested by thread and time, each belongs to the annotation around
it, and a kernel to the op of the event that it links to (notes: kernels, 6). Torch's own profiler joins by the same
two numbers (`torch.autograd.profiler._parse_kineto_results`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Literal

ANNOTATION: Final = "opdrift#"
#: Around what the recorder itself runs on a device.
OWN: Final = "opdrift: fingerprint"

#: `host` is an op or annotation, `launch` a call of the device's runtime; on a device ran a `kernel` or a `copy`.
Kind = Literal["host", "launch", "kernel", "copy", "other"]

#: Kineto's names of activities (libkineto, ActivityType.cpp). Annotations that it mirrors onto the device are none.
_KINDS: Final[dict[str, Kind]] = {
    "cpu_op": "host",
    "user_annotation": "host",
    "cuda_runtime": "launch",
    "cuda_driver": "launch",
    "kernel": "kernel",
    "gpu_memcpy": "copy",
    "gpu_memset": "copy",
}


@dataclass(frozen=True, slots=True)
class Event:
    """One event of a profile.

    Attributes:
        name: Of the op, annotation, runtime call or kernel.
        kind: What it is.
        start: In ns.
        end: In ns.
        thread: The system's number of the thread; of host events and launches.
        correlation: A host event's external id; of a launch and of what it launched, the device library's number.
        linked: External id of the innermost host event around the launch; 0 where kineto knows of none.
        stream: Of device events.
        device: Index of the device; of device events.
    """

    name: str
    kind: Kind
    start: int
    end: int
    thread: int = 0
    correlation: int = 0
    linked: int = 0
    stream: int = 0
    device: int = 0

    @property
    def on_device(self) -> bool:
        """Whether it is what ran on a device."""
        return self.kind in ("kernel", "copy")


@dataclass(frozen=True, slots=True)
class Launch:
    """A kernel, copy or fill that ran on a device."""

    name: str
    stream: int = 0
    device: int = 0


@dataclass(frozen=True, slots=True)
class Joined:
    """What a window's ops ran on devices.

    Attributes:
        ops: Number of an op -> what it launched, in the order in which it ran.
        after: Number of an op -> kernels that the program launched by itself after it, before the thread's next op:
            one of its own, a replayed graph. 0 is before the first op.
        unknown: Without a link to anything on the host.
    """

    ops: dict[int, list[Launch]] = field(default_factory=dict[int, list[Launch]])
    after: dict[int, list[Launch]] = field(default_factory=dict[int, list[Launch]])
    unknown: list[Launch] = field(default_factory=list[Launch])


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a host event is: inside an op, after it, or (`seq` is None) in what the recorder runs."""

    seq: int | None
    inside: bool


def read_event(event: Any) -> Event:
    """An event of torch's (`_KinetoEvent`)."""
    kind = _KINDS.get(event.activity_type(), "other")
    resource, start = event.device_resource_id(), event.start_ns()
    on_device = kind in ("kernel", "copy")
    return Event(
        event.name(),
        kind,
        start,
        start + event.duration_ns(),
        thread=0 if on_device else resource,
        correlation=event.correlation_id(),
        linked=event.linked_correlation_id(),
        stream=resource if on_device else 0,
        device=event.device_index() if on_device else 0,
    )


def join(events: Iterable[Event]) -> Joined:
    """Give each device event to the op that launched it."""
    threads: dict[int, list[Event]] = defaultdict(list)
    ran: list[Event] = []
    for event in events:
        if event.on_device:
            ran.append(event)
        elif event.kind != "other":
            threads[event.thread].append(event)
    hosts: dict[int, _Place] = {}
    launches: dict[int, _Place] = {}
    for found in threads.values():
        _nest(found, hosts, launches)

    joined = Joined()
    for event in sorted(ran, key=lambda e: (e.start, e.end)):
        launch = Launch(event.name, event.stream, event.device)
        place = hosts.get(event.linked) or launches.get(event.correlation)
        if place is None:
            joined.unknown.append(launch)
        elif place.seq is not None and place.inside:
            joined.ops.setdefault(place.seq, []).append(launch)
        elif place.seq is not None and event.kind == "kernel":
            joined.after.setdefault(place.seq, []).append(launch)
    return joined


def _nest(events: list[Event], hosts: dict[int, _Place], launches: dict[int, _Place]) -> None:
    """Find the place of each event of one thread. Both kinds of numbers count from 1, so they are kept apart."""
    events.sort(key=lambda e: (e.start, -e.end))
    around: list[tuple[int, _Place]] = []  # (end, place) of the events that are open
    outside = _Place(0, inside=False)
    for event in events:
        while around and around[-1][0] <= event.start:
            around.pop()
        place = around[-1][1] if around else outside
        if event.name == OWN:
            place = _Place(None, inside=True)
        elif (seq := _annotated(event.name)) is not None:
            place = _Place(seq, inside=True)
            outside = _Place(seq, inside=False)
        elif not place.inside:
            place = outside  # an event may be open since before the op that just ended
        (hosts if event.kind == "host" else launches)[event.correlation] = place
        around.append((event.end, place))


def _annotated(name: str) -> int | None:
    """The op that an annotation of ours stands for."""
    number = name.removeprefix(ANNOTATION)
    return int(number) if number != name and number.isdecimal() else None
