"""Rows on their way from the threads' buffers to disk."""

from __future__ import annotations

import errno
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from recordings import recording

import opdrift
from opdrift import spool as spool_module
from opdrift.fingerprint import load_engine
from opdrift.spool import Spool
from opdrift.tracefile.lock import hold, is_held


class FakeWriter:
    """Notes what is written, and fails when it is told to."""

    folder = Path("run.trace")

    def __init__(self) -> None:
        self.tables: list[str] = []
        self.error: BaseException | None = None
        self.footer: Any = "none yet"

    def append(self, table: str, columns: Any) -> None:
        if self.error is not None:
            raise self.error
        self.tables.append(table)

    def announce(self, mark: Any) -> None: ...

    def check(self) -> None: ...

    def close(self, footer: Any) -> None:
        self.footer = footer

    def abandon(self) -> None:
        self.footer = None


@pytest.fixture
def writer() -> FakeWriter:
    return FakeWriter()


@pytest.fixture
def spool(writer: FakeWriter) -> Spool:
    stopped: list[bool] = []
    return Spool(
        writer,  # type: ignore[arg-type]
        load_engine().ROW,
        failed=lambda where, error: stopped.append(True),
        stopped=lambda: stopped.append(True),
    )


def test_a_thread_has_buffers_of_its_own(spool: Spool):
    found = []
    thread = threading.Thread(target=lambda: found.append(spool.thread()))
    thread.start()
    thread.join()

    assert found[0] is not spool.thread()
    assert {found[0].index, spool.thread().index} == {0, 1}


def test_an_interrupt_in_the_middle_of_a_flush_ends_the_trace_there(
    spool: Spool, writer: FakeWriter, caplog: pytest.LogCaptureFixture
):
    """The program gets its Ctrl-C; what was taken and not written is never missing from a trace that calls itself whole."""
    t = spool.thread()
    spool.name("op", 1, "{}")
    writer.error = KeyboardInterrupt()

    with pytest.raises(KeyboardInterrupt):
        spool.flush(t)
    writer.error = None
    spool.flush(t)
    spool.close({"ops": 0})

    assert (writer.tables, writer.footer) == ([], None)
    assert "was interrupted while it wrote" in caplog.text


def test_a_flush_writes_names_before_leaves_and_marks(spool: Spool, writer: FakeWriter):
    t = spool.thread()
    spool.mark(t, "step", {})
    spool.leaf(("x", "input", "use", 1, 0, 0))
    spool.name("op", 1, "{}")
    spool.flush(t)

    assert writer.tables == ["names", "leaves", "marks"]


def test_nothing_is_written_twice(spool: Spool, writer: FakeWriter):
    t = spool.thread()
    spool.mark(t, "step", {})
    spool.flush(t)
    spool.flush(t)

    assert writer.tables == ["marks"]


def test_a_full_disk_ends_the_writing(
    spool: Spool, writer: FakeWriter, caplog: pytest.LogCaptureFixture
):
    t = spool.thread()
    spool.mark(t, "step", {})
    writer.error = OSError(errno.ENOSPC, "No space left on device")
    spool.flush(t)

    assert not spool.writing
    assert "No space left on device" in caplog.text


def test_after_a_full_disk_nothing_piles_up(spool: Spool, writer: FakeWriter):
    t = spool.thread()
    spool.writing = False
    for _ in range(3):
        spool.mark(t, "step", {})
        spool.leaf(("x", "input", "use", 1, 0, 0))
        spool.name("op", 1, "{}")
    spool.flush(t)

    assert [len(rows) for rows in (spool._names, spool._leaves, spool._marks)] == [0, 0, 0]


def test_a_trace_that_is_not_whole_has_no_footer(spool: Spool, writer: FakeWriter):
    spool.writing = False
    spool.close({"ops": 0})

    assert writer.footer is None


def wait_until(holds: Any) -> bool:
    end = time.monotonic() + 10
    while time.monotonic() < end:
        if holds():
            return True
        time.sleep(0.02)
    return False


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A watchdog that looks often, and a flush that is due at once."""
    monkeypatch.setattr(spool_module, "_WATCH_SECONDS", 0.05)
    monkeypatch.setattr(spool_module, "FLUSH_NS", 0)
    monkeypatch.setattr(spool_module, "_GRACE_NS", 0)


@pytest.mark.usefixtures("impatient")
def test_marks_of_an_idle_program_reach_the_disk(spool: Spool, writer: FakeWriter):
    spool.start()
    spool.mark(spool.thread(), "step", {})
    arrived = wait_until(lambda: "marks" in writer.tables)
    spool.stop()

    assert arrived


def test_an_idle_thread_is_flushed_while_another_is_busy(spool: Spool, writer: FakeWriter):
    """Else a killed run loses what the busy thread did with the idle one's values."""
    idle: list[Any] = []
    thread = threading.Thread(target=lambda: idle.append(spool.thread()))
    thread.start()
    thread.join()
    busy = spool.thread()

    spool.flush(busy)

    assert busy.due > time.perf_counter_ns() > idle[0].due


def test_the_watchdog_sleeps_no_longer_than_until_a_thread_s_rows_are_due(spool: Spool):
    """A thread that flushed and then fell silent would else keep its last rows for a second look, after the promised one."""
    t = spool.thread()
    idle = spool._until_due()
    spool.flush(t)
    spool.mark(t, "step", {})
    far, t.due = spool._until_due(), time.perf_counter_ns() + 300_000_000

    assert idle == far == spool_module._WATCH_SECONDS
    assert spool._until_due() <= 0.35


def test_rows_are_on_disk_before_what_may_end_the_process(spool: Spool, writer: FakeWriter):
    """Unless the last flush was just before: a program that issues many collectives is not slowed down."""
    t = spool.thread()
    spool.flush(t)
    spool.mark(t, "step", {})
    spool.announce(t, "collective", {})
    at_once = list(writer.tables)
    t.due -= spool_module._SOON_NS
    spool.announce(t, "collective", {})

    assert (at_once, writer.tables) == ([], ["marks"])


class GrowingBuffers:
    """A thread that ends an op whenever somebody looks."""

    due = 0

    def __init__(self) -> None:
        self.done = [0, 0, 0, 0, 0]
        self.ended = 0

    @property
    def op_count(self) -> int:
        self.ended += 1
        return self.ended

    def counts(self) -> tuple[int, int, int, int]:
        return self.op_count, 0, 0, 0

    def write(self, writer: Any, counts: tuple[int, int, int, int], *, reset: bool) -> None:
        self.done[0] = counts[0]


def test_ops_that_end_while_the_watchdog_writes_are_counted_once(spool: Spool):
    t = GrowingBuffers()
    for _ in range(3):
        spool.flush(t, reset=False)  # type: ignore[arg-type]

    assert spool.ops_written == t.done[0]


@pytest.mark.slow
def test_the_watchdog_and_the_busy_thread_lose_and_double_no_op(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """They write the same buffers; the footer counts what the table holds."""
    monkeypatch.setattr(spool_module, "_WATCH_SECONDS", 0.0002)
    monkeypatch.setattr(spool_module, "_GRACE_NS", 0)
    monkeypatch.setattr(spool_module, "FLUSH_NS", 500_000)
    with opdrift.record(tmp_path / "run.trace"):
        a = torch.ones(2)
        for _ in range(3000):
            a = a + 1

    trace = opdrift.load(tmp_path / "run.trace")
    assert trace.incomplete is None
    assert trace.ops.seq.tolist() == list(range(1, 3002))


def test_a_long_run_keeps_its_rows_bounded():
    with recording() as found:
        for _ in range(10_000):
            torch.ones(2)
        t = found.recorder._spool.thread()
        held = (t.op_count, t.value_count, t.fingerprint_count)

    assert max(held) <= 8192
    assert len(found.trace.ops) == 10_000


# ---- the lock on a trace that is being written ------------------------------------------------------------


def test_a_file_is_held_until_it_is_closed(tmp_path: Path):
    path = tmp_path / "checks"
    with path.open("wb") as file:
        assert hold(file)
        during = is_held(path)

    assert (during, is_held(path)) == (True, False)


def test_a_file_that_is_not_there_is_not_held(tmp_path: Path):
    assert not is_held(tmp_path / "nothing")
