"""The public surface: names, options, and what reading never imports."""

from __future__ import annotations

import argparse
import importlib
import tomllib
from pathlib import Path

import pytest

import opdrift
from opdrift.commands import diff_trace, env, export, run, show

ROOT = Path(__file__).parent.parent


# ---- names ---------------------------------------------------------------------------------------------


def test_public_names_are_sorted_and_whole():
    """Exactly these names are promised."""
    assert opdrift.__all__ == [
        "Batch", "CheckpointError", "DamagedTraceError", "Diagnosis", "ExportError", "IncomparableTracesError", "InvalidOptionError",
        "NotATraceError", "OpdriftError", "Recorder", "RecorderStateError", "Trace", "TraceExistsError", "TraceNotWritableError",
        "TraceVersionError", "__version__", "diff", "load", "record",
    ]  # fmt: skip
    assert opdrift.__all__ == sorted(opdrift.__all__)
    assert set(dir(opdrift)) >= set(opdrift.__all__)


@pytest.mark.parametrize("name", opdrift.__all__)
def test_every_public_name_can_be_used(name):
    """Names are loaded on first use; none leads nowhere."""
    assert getattr(opdrift, name) is not None


def test_every_error_is_public():
    """Whoever catches one can name it."""
    errors = importlib.import_module("opdrift.errors")
    names = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert names <= set(opdrift.__all__)
    assert all(issubclass(getattr(errors, name), opdrift.OpdriftError) for name in names)


def test_an_unknown_name_is_an_attribute_error():
    """`hasattr` and typos behave as for every module."""
    with pytest.raises(AttributeError, match="'opdrift' has no attribute 'recrod'"):
        opdrift.recrod  # noqa: B018 (the access is the test)


def test_version_is_the_distribution_s():
    """The version is that of pyproject.toml, or says that nothing is installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert opdrift.__version__ in (project["version"], "0+uninstalled")


def test_console_scripts_lead_somewhere():
    """`opdrift` and `diff-trace` are functions that return an exit status."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts.keys() == {"opdrift", "diff-trace"}
    for target in scripts.values():
        module, _, function = target.partition(":")
        assert callable(getattr(importlib.import_module(module), function))


# ---- options -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "options"),
    [
        (diff_trace, "--across-ranks --atol --checkpoint --context --fail-on --format --map --output --quiet --rank --rtol --samples"
                     " --side-by-side --tree -o -q"),
        (run, "--integrations --integrity --kernels --label --output --overwrite -o"),
        (show, "--checkpoint --findings --format --kernels --leaf --op --scope"),
        (env, ""),
    ],
)  # fmt: skip
def test_options_are_frozen(command, options):
    """Scripts use these; an option is added with its documentation, and none goes."""
    parser = argparse.ArgumentParser(add_help=False)
    command.add_arguments(parser)
    assert (
        sorted(name for action in parser._actions for name in action.option_strings)
        == options.split()
    )


def test_options_that_all_exports_share_are_frozen():
    """What an exporter adds comes beside these; an option of the same name would fail at once."""
    parser = argparse.ArgumentParser(add_help=False)
    export._add_shared(parser)
    assert sorted(name for action in parser._actions for name in action.option_strings) == (
        ["--against", "--force", "--map", "--output", "--rank", "--scope", "--steps", "-o"]
    )


def test_formats_are_frozen():
    """`--format` takes these, and `--fail-on` these."""
    parser = argparse.ArgumentParser()
    diff_trace.add_arguments(parser)
    choices = {action.dest: action.choices for action in parser._actions if action.choices}
    assert choices == {
        "format": ("text", "json", "markdown", "html"),
        "fail_on": ("any", "diverged"),
    }


# ---- what reading imports ------------------------------------------------------------------------------

_CHECK = """
import sys
sys.argv = ["opdrift", *sys.argv[1:]]
import opdrift
{body}
loaded = sorted(set(sys.modules) & {{{forbidden}}})
if loaded:
    sys.exit(f"imported: {{loaded}}")
"""
_COMMAND = """
from opdrift.commands.main import diff_trace, opdrift as main
status = {function}({arguments!r})
assert status in (0, 1), status
"""


def imports(python, body, *forbidden):
    """What a program in a process of its own says about forbidden modules; empty if it imported none."""
    done = python("-c", _CHECK.format(body=body, forbidden=", ".join(map(repr, forbidden))))
    assert done.returncode == 0 or done.stderr.startswith("imported"), done.stderr
    return done.stderr


def test_import_opdrift_imports_nothing_heavy(python):
    """Neither torch nor what reading needs is paid for before it is used."""
    assert imports(python, "", "torch", "numpy", "pyarrow", "rich") == ""


def test_load_and_diff_never_import_torch(python, recorded):
    """Traces of a cluster are read on a laptop without torch."""
    body = f"opdrift.diff(opdrift.load({str(recorded / 'base.trace')!r}), {str(recorded / 'weights.trace')!r})"
    assert imports(python, body, "torch") == ""


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        ("diff_trace", ["{0}/base.trace", "{0}/weights.trace"]),
        ("diff_trace", ["{0}/base.trace", "{0}/math.trace", "--format", "json"]),
        ("diff_trace", ["{0}/base.trace", "{0}/eps.trace", "--format", "markdown"]),
        ("diff_trace", ["{0}/base.trace", "{0}/eps.trace", "--side-by-side", "--tree"]),
        ("main", ["show", "{0}/base.trace"]),
        ("main", ["show", "{0}/base.trace", "--format", "json", "--kernels"]),
        ("main", ["show", "{0}/base.trace", "--leaf", "*", "--kernels"]),
        ("main", ["show", "{0}/nan.trace", "--findings"]),
        ("main", ["env"]),
    ],
)
def test_commands_never_import_torch(function, arguments, python, recorded):
    """Every command but `opdrift run`."""
    filled = [argument.format(recorded) for argument in arguments]
    assert (
        imports(python, _COMMAND.format(function=function, arguments=filled), "torch", "pandas")
        == ""
    )


def test_recording_never_imports_pandas(python, tmp_path):
    """pyarrow would, where it is installed, in the middle of the program's run."""
    body = f"""
import torch
with opdrift.record({str(tmp_path / "run.trace")!r}, model=(model := torch.nn.Linear(2, 2)), batch=opdrift.Batch(2)):
    model(torch.ones(2, 2))
"""
    assert imports(python, body, "pandas") == ""


def test_the_import_check_can_fail(python):
    """Recording does import torch, and the check above would say so."""
    assert imports(python, "opdrift.record", "torch") == "imported: ['torch']\n"
