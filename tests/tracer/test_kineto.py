"""Kernels are given to the op that launched them, from the events of a profile alone."""

from __future__ import annotations

import pytest

from opdrift.kernels.kineto import ANNOTATION, OWN, Event, Launch, join, read_event


def host(name: str, start: int, end: int, number: int, thread: int = 1) -> Event:
    return Event(name, "host", start, end, thread, number)


def op(seq: int, start: int, end: int, number: int, thread: int = 1) -> Event:
    return host(f"{ANNOTATION}{seq}", start, end, number, thread)


def launch(start: int, number: int, thread: int = 1) -> Event:
    """A call of the runtime; its number is of the device library's own count."""
    return Event("cudaLaunchKernel", "launch", start, start + 1, thread, number)


def kernel(name: str, start: int, linked: int, number: int = 0, stream: int = 7) -> Event:
    return Event(name, "kernel", start, start + 10, 0, number, linked, stream)


def names(events: list[Event]) -> dict[int, list[str]]:
    return {seq: [found.name for found in launches] for seq, launches in join(events).ops.items()}


def test_a_kernel_belongs_to_the_op_around_the_event_that_launched_it():
    """The innermost event is the op inside, an op deeper in it, or the annotation itself (a kernel of Triton's)."""
    events = [
        host("aten::linear", 0, 400, 1),
        *(op(1, 10, 90, 2), host("aten::addmm", 12, 88, 3)),
        *(op(2, 100, 190, 4), host("aten::_flash", 101, 189, 5), host("aten::_fwd", 110, 180, 6)),
        op(3, 200, 290, 7),
        *(kernel("gemm", 500, 3), kernel("flash", 520, 6), kernel("triton", 540, 7)),
    ]

    assert names(events) == {1: ["gemm"], 2: ["flash"], 3: ["triton"]}


def test_an_op_has_all_its_kernels_in_the_order_in_which_they_ran():
    """A product that is split over k, and its sum; what came first in the list ran second."""
    events = [
        *(op(1, 0, 90, 1), host("aten::mm", 10, 80, 2)),
        *(kernel("splitKreduce", 260, 2), kernel("sgemm_splitK", 200, 2), kernel("tail", 280, 2)),
    ]

    assert names(events) == {1: ["sgemm_splitK", "splitKreduce", "tail"]}


def test_threads_do_not_mix():
    """Two ops at the same time: an autograd thread beside the program's own."""
    events = [
        *(op(1, 0, 100, 1, thread=1), op(2, 5, 90, 2, thread=2)),
        *(host("aten::mm", 10, 80, 3, thread=1), host("aten::add", 20, 60, 4, thread=2)),
        *(kernel("mm", 200, 3), kernel("add", 210, 4)),
    ]

    assert names(events) == {1: ["mm"], 2: ["add"]}


def test_kernels_on_two_streams_belong_to_the_ops_that_enqueued_them():
    """A copy on a stream of its own may run long after, or beside, a later op's kernel."""
    events = [
        *(op(1, 0, 10, 1), op(2, 20, 30, 2)),
        Event("Memcpy DtoH (Device -> Pinned)", "copy", 400, 900, 0, 0, 1, stream=9),
        kernel("mm", 300, 2, stream=7),
    ]

    found = join(events).ops

    assert found == {
        1: [Launch("Memcpy DtoH (Device -> Pinned)", stream=9)],
        2: [Launch("mm", stream=7)],
    }


def test_an_op_inside_another_one_has_its_own_kernels():
    """A subclass's op runs plain ones in its turn; what comes after them is the outer op's again."""
    events = [
        *(op(1, 0, 100, 1), op(2, 10, 50, 2), host("aten::mm", 20, 40, 3)),
        host("aten::add", 60, 80, 4),
        *(kernel("mm", 200, 3), kernel("add", 220, 4)),
    ]

    assert names(events) == {1: ["add"], 2: ["mm"]}


def test_a_kernel_that_the_program_launches_between_ops_is_told_after_the_op_before():
    """A replayed graph, or a kernel of its own: no op's, but not lost either."""
    events = [
        host("replay before", 0, 5, 1),
        op(4, 10, 20, 2),
        host("replay", 30, 50, 3),
        op(5, 60, 70, 4),
        *(kernel("early", 200, 1), kernel("graphed", 220, 3), kernel("graphed", 240, 3)),
    ]

    found = join(events)

    assert found.ops == {}
    assert {seq: [each.name for each in ran] for seq, ran in found.after.items()} == {
        0: ["early"],
        4: ["graphed", "graphed"],
    }


def test_what_the_recorder_runs_is_nobodys():
    """Its fingerprints come right after the op, inside the event that torch opened around both."""
    events = [
        host("aten::mm", 0, 200, 1),
        op(1, 10, 50, 2),
        *(host(OWN, 60, 100, 3), host("aten::copy_", 70, 90, 4)),
        *(kernel("fingerprint", 300, 3), Event("Memcpy DtoH", "copy", 320, 330, linked=4)),
        kernel("the program's", 340, 1),
    ]

    found = join(events)

    assert (found.ops, found.unknown) == ({}, [])
    assert found.after == {0: [Launch("the program's", stream=7)]}


def test_a_kernel_without_any_link_is_unknown():
    """An op was running when it ran, which says nothing."""
    events = [op(1, 0, 1000, 1), kernel("nccl", 460, 0, stream=20), kernel("lost", 470, 77)]

    found = join(events)

    assert found.ops == {}
    assert found.unknown == [Launch("nccl", stream=20), Launch("lost", stream=7)]


def test_without_a_link_to_an_op_the_call_that_launched_it_tells():
    """Launch and kernel have one number, in a count that has nothing to do with that of ops."""
    events = [
        *(op(1, 0, 100, 5), op(2, 110, 200, 6)),
        *(launch(50, 6), launch(150, 5), launch(250, 9)),
        *(kernel("first", 300, 0, 6), kernel("second", 320, 0, 5), kernel("after", 340, 0, 9)),
    ]

    found = join(events)

    assert {seq: ran[0].name for seq, ran in found.ops.items()} == {1: "first", 2: "second"}
    assert [ran.name for ran in found.after[2]] == ["after"]


def test_annotations_that_kineto_mirrors_onto_the_device_are_no_kernels():
    """They have the name and the time of the op; nor is anything else it puts there."""
    mirrored = Event(f"{ANNOTATION}1", "other", 200, 300, linked=1)

    assert names([op(1, 0, 100, 1), mirrored]) == {}


def test_an_annotation_of_the_programs_own_is_not_taken_for_an_op():
    events = [host(f"{ANNOTATION}x", 0, 100, 1), host("opdrift", 10, 90, 2), kernel("k", 200, 2)]

    assert names(events) == {}


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

    def duration_ns(self) -> int:
        return 5

    def device_resource_id(self) -> int:
        return 7

    def device_index(self) -> int:
        return 1

    def correlation_id(self) -> int:
        return 3

    def linked_correlation_id(self) -> int:
        return 2


@pytest.mark.parametrize(
    ("activity", "event"),
    [
        ("cpu_op", Event("x", "host", 100, 105, 7, 3, 2)),
        ("user_annotation", Event("x", "host", 100, 105, 7, 3, 2)),
        ("cuda_runtime", Event("x", "launch", 100, 105, 7, 3, 2)),
        ("kernel", Event("x", "kernel", 100, 105, 0, 3, 2, stream=7, device=1)),
        ("gpu_memcpy", Event("x", "copy", 100, 105, 0, 3, 2, stream=7, device=1)),
        ("gpu_user_annotation", Event("x", "other", 100, 105, 7, 3, 2)),
        ("an activity of next year's", Event("x", "other", 100, 105, 7, 3, 2)),
    ],
)
def test_an_event_of_torchs_is_read_by_its_activity(activity: str, event: Event):
    """Resources are threads of the host and streams of a device."""
    assert read_event(Kineto(activity)) == event
