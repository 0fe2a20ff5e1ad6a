"""`opdrift export chrome`: a timeline in the JSON that torch.profiler writes."""

from __future__ import annotations

import gzip
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Final, Literal

from opdrift.plugins import Export

#: Of what a timeline's JSON is made, more is hardly smaller and takes twice as long.
_LEVEL: Final = 4


class ChromeExporter:
    """Write a timeline as torch.profiler does, in Chrome's JSON.

    It opens wherever such traces do: at ui.perfetto.dev, in chrome://tracing, in HTA (one file a rank: --rank), on one
    time axis with a torch.profiler trace of the same run. -o FILE.json.gz compresses it.
    """

    writes: Literal["file", "folder"] = "file"
    requires: tuple[str, ...] = ()
    extra = ""

    def add_arguments(self, parser: ArgumentParser) -> None:
        """There are none of its own."""

    def suffix(self, options: Namespace) -> str:
        """What torch.profiler's handlers call such files."""
        return ".pt.trace.json.gz"

    def export(self, export: Export) -> str:
        """Write it."""
        # here, because the class is loaded for every `opdrift export --help`
        from opdrift.export.kineto import Document  # noqa: PLC0415
        from opdrift.export.output import Counted, file_size  # noqa: PLC0415

        assert export.output is not None
        named = Path(getattr(export.options, "output", None) or f"x{self.suffix(export.options)}")
        with export.output.open("wb") as opened:
            file = Counted(opened)
            if named.suffix != ".gz":
                said = Document(file, named.name).write(export)
            else:  # no name and no time in it: equal traces give equal files
                with gzip.GzipFile("", "wb", _LEVEL, file, mtime=0) as packed:
                    said = Document(packed, named.name).write(export)
            return f"{said}, {file_size(file.written)}; open it at ui.perfetto.dev"
