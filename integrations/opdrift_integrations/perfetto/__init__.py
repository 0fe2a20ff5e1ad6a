"""`opdrift export perfetto`: a timeline for Perfetto's viewer."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Literal

from opdrift.plugins import Export


class PerfettoExporter:
    """Write a timeline for Perfetto: modules, ops, gathers and moves, collectives, memory.

    Open it at ui.perfetto.dev, which reads it in your browser and sends it nowhere, or query it with Perfetto's
    trace_processor. With --against, ops are categorised by the comparison, and the first divergence is marked.
    """

    writes: Literal["file", "folder"] = "file"
    requires: tuple[str, ...] = ("perfetto", "google.protobuf")
    extra = "perfetto"

    def add_arguments(self, parser: ArgumentParser) -> None:
        """There are none of its own."""

    def suffix(self, options: Namespace) -> str:
        """What such files are called."""
        return ".pftrace"

    def export(self, export: Export) -> str:
        """Write it."""
        # here, because the class is loaded for every `opdrift export --help`
        from opdrift.export.output import Counted, file_size  # noqa: PLC0415
        from opdrift.export.timeline import written  # noqa: PLC0415
        from opdrift_integrations.perfetto.dialect import DIALECT  # noqa: PLC0415
        from opdrift_integrations.perfetto.writer import write  # noqa: PLC0415

        assert export.output is not None
        with export.output.open("wb") as opened:
            file = Counted(opened)
            said = written(export, DIALECT, lambda drawn, progress: write(file, drawn, progress))
            return f"{said}, {file_size(file.written)}; open it at ui.perfetto.dev"
