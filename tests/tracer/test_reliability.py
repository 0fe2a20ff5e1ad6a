"""Whatever goes wrong, the user's program goes on, and what was recorded can be read."""

from __future__ import annotations

import importlib
import logging
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import opdrift

Python = Callable[..., subprocess.CompletedProcess[str]]


class PlantedError(Exception):
    """A defect of the tracer that a test plants."""


def program() -> list[torch.Tensor]:
    """A training step with random ops, views, writes and module calls."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    result = model(torch.randn(3, 4))
    result.sum().backward()
    with torch.no_grad():
        result.t().mul_(2)
    return [
        result.detach(),
        *(p.grad for p in model.parameters() if p.grad is not None),
        torch.rand(2),
    ]


def equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(
        torch.equal(a, b) for a, b in zip(left, right, strict=True)
    )


@pytest.mark.parametrize(
    "place",
    [
        "opdrift.values:Values.make",
        "opdrift.values:Values.output",
        "opdrift.values:Values.adopt",
        "opdrift.values:Values.written",
        "opdrift.values:Values.fingerprint",
        "opdrift.sources:Sources.find",
        "opdrift.scopes:Scopes._open",
        "opdrift.scopes:Scopes.discover",
        "opdrift.interning:Interning.add_plan",
        "opdrift.mode:RecordingMode.commit",
        "opdrift.interning:Interning.add_signature",
        "opdrift.mode:digest_before",
    ],
)
def test_a_defect_inside_the_tracer_does_not_reach_the_user(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """The program's ops still return what they return; the defect is reported once, and noted in the trace."""
    expected = program()
    module, _, attribute = place.partition(":")
    owner: Any = importlib.import_module(module)
    *holders, name = attribute.split(".")
    for holder in holders:
        owner = getattr(owner, holder)

    def fail(*_: Any, **__: Any) -> Any:
        raise PlantedError("planted")

    with caplog.at_level(logging.WARNING), opdrift.record(tmp_path / "run.trace"):
        # planted once the recorder is open: opening one may fail, loudly
        monkeypatch.setattr(owner, name, fail)
        found = program()
        monkeypatch.undo()

    assert equal(found, expected)
    footer = opdrift.load(tmp_path / "run.trace").footer
    assert footer is not None
    assert any(
        "PlantedError" in failure["error"] and failure["count"] >= 1 for failure in footer.failures
    )
    told = [
        record.getMessage() for record in caplog.records if "PlantedError" in record.getMessage()
    ]
    assert len(told) == len({record.args for record in caplog.records})
    assert 1 <= len(told) <= len(footer.failures)


def test_a_failure_at_every_op_is_reported_once_with_a_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def fail(*_: Any, **__: Any) -> Any:
        raise PlantedError("planted")

    with caplog.at_level(logging.WARNING), opdrift.record(tmp_path / "run.trace"):
        a = torch.ones(2)
        monkeypatch.setattr("opdrift.values.Values.output", fail)
        for _ in range(20):
            a = a + 1
        monkeypatch.undo()

    footer = opdrift.load(tmp_path / "run.trace").footer
    assert footer is not None
    assert [(failure["where"], failure["count"]) for failure in footer.failures] == [
        ("aten.add.Tensor", 20)
    ]
    assert len(caplog.records) == 1
    assert "aten.add.Tensor" in caplog.text


def test_a_defect_in_writing_does_not_stop_the_program_and_reads_as_incomplete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Rows that could not be written are missing from the count in the footer."""
    expected = program()

    def fail(*_: Any, **__: Any) -> Any:
        raise PlantedError("planted")

    with caplog.at_level(logging.WARNING), opdrift.record(tmp_path / "run.trace"):
        monkeypatch.setattr("opdrift.tracefile.writer.TraceWriter.append", fail)
        found = program()
    monkeypatch.undo()

    assert equal(found, expected)
    assert "incomplete" in str(opdrift.load(tmp_path / "run.trace").incomplete)
    assert len(caplog.records) == 1
    assert "at writing" in caplog.text


@pytest.mark.usefixtures("restored")
def test_a_program_that_raises_gets_its_exception_and_leaves_a_whole_trace(tmp_path: Path):
    with pytest.raises(KeyError, match="mine") as caught, opdrift.record(tmp_path / "run.trace"):
        torch.ones(2) + 1
        raise KeyError("mine")

    assert caught.value.__context__ is None
    trace = opdrift.load(tmp_path / "run.trace")
    assert trace.footer is not None
    assert (trace.footer.ops, trace.footer.ended) == (2, "raised")
    assert trace.footer.exception is not None
    assert "KeyError" in trace.footer.exception


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_a_program_that_is_interrupted_leaves_a_whole_trace(
    error: type[BaseException], tmp_path: Path
):
    with pytest.raises(error), opdrift.record(tmp_path / "run.trace"):
        torch.ones(2) + 1
        raise error

    trace = opdrift.load(tmp_path / "run.trace")
    assert trace.incomplete is None
    assert len(trace.ops) == 2


@pytest.mark.usefixtures("restored")
def test_a_trace_is_never_overwritten_unasked(tmp_path: Path):
    with opdrift.record(tmp_path / "run.trace"):
        torch.ones(2)
    ran = False

    with (
        pytest.raises(opdrift.TraceExistsError, match="overwrite"),
        opdrift.record(tmp_path / "run.trace"),
    ):
        ran = True

    assert not ran
    assert len(opdrift.load(tmp_path / "run.trace").ops) == 1


@pytest.mark.usefixtures("restored")
def test_a_path_below_a_file_says_what_to_do(tmp_path: Path):
    (tmp_path / "file").write_text("mine")

    with (
        pytest.raises(opdrift.TraceNotWritableError, match="Choose a path"),
        opdrift.record(tmp_path / "file" / "run.trace"),
    ):
        pass

    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_without_write_permission_says_what_to_do(python: Python):
    """Root may write anywhere, so the program gives its rights up; all is loaded before, from folders of root's."""
    done = python(
        """
        import os, torch, opdrift
        with opdrift.record("first.trace"):
            torch.ones(2)
        os.mkdir("locked", 0o555)
        os.chmod(".", 0o755)
        if os.geteuid() == 0:
            os.seteuid(65534)
        try:
            with opdrift.record("locked/run.trace"):
                print("ran")
        except opdrift.TraceNotWritableError as error:
            print(error)
        """
    )

    assert "locked/run.trace" in done.stdout, done.stderr
    assert "Choose a path that you may write to." in done.stdout
    assert "ran" not in done.stdout.split()


def test_a_full_disk_stops_the_recording_and_not_the_program(python: Python):
    """A limit on the size of files stands for the full disk: writes fail in the same way."""
    done = python(
        """
        import resource, torch, opdrift
        a = torch.ones(64)
        with opdrift.record("run.trace"):
            a = a + 1
            resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, resource.RLIM_INFINITY))
            for _ in range(20_000):
                a = a + 1
        print(a[0].item())
        trace = opdrift.load("run.trace")
        print(trace.incomplete)
        print(len(trace.ops) > 0)
        """
    )

    assert done.returncode == 0, done.stderr
    result, incomplete, some = done.stdout.strip().splitlines()
    assert result == "20002.0"
    assert incomplete.startswith("incomplete at op ")
    assert some == "True"
    assert "Traceback" not in done.stderr
    assert len([line for line in done.stderr.splitlines() if "run.trace" in line]) == 1


@pytest.mark.slow
@pytest.mark.parametrize("behaviour", ["busy", "idle"])
def test_a_killed_process_loses_at_most_its_last_second(behaviour: str, tmp_path: Path):
    """Busy or idle at the moment of `kill -9`, all but the last second of ops is on disk."""
    source = f"""
import sys; sys.path[:0] = {[p for p in sys.path if p]!r}
import time, torch, opdrift
torch.set_num_threads(1)
a = torch.ones(64)
with opdrift.record("run.trace"):
    for step in range(100_000_000):
        a + 1
        if step % 500 == 0:
            print(step, time.monotonic(), flush=True)
        if {behaviour == "idle"} and step == 3000:
            time.sleep(60)
"""
    with subprocess.Popen(
        [sys.executable, "-c", source], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(3)
        killed = time.monotonic()
        child.kill()
        lines = [line.split() for line in child.stdout.read().splitlines()]

    trace = opdrift.load(tmp_path / "run.trace")
    issued = [
        int(step)
        for step, moment in (line for line in lines if len(line) == 2)
        if float(moment) < killed - 1.5
    ]
    assert trace.footer is None
    assert trace.incomplete is not None
    assert issued
    assert len(trace.ops) >= issued[-1]


def test_a_recorder_is_good_for_one_run(tmp_path: Path):
    recorder = opdrift.record(tmp_path / "run.trace")
    with recorder:
        torch.ones(2)

    with pytest.raises(opdrift.RecorderStateError), recorder:
        pass
    with pytest.raises(opdrift.RecorderStateError):
        recorder.mark("step")
