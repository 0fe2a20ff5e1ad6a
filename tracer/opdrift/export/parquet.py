"""`opdrift export parquet`: tables for DuckDB, Polars, pandas."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from typing import Literal

from opdrift.plugins import Export


class ParquetExporter:
    """Write a folder of Parquet tables, for DuckDB, Polars, pandas and the like.

    One file a table: ops, tensors, leaves, marks, calls, runs; all ranks are in them. docs/export.md explains each
    column. With --against, ops have the columns status and counterpart.
    """

    writes: Literal["file", "folder"] = "folder"
    requires: tuple[str, ...] = ()
    extra = ""

    def add_arguments(self, parser: ArgumentParser) -> None:
        """There are none of its own."""

    def suffix(self, options: Namespace) -> str:
        """Of the files; the folder is called so, too."""
        return ".parquet"

    def export(self, export: Export) -> str:
        """Write it."""
        # here, because the class is loaded for every `opdrift export --help`
        from opdrift.export.tables import write_tables  # noqa: PLC0415

        assert export.output is not None
        return write_tables(export, export.output)
