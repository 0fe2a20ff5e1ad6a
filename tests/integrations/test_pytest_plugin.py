"""The pytest plugin as those see it who run tests: outcomes, what is printed, what it costs who does not use it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
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
    assert suite.stdout.splitlines()[-1].count("2 failed, 11 passed") == 1, suite.stdout


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
