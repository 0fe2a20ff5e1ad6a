"""Rings of partial rows, on a device that does its work only when the test lets it."""

import numpy as np
import pytest
import torch
from fake_device import FakeStream
from fingerprint_checks import assert_same, tensor_of
from hypothesis import given, settings
from hypothesis import strategies as st

from opdrift.fingerprint import load_engine
from opdrift.fingerprint.device_ring import DoesNotFitError, Ring
from opdrift.tfp1 import Code

F32 = int(Code.F32)
ENGINE = load_engine()


def put(ring: Ring, stream: FakeStream, tensor: torch.Tensor, value: int) -> None:
    ring.put(stream, tensor, F32, (1, 1, tensor.numel()), value)


def values(rows: list[np.ndarray]) -> list[int]:
    return [value for some in rows for value in some["value"].tolist()]


def test_nothing_is_done_or_waited_for_until_rows_are_asked_for():
    """Putting tensors only enqueues; the rows are right when they come."""
    stream = FakeStream()
    ring = Ring(stream, rows=16)
    tensors = [tensor_of(torch.float32, n) for n in (0, 5, 4096, 9000)]
    for value, tensor in enumerate(tensors):
        put(ring, stream, tensor, value)

    assert stream.log == ["make 16", "make 16", "write 0", "write 1", "write 2", "write 3"]
    assert len(stream.queue) == 4
    assert ring.take() == []

    (rows,) = ring.finish()
    assert stream.log[6:] == ["copy 6"]  # 9000 components have three parts here
    for row, tensor in zip(rows, tensors, strict=True):
        assert_same(row, ENGINE.fingerprint(tensor))


def test_a_fingerprint_is_of_the_content_at_its_place_in_the_stream():
    """What is enqueued later, a write or another use of freed memory, comes too late to be seen."""
    stream = FakeStream()
    ring = Ring(stream, rows=16)
    tensor = torch.ones(100)
    stream.enqueue("op", lambda: tensor.fill_(2.0))
    put(ring, stream, tensor, 1)
    stream.enqueue("op", lambda: tensor.fill_(3.0))

    (rows,) = ring.finish()
    assert rows["sum"].tolist() == [200.0]


def test_a_full_half_is_copied_while_the_other_is_filled():
    """The host goes on without waiting."""
    stream = FakeStream()
    ring = Ring(stream, rows=4)
    for value in range(8):
        put(ring, stream, torch.full((3,), float(value)), value)

    assert stream.log[2:] == [f"write {i}" for i in range(4)] + ["copy 4"] + [
        f"write {i}" for i in range(4)
    ]
    assert stream.waits == 0


def test_the_host_waits_for_the_oldest_half_only_when_both_are_full():
    """And for no more than its copy: what was enqueued behind it is still to be done."""
    stream = FakeStream()
    ring = Ring(stream, rows=4)
    for value in range(9):
        put(ring, stream, torch.full((3,), float(value)), value)

    assert stream.waits == 1
    assert len(stream.queue) == 4 + 1 + 1  # the second half's writes and copy, and the ninth write
    assert values(ring.take()) == [0, 1, 2, 3]
    assert values(ring.finish()) == [4, 5, 6, 7, 8]


def test_starting_a_copy_never_waits():
    """A flush fetches what has arrived, and begins the next copy only where a half is free."""
    stream = FakeStream()
    ring = Ring(stream, rows=4)
    put(ring, stream, torch.ones(1), 1)
    ring.start()
    put(ring, stream, torch.ones(1), 2)
    ring.start()

    assert stream.log[2:] == ["write 0", "copy 1", "write 0"]
    assert ring.take() == []
    stream.run()
    ring.start()
    assert values(ring.take()) == [1]
    assert stream.log[-1] == "copy 1"
    assert stream.waits == 0


def test_starting_with_nothing_to_copy_does_nothing():
    """An idle stream gets no work from us."""
    stream = FakeStream()
    ring = Ring(stream, rows=4)
    ring.start()

    assert stream.log == ["make 4", "make 4"]
    assert ring.finish() == []


def test_streams_do_not_wait_for_each_other():
    """A ring for each stream: a stream that stands still keeps its own rows only."""
    still, moving = FakeStream(), FakeStream()
    rings = Ring(still, rows=4), Ring(moving, rows=4)
    put(rings[0], still, torch.ones(1), 1)
    put(rings[1], moving, torch.ones(2), 2)
    for ring in rings:
        ring.start()
    moving.run()

    assert rings[0].take() == []
    assert values(rings[1].take()) == [2]
    assert still.waits == moving.waits == 0


def test_a_tensor_with_more_parts_than_rows_is_refused():
    """It could never be written; the ring stays as it was."""
    stream = FakeStream()
    ring = Ring(stream, rows=2)
    with pytest.raises(DoesNotFitError, match="1 items of 9000 components need 3 rows"):
        put(ring, stream, torch.zeros(9000), 1)
    with pytest.raises(DoesNotFitError, match="3 items"):
        ring.put(stream, torch.zeros(9), F32, (1, 3, 3), 1)
    put(ring, stream, torch.zeros(5000), 2)

    assert values(ring.finish()) == [2]


def test_a_kernel_that_raises_leaves_the_ring_as_it_was():
    """Its rows are given to the next tensor."""
    stream = FakeStream()
    ring = Ring(stream, rows=4)
    put(ring, stream, torch.ones(3), 1)
    stream.fail = RuntimeError("no such architecture")
    with pytest.raises(RuntimeError, match="no such architecture"):
        put(ring, stream, torch.ones(3), 2)
    stream.fail = None
    put(ring, stream, torch.ones(3), 3)

    assert values(ring.finish()) == [1, 3]


def test_rows_that_cannot_be_copied_are_lost_and_the_ring_goes_on():
    """A failed device may come back to its senses, or not; the error is the caller's to tell."""
    stream = FakeStream()
    ring = Ring(stream, rows=4)
    put(ring, stream, torch.ones(3), 1)
    stream.fail = RuntimeError("unspecified launch failure")
    with pytest.raises(RuntimeError, match="launch failure"):
        ring.finish()
    stream.fail = None
    put(ring, stream, torch.ones(3), 2)

    assert values(ring.finish()) == [2]


STEPS = st.lists(
    st.tuples(st.just("put"), st.integers(0, 9000))
    | st.tuples(st.sampled_from(["start", "take"]), st.just(0))
    | st.tuples(st.just("run"), st.integers(1, 3)),
    max_size=40,
)


@given(STEPS)
@settings(max_examples=40, deadline=None)
def test_every_tensor_has_its_row_once_whatever_the_order(steps):
    """However the device lags behind and whenever rows are taken."""
    stream = FakeStream()
    ring = Ring(stream, rows=5)
    wanted: dict[int, torch.Tensor] = {}
    found: list[np.ndarray] = []
    for step, number in steps:
        if step == "put":
            wanted[len(wanted)] = torch.full((number,), float(len(wanted)))
            put(ring, stream, wanted[len(wanted) - 1], len(wanted) - 1)
        elif step == "start":
            ring.start()
        elif step == "take":
            found += ring.take()
        else:
            stream.run(number)
    found += ring.finish()

    assert values(found) == list(wanted)
    for row in (row for some in found for row in some):
        assert row["raw"] == ENGINE.fingerprint(wanted[int(row["value"])])["raw"]
