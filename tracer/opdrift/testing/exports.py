"""Run an exporter on traces in memory."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from warnings import warn

from opdrift.export.processes import Processes, Selection
from opdrift.plugins import Export, Exporter
from opdrift.tracefile.reader import Trace


def export(
    exporter: Exporter,
    *traces: Trace,
    arguments: Sequence[str] = (),
    output: Path | None = None,
    against: Trace | None = None,
) -> str:
    """Do what `opdrift export` does with an exporter, and return what it says.

    Args:
        exporter: An instance.
        traces: One, or one a rank.
        arguments: The exporter's own options, as on the command line.
        output: Where it writes; a folder must exist.
        against: Compare with this trace.

    Raises:
        OpdriftError: What the command would say and exit with 2.

    Warns:
        UserWarning: What the command would say on stderr.
    """
    parser = ArgumentParser()
    parser.set_defaults(output=output)  # the option -o, which an exporter may look at
    exporter.add_arguments(parser)
    options = parser.parse_args(arguments)
    processes = Processes(traces, Selection(), warn=warn, against=against)
    return exporter.export(Export(processes, options, output, lambda done, total: None, warn))
