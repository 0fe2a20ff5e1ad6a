"""`opdrift export`, whatever the format: which ops, whole files or none, one sentence where it fails."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from opdrift import plugins
from opdrift.commands.main import opdrift
from opdrift.errors import ExportError, InvalidOptionError
from opdrift.export.output import file_size, whole
from opdrift.export.processes import Processes, Selection
from opdrift.export.selection import in_steps
from opdrift.plugins import OP_STATUSES
from opdrift.testing import Builder, export, trace
from opdrift.tracefile.schema import checksum


class Lines:
    """One line an op: its process, number and status.

    More about it.
    """

    writes = "file"
    requires = ()
    extra = ""

    def add_arguments(self, parser):
        parser.add_argument("--fail", choices=["error", "disk", "interrupt"])
        parser.add_argument("--send", action="store_true")

    def suffix(self, options):
        return None if options.send else ".txt"

    def export(self, export):
        text = "".join(line for process in export.processes for line in self._lines(process))
        export.progress(1, 2)
        if export.output is None:
            return f"sent {text!r}"
        path = export.output / "ops.txt" if self.writes == "folder" else export.output
        with open(path, "a") as file:
            file.write(text)
        if export.options.fail == "error":
            raise ExportError("the receiver refused.")
        if export.options.fail == "disk":
            raise OSError(28, "No space left on device")
        if export.options.fail == "interrupt":
            raise KeyboardInterrupt
        return f"wrote {len(text.splitlines())} ops"

    def _lines(self, process):
        rank, found = process.trace.header.rank, process.comparison
        for index in process.ops.tolist():
            status = "" if found is None else f" {OP_STATUSES[found.status[index]]}"
            yield f"{rank} {process.trace.ops.seq[index]}{status}\n"


class Folder(Lines):
    """The same in a folder."""

    writes = "folder"


class Missing(Lines):
    """Wants what is not installed."""

    requires = ("json", "no_such_library.part")
    extra = "otel"


class Point:
    """An entry point."""

    def __init__(self, made):
        self.load = made


def _broken():
    raise ImportError("needs another version")


@pytest.fixture
def traces(recorded, tmp_path, monkeypatch):
    """Work in a folder with recorded traces, and exporters of all kinds installed."""
    for path in recorded.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    points = {
        "lines": Point(lambda: Lines),
        "folder": Point(lambda: Folder),
        "missing": Point(lambda: Missing),
        "broken": Point(_broken),
    }
    monkeypatch.setattr(plugins, "installed_exporters", lambda: points)
    return tmp_path


def made(folder):
    """What lies in a folder besides traces, hidden files too."""
    return sorted(p.name for p in folder.iterdir() if p.suffix != ".trace")


def ranks(source, target, count=2):
    """A distributed trace, made of a trace of one process."""
    for rank in range(count):
        folder = Path(target) / f"rank-{rank:05}"
        shutil.copytree(source, folder)
        text = {**json.loads((folder / "header.json").read_text()), "rank": rank}
        text["world_size"] = count
        del text["crc"]
        (folder / "header.json").write_text(json.dumps({**text, "crc": checksum(text)}))


# ---- what is exported ------------------------------------------------------------------------------------


def test_a_trace_goes_into_a_file_named_after_it(traces, capsys):
    """Without -o it lies in the folder that the user is in; stdout says what was written, stderr nothing."""
    assert opdrift(["export", "lines", "base.trace"]) == 0

    out, err = capsys.readouterr()
    written = Path("base.txt").read_text().splitlines()
    assert (out, err) == (f"wrote {len(written)} ops\n", "")
    assert written[0] == "None 1"
    assert len(written) > 20


def test_all_ranks_are_exported_or_the_one_that_is_asked_for(traces, capsys):
    """A distributed trace is one export."""
    ranks("base.trace", "two.trace")

    assert opdrift(["export", "lines", "two.trace"]) == 0
    both = Path("two.txt").read_text().splitlines()
    assert opdrift(["export", "lines", "two.trace", "--rank", "1", "--force"]) == 0
    second = Path("two.txt").read_text().splitlines()

    assert {line.split()[0] for line in both} == {"0", "1"}
    assert second == [line for line in both if line.startswith("1 ")]


def test_only_the_ops_of_a_module_are_exported(traces):
    """--scope takes what is below the module, too."""
    assert opdrift(["export", "lines", "base.trace", "-o", "all.txt"]) == 0
    assert opdrift(["export", "lines", "base.trace", "--scope", "2.*", "-o", "some.txt"]) == 0

    every, some = (Path(name).read_text().splitlines() for name in ("all.txt", "some.txt"))
    assert 0 < len(some) < len(every)
    assert set(some) < set(every)


def stepped():
    """Three steps, numbered from 5, of one op each, after one op before them all."""
    build = Builder()
    x = build.op("relu", build.leaf("x", kind="input"))
    for number in (5, 6, 7):
        build.mark("step", step=number)
        x = build.op("relu", x)
    return build.build()


@pytest.mark.parametrize(("steps", "ops"), [((5, 5), [1]), ((6, 7), [2, 3]), ((0, 99), [1, 2, 3])])
def test_only_the_ops_of_some_steps_are_exported(steps, ops):
    """Both ends belong to it; what ran before the first step is of none."""
    assert Selection(steps=steps).of(stepped()).tolist() == ops


@pytest.mark.parametrize(
    ("run", "words"),
    [(stepped(), "its steps are 5 to 7"), (trace("relu"), "it has no step marks")],
)
def test_steps_that_are_not_there_are_refused(run, words):
    """The sentence says which there are."""
    with pytest.raises(InvalidOptionError, match=words):
        in_steps(run, 1, 2)


def test_a_trace_without_an_end_is_exported_as_far_as_it_goes(traces, capsys):
    """One that is still being written; stderr says so, and it is no failure."""
    shutil.copytree("base.trace", "cut.trace")
    Path("cut.trace/footer.json").unlink()

    assert opdrift(["export", "lines", "cut.trace"]) == 0

    err = capsys.readouterr().err
    assert err.startswith("opdrift: cut.trace is incomplete at op")
    assert err.count("\n") == 1
    assert Path("cut.txt").read_text()


# ---- --against -------------------------------------------------------------------------------------------


def test_ops_are_marked_as_a_comparison_finds_them(traces):
    """The exported run is the right side: what begins to differ in it, and what that reached."""
    assert opdrift(["export", "lines", "eps.trace", "--against", "base.trace"]) == 0

    statuses = [line.split()[2] for line in Path("eps.txt").read_text().splitlines()]
    begins = statuses.index("origin")
    assert set(statuses[:begins]) == {"equal"}
    assert "receiver" in statuses[begins:]


def test_a_comparison_says_which_op_is_which():
    """Counterparts and the first divergence are indices; an op that only this run has is unpaired."""
    left, right = trace("mm relu mm"), trace("mm _to_copy relu mm*")

    (process,) = Processes([right], Selection(), warn=pytest.fail, against=left)

    assert process.comparison is not None
    assert process.comparison.baseline is left
    assert process.comparison.counterpart.tolist() == [0, -1, 1, 2]
    assert [OP_STATUSES[s] for s in process.comparison.status] == [
        "equal", "unpaired", "equal", "origin",
    ]  # fmt: skip
    assert process.comparison.first == 3


def test_equal_runs_have_no_first_divergence():
    """Every op is equal, and nothing is marked."""
    (process,) = Processes([trace("mm")], Selection(), warn=pytest.fail, against=trace("mm"))

    assert process.comparison is not None
    assert process.comparison.first is None
    assert np.all(process.comparison.status == OP_STATUSES.index("equal"))


def test_ranks_are_compared_with_their_own(traces, capsys):
    """Each process has the answer of its rank."""
    ranks("base.trace", "left.trace")
    ranks("eps.trace", "right.trace")

    assert opdrift(["export", "lines", "right.trace", "--against", "left.trace"]) == 0

    lines = [line.split() for line in Path("right.txt").read_text().splitlines()]
    assert {rank for rank, _, status in lines if status == "origin"} == {"0", "1"}


# ---- where to ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format_", ["lines", "folder"])
def test_what_is_there_is_replaced_only_when_asked(format_, traces, capsys):
    """The second export is refused before any work, with --force it replaces the first."""
    arguments = ["export", format_, "base.trace", "-o", "made"]
    assert opdrift(arguments) == 0
    before = Path("made").stat().st_ino
    capsys.readouterr()

    assert opdrift(arguments) == 2
    assert capsys.readouterr().err == (
        "opdrift: made exists already; give another path with -o, or --force to replace it.\n"
    )
    assert Path("made").stat().st_ino == before
    assert opdrift([*arguments, "--force"]) == 0
    assert Path("made").stat().st_ino != before
    assert made(traces) == ["made"]


@pytest.mark.parametrize("format_", ["lines", "folder"])
@pytest.mark.parametrize(("fail", "status"), [("error", 2), ("disk", 2), ("interrupt", 130)])
def test_a_failure_leaves_nothing_half_written(format_, fail, status, traces, capsys):
    """A refusal, a full disk, Ctrl-C: no file, no partial one, and what was there before is still there."""
    assert opdrift(["export", format_, "base.trace", "--fail", fail]) == status
    assert made(traces) == []
    assert opdrift(["export", format_, "base.trace"]) == 0
    assert opdrift(["export", format_, "base.trace", "--fail", fail, "--force"]) == status

    assert made(traces) == ["base.txt"]
    assert "Traceback" not in capsys.readouterr().err


def test_a_full_disk_is_told_in_one_sentence(traces, capsys):
    """With the path, the reason, and what to do."""
    assert opdrift(["export", "lines", "base.trace", "--fail", "disk"]) == 2
    assert capsys.readouterr().err == (
        "opdrift: base.txt cannot be written (No space left on device); nothing of it was left."
        " Give another path with -o.\n"
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has /dev/full")
def test_a_pipe_that_takes_no_more_is_told_as_what_it_is(traces, capsys):
    """What went into it cannot be taken back."""
    assert opdrift(["export", "lines", "base.trace", "-o", "/dev/full"]) == 2
    assert capsys.readouterr().err == (
        "opdrift: /dev/full cannot be written (No space left on device); what it took before is incomplete."
        " Give another path with -o.\n"
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["lines", "base.trace", "-o", "nowhere/x"], "nowhere does not exist"),
        (["lines", "base.trace", "-o", "."], "this is a folder"),
        (["lines", "base.trace", "-o", "base.trace"], "is an opdrift trace"),
        (["folder", "base.trace", "-o", "base.trace", "--force"], "is an opdrift trace"),
        (["lines", "base.trace", "-o", "base.trace/ops.arrows"], "is an opdrift trace"),
        (["folder", "base.trace", "-o", "file"], "this is a file"),
        (["folder", "base.trace", "-o", "mine", "--force"], "something else than .txt files"),
        (["lines", "nowhere.trace"], "does not exist"),
        (["lines", "base.trace", "--rank", "3"], "not 3"),
        (["lines", "base.trace", "--scope", "nowhere"], "No op of base.trace ran in 'nowhere'"),
        (["lines", "base.trace", "--against", "nowhere.trace"], "nowhere.trace does not exist"),
        (["missing", "base.trace"], "no_such_library.part, which this Python does not have"),
        (["missing", "base.trace"], "pip install 'opdrift[otel]'"),
        (["broken", "base.trace"], "needs another version"),
    ],
)
def test_impossible_requests_get_one_sentence(arguments, words, traces, capsys):
    """Status 2, and nothing is written, nor taken away."""
    Path("file").write_text("mine")
    Path("mine").mkdir()
    Path("mine/thesis.tex").write_text("mine")

    assert opdrift(["export", *arguments]) == 2

    out, err = capsys.readouterr()
    assert out == ""
    assert words in err
    assert made(traces) == ["file", "mine"]
    assert Path("mine/thesis.tex").read_text() == "mine"


def test_a_file_that_appears_meanwhile_is_kept(tmp_path):
    """Another export was faster."""
    target = tmp_path / "made"
    with (
        pytest.raises(ExportError, match="meanwhile"),
        whole(target, kind="file", suffix="", replace=False) as partial,
    ):
        partial.write_text("mine")
        target.write_text("theirs")

    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("made", "theirs")]


def test_an_export_can_go_to_stdout(traces, python):
    """Then what is said goes to stderr."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent("""
            import sys
            sys.path.insert(0, sys.argv.pop())
            import test_export
            from opdrift import plugins
            from opdrift.commands.main import opdrift
            plugins.installed_exporters = lambda: {"lines": test_export.Point(lambda: test_export.Lines)}
            sys.exit(opdrift(["export", "lines", "base.trace", "-o", "/dev/stdout"]))
        """), str(Path(__file__).parent)],
        capture_output=True, text=True, check=True, timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip

    assert done.stdout.startswith("None 1\n")
    assert done.stderr.startswith("opdrift: wrote ")


def test_what_is_sent_writes_nothing(traces, capsys):
    """An exporter may have another place to go to."""
    assert opdrift(["export", "lines", "base.trace", "--send"]) == 0
    assert capsys.readouterr().out.startswith("sent ")
    assert made(traces) == []


# ---- help, progress ----------------------------------------------------------------------------------------


def test_help_lists_the_formats_also_where_one_is_broken(traces, capsys):
    """The first line of each docstring; of a broken one why it is not usable."""
    with pytest.raises(SystemExit) as stop:
        opdrift(["export", "--help"])

    out = capsys.readouterr().out
    assert stop.value.code == 0
    assert "one line an op: its process, number and status\n" in out
    assert "cannot be loaded: needs another version" in out


def test_help_of_a_format_shows_its_own_options(traces, capsys):
    """And its whole docstring."""
    with pytest.raises(SystemExit):
        opdrift(["export", "lines", "--help"])

    out = capsys.readouterr().out
    assert "More about it.\n" in out
    assert "--send" in out
    assert "--against" in out


def test_a_bar_is_drawn_on_a_terminal_and_taken_away(traces, capsys, monkeypatch):
    """And only there: the other tests see an empty stderr."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)

    assert opdrift(["export", "lines", "base.trace"]) == 0

    err = capsys.readouterr().err
    assert "exporting base.trace [############............]  50%" in err
    assert err.endswith("\r")
    assert err.rsplit("\r", 2)[1].strip() == ""


# ---- opdrift.testing -----------------------------------------------------------------------------------------


def test_an_exporter_can_be_tried_on_traces_in_memory(tmp_path):
    """`opdrift.testing.export` does what the command does."""
    said = export(Lines(), trace("mm relu*"), output=tmp_path / "ops.txt", against=trace("mm relu"))

    assert said == "wrote 2 ops"
    assert (tmp_path / "ops.txt").read_text() == "None 1 equal\nNone 2 origin\n"


def test_what_an_exporter_would_tell_the_user_is_a_warning(tmp_path):
    """pytest.warns sees it."""
    build = Builder(complete=False)
    build.op("relu", build.leaf("x", kind="input"))

    with pytest.warns(UserWarning, match="What is there is exported"):
        export(Lines(), build.build(), output=tmp_path / "ops.txt")


@pytest.mark.parametrize(
    ("length", "said"),
    [(12, "1 kB"), (18_400, "18 kB"), (49_999, "50 kB"), (50_000, "0.1 MB"), (2_150_000_000, "2,150.0 MB")],
)  # fmt: skip
def test_a_file_is_never_said_to_hold_nothing(length, said):
    """Small ones are counted in kB."""
    assert file_size(length) == said
