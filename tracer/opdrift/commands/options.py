"""What the parsers of all commands share: `--version`, and kinds of arguments."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Sequence
from typing import Any

from opdrift.commands.console import emit


class Version(argparse.Action):
    """Print the version and stop; it is looked up only when asked for."""

    def __init__(self, option_strings: Sequence[str], dest: str, **_: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, help="print the version and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        """Called by the parser where the option stands."""
        import opdrift

        emit(f"{parser.prog} {opdrift.__version__}\n")
        parser.exit()


class Paragraphs(argparse.HelpFormatter):
    """Help as wide as the terminal; what a description or epilog indents stays as it is."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        made: list[str] = []
        flowing = False
        for line in text.splitlines():
            flows = bool(line) and not line.startswith(" ")
            if flows and flowing:
                made[-1] += f" {line}"
            else:
                made.append(line)
            flowing = flows
        return "\n".join(
            line if line.startswith(" ") or not line else textwrap.fill(line, width)
            for line in made
        )


def sample_pair(text: str) -> tuple[int, int]:
    """Which sample of the left trace and which of the right one: "0:7" gives (0, 7)."""
    left, colon, right = text.partition(":")
    if not colon or not left.isdecimal() or not right.isdecimal():
        raise argparse.ArgumentTypeError(
            f"{text!r} is not L:R, two sample numbers counted from 0, such as 0:7"
        )
    return int(left), int(right)


def name_pair(text: str) -> tuple[str, str]:
    """The two sides of "encoder=model.encoder"; "=encoder" says that the left root is the right run's encoder."""
    left, equals, right = text.partition("=")
    if not equals or not (left or right):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not LEFT=RIGHT, two module paths, such as encoder=model.encoder"
            " (an empty one is the root module)"
        )
    return left, right


def natural(text: str) -> int:
    """A whole number from 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0")
    return int(text)


def span(text: str) -> tuple[int, int]:
    """The ends of "2:5", both included; "3" is one alone."""
    first, colon, last = text.partition(":")
    last = last if colon else first
    if not first.isdecimal() or not last.isdecimal() or int(first) > int(last):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not N or FIRST:LAST, two whole numbers, such as 2:5"
        )
    return int(first), int(last)


def tolerance(text: str) -> float:
    """A finite number from 0."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number from 0, such as 1e-5")
    return number
