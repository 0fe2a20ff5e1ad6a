"""Compare two traces: which op, parameter or input differs first, how far, why, and what to try.

LEFT is the run taken as reference, RIGHT the one to explain. Traces of several ranks are compared
rank by rank.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from opdrift.commands.console import check_output, emit, write_report
from opdrift.commands.exit_codes import ExitCode
from opdrift.commands.options import name_pair, natural, sample_pair, tolerance
from opdrift.commands.progress import Elapsed
from opdrift.errors import InvalidOptionError

if TYPE_CHECKING:
    from opdrift.records import Diagnosis, Sides, TraceSummary
    from opdrift.render.page import Screen
    from opdrift.tracefile.reader import Trace

EPILOG: Final = """\
exit status: 0 identical, 1 they differ, 2 they could not be compared.
With --fail-on diverged, runs that differ by rounding only end with 0."""

_FILE_WIDTH: Final = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `diff-trace`; tests/test_public_api.py freezes them."""
    parser.usage = (
        f"{parser.prog} LEFT RIGHT [options]\n       {parser.prog} --across-ranks TRACE [options]"
    )
    parser.add_argument(
        "traces",
        metavar="TRACE",
        nargs="*",
        help="LEFT and RIGHT: folders that record() wrote; or two logs of DebugMode or torchtitan",
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
        help="a module has another path on the right; an empty side is the root module; may be repeated",
    )
    add(
        "--checkpoint",
        metavar="FILE",
        type=Path,
        action="append",
        default=[],
        help="say of each run how much of this file reached its model; may be repeated",
    )
    add(
        "--across-ranks",
        action="store_true",
        help="with one distributed trace: check that what should be equal on all its ranks is",
    )
    add = parser.add_argument_group("what is printed").add_argument
    add(
        "--format",
        choices=("text", "json", "markdown", "html"),
        default="text",
        help="text is the default; html is one page to open in a browser, and needs -o FILE",
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
    names = " with ".join(Path(given).name for given in options.traces)
    with Elapsed(f"comparing {names}", quiet=options.quiet) as elapsed:
        diagnosis, traces = _compare(options, elapsed.now)
        if options.checkpoint:
            diagnosis = _with_checkpoint(diagnosis, traces, options.checkpoint)
    _report(diagnosis, traces, options)
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
        _check_across_ranks(options)
    elif len(options.traces) != 2:
        raise InvalidOptionError(
            f"diff-trace compares two traces, LEFT and RIGHT; {len(options.traces)} were given."
        )
    if (options.rtol is None) != (options.atol is None):
        raise InvalidOptionError(
            "--rtol and --atol belong together: give both, or neither for the bounds of each op."
        )
    if options.format != "text" and (
        options.tree or options.side_by_side or options.context is not None
    ):
        raise InvalidOptionError(
            f"--tree, --side-by-side and --context belong to text; {options.format} has no such views."
        )
    if options.output is not None:
        check_output(options.output)
    elif options.format == "html":
        raise InvalidOptionError(
            "--format html writes a page for a browser, not for a terminal: name its file with -o, such as -o report.html."
        )
    elif options.quiet and options.format != "text":
        raise InvalidOptionError(
            f"-q prints only the verdict, and no {options.format}; leave one of them out, or write the report with -o FILE."
        )


def _check_across_ranks(options: argparse.Namespace) -> None:
    """One trace, and nothing that chooses what of two runs is compared."""
    if len(options.traces) != 1:
        raise InvalidOptionError(
            f"diff-trace --across-ranks looks into one distributed trace; {len(options.traces)} were given."
        )
    chosen = {
        "--samples": options.samples is not None,
        "--rank": options.rank is not None,
        "--rtol and --atol": options.rtol is not None or options.atol is not None,
        "--map": bool(options.map),
        "--tree": options.tree,
        "--side-by-side": options.side_by_side,
        "--context": options.context is not None,
        "--checkpoint": bool(options.checkpoint),
    }
    for name in (name for name, given in chosen.items() if given):
        raise InvalidOptionError(
            f"{name} compares two runs; --across-ranks holds the ranks of one against each other, bit for bit. Leave one of them out."
        )


def _compare(
    options: argparse.Namespace, progress: Callable[[str], object]
) -> tuple[Diagnosis, Sides[Trace | Path]]:
    """The answer, and the traces, opened already where they are of one process; logs stay paths."""
    from opdrift.diagnose import diff
    from opdrift.records import Sides
    from opdrift.tracefile.opening import load, rank_folders

    if options.across_ranks:
        from opdrift.diagnose.across_ranks import across_ranks

        folder = Path(options.traces[0])
        return across_ranks(folder), Sides(folder, folder)
    paths = [Path(given) for given in options.traces]
    logs = any(path.is_file() for path in paths)
    if logs and (options.tree or options.side_by_side or options.context is not None):
        raise InvalidOptionError(
            "--tree, --side-by-side and --context need traces of opdrift.record(); these are logs of another tool."
        )
    left, right = (path if logs or rank_folders(path) else load(path) for path in paths)
    answer = diff(
        left,
        right,
        samples=options.samples,
        tolerance=_tolerance(options),
        rank=options.rank,
        maps=tuple(options.map),
        progress=progress,
    )
    return answer, Sides(left, right)


def _with_checkpoint(
    diagnosis: Diagnosis, traces: Sides[Trace | Path], files: Sequence[Path]
) -> Diagnosis:
    from opdrift.checkpoints import compared, dtypes_of, read
    from opdrift.records import Sides

    if not diagnosis.exact:
        raise InvalidOptionError(
            "--checkpoint needs traces of opdrift.record(); these are logs of another tool."
        )
    opened = Sides(
        _opened(traces.left, diagnosis.left),
        _opened(traces.right, diagnosis.right),
    )
    dtypes = dtypes_of(opened.left) | dtypes_of(opened.right)
    return compared(diagnosis, opened, read(files, dtypes=dtypes))


def _report(diagnosis: Diagnosis, traces: Sides[Trace | Path], options: argparse.Namespace) -> None:
    from opdrift.render import text
    from opdrift.render.page import Screen

    screen = Screen.of(sys.stdout)
    if options.output is not None:
        # a file has no width of its own; UTF-8 is what it is written in
        paper = Screen(_FILE_WIDTH, unicode=True, folder=screen.folder)
        with Elapsed(f"writing {options.output}", quiet=options.quiet):
            write_report(options.output, _rendered(diagnosis, traces, options, paper))
    if options.output is not None or options.quiet:
        emit(text.verdict_line(diagnosis, screen))
        return
    with Elapsed("writing the report"):
        report = _rendered(diagnosis, traces, options, screen)
    emit(report)


def _rendered(
    diagnosis: Diagnosis, traces: Sides[Trace | Path], options: argparse.Namespace, screen: Screen
) -> str:
    if options.format == "json":
        from opdrift.render import json

        return json.render(diagnosis)
    if options.format == "markdown":
        from opdrift.render import markdown
        from opdrift.render.words import relative

        # it is made to be pasted where others read: no path of this machine that need not be there
        return relative(markdown.render(diagnosis), screen.folder)
    if options.format == "html":
        return _page(diagnosis, traces, options, screen)
    from opdrift.render import text

    if not diagnosis.exact:  # logs of another tool: no trace to look further into
        return text.render(diagnosis, screen, options=_chosen(options))
    left, right = _both(diagnosis, traces)
    types = {path: type_ for path, type_ in left.module_types.items() if type_}
    pages = [
        text.render(
            diagnosis,
            screen,
            module_types=types,
            options=_chosen(options),
            seen=options.side_by_side,
        ),
        *_views(diagnosis, left, right, options, screen),
    ]
    return "".join(pages)


def _page(
    diagnosis: Diagnosis, traces: Sides[Trace | Path], options: argparse.Namespace, screen: Screen
) -> str:
    from opdrift.records import Sides
    from opdrift.render import html

    return html.render(
        diagnosis,
        Sides(*_both(diagnosis, traces)) if diagnosis.exact else None,
        samples=options.samples,
        maps=options.map,
        options=_chosen(options),
        folder=screen.folder,
    )


def _both(diagnosis: Diagnosis, traces: Sides[Trace | Path]) -> tuple[Trace, Trace]:
    """The traces that the answer is about, opened."""
    return _opened(traces.left, diagnosis.left), _opened(traces.right, diagnosis.right)


def _opened(trace: Trace | Path, summary: TraceSummary) -> Trace:
    from opdrift.tracefile.opening import load

    return load(trace, rank=summary.rank) if isinstance(trace, Path) else trace


def _views(
    diagnosis: Diagnosis, left: Trace, right: Trace, options: argparse.Namespace, screen: Screen
) -> Iterator[str]:
    """What --context, --side-by-side and --tree add below the card."""
    if options.context is None and not options.side_by_side and not options.tree:
        return
    from opdrift.render import tree, views
    from opdrift.render.rows import rows_of

    rows = rows_of(left, right, diagnosis, samples=options.samples, maps=options.map)
    if options.side_by_side:
        yield views.side_by_side(
            rows, views.CONTEXT if options.context is None else options.context, screen
        )
    elif options.context is not None:
        yield views.around(rows, options.context, screen)
    if options.tree:
        yield tree.tree(rows, screen)


def _chosen(options: argparse.Namespace) -> list[str]:
    """The options that choose what is compared, as they are typed: a command that looks further needs them, too."""
    found = []
    if options.samples is not None:
        found += ["--samples", "{}:{}".format(*options.samples)]
    if options.rank is not None:
        found += ["--rank", str(options.rank)]
    for left, right in options.map:
        found += ["--map", f"{left}={right}"]
    return found


def _tolerance(options: argparse.Namespace) -> tuple[float, float] | None:
    return None if options.rtol is None else (options.rtol, options.atol)
