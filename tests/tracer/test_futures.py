"""What a program does once a future is done is recorded on whatever thread that happens."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

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
