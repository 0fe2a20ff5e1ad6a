"""What a program does once a future is done is recorded on whatever thread that happens."""

from __future__ import annotations

import contextlib
import functools
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import opdrift
from opdrift.findings import findings


def done_elsewhere(future: torch.futures.Future[Any], value: Any) -> None:
    """As a communication library does it."""
    thread = threading.Thread(target=future.set_result, args=(value,))
    thread.start()
    thread.join()


def write_back() -> torch.Tensor:
    """A hook of DistributedDataParallel: the result goes into the memory that it was made from."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    bucket = torch.ones(64) * 2
    later = future.then(lambda done: bucket.copy_(done.value()))
    done_elsewhere(future, torch.arange(64.0))
    later.wait()
    return bucket * 2


def entries() -> list[object]:
    return [vars(torch._C.Future)[name] for name in ("then", "add_done_callback")]


def test_what_a_callback_writes_on_another_thread_is_recorded(tmp_path):
    with opdrift.record(tmp_path / "t"):
        write_back()

    trace = opdrift.load(tmp_path / "t")
    assert findings([trace]) == ()
    assert [trace.op(i).name for i in range(len(trace.ops))][-2:] == [
        "aten.copy_.default",
        "aten.mul.Tensor",
    ]


def test_a_callback_that_comes_after_the_recording_is_not(tmp_path):
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    with opdrift.record(tmp_path / "t"):
        later = future.then(lambda done: done.value() * 2)
    done_elsewhere(future, torch.ones(2))

    assert later.wait().tolist() == [2.0, 2.0]
    assert len(opdrift.load(tmp_path / "t").ops) == 0


def test_what_a_callback_raises_reaches_the_program(tmp_path):
    def fail(_: Any) -> None:
        raise ValueError("not today")

    future: torch.futures.Future[int] = torch.futures.Future()
    with opdrift.record(tmp_path / "t"):
        later = future.then(fail)
        done_elsewhere(future, 1)
        with pytest.raises(RuntimeError, match="ValueError: not today"):
            later.wait()


@pytest.mark.parametrize("first", ["inner", "outer"])
def test_nothing_is_left_whoever_leaves_first(tmp_path, first):
    before = entries()
    outer, inner = opdrift.record(tmp_path / "outer"), opdrift.record(tmp_path / "inner")

    def other() -> None:
        with inner:
            entered.set()
            leave.wait()

    entered, leave = threading.Event(), threading.Event()
    thread = threading.Thread(target=other)
    outer.__enter__()
    thread.start()
    entered.wait()
    if first == "inner":
        leave.set()
        thread.join()
    outer.__exit__(None, None, None)
    leave.set()
    thread.join()

    assert entries() == before


# ---- under stress ---------------------------------------------------------------------------------------


def worked(future: torch.futures.Future[torch.Tensor], number: int) -> torch.Tensor:
    """What a callback makes of a result; every seventh raises, and every eleventh begins a callback of its own."""
    value = future.value()
    value = torch.nn.functional.linear(value, value) * number + value.mean()
    if number % 7 == 3:
        raise ValueError(f"no {number}")
    if number % 11 == 5:
        inner: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        later = inner.then(lambda done: done.value().mul_(3).sum())
        inner.set_result(value)
        value = value + later.wait()
    return value.cumsum(0)


def many(
    folder: Path | None, *, leave_at: int | None = None, threads: int = 4, count: int = 120
) -> tuple[list[object], list[int]]:
    """What came of many futures that other threads fulfil, and how many modes each such thread was left with.

    Args:
        folder: Where it is recorded; None for not at all.
        leave_at: The recording ends when about so many are done, and callbacks are under way and to come.
        threads: How many fulfil them.
        count: How many there are.
    """
    given: list[torch.futures.Future[torch.Tensor]] = [torch.futures.Future() for _ in range(count)]
    done, modes, go = threading.Semaphore(0), [], threading.Event()

    def fulfil(first: int) -> None:
        go.wait()
        for number in range(first, count, threads):
            given[number].set_result(torch.arange(36.0).view(6, 6) + number)
            done.release()
        modes.append(len(_get_current_dispatch_mode_stack()))

    workers = [threading.Thread(target=fulfil, args=(first,)) for first in range(threads)]
    recorded = contextlib.nullcontext() if folder is None else opdrift.record(folder)
    with recorded:
        later = [
            future.then(functools.partial(worked, number=number))
            for number, future in enumerate(given)
        ]
        for worker in workers:
            worker.start()
        go.set()
        for _ in range(count if leave_at is None else leave_at):
            done.acquire()
            torch.ones(3).sum()  # this thread goes on meanwhile
    for worker in workers:
        worker.join()
    said: list[object] = []
    for future in later:
        try:
            said.append(future.wait().tolist())
        except RuntimeError as error:
            said.append(str(error).splitlines()[0])
    return said, modes


@pytest.mark.parametrize("leave_at", [None, 1, 40, 110])
def test_many_callbacks_on_many_threads_compute_and_raise_what_they_do_without_a_recorder(
    tmp_path, leave_at
):
    """Also where the recording ends while they are under way; threads are left with no mode, the trace is whole."""
    before = entries()
    plain, _ = many(None)

    said, modes = many(tmp_path / "t", leave_at=leave_at)

    assert said == plain
    assert sum("ValueError: no " in str(each) for each in said) == 17
    assert modes == [0] * 4
    assert entries() == before
    trace = opdrift.load(tmp_path / "t")
    assert trace.complete
    assert trace.footer is not None
    assert trace.footer.failures == ()
    if leave_at is None:  # all of them are recorded, whatever thread they ran on
        names = [trace.op(index).name for index in range(len(trace.ops))]
        assert names.count("aten.cumsum.default") == 120 - 17
        assert findings([trace]) == ()
