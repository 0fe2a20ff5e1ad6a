"""Entry points: `diff-trace`, and `opdrift` with its sub-commands."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from opdrift.commands.console import complain, open_streams
from opdrift.commands.exit_codes import ExitCode
from opdrift.commands.options import Paragraphs, Version
from opdrift.errors import OpdriftError

#: An exit status; or what runs a program of the user's, whose exceptions are not ours to catch, and returns one.
Outcome = int | Callable[[], int]


T = TypeVar("T")


class Command(Protocol):
    """A module that is a command; its docstring is its help, the first line its summary."""

    __doc__: str | None
    EPILOG: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the options."""

    def run(self, options: argparse.Namespace) -> Outcome:
        """Do it and return the exit status, or what runs the user's program."""
        ...


def diff_trace(arguments: Sequence[str] | None = None) -> int:
    """The command `diff-trace`; returns the exit status."""
    from opdrift.commands import diff_trace as command

    given = sys.argv[1:] if arguments is None else list(arguments)
    parser = _configured(argparse.ArgumentParser("diff-trace"), command)
    parser.add_argument("--version", action=Version)
    return _guarded("diff-trace", lambda: int(command.run(parser.parse_args(given))))


def opdrift(arguments: Sequence[str] | None = None) -> int:
    """The command `opdrift`; returns the exit status."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    outcome = _guarded("opdrift", lambda: _dispatch(given))
    return outcome() if callable(outcome) else outcome


def _dispatch(given: Sequence[str]) -> Outcome:
    from opdrift.commands import diff_trace, env, export, run, show

    # `diff` is `diff-trace`, for where scripts are not on the PATH
    commands: dict[str, Command] = {
        "diff": diff_trace,
        "run": run,
        "show": show,
        "export": export,
        "env": env,
    }
    parser = argparse.ArgumentParser(
        "opdrift",
        description="Record every op of a PyTorch run, diff two runs, and learn which op diverged first and why.",
    )
    parser.add_argument("--version", action=Version)
    parsers = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True, dest="command"
    )
    for name, command in commands.items():
        summary = (command.__doc__ or "").partition("\n")[0]
        below = parsers.add_parser(name, help=summary[0].lower() + summary[1:].rstrip("."))
        if given[:1] == [name]:  # the options of the others are not looked for
            _configured(below, command)
    # what follows the program's name belongs to the program, dashes and all; argparse cannot tell
    own, program = run.split(given) if given[:1] == ["run"] else (given, ())
    options = parser.parse_args(own)
    options.program = program
    return commands[options.command].run(options)


def _configured(parser: argparse.ArgumentParser, command: Command) -> argparse.ArgumentParser:
    parser.description = command.__doc__
    parser.epilog = command.EPILOG
    parser.formatter_class = Paragraphs
    command.add_arguments(parser)
    return parser


def _guarded(program: str, work: Callable[[], T]) -> T | int:
    """Run a command: every failure is one sentence on stderr and an exit status, never a traceback."""
    open_streams()
    try:
        return work()
    except OpdriftError as error:
        complain(program, str(error))
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except (
        Exception
    ) as error:  # a bug of ours, whatever it is: ask for a report instead of a traceback
        if os.environ.get("OPDRIFT_DEBUG") == "1":
            traceback.print_exc()
        said = f"{type(error).__name__}: {error}".rstrip(": ")
        complain(
            program,
            f"this is a bug in opdrift ({said}). Please report it with the output of `opdrift env`;"
            " OPDRIFT_DEBUG=1 shows where it happened.",
        )
    return ExitCode.TROUBLE
