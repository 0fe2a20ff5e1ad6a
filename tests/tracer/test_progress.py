"""What commands show of long work: on a terminal only, on one line, and nothing of it is left."""

from __future__ import annotations

import io
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from opdrift.commands import progress
from opdrift.commands.main import opdrift
from opdrift.commands.progress import Elapsed, Progress
from opdrift.findings import findings
from opdrift.records import Finding
from opdrift.tracefile.reader import Trace


class Stream(io.TextIOWrapper):
    """A stderr that is a terminal or not, and tells when something was written."""

    def __init__(self, *, terminal: bool = True, encoding: str = "utf-8") -> None:
        super().__init__(io.BytesIO(), encoding=encoding, newline="")
        self.terminal = terminal
        self.written = threading.Event()

    def isatty(self) -> bool:
        return self.terminal

    def flush(self) -> None:
        super().flush()
        self.written.set()

    @property
    def text(self) -> str:
        assert isinstance(self.buffer, io.BytesIO)
        return self.buffer.getvalue().decode()

    @property
    def screen(self) -> str:
        """What a terminal shows in the end: a carriage return goes to the start of the line."""
        shown = ""
        for part in self.text.split("\r"):
            shown = part + shown[len(part) :]
        return shown.rstrip()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_PATIENCE", 0.001)
    monkeypatch.setattr(progress, "_INTERVAL", 0.0)
    monkeypatch.setenv("COLUMNS", "60")


@pytest.mark.usefixtures("impatient")
def test_long_work_says_that_it_goes_on_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.stderr", stream := Stream())
    with Elapsed("comparing a.trace with b.trace"):
        assert stream.written.wait(30)

    assert stream.text.startswith("\rcomparing a.trace with b.trace: 0 s")
    assert stream.screen == ""


@pytest.mark.usefixtures("impatient")
def test_long_work_says_what_of_it_is_being_done(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.stderr", stream := Stream())
    with Elapsed("comparing a with b") as elapsed:
        elapsed.now("rank 2 of 8, pairing ops")
        stream.written.clear()
        assert stream.written.wait(30)

    assert "\rcomparing a with b: rank 2 of 8, pairing ops, 0 s" in stream.text


def test_short_work_needs_no_words(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(progress, "_PATIENCE", 3600.0)
    monkeypatch.setattr("sys.stderr", stream := Stream())
    with Elapsed("comparing"):
        pass

    assert stream.text == ""


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(("terminal", "quiet"), [(False, False), (True, True)])
def test_files_pipes_and_the_quiet_get_nothing(
    terminal: bool, quiet: bool, monkeypatch: pytest.MonkeyPatch
):
    """No thread is started, either."""
    monkeypatch.setattr("sys.stderr", stream := Stream(terminal=terminal))
    threads = threading.active_count()
    with Elapsed("comparing", quiet=quiet):
        assert threading.active_count() == threads

    assert stream.text == ""


@pytest.mark.usefixtures("impatient")
def test_an_interrupt_leaves_nothing_of_the_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.stderr", stream := Stream())
    with pytest.raises(KeyboardInterrupt), Elapsed("comparing"):
        assert stream.written.wait(30)
        raise KeyboardInterrupt

    assert stream.screen == ""


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("name", ["\x1b[2J\nrun", "run\u202egnp", "x" * 500])
def test_odd_names_stay_on_one_line_and_reach_no_terminal(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("sys.stderr", stream := Stream())
    with Progress(f"exporting {name}") as bar:
        bar(1, 2)
        assert 0 < len(stream.screen) < 60
        assert not set("\x1b\n\u202e") & set(stream.text)

    assert stream.screen == ""


@pytest.mark.usefixtures("impatient")
def test_a_terminal_that_lacks_letters_gets_others(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.stderr", stream := Stream(encoding="ascii"))
    with Progress("exporting modèle") as bar:
        bar(1, 2)

    assert stream.text.startswith("\rexporting mod?le [############............]  50%")


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("arguments", [[], ["--findings"], ["--format", "json"]])
def test_a_long_look_into_a_trace_says_that_it_goes_on(
    arguments: list[str],
    recorded: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    """And takes the line away before the report comes."""
    opdrift(["show", str(recorded / "base.trace"), *arguments])
    report = capsys.readouterr().out
    monkeypatch.setattr("sys.stderr", stream := Stream())

    def slow(traces: Sequence[Trace]) -> list[Finding]:
        stream.written.wait(30)
        return findings(traces)

    monkeypatch.setattr("opdrift.findings.findings", slow)

    opdrift(["show", str(recorded / "base.trace"), *arguments])

    assert stream.text.startswith("\rreading base.trace: 0 s")
    assert stream.screen == ""
    assert capsys.readouterr().out == report
