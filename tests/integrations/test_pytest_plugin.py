"""The pytest plugin as those see it who run tests: outcomes, what is printed, what it costs who does not use it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

#: One suite, run once: what its tests print is looked at below.
SUITE = """
import pytest
import torch
import opdrift
from opdrift.testing import assert_same_run


def model(change=0.0):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    model[2].weight.data[1, 2] += change
    return model


X = torch.ones(3, 8)


def test_same(opdrift_record):
    plain, changed = model(), model()
    with opdrift_record("left", model=plain) as left:
        plain(X)
    with opdrift_record("right", model=changed) as right:
        changed(X)
    assert_same_run(left, right)


def test_weight(opdrift_record):
    plain, changed = model(), model(0.5)
    with opdrift_record("left", model=plain) as left:
        plain(X)
    with opdrift_record("right", model=changed) as right:
        changed(X)
    assert_same_run(left, right)


@pytest.mark.parametrize("case", ["a/b", "a b[c]"])
def test_where(case, opdrift_record, request, tmp_path):
    with opdrift_record() as recorder:
        X + 1
    assert recorder.path == tmp_path / "run.trace"
    assert opdrift.load(recorder.path).header.label == request.node.nodeid


def test_options(opdrift_record):
    with opdrift_record("named", label="mine", integrations=()) as recorder:
        X + 1
    assert opdrift.load(recorder).header.label == "mine"


def test_a_name_twice(opdrift_record):
    opdrift_record()
    opdrift_record(overwrite=True)
    with pytest.raises(opdrift.InvalidOptionError, match="give the second recording a name of its own"):
        opdrift_record()


@pytest.mark.parametrize("name", ["../elsewhere", "/elsewhere", "a/b", "", ".", "..", model()])
def test_names(name, opdrift_record, tmp_path):
    with pytest.raises(opdrift.InvalidOptionError, match="no name of a folder"):
        opdrift_record(name)
    assert list(tmp_path.iterdir()) == []
"""


def blocks(language: str) -> list[str]:
    """The examples of the plugin's page, and what they print."""
    page = (ROOT / "docs" / "pytest.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """pytest as its users start it, with warnings as errors, in a folder with a suite."""
    command = [sys.executable, "-m", "pytest", "-W", "error", "-p", "no:cacheprovider", *options]
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> subprocess.CompletedProcess[str]:
    folder = tmp_path_factory.mktemp("suite")
    (folder / "test_suite.py").write_text(SUITE)
    (folder / "test_port.py").write_text(blocks("python")[0])
    return run(folder, "-v", "--basetemp", str(folder / "tmp"))


def test_runs_are_recorded_and_compared(suite: subprocess.CompletedProcess[str]):
    """All tests but those whose models differ pass, also where ids are odd."""
    assert suite.stdout.splitlines()[-1].count("2 failed, 12 passed") == 1, suite.stdout


def test_a_failure_shows_the_card_and_none_of_our_code(suite: subprocess.CompletedProcess[str]):
    """The test's own lines, the verdict card, and in the summary the verdict."""
    assert "E       AssertionError: diverged: before the first op: 2.weight differs" in suite.stdout
    assert (
        "E         cause      weights (certain): 1 of 4 tensors of the model differs"
        in suite.stdout
    )
    assert "FAILED test_suite.py::test_weight - AssertionError: diverged: " in suite.stdout
    assert "assertions.py" not in suite.stdout
    assert "diagnosis = diff(" not in suite.stdout


def test_the_documentation_shows_what_is_printed(suite: subprocess.CompletedProcess[str]):
    printed = [line.rstrip() for line in suite.stdout.splitlines()]
    shown = [line for line in blocks("console")[0].splitlines() if line[:1] in (">", "E")]

    assert len(shown) > 10
    assert [line for line in shown if line not in printed] == []


#: Runs of one process after another with what they are told: (EPS, options). Workers of xdist are processes of their own.
KEPT = """
import os, sys, pytest
runs = [
    ("1e-5", []),
    ("1e-5", ["--opdrift-update", "-n", "1"]),
    ("1e-5", []),
    ("1e-3", []),
    ("1e-5", ["--opdrift-update"]),
]
for eps, options in runs:
    os.environ["EPS"] = eps
    print("==== run", flush=True)
    status = pytest.main(["-W", "error", "-p", "no:cacheprovider", *options])
    print("status", int(status), flush=True)
"""
ODD = """
import pytest
import torch


class TestAttention:
    @pytest.mark.parametrize("case", ["a/b", "a b"])
    def test_odd_names(self, case, opdrift_golden):
        with opdrift_golden("first"):
            torch.ones(2) + 1
        with opdrift_golden("second", allow="nothing", rtol=None, atol=None, integrations=()):
            torch.ones(2) * 2


def test_bodies_that_raise(opdrift_golden, request):
    if request.config.getoption("--opdrift-update"):
        with pytest.raises(ZeroDivisionError), opdrift_golden():
            torch.ones(2) / (1 // 0)
    assert not (request.path.parent / "opdrift-goldens" / "test_odd" / "test_bodies_that_raise.trace.zip").exists()


def test_one_name_for_two_runs(opdrift_golden):
    opdrift_golden("twice")
    with pytest.raises(Exception, match="give each of its runs a name of its own"):
        opdrift_golden("twice")


def test_wrong_options(opdrift_golden):
    with pytest.raises(Exception, match="choose one of 'nothing', 'rounding'"):
        opdrift_golden(allow="all")
    with pytest.raises(Exception, match="no name of a folder"):
        opdrift_golden("a/b")
"""


@dataclass(frozen=True)
class Kept:
    """What the five runs above printed, and the folder in which they ran."""

    printed: list[str]
    folder: Path

    def failures(self, number: int) -> list[str]:
        lines = self.printed[number].splitlines()
        return [line.split(" - ")[0] for line in lines if line.startswith("FAILED ")]


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Kept:
    folder = tmp_path_factory.mktemp("kept")
    example = blocks("python")[1].replace(
        "encoder()", 'encoder(float(__import__("os").environ["EPS"]))'
    )
    (folder / "test_encoder.py").write_text(example)
    (folder / "test_odd.py").write_text(ODD)
    done = subprocess.run(
        [sys.executable, "-c", KEPT],
        cwd=folder,
        env={**os.environ, "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    printed = done.stdout.split("==== run\n")[1:]
    assert len(printed) == 5, done.stderr
    return Kept(printed, folder)


def test_a_test_without_a_golden_fails_and_says_how_to_make_one(kept: Kept):
    """Its block does not even run; tests that compare nothing pass."""
    assert len(kept.failures(0)) == 3
    assert "3 failed, 3 passed" in kept.printed[0]
    assert "Traceback" not in kept.printed[0]


def test_update_writes_goldens_and_says_how_large_they_are(kept: Kept):
    """Under xdist, too: what its workers wrote is told by the main process."""
    files = {path.relative_to(kept.folder) for path in kept.folder.rglob("*.zip")}

    assert "6 passed" in kept.printed[1]
    assert {path.parent.as_posix() for path in files} == {
        "opdrift-goldens/test_encoder",
        "opdrift-goldens/test_odd",
    }
    assert len(files) == 5
    assert all(
        re.search(rf"{re.escape(str(path))}: \d+ ops, [\d,]+ bytes", kept.printed[1])
        for path in files
    )


def test_a_run_that_computes_what_it_did_passes(kept: Kept):
    assert "6 passed" in kept.printed[2]
    assert "opdrift goldens" not in kept.printed[2]


def test_a_changed_model_fails_with_the_report(kept: Kept):
    assert kept.failures(3) == ["FAILED test_encoder.py::test_the_encoder_computes_what_it_did"]
    assert "pytest_plugin.py" not in kept.printed[3]
    assert "assertions.py" not in kept.printed[3]


def test_an_update_leaves_goldens_that_are_current_as_they_are(kept: Kept):
    assert kept.printed[4].count(": unchanged\n") == 5


def test_the_documentation_shows_what_is_printed_of_goldens(kept: Kept):
    printed = {
        re.sub(r"[\d,]+ bytes", "", line.rstrip())
        for run in kept.printed
        for line in run.splitlines()
    }
    pages = "".join(blocks("console")[1:])
    shown = [
        re.sub(r"[\d,]+ bytes", "", line)
        for line in pages.splitlines()
        if not line.startswith("$") and line != "..."
    ]

    assert len(shown) > 10
    assert [line for line in shown if line not in printed] == []


@pytest.mark.parametrize("plugin", [True, False])
def test_the_plugin_can_be_left_out(plugin: bool, tmp_path: Path):
    """Its fixtures and its option are gone then."""
    (tmp_path / "test_it.py").write_text("def test(opdrift_record): pass")
    done = run(tmp_path, *([] if plugin else ["-p", "no:opdrift"]), "--setup-plan")

    assert ("fixture 'opdrift_record' not found" in done.stdout) is not plugin


def loaded(statement: str) -> set[str]:
    """Which of these modules a fresh process has after a statement."""
    heavy = "{'torch', 'numpy', 'pyarrow', 'rich', 'opdrift', 'opdrift_integrations'}"
    roots = [str(ROOT / "tracer"), str(ROOT / "integrations")]
    program = (
        f"import sys; sys.path[:0] = {roots!r}\n{statement}\nprint(*{heavy} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    return set(done.stdout.split())


def test_the_plugin_is_light():
    """pytest loads it in every run of everybody who has opdrift installed."""
    assert loaded("import opdrift_integrations.pytest_plugin") == {"opdrift_integrations"}


def test_the_test_above_can_fail():
    assert loaded("import opdrift_integrations.pytest_plugin, opdrift.testing") >= {
        "numpy",
        "pyarrow",
        "rich",
        "opdrift",
    }
