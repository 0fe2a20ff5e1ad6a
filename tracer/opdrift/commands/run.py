"""Run an unmodified program, traced.

The program sees its own arguments, its exit status is kept, and the trace is written however it
ends. What follows SCRIPT or -m MODULE belongs to the program.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Final

from opdrift.commands.console import complain
from opdrift.commands.program import check
from opdrift.errors import InvalidOptionError

if TYPE_CHECKING:
    from opdrift.recorder import Recorder

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
        alone = word in _FLAGS or "=" in word or (word.startswith("-o") and word != "-o")
        position += 1 if alone else 2
    return list(arguments[:position]), tuple(arguments[position:])


def run(options: argparse.Namespace) -> int:
    """Run the program inside `record()` and answer with its exit status."""
    module, name, arguments = _program(options.program)
    output = options.output or Path(
        f"{name.rpartition('.')[2] if module else Path(name).stem}.trace"
    )

    with _as_program(module, name, arguments):
        check(module, name)  # before a trace is made, or replaced, for nothing

    import opdrift

    recorder = opdrift.record(
        output,
        label=options.label,
        integrations=_integrations(options.integrations),
        kernels=options.kernels,
        integrity=options.integrity,
        overwrite=options.overwrite,
    )
    with _as_program(module, name, arguments):
        status = _run_traced(recorder, module, name)
    complain("opdrift", f"the trace is in {output}")
    return status


def _program(program: Sequence[str]) -> tuple[bool, str, Sequence[str]]:
    module = program[:1] == ("-m",)
    rest = program[1:] if module else program
    if not rest:
        raise InvalidOptionError(
            "run needs a program: opdrift run [options] SCRIPT|-m MODULE [ARGS...]"
        )
    if not module and not Path(rest[0]).is_file():
        raise InvalidOptionError(
            f"{rest[0]} is no file that could be run; give a Python script, or -m and a module."
        )
    return module, rest[0], rest[1:]


def _integrations(text: str) -> str | tuple[str, ...]:
    if text == "auto":
        return "auto"
    return () if text == "none" else tuple(name.strip() for name in text.split(","))


@contextmanager
def _as_program(module: bool, name: str, arguments: Sequence[str]) -> Iterator[None]:
    """Let `sys.argv` and `sys.path` be what `python SCRIPT ARGS` would have."""
    argv, path = sys.argv, sys.path[:]
    sys.argv = [name, *arguments]
    sys.path.insert(0, "" if module else str(Path(name).resolve().parent))
    try:
        yield
    finally:
        sys.argv = argv
        sys.path[:] = path


def _run_traced(recorder: Recorder, module: bool, name: str) -> int:
    """Run the program as `__main__`; return what Python's exit status would be."""
    started = False
    try:
        with recorder:
            started = True
            return _run_as_main(module, name)
    except SystemExit as end:
        return _status(end)
    except BaseException as error:
        if not started:
            raise
        # the program's own: shown as Python shows it, by its own hook if it has one
        error = error.with_traceback(_below_us(error.__traceback__))
        sys.excepthook(type(error), error, error.__traceback__)
        return 130 if isinstance(error, KeyboardInterrupt) else 1


def _run_as_main(module: bool, name: str) -> int:
    try:
        if module:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(name, run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise  # the trace then says that the run did not end well
    return 0


def _status(end: SystemExit) -> int:
    if isinstance(end.code, int):
        return end.code
    print(end.code, file=sys.stderr)
    return 1


def _below_us(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the program's first frame on; all of it if the program has none."""
    here = trace
    while here is not None and here.tb_frame.f_code.co_filename in (
        __file__,
        runpy.__file__,
        "<frozen runpy>",
    ):
        here = here.tb_next
    return here or trace
