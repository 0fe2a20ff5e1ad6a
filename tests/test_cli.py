"""The commands as scripts see them: exit statuses, streams, files, bad input."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from opdrift.commands.exit_codes import ExitCode
from opdrift.commands.main import diff_trace, opdrift
from opdrift.tracefile.schema import checksum


def environment():
    """The environment of a process that finds opdrift in this checkout."""
    root = Path(__file__).parent.parent
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(root / "tracer"), str(root / "integrations")]),
    }


@pytest.fixture
def traces(recorded, tmp_path, monkeypatch):
    """Work in a folder where the recorded traces lie beside each other; reports then name them shortly."""
    for trace in recorded.iterdir():
        (tmp_path / trace.name).symlink_to(trace)
    monkeypatch.chdir(tmp_path)
    for name in ("COLUMNS", "NO_COLOR", "FORCE_COLOR", "OPDRIFT_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def said(capsys):
    """What a command printed: (stdout, stderr)."""
    captured = capsys.readouterr()
    return captured.out, captured.err


# ---- exit status ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("right", "options", "status", "verdict"),
    [
        ("base", [], 0, "identical"),
        ("same", [], 0, "identical"),
        ("math", [], 1, "rounding"),
        ("math", ["--fail-on", "diverged"], 0, "rounding"),
        ("weights", [], 1, "diverged"),
        ("weights", ["--fail-on", "diverged"], 1, "diverged"),
        ("eps", ["--fail-on", "any"], 1, "diverged"),
        ("nan", [], 1, "diverged"),
    ],
)
def test_exit_status_follows_the_verdict(right, options, status, verdict, traces, capsys):
    """0 identical, 1 they differ; with --fail-on diverged rounding is no failure."""
    assert diff_trace(["base.trace", f"{right}.trace", *options]) == status
    out, err = said(capsys)
    assert out.startswith(verdict)
    assert err == ""


def test_exit_statuses_are_these():
    """As `diff` and `cmp` have them."""
    assert (ExitCode.SAME, ExitCode.DIFFER, ExitCode.TROUBLE) == (0, 1, 2)


@pytest.mark.parametrize("command", ["script", "-m opdrift diff", "-m opdrift.commands"])
def test_every_way_to_start_the_command(command, traces, python):
    """The script `diff-trace`, and `python -m opdrift diff` where scripts are not on the PATH."""
    if command == "script":
        script = shutil.which("diff-trace", path=str(Path(sys.executable).parent))
        if script is None:
            pytest.skip("opdrift is not installed here, so there is no script")
        done = subprocess.run(
            [script, "base.trace", "eps.trace"],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
    else:
        done = python(*command.split(), "base.trace", "eps.trace", cwd=traces)
    if command == "-m opdrift.commands":
        assert done.returncode != 0  # a package, no command: only the two above are promised
        return
    assert (done.returncode, done.stdout.partition(":")[0], done.stderr) == (1, "diverged", "")


# ---- what is printed -----------------------------------------------------------------------------------


def test_quiet_prints_the_verdict_line_alone(traces, capsys):
    """One line for logs."""
    assert diff_trace(["base.trace", "eps.trace", "-q"]) == 1
    out, _ = said(capsys)
    assert out.startswith("diverged: at op ")
    assert out.count("\n") == 1


def test_json_goes_to_stdout_whole(traces, capsys):
    """One document, and the same verdict as the exit status says."""
    assert diff_trace(["base.trace", "weights.trace", "--format", "json"]) == 1
    document = json.loads(said(capsys)[0])
    assert (document["schema"], document["verdict"]) == ("opdrift.diagnosis/1", "diverged")
    assert (document["left"]["path"], document["left"]["label"]) == ("base.trace", "as published")


def test_report_file_gets_the_report_and_stdout_the_verdict(traces, capsys):
    """-o writes the file whole, in UTF-8, and an earlier report is replaced."""
    for _ in range(2):
        assert (
            diff_trace(["base.trace", "weights.trace", "--format", "json", "-o", "report.json"])
            == 1
        )
    out, _ = said(capsys)
    assert out.count("\n") == 2
    assert out.startswith("diverged")
    assert json.loads(Path("report.json").read_text("utf-8"))["verdict"] == "diverged"
    assert [p.name for p in traces.iterdir() if "report" in p.name] == ["report.json"]


def test_views_follow_the_card(traces, capsys):
    """--side-by-side and --tree add to the report; --context says how many ops."""
    assert (
        diff_trace(["base.trace", "eps.trace", "--side-by-side", "--tree", "--context", "2"]) == 1
    )
    out, _ = said(capsys)
    card, _, views = out.partition("ops around the first divergence")
    assert "cause" in card
    assert "next: " in card
    assert "--side-by-side" not in card  # was just run
    marked = [
        line for line in views.splitlines() if " = " in line or " x " in line or " ~ " in line
    ]
    assert "modules" in views
    assert (
        len(
            [
                line
                for line in views.partition("modules")[0].splitlines()
                if line[:1] not in ("", "=")
            ]
        )
        == 6
    )
    assert any("x" in line for line in marked)


def test_narrow_terminal(traces, capsys, monkeypatch):
    """COLUMNS is obeyed also in a pipe; commands to type stay whole."""
    monkeypatch.setenv("COLUMNS", "40")
    diff_trace(["base.trace", "eps.trace"])
    lines = said(capsys)[0].splitlines()
    assert [
        line
        for line in lines
        if len(line) > 40 and "opdrift show" not in line and "diff-trace" not in line
    ] == []


def test_a_terminal_without_utf8_gets_ascii(traces, python):
    """Bars and marks have ASCII forms; nothing fails to encode."""
    done = python(
        "-m",
        "opdrift",
        "diff",
        "base.trace",
        "eps.trace",
        "--tree",
        cwd=traces,
        PYTHONIOENCODING="ascii",
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.isascii()


def test_a_reader_that_leaves_is_no_error(traces, python):
    """`opdrift show ... | head -1` ends quietly."""
    code = (
        "import subprocess, sys; p = subprocess.Popen([sys.executable, '-m', 'opdrift', 'show', 'base.trace', '--format',"
        " 'json'], stdout=subprocess.PIPE, stderr=subprocess.PIPE); p.stdout.close(); print(p.wait(), p.stderr.read())"
    )
    assert python("-c", code, cwd=traces).stdout == "0 b''\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has /dev/full")
def test_a_full_disk_is_no_bug(traces):
    """What cannot be written is said in one sentence, with status 2."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "opdrift", "diff", "base.trace", "eps.trace"], stdout=full, stderr=subprocess.PIPE,
            text=True, env=environment(), check=False, timeout=60,
        )  # fmt: skip
    assert done.returncode == 2
    assert (
        done.stderr == "opdrift: the result cannot be written to stdout: No space left on device.\n"
    )


def test_closed_streams_are_no_bug(traces):
    """`diff-trace LEFT RIGHT >&-` answers with its exit status alone."""
    command = f"{sys.executable} -m opdrift diff base.trace eps.trace >&- 2>&-"
    assert (
        subprocess.run(command, shell=True, env=environment(), check=False, timeout=60).returncode
        == 1
    )


def test_an_identical_pair_tells_what_differed_in_vain(traces, capsys):
    """One line, and the settings that changed nothing; no table of them."""
    assert diff_trace(["base.trace", "same.trace"]) == 0
    lines = said(capsys)[0].splitlines()
    assert lines[0].startswith("identical: ")
    assert [line for line in lines[1:] if line and not line.startswith(("note: ", "      "))] == []


# ---- bad input -----------------------------------------------------------------------------------------


def damaged(traces, what):
    """A path that is no readable trace, and words that the complaint must hold."""
    path = traces / f"{what}.trace"
    if what == "missing":
        return path, "does not exist"
    if what == "file":
        path.write_text("no trace")
        return path, "is a file"
    if what == "folder":
        path.mkdir()
        return path, "has no header.json"
    shutil.copytree(traces / "base.trace", path)
    header = path / "header.json"
    if what == "newer":
        text = json.loads(header.read_text())
        text["schema"] = "opdrift.trace/2"
        del text["crc"]
        header.write_text(json.dumps({**text, "crc": checksum(text)}))
        return path, "opdrift.trace/2"
    if what == "unreadable":
        header.write_bytes(b"{\xff not json")
        return path, "header.json cannot be read"
    assert what == "empty"
    header.write_text("")
    return path, "header.json cannot be read"


@pytest.mark.parametrize("what", ["missing", "file", "folder", "newer", "unreadable", "empty"])
@pytest.mark.parametrize("command", ["left", "right", "show"])
def test_what_is_no_trace_gets_one_sentence(what, command, traces, capsys):
    """Status 2, nothing on stdout, one line on stderr that names the path."""
    path, words = damaged(traces, what)
    if command == "show":
        status = opdrift(["show", str(path)])
    else:
        sides = [str(path), "base.trace"]
        status = diff_trace(sides if command == "left" else sides[::-1])
    out, err = said(capsys)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert words in err
    assert str(path) in err
    assert "Traceback" not in err


def test_a_cut_off_trace_is_never_called_identical(traces, capsys):
    """Where nothing differs as far as a killed run goes, there is no answer; what differs is still told."""
    for name in ("same", "eps"):
        shutil.copytree(f"{name}.trace", f"cut-{name}.trace")
        (Path(f"cut-{name}.trace") / "footer.json").unlink()

    assert diff_trace(["base.trace", "cut-same.trace"]) == 2
    assert "incomplete" in said(capsys)[1]

    assert diff_trace(["base.trace", "cut-eps.trace"]) == 1
    out, err = said(capsys)
    assert out.startswith("diverged")
    assert "incomplete" in out
    assert err == ""


def with_header(source, target, **fields):
    """A copy of a trace with other facts in its header."""
    shutil.copytree(source, target)
    header = Path(target) / "header.json"
    text = {**json.loads(header.read_text()), **fields}
    del text["crc"]
    header.write_text(json.dumps({**text, "crc": checksum(text)}))


def test_fingerprints_of_another_kind_are_not_compared(traces, capsys):
    """Their digests mean something else: no pair of them would be equal."""
    with_header("same.trace", "older.trace", fingerprint="tfp0")

    assert diff_trace(["base.trace", "older.trace"]) == 2
    out, err = said(capsys)
    assert (out, err.count("\n")) == ("", 1)
    assert "older.trace of kind 'tfp0'" in err


def test_a_rank_that_only_one_run_has(traces, capsys):
    """Asked for, it is missing in the other; not asked for, the ranks of both are compared, and it is said."""
    for rank in (0, 1, 2):
        with_header("base.trace", f"three.trace/rank-0000{rank}", rank=rank, world_size=3)
    for rank in (0, 1):
        with_header("same.trace", f"two.trace/rank-0000{rank}", rank=rank, world_size=2)

    assert diff_trace(["three.trace", "two.trace", "--rank", "2"]) == 2
    out, err = said(capsys)
    assert (out, err.count("\n")) == ("", 1)
    assert "two.trace has no rank 2; it holds ranks 0, 1" in err

    assert diff_trace(["three.trace", "two.trace", "--format", "json"]) == 0
    assert "only the left trace has rank 2" in said(capsys)[0]


@pytest.mark.parametrize("alone", ["same.trace", "launched.trace"])
def test_one_process_is_compared_with_each_rank(traces, capsys, alone):
    """Also one that a launcher started as the only rank."""
    with_header("same.trace", "launched.trace/rank-00000", rank=0, world_size=1)
    with_header("base.trace", "two.trace/rank-00000", rank=0, world_size=2)
    with_header("weights.trace", "two.trace/rank-00001", rank=1, world_size=2)

    assert diff_trace([alone, "two.trace", "--format", "json"]) == 1
    found = json.loads(said(capsys)[0])
    assert found["right"]["rank"] == 1
    assert any("was compared with each of ranks 0 and 1" in note for note in found["notes"])

    assert diff_trace(["two.trace", alone, "-q"]) == 1
    assert [diff_trace([alone, "two.trace", "--rank", rank, "-q"]) for rank in "01"] == [0, 1]
    assert diff_trace([alone, "two.trace/rank-00001", "-q"]) == 1
    assert said(capsys)[1] == ""


def test_a_rank_that_a_run_of_one_process_has_not(traces, capsys):
    assert diff_trace(["base.trace", "same.trace", "--rank", "1"]) == 2
    out, err = said(capsys)
    assert (out, err.count("\n")) == ("", 1)
    assert "base.trace is of rank 0, not 1. Leave --rank out." in err


def test_a_rank_whose_folder_is_empty(traces, capsys):
    """It never came to `record`, or its folder was not copied whole."""
    with_header("base.trace", "run.trace/rank-00000", rank=0, world_size=2)
    Path("run.trace/rank-00001").mkdir()

    assert diff_trace(["run.trace", "--across-ranks"]) == 2
    out, err = said(capsys)
    assert (out, err.count("\n")) == ("", 1)
    assert "holds the trace of rank 0 alone, of 2; rank-00001 holds no trace. Record all" in err


def test_no_rank_in_both(traces, capsys):
    """Each run recorded another rank."""
    for name, rank in (("first.trace", 0), ("second.trace", 1)):
        with_header("base.trace", f"{name}/rank-0000{rank}", rank=rank, world_size=2)

    assert diff_trace(["first.trace", "second.trace"]) == 2
    out, err = said(capsys)
    assert (out, err.count("\n")) == ("", 1)
    assert "no rank is in both" in err


def test_traces_with_nothing_in_common(traces, tmp_path, python, capsys):
    """Another program altogether: no answer would mean anything."""
    program = """
        import torch, opdrift
        with opdrift.record("other.trace"):
            x = torch.full((3, 5), 0.25)
            for _ in range(9):
                x = (x.cos() + 2).log()
            print(x)
    """
    made = python("-c", textwrap.dedent(program), cwd=tmp_path)
    assert made.returncode == 0, made.stderr

    assert diff_trace(["base.trace", "other.trace"]) == 2
    out, err = said(capsys)
    assert (out, err.count("\n")) == ("", 1)
    assert "nothing in common" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "two traces"),
        (["base.trace"], "two traces"),
        (["base.trace", "same.trace", "eps.trace"], "two traces"),
        (["base.trace", "same.trace", "--format", "html"], "such as -o report.html"),
        (["base.trace", "--across-ranks"], "the trace of one process"),
        (["base.trace", "same.trace", "--rtol", "1e-3"], "--rtol and --atol belong together"),
        (["base.trace", "same.trace", "-q", "--format", "json"], "-q prints only the verdict"),
        (["base.trace", "same.trace", "--tree", "--format", "json"], "belong to text"),
        (["base.trace", "same.trace", "-o", "."], "is a folder"),
        (["base.trace", "same.trace", "-o", "base.trace"], "is an opdrift trace"),
        (["base.trace", "same.trace", "-o", "base.trace/ops.arrows"], "lies in an opdrift trace"),
        (["base.trace", "same.trace", "-o", "nowhere/report.txt"], "does not exist"),
        (["base.trace", "same.trace", "--rank", "3"], "rank"),
        (
            ["base.trace", "same.trace", "--map", "nowhere=0"],
            "the left run has no module 'nowhere'",
        ),
        (
            ["base.trace", "same.trace", "--map", "=nowhere"],
            "the right run has no module 'nowhere'",
        ),
        (["base.trace", "same.trace", "--samples", "0:3"], "without batch="),
    ],
)
def test_impossible_requests_get_one_sentence(arguments, words, traces, capsys):
    """Status 2 and what to do instead, before any work is done."""
    assert diff_trace(arguments) == 2
    out, err = said(capsys)
    assert (out, err.count("\n")) == ("", 1)
    assert words in err


@pytest.mark.parametrize(
    "options",
    ["--samples 3", "--samples -1:2", "--map encoder", "--map =", "--rtol -1 --atol 1", "--rtol inf --atol 1", "--rank x", "--context -2",
     "--format yaml", "--fail-on never", "--no-such-option"],
)  # fmt: skip
def test_wrong_values_are_refused_by_name(options, traces, capsys):
    """argparse's own status 2, with the option named."""
    with pytest.raises(SystemExit) as stop:
        diff_trace(["base.trace", "same.trace", *options.split()])
    assert stop.value.code == 2
    assert options.split()[0] in said(capsys)[1]


def test_a_bug_asks_for_a_report(traces, capsys, monkeypatch):
    """No traceback for users; one for those who ask."""
    monkeypatch.setattr("opdrift.tracefile.opening.load", lambda path: 1 // 0)
    assert opdrift(["show", "base.trace"]) == 2
    out, err = said(capsys)
    assert (out, err.count("\n")) == ("", 1)
    assert "bug in opdrift (ZeroDivisionError" in err
    assert "`opdrift env`" in err

    monkeypatch.setenv("OPDRIFT_DEBUG", "1")
    assert opdrift(["show", "base.trace"]) == 2
    assert "Traceback" in said(capsys)[1]


# ---- what to type next -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        *(f"diff-trace base.trace {right}.trace" for right in ("math", "weights", "eps", "nan")),
        "diff-trace base.trace eps.trace --map 1=1",
        "diff-trace two.trace other.trace",
        "diff-trace two.trace other.trace --rank 1",
        *(f"opdrift show {run}.trace" for run in ("base", "nan", "two")),
    ],
)
def test_every_command_that_is_printed_can_be_typed(line, traces, follow):
    """None of them is refused, nor finds that there is no such op, leaf or module."""
    for name, source in (("two", "base"), ("other", "weights")):
        for rank in (0, 1):
            with_header(f"{source}.trace", f"{name}.trace/rank-0000{rank}", rank=rank, world_size=2)

    statuses = follow(line)

    assert statuses
    assert 2 not in statuses.values(), statuses


def test_a_leaf_whose_name_is_a_pattern_is_named_such_that_it_is_found(
    tmp_path, python, follow, monkeypatch
):
    """Brackets of a name are no choice of letters."""
    monkeypatch.chdir(tmp_path)  # one of the commands writes a page
    program = """
        import torch, opdrift
        for number in (1, 2):
            with opdrift.record(f"{number}.trace", inputs={"x[0]": (x := torch.full((3,), number))}):
                x.cos()
    """
    made = python("-c", textwrap.dedent(program), cwd=tmp_path)
    assert made.returncode == 0, made.stderr

    first, *_ = follow("diff-trace 1.trace 2.trace").items()

    assert first == ("opdrift show 1.trace --leaf 'x[[]0]'", 0)


# ---- help ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        *([command, "--help"] for command in ("run", "show", "export", "env", "diff")),
        *(["export", name, "--help"] for name in ("chrome", "otlp", "parquet", "perfetto")),
    ],
    ids=" ".join,
)
def test_help_of_every_command(arguments, capsys, monkeypatch):
    """Every command explains itself, also where a line holds 80 characters."""
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stop:
        opdrift(arguments)
    out, _ = said(capsys)
    assert stop.value.code == 0
    assert out.startswith("usage: opdrift")
    assert [line for line in out.splitlines() if len(line) > 80] == []


# ---- opdrift show --------------------------------------------------------------------------------------


def test_show_tells_what_was_recorded(traces, capsys):
    """An overview, and the next command to type."""
    assert opdrift(["show", "base.trace"]) == 0
    out, err = said(capsys)
    assert "ops, complete" in out.splitlines()[0]
    assert "next: opdrift show base.trace" in out
    assert err == ""


def test_show_json_has_the_keys_of_the_contract(traces, capsys):
    """One object: header, ops, marks, leaves, findings."""
    assert opdrift(["show", "nan.trace", "--format", "json"]) == 0
    document = json.loads(said(capsys)[0], parse_constant=pytest.fail)
    assert list(document) == ["schema", "header", "ops", "marks", "leaves", "findings"]
    assert document["schema"] == "opdrift.trace/1"
    assert "aten.embedding.default" in {op["op"] for op in document["ops"]}
    assert document["findings"][0].keys() == {
        "kind",
        "cause",
        "name",
        "op",
        "module",
        "seq",
        "step",
        "rank",
    }
    assert document["findings"][0]["name"] == "2.attention.out.weight"


def test_show_findings_as_json_are_alone(traces, capsys):
    """--findings leaves the same object's other lists empty."""
    assert opdrift(["show", "nan.trace", "--findings", "--format", "json"]) == 1
    document = json.loads(said(capsys)[0])
    assert list(document) == ["schema", "header", "ops", "marks", "leaves", "findings"]
    assert document["header"]["schema"] == "opdrift.trace/1"
    assert (document["ops"], document["marks"], document["leaves"]) == ([], [], [])
    assert [f["kind"] for f in document["findings"]] == ["nan"]


def test_show_the_ops_of_the_root_module_alone(traces, capsys):
    """--scope takes the word that tables have for the module without a path."""
    assert opdrift(["show", "base.trace", "--format", "json", "--scope", "(root)"]) == 0
    ops = json.loads(said(capsys)[0])["ops"]
    assert {op["module"] for op in ops} == {""}


def test_show_one_op(traces, capsys):
    """--op N takes the number that the reports print."""
    assert opdrift(["show", "base.trace", "--op", "1"]) == 0
    assert said(capsys)[0].startswith("op 1 of ")


def test_show_the_ops_of_a_module_and_below(traces, capsys):
    """--scope takes a pattern; what is in a module belongs to it."""
    assert (
        opdrift(["show", "base.trace", "--format", "json", "--scope", "*.attention", "--kernels"])
        == 0
    )
    ops = json.loads(said(capsys)[0])["ops"]
    assert {op["module"].partition(".")[2].partition(".")[0] for op in ops} == {"attention"}
    assert "FLASH_ATTENTION" in {op["kernel"]["backend"] for op in ops if op["kernel"]}


def test_show_a_leaf_over_time(traces, capsys):
    """--leaf prints content and origin of each matching leaf."""
    assert opdrift(["show", "base.trace", "--leaf", "1.norm.*"]) == 0
    out, _ = said(capsys)
    assert [line for line in out.splitlines() if line.startswith("1.norm")] == [
        "1.norm.weight  parameter float32[16]",
        "1.norm.bias  parameter float32[16]",
    ]


@pytest.mark.parametrize(("trace", "status"), [("base", 0), ("nan", 1)])
def test_findings_decide_the_exit_status(trace, status, traces, capsys):
    """--findings ends with 1 if there are any."""
    assert opdrift(["show", f"{trace}.trace", "--findings"]) == status
    assert said(capsys)[0].startswith("1 finding" if status else "nothing found")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--op 0", "has no op 0"),
        ("--op 99999", "it holds 1 to"),
        ("--scope decoder", "No op of"),
        ("--leaf x.y", "has no leaf named"),
    ],
)
def test_show_says_what_there_is_instead(options, words, traces, capsys):
    """A pattern that matches nothing is an error, with what could be asked for."""
    assert opdrift(["show", "base.trace", *options.split()]) == 2
    out, err = said(capsys)
    assert (out, err.count("\n")) == ("", 1)
    assert words in err


# ---- opdrift env ---------------------------------------------------------------------------------------


def test_env_says_what_a_bug_report_needs(capsys):
    """Versions, flags and the active fingerprint path."""
    assert opdrift(["env"]) == 0
    out, err = said(capsys)
    assert err == ""
    for words in ("fingerprint", "torch: ", "python: ", "num_threads: "):
        assert words in out


def test_env_reports_a_torch_that_cannot_be_imported(python, tmp_path):
    """The machine that needs a bug report most is the one where torch is broken."""
    (tmp_path / "torch.py").write_text(
        "raise ImportError('libcudart.so.13: cannot open shared object file')\n"
    )
    done = python("-m", "opdrift", "env", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout.startswith("opdrift: ")
    assert done.stderr.count("\n") == 1
    assert "libcudart.so.13" in done.stderr
