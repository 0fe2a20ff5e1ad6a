"""What is known of memory that is not written, or is being written."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from opdrift.memory import MAX_MASK, InFlight, Unwritten, Use, glimpse
from opdrift.plans import Plan


def unwritten(tensor: torch.Tensor) -> Unwritten:
    return Unwritten(tensor.untyped_storage())


def test_nothing_is_written_at_first():
    x = torch.zeros(4)

    assert not unwritten(x).holds(x[:1])


def test_a_written_part_is_held():
    x = torch.zeros(4)
    memory = unwritten(x)
    memory.write(x.untyped_storage(), x[1:3])

    assert memory.holds(x[1:3])


def test_more_than_the_written_part_is_not_held():
    x = torch.zeros(4)
    memory = unwritten(x)
    memory.write(x.untyped_storage(), x[1:3])

    assert not memory.holds(x[1:4])


def test_the_parts_add_up_to_the_whole():
    x = torch.zeros(2, 3)
    memory = unwritten(x)
    whole = [memory.write(x.untyped_storage(), x[:, column]) for column in range(3)]

    assert whole == [False, False, True]


def test_elements_of_another_size_are_followed_too():
    """Bytes written as such and read as numbers."""
    x = torch.zeros(4)
    memory = unwritten(x)
    memory.write(x.untyped_storage(), x[:2])

    assert memory.holds(x.view(torch.uint8)[:8])
    assert not memory.holds(x.view(torch.uint8)[:9])


def test_larger_elements_than_were_written_are_followed_too():
    x = torch.zeros(16, dtype=torch.uint8)
    memory = unwritten(x)
    memory.write(x.untyped_storage(), x[:5])

    assert memory.holds(x.view(torch.float32)[:1])
    assert not memory.holds(x.view(torch.float32)[:2])


def test_a_selection_writes_only_what_it_names():
    x = torch.zeros(3)
    memory = unwritten(x)
    memory.write(x.untyped_storage(), x, np.array([True, False, True]))

    assert memory.holds(x[::2])
    assert not memory.holds(x[1])


def test_memory_too_large_to_follow_counts_as_written_and_as_not_written():
    x = torch.zeros(MAX_MASK + 1, dtype=torch.uint8)
    memory = unwritten(x)
    memory.write(x.untyped_storage(), x[:1])

    assert not memory.holds(x[1:])
    assert memory.may_hold(x[1:])


def test_a_resized_storage_is_other_memory():
    x = torch.zeros(4)
    memory = unwritten(x)
    memory.write(x.untyped_storage(), x[:2])
    x.untyped_storage().resize_(4096)

    assert not memory.holds(x[:2])


def test_a_write_behind_the_back_is_noticed():
    x = torch.zeros(1000)
    memory = unwritten(x)
    x.numpy()[:] = 1.0

    assert memory.was_touched(x.untyped_storage())


def test_a_write_that_was_noted_is_not_behind_the_back():
    x = torch.zeros(1000)
    memory = unwritten(x)
    x[:10] = 1.0
    memory.write(x.untyped_storage(), x[:10])

    assert not memory.was_touched(x.untyped_storage())


@pytest.mark.parametrize("size", [0, 1, 16, 63, 64, 65, 100, 1000])
def test_a_glimpse_stays_within_the_storage(size: int):
    content = torch.arange(size, dtype=torch.uint8)
    seen = glimpse(content.untyped_storage())

    assert seen is None if size == 0 else set(seen) <= set(bytes(content.tolist()))


class FakeWork:
    def __init__(self) -> None:
        self.done = False

    def wait(self) -> None: ...

    def is_completed(self) -> bool:
        return self.done


def test_a_collective_is_done_once_its_work_is():
    work = FakeWork()
    in_flight = InFlight(work, readable=True)
    before = in_flight.is_done()
    work.done = True

    assert (before, in_flight.is_done()) == (False, True)


def test_a_reduce_scatter_is_never_known_to_be_done():
    """On gloo its output is filled by the program's own wait."""
    work = FakeWork()
    work.done = True

    in_flight = InFlight(work, readable=False)

    assert not in_flight.is_done()
    assert not in_flight.is_pending()  # nor that it is not


def test_only_what_is_known_to_be_under_way_is_pending():
    work = FakeWork()
    in_flight = InFlight(work, readable=True)
    before = in_flight.is_pending()
    work.done = True

    assert (before, in_flight.is_pending()) == (True, False)
    assert not InFlight(None, readable=True).is_pending()


# ---- which arguments an op reads -----------------------------------------------------------------------

aten = torch.ops.aten


def use(func, *args, **kwargs) -> Use:
    return Use(Plan(func, 1), args, kwargs)


def test_an_op_reads_its_arguments():
    x = torch.ones(2)

    assert use(aten.add.Tensor, x, 1).reads(x)


def test_a_copy_does_not_read_what_it_writes():
    x, y = torch.ones(2), torch.ones(2)
    copy = use(aten.copy_.default, x, y)

    assert (copy.reads(x), copy.reads(y)) == (False, True)


def test_an_out_argument_is_not_read():
    x, out = torch.ones(2), torch.ones(2)

    assert not use(aten.add.out, x, 1, out=out).reads(out)


def test_a_view_reads_nothing():
    x = torch.ones(2)

    assert not use(aten.t.default, x).reads(x)


@pytest.mark.parametrize(("device", "reads"), [("meta", False), ("cpu", True)])
def test_a_copy_to_the_device_without_memory_reads_nothing(device, reads):
    """Weights are put there before they are written, and when they are taken out of a module."""
    x = torch.ones(2)

    assert use(aten._to_copy.default, x, device=torch.device(device)).reads(x) is reads


def test_an_indexed_write_reads_its_indices():
    x, index = torch.ones(2), torch.tensor([0])

    assert use(aten.index_copy_.default, x, 0, index, torch.ones(1)).reads(index)


def test_what_an_indexed_write_selects_is_found_by_the_op_itself():
    x = torch.ones(3)
    index = use(aten.index_copy_.default, x, 0, torch.tensor([2, 0]), torch.ones(2))

    assert index.selection().tolist() == [True, False, True]


def test_finding_the_selection_changes_nothing():
    x = torch.ones(3)
    use(aten.masked_fill_.Scalar, x, x > 0, 5.0).selection()

    assert x.tolist() == [1.0, 1.0, 1.0]


# ---- what is under way -----------------------------------------------------------------------------------


class _Work:
    """Stands for a collective: whether it is completed, and whether its future is done."""

    def __init__(self, *, completed: bool, done: bool | None) -> None:
        self._completed = completed
        if done is not None:
            self.get_future = lambda: self
        self.done = lambda: done

    def wait(self) -> None:
        self._completed = True

    def is_completed(self) -> bool:
        return self._completed


@pytest.mark.parametrize(
    ("work", "readable", "wanted"),
    [
        (_Work(completed=False, done=False), True, True),
        (_Work(completed=False, done=None), True, True),  # a copy has no future
        (_Work(completed=False, done=True), True, False),  # C++ waits for the future
        (_Work(completed=True, done=True), True, False),
        (_Work(completed=False, done=False), False, False),  # reduce_scatter: nothing tells
        (None, True, False),
    ],
)
def test_only_what_is_surely_not_there_yet_is_under_way(
    work: _Work | None, readable: bool, wanted: bool
):
    assert InFlight(work, readable=readable).is_under_way() is wanted


def test_what_was_waited_for_is_done():
    in_flight = InFlight(_Work(completed=False, done=False), readable=True)

    in_flight.wait()

    assert (in_flight.is_done(), in_flight.is_under_way()) == (True, False)
