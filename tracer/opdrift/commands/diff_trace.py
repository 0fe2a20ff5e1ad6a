"""Compare two traces: which op, parameter or input differs first, how far, why, and what to try.

LEFT is the run taken as reference, RIGHT the one to explain. Traces of several ranks are compared
rank by rank.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from opdrift.commands.console import check_output, complain, emit, write_report
from opdrift.commands.exit_codes import ExitCode
from opdrift.commands.options import name_pair, natural, sample_pair, tolerance
from opdrift.errors import InvalidOptionError

if TYPE_CHECKING:
    from opdrift.records import Diagnosis
    from opdrift.render.page import Screen

EPILOG: Final = """\
exit status: 0 identical, 1 they differ, 2 they could not be compared.
With --fail-on diverged, runs that differ by rounding only end with 0."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `diff-trace`; tests/test_public_api.py freezes them."""
    parser.usage = f"{parser.prog} LEFT RIGHT [options]"
    parser.add_argument(
        "traces", metavar="TRACE", nargs="*", help="LEFT and RIGHT: folders that record() wrote"
    )
    add = parser.add_argument_group("what is compared").add_argument
    add(
        "--samples",
        metavar="L:R",
        type=sample_pair,
        help="sample L of the left run with sample R of the right one (recorded with batch=)",
    )
    add("--rank", metavar="N", type=natural, help="only this rank of distributed traces")
    add(
        "--rtol",
        metavar="R",
        type=tolerance,
        help="relative difference that counts as rounding; together with --atol",
    )
    add(
        "--atol",
        metavar="A",
        type=tolerance,
        help="absolute difference that counts as rounding; together with --rtol",
    )
    add(
        "--map",
        metavar="LEFT=RIGHT",
        type=name_pair,
        action="append",
        default=[],
        help="a module has another path on the right; may be repeated",
    )
    add(
        "--across-ranks",
        action="store_true",
        help="compare the ranks of one trace (not in this version)",
    )
    add = parser.add_argument_group("what is printed").add_argument
    add(
        "--format",
        choices=("text", "json", "markdown", "html"),
        default="text",
        help="text is the default; html is not in this version",
    )
    add(
        "-o",
        "--output",
        metavar="FILE",
        type=Path,
        help="write the report to FILE, and only the verdict to stdout",
    )
    add("-q", "--quiet", action="store_true", help="print only the verdict")
    add("--context", metavar="N", type=natural, help="also show N ops around the first divergence")
    add(
        "--side-by-side",
        action="store_true",
        help="show the ops of both runs around the first divergence in two columns",
    )
    add("--tree", action="store_true", help="show the modules as a tree, equal ones folded")
    parser.add_argument(
        "--fail-on",
        choices=("any", "diverged"),
        default="any",
        help="what ends with status 1 (default: any difference)",
    )


def run(options: argparse.Namespace) -> int:
    """Compare, report, and answer with the exit status."""
    _check(options)
    left, right = options.traces
    from opdrift import diff

    diagnosis = diff(
        left,
        right,
        samples=options.samples,
        tolerance=_tolerance(options),
        rank=options.rank,
        maps=tuple(options.map),
    )
    _report(diagnosis, options)
    failed = diagnosis.verdict == "diverged" or (
        diagnosis.verdict == "rounding" and options.fail_on == "any"
    )
    return ExitCode.DIFFER if failed else ExitCode.SAME


def _check(options: argparse.Namespace) -> None:
    """What argparse cannot see: combinations, and what this version lacks.

    Raises:
        InvalidOptionError: Said with what to do instead.
    """
    if options.across_ranks:
        raise InvalidOptionError(
            "--across-ranks is not in this version of opdrift; `diff-trace LEFT RIGHT` compares two distributed runs rank by rank."
        )
    if options.format == "html":
        raise InvalidOptionError(
            "--format html is not in this version of opdrift; choose text, json or markdown."
        )
    if len(options.traces) != 2:
        raise InvalidOptionError(
            f"diff-trace compares two traces, LEFT and RIGHT; {len(options.traces)} were given."
        )
    if (options.rtol is None) != (options.atol is None):
        raise InvalidOptionError(
            "--rtol and --atol belong together: give both, or neither for the bounds of each op."
        )
    if options.output is not None:
        check_output(options.output)
    elif options.quiet and options.format != "text":
        raise InvalidOptionError(
            f"-q prints only the verdict, and no {options.format}; leave one of them out, or write the report with -o FILE."
        )


def _report(diagnosis, options):
    pass


def _tolerance(options):
    return None
