"""What was observed of ops comes back from the trace as it was noted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from opdrift.kernels.observed import ObservedOps
from opdrift.picks.observed import Observed, Seen
from opdrift.testing import Builder


@pytest.fixture
def builder() -> Builder:
    return Builder()


@pytest.fixture
def ops(builder: Builder) -> ObservedOps:
    def write(fields: Mapping[str, Any]) -> None:
        builder.mark("kernels", **fields)

    return ObservedOps("verbose", write)


def read(builder: Builder) -> Observed:
    return Observed(builder.build())


def test_an_op_has_the_names_that_were_noted_for_it(builder: Builder, ops: ObservedOps):
    """In order, the same one as often as it was noted; an op without any was still watched."""
    ops.add(4, ["reorder", "matmul", "reorder"])
    ops.add(5)
    ops.add(6, raw=["a new format"])
    ops.write()

    seen = read(builder)

    assert seen.of(4, "verbose") == Seen("verbose", ("reorder", "matmul", "reorder"))
    assert seen.of(5, "verbose") == Seen("verbose")
    assert seen.of(6, "verbose") == Seen("verbose", raw=("a new format",))


def test_nothing_is_known_of_ops_that_were_not_watched(builder: Builder, ops: ObservedOps):
    """Before, between and after marks; and of those that another source watched."""
    ops.add(4, ["matmul"])
    ops.write()
    ops.add(8, ["matmul"])
    ops.write()

    seen = read(builder)

    assert [seen.of(seq, "verbose") is None for seq in (3, 4, 6, 8, 9)] == [
        True,
        False,
        True,
        False,
        True,
    ]
    assert seen.of(4, "profiler") is None


def test_an_op_that_ended_after_a_later_one_keeps_its_names(builder: Builder, ops: ObservedOps):
    """Ops of several threads: a mark may end before an op that began in it."""
    ops.add(1, ["matmul"])
    ops.add(3, ["matmul"])
    ops.write()
    ops.add(2, ["convolution"])
    ops.write()

    assert read(builder).of(2, "verbose") == Seen("verbose", ("convolution",))


def test_ops_at_the_same_time_are_ambiguous(builder: Builder, ops: ObservedOps):
    ops.add(1, ambiguous=True)
    ops.add(2)
    ops.write()

    seen = read(builder)

    assert seen.of(1, "verbose") == Seen("verbose", ambiguous=True)
    assert seen.of(2, "verbose") == Seen("verbose")


def test_marks_are_written_for_some_hundred_ops_at_a_time(builder: Builder, ops: ObservedOps):
    """Each holds its own texts, so a trace that was cut off reads up to its end."""
    for seq in range(1, 2001):
        ops.add(seq, [f"kernel {seq % 7}"])
    ops.write()

    trace = builder.build()

    marks = [m for m in trace.marks if m.kind == "kernels"]
    assert 3 < len(marks) < 40
    assert all(len(m.fields["names"]) == 7 for m in marks[:-1])
    assert [Observed(trace).of(s, "verbose") for s in (1, 2000)] == [
        Seen("verbose", ("kernel 1",)),
        Seen("verbose", ("kernel 5",)),
    ]


def test_a_refusal_is_told_and_ends_what_was_watched(builder: Builder, ops: ObservedOps):
    ops.add(1, ["matmul"])
    ops.refuse("the program is verbose itself")

    seen = read(builder)

    assert seen.refused == ["the program is verbose itself"]
    assert seen.of(1, "verbose") == Seen("verbose", ("matmul",))
    assert seen.of(2, "verbose") is None


def test_what_was_told_before_a_foreign_thread_showed_up_is_ambiguous(
    builder: Builder, ops: ObservedOps
):
    """When it began to call is not known; what was not written yet is dropped."""
    ops.add(1, ["matmul"])
    ops.write()
    ops.add(2, ["matmul"])
    ops.disown("another thread calls MKL")

    seen = read(builder)

    assert seen.refused == ["another thread calls MKL"]
    assert seen.of(1, "verbose") == Seen("verbose", ("matmul",), ambiguous=True)
    assert seen.of(2, "verbose") is None


def test_a_mark_that_the_program_calls_kernels_is_left_alone(builder: Builder):
    builder.mark("kernels", source="my own", ops="many")
    builder.mark("kernels", count=3)

    seen = read(builder)

    assert (seen.of(1, "verbose"), seen.refused) == (None, [])
