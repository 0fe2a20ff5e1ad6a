"""Run an unmodified program, traced.

The program sees its own arguments, its exit status is kept, and the trace is written however it
ends. What follows SCRIPT or -m MODULE belongs to the program.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Final

from opdrift.commands.as_main import become, execute, program_frames, searching_as
from opdrift.commands.program import check
from opdrift.commands.recording import Recording
from opdrift.commands.torch_import import when_imported
from opdrift.errors import InvalidOptionError
from opdrift.plugins import check_integrations
from opdrift.tracefile.claiming import announced_rank, claim

EPILOG: Final = """\
examples:
  opdrift run -o monday.trace predict.py --batch 8
  torchrun --nproc-per-node 2 -m opdrift run -o monday.trace train.py
exit status: the program's own; 2 if it could not be started."""

#: Options that take no value; every other one is followed by its value.
_FLAGS: Final = frozenset({"-h", "--help", "--overwrite"})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `opdrift run`."""
    parser.usage = "opdrift run [options] SCRIPT|-m MODULE [ARGS...]"
    add = parser.add_argument
    add(
        "-o",
        "--output",
        metavar="TRACE",
        type=Path,
        help="where the trace goes (default: NAME.trace, after the program)",
    )
    add("--overwrite", action="store_true", help="replace a trace that is already there")
    add("--label", metavar="TEXT", default="", help="a name for this run, shown in reports")
    add(
        "--integrations",
        metavar="NAMES",
        default="auto",
        help="names with commas between; auto: those whose library the program uses; none",
    )
    add(
        "--kernels",
        choices=("auto", "full", "off"),
        default="auto",
        help="which implementation ran: auto is free, full asks the libraries",
    )
    add(
        "--integrity",
        choices=("auto", "full", "off"),
        default="auto",
        help="re-check parameters at use: within a budget, always, never",
    )


def split(arguments: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Part `opdrift run`'s own arguments from the program: its name, or "-m" and one, and its arguments."""
    position = 1  # 0 is "run"
    while position < len(arguments):
        word = arguments[position]
        if word == "--":
            return list(arguments[:position]), tuple(arguments[position + 1 :])
        if word == "-m" or not word.startswith("-") or word == "-":
            break
        # argparse takes the beginning of an option for it
        flag = any(each.startswith(word) for each in _FLAGS)
        alone = flag or "=" in word or (word.startswith("-o") and word != "-o")
        position += 1 if alone else 2
    return list(arguments[:position]), tuple(arguments[position:])


def run(options: argparse.Namespace) -> Callable[[], int]:
    """Check all that can be wrong before the program starts; what is returned runs it."""
    module, name, arguments = _program(options.program)
    output = options.output or Path(
        f"{name.rpartition('.')[2] if module else Path(name).stem}.trace"
    )
    integrations = _integrations(options.integrations)
    if not isinstance(integrations, str):
        check_integrations(integrations)
    with searching_as(module, name):
        check(module, name)
    # that it can be written is said now, not when the program imports torch
    claim(output, rank=announced_rank(os.environ)[0], overwrite=options.overwrite).give_back()
    recording = Recording(
        output,
        label=options.label,
        integrations=integrations,
        kernels=options.kernels,
        integrity=options.integrity,
        overwrite=options.overwrite,
    )
    return partial(_traced, recording, module, name, arguments)


def _traced(recording: Recording, module: bool, name: str, arguments: Sequence[str]) -> int:
    """Run the program. What it raises goes on to Python itself, which shows it and ends as for the program alone."""
    become(module, name, arguments)
    when_imported(recording.begin)
    try:
        execute(module, name)
    except BaseException as error:
        well = isinstance(error, SystemExit) and error.code in (None, 0)
        recording.end(None if well else error)
        sys.excepthook = partial(_show, sys.excepthook)
        raise
    recording.end(None)
    return 0


def _show(
    hook: Callable[[type[BaseException], BaseException, TracebackType | None], object],
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """Show an exception as the program's own hook does, without our frames."""
    trace = program_frames(trace)
    sys.last_traceback = trace
    hook(kind, error.with_traceback(trace), trace)


def _program(program: Sequence[str]) -> tuple[bool, str, Sequence[str]]:
    module = program[:1] == ("-m",)
    rest = program[1:] if module else program
    if not rest:
        raise InvalidOptionError(
            "run needs a program: opdrift run [options] SCRIPT|-m MODULE [ARGS...]"
        )
    if not module and not Path(rest[0]).exists():
        raise InvalidOptionError(
            f"{rest[0]} does not exist; give a Python script, or -m and a module."
        )
    return module, rest[0], rest[1:]


def _integrations(text: str) -> str | tuple[str, ...]:
    if text == "auto":
        return "auto"
    return () if text == "none" else tuple(name.strip() for name in text.split(","))
