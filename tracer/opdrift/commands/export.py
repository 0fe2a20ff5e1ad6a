"""Write a trace in the format of another tool, or send it there.

`opdrift export FORMAT --help` tells the options of a format.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from opdrift.commands.console import complain, emit
from opdrift.commands.exit_codes import ExitCode
from opdrift.commands.options import Paragraphs, name_pair, natural, span
from opdrift.commands.progress import Progress
from opdrift.errors import ExportError

if TYPE_CHECKING:
    from opdrift.plugins import Exporter

EPILOG: Final = """\
exit status: 0; 2 if the trace could not be exported, or not all of it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare a sub-command for each installed exporter."""
    from opdrift.plugins import installed_exporters

    parsers = parser.add_subparsers(
        title="formats", metavar="FORMAT", required=True, dest="exporter_name"
    )
    for name in sorted(installed_exporters()):
        exporter = _loaded(name)
        if isinstance(exporter, Exception):
            below = parsers.add_parser(
                name, help=f"cannot be loaded: {exporter}".replace("%", "%%")
            )
            below.add_argument("trace", nargs=argparse.REMAINDER)  # run() says what is wrong
            continue
        said = exporter.__doc__ or name
        summary = said.partition("\n")[0].strip().rstrip(".")
        below = parsers.add_parser(
            name,
            help=(summary[:1].lower() + summary[1:]).replace("%", "%%"),
            description=inspect.cleandoc(said).replace("%", "%%"),
            epilog=EPILOG,
            formatter_class=Paragraphs,
        )
        _add_shared(below)
        exporter.add_arguments(below)


def _add_shared(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "trace", metavar="TRACE", type=Path, help="a folder that record() wrote; all its ranks"
    )
    add = parser.add_argument_group("what is exported").add_argument
    add("--rank", metavar="N", type=natural, help="only this rank of a distributed trace")
    add("--scope", metavar="GLOB", help="only the ops of these modules and of what is below them")
    add("--steps", metavar="FIRST:LAST", type=span, help="only the ops of these steps, as 3 or 2:5")
    add(
        "--against",
        metavar="OTHER",
        type=Path,
        help="compare with this run, and mark where TRACE comes apart from it",
    )
    add(
        "--map",
        metavar="LEFT=RIGHT",
        type=name_pair,
        action="append",
        default=[],
        help="with --against: a module of OTHER has another path in TRACE; may be repeated",
    )
    add = parser.add_argument_group("where to").add_argument
    add(
        "-o",
        "--output",
        metavar="PATH",
        type=Path,
        help="what to write (default: after the trace, in this folder)",
    )
    add("--force", action="store_true", help="replace what an earlier export wrote there")


def run(options: argparse.Namespace) -> int:
    """Export, and say what was."""
    exporter = _loaded(options.exporter_name)
    if isinstance(exporter, Exception):
        raise ExportError(
            f"the exporter {options.exporter_name} cannot be loaded ({type(exporter).__name__}: {exporter});"
            " upgrade or uninstall the package that it comes with."
        )
    _check_installed(options.exporter_name, exporter)
    target = _target(exporter, options)

    from opdrift.export.processes import Processes, Selection
    from opdrift.plugins import Export

    selection = Selection(options.rank, options.scope, options.steps)
    with Progress(f"exporting {options.trace.name}") as progress:

        def warn(text: str) -> None:
            progress.clear()
            complain("opdrift", text)

        maps = tuple(options.map)
        processes = Processes(
            options.trace, selection, warn=warn, against=options.against, maps=maps
        )
        with _output(exporter, target, options) as output:
            said = exporter.export(Export(processes, options, output, progress, warn))
    if target is not None and target.exists() and not (target.is_file() or target.is_dir()):
        complain("opdrift", said)  # the export itself may have gone to stdout
    else:
        emit(f"{said}\n")
    return ExitCode.SAME


def _loaded(name: str) -> Exporter | Exception:
    """An exporter, or why it cannot be loaded: one that is broken is no reason to fail for the others."""
    from opdrift.plugins import installed_exporters

    try:
        made: Exporter = installed_exporters()[name].load()()
    except Exception as error:  # whatever a package that is not ours raises
        return error
    return made


def _check_installed(name: str, exporter: Exporter) -> None:
    missing = [module for module in exporter.requires if not _importable(module)]
    if not missing:
        return
    remedy = f"pip install 'opdrift[{exporter.extra}]'" if exporter.extra else "install it"
    raise ExportError(
        f"export {name} needs {' and '.join(missing)}, which this Python does not have: {remedy}"
    )


def _importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that it is in
        return False


def _target(exporter: Exporter, options: argparse.Namespace) -> Path | None:
    suffix = exporter.suffix(options)
    if options.output is not None:
        return Path(options.output)
    return None if suffix is None else Path(options.trace.resolve().stem + suffix)


@contextmanager
def _output(
    exporter: Exporter, target: Path | None, options: argparse.Namespace
) -> Iterator[Path | None]:
    if target is None:
        yield None
        return
    from opdrift.export.output import whole

    with whole(
        target,
        kind=exporter.writes,
        suffix=exporter.suffix(options) or "",
        replace=options.force,
    ) as path:
        yield path
