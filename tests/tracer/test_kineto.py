"""Kernels are given to the op that launched them, from the events of a profile alone."""

from __future__ import annotations

import itertools

import pytest

from opdrift.kernels.kineto import Event, Interval, Joined, join, read_event

MAIN, OTHER = 100, 200


def op(seq: int, start: int, end: int, thread: int = MAIN) -> Interval:
    return Interval(seq, thread, start, end)


class Profile:
    """What CUPTI sees: launches at a time of a thread, and what they ran, as late as it likes."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._numbers = itertools.count(1)

    def run(
        self,
        name: str,
        at: int,
        *,
        ran: int,
        thread: int = MAIN,
        stream: int = 7,
        copy: bool = False,
    ) -> Profile:
        number = next(self._numbers)
        self.events += [
            Event("cudaLaunchKernel", "launch", at, number, thread),
            Event(name, "copy" if copy else "kernel", ran, number, stream=stream),
        ]
        return self


def names(profile: Profile, *ops: Interval) -> dict[int, list[str]]:
    found = join(profile.events, ops)
    return {seq: [event.name for event in events] for seq, events in found.ops.items()}


def test_a_kernel_belongs_to_the_op_around_its_launch():
    """When it ran does not count: the device is behind the host."""
    profile = Profile().run("gemm", 20, ran=500).run("flash", 110, ran=520).run("triton", 199, ran=540)  # fmt: skip

    assert names(profile, op(1, 10, 90), op(2, 100, 150), op(3, 150, 200), op(4, 200, 210)) == {
        1: ["gemm"],
        2: ["flash"],
        3: ["triton"],
    }


def test_an_op_has_all_its_kernels_in_the_order_in_which_they_ran():
    """A product that is split over k, and its sum; events come in any order."""
    profile = Profile().run("splitKreduce", 30, ran=260).run("sgemm_splitK", 20, ran=200).run("tail", 40, ran=280)  # fmt: skip

    assert names(profile, op(1, 10, 90)) == {1: ["sgemm_splitK", "splitKreduce", "tail"]}


def test_threads_do_not_mix():
    """Two ops at the same time: an autograd thread beside the program's own."""
    profile = Profile().run("mm", 20, ran=200).run("add", 30, ran=210, thread=OTHER)

    assert names(profile, op(1, 0, 100), op(2, 5, 90, OTHER)) == {1: ["mm"], 2: ["add"]}


def test_kernels_on_two_streams_belong_to_the_ops_that_enqueued_them():
    """A copy on a stream of its own may run long after, or beside, a later op's kernel."""
    profile = Profile().run("Memcpy DtoH", 5, ran=400, stream=9, copy=True).run("mm", 25, ran=300)

    found = join(profile.events, [op(1, 0, 10), op(2, 20, 30)])

    assert {seq: [(e.name, e.stream) for e in events] for seq, events in found.ops.items()} == {
        1: [("Memcpy DtoH", 9)],
        2: [("mm", 7)],
    }


def test_an_op_inside_another_one_has_its_own_kernels():
    """A subclass's op runs plain ones in its turn; what comes between and after them is the outer op's."""
    profile = Profile()
    for at in (5, 15, 30, 45, 70, 95):
        profile.run(f"at {at}", at, ran=200 + at)

    assert names(profile, op(1, 0, 90), op(2, 10, 50), op(3, 20, 40), op(4, 60, 80)) == {
        1: ["at 5"],
        2: ["at 15", "at 45"],
        3: ["at 30"],
        4: ["at 70"],
    }


def test_what_is_launched_outside_every_op_is_counted():
    """The recorder's fingerprints, a replayed graph, a thread whose ops are not recorded."""
    profile = Profile().run("before", 5, ran=200).run("fingerprint", 25, ran=210).run("graph", 25, ran=220).run("other", 15, ran=230, thread=OTHER)  # fmt: skip

    assert join(profile.events, [op(1, 10, 20), op(2, 30, 40)]) == Joined(between=4)


def test_a_kernel_without_a_launch_is_unknown():
    """An op was running when it ran, which says nothing."""
    stray = Event("nccl", "kernel", 460, 77, stream=20)

    found = join([*Profile().run("mm", 20, ran=450).events, stray], [op(1, 0, 1000)])

    assert found.unknown == [stray]
    assert [event.name for event in found.ops[1]] == ["mm"]


def test_what_kineto_adds_is_no_kernel():
    """Annotations that it mirrors onto the device have the number of a launch; so have waits."""
    profile = Profile().run("mm", 20, ran=200)
    profile.events.append(Event("an annotation", "other", 200, 1))

    assert names(profile, op(1, 0, 100)) == {1: ["mm"]}


def test_a_launch_that_ran_nothing_is_none():
    """A synchronisation, an event."""
    assert join([Event("cudaStreamSynchronize", "launch", 5, 1, MAIN)], [op(1, 0, 9)]) == Joined()


def test_nothing_is_joined_to_nothing():
    assert join([], []) == Joined()


class Kineto:
    """An event as torch hands it out."""

    def __init__(self, activity: str) -> None:
        self._activity = activity

    def activity_type(self) -> str:
        return self._activity

    def name(self) -> str:
        return "x"

    def start_ns(self) -> int:
        return 100

    def device_resource_id(self) -> int:
        return 7

    def device_index(self) -> int:
        return 1

    def correlation_id(self) -> int:
        return 3


@pytest.mark.parametrize(
    ("activity", "event"),
    [
        ("cuda_runtime", Event("x", "launch", 100, 3, thread=7)),
        ("cuda_driver", Event("x", "launch", 100, 3, thread=7)),
        ("kernel", Event("x", "kernel", 100, 3, stream=7, device=1)),
        ("gpu_memcpy", Event("x", "copy", 100, 3, stream=7, device=1)),
        ("gpu_memset", Event("x", "copy", 100, 3, stream=7, device=1)),
        ("gpu_user_annotation", Event("x", "other", 100, 3, stream=7, device=1)),
        ("an activity of next year's", Event("x", "other", 100, 3, stream=7, device=1)),
    ],
)
def test_an_event_of_torchs_is_read_by_its_activity(activity: str, event: Event):
    """Resources are threads of the host and streams of a device."""
    assert read_event(Kineto(activity)) == event
