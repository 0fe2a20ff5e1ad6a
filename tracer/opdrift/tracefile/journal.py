"""Marks that are on disk before what they announce happens, until the table of marks has them.

A line each, its CRC-32 in front: `1f2e3d4c [seq, time, kind, call, thread, fields]`. Written without a buffer, so
that a process that ends in the next instruction leaves it.
"""

from __future__ import annotations

import json
import zlib
from io import FileIO
from pathlib import Path
from typing import Final

import pyarrow as pa

from opdrift.tracefile.schema import TABLES

JOURNAL: Final = "journal.jsonl"

MarkRow = tuple[int, int, str, int, int, str]


class Journal:
    """The journal of a trace that is being written; its file is made with the first mark. Not thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / JOURNAL
        self._file: FileIO | None = None
        self._length = 0

    def append(self, row: MarkRow) -> None:
        """Write a mark."""
        if self._file is None:
            self._file = FileIO(self._path, "xb")
        data = json.dumps(row).encode()
        self._length += self._file.write(b"%08x %s\n" % (zlib.crc32(data), data)) or 0

    def clear(self) -> None:
        """The table has all marks now."""
        if self._file is not None and self._length:
            self._file.seek(0)
            self._file.truncate()
            self._length = 0

    def close(self) -> None:
        """Close the file; it goes if nothing is in it."""
        if self._file is None:
            return
        self._file.close()
        self._file = None
        if not self._length:
            self._path.unlink()


def with_journal(folder: Path, marks: pa.Table) -> pa.Table:
    """The table of marks of a run that was killed, with those that only its journal has."""
    try:
        lines = (folder / JOURNAL).read_bytes().splitlines()
    except OSError:
        return marks
    names = TABLES["marks"].names
    known = {tuple(row[name] for name in names) for row in marks.to_pylist()} if lines else set()
    rows = []
    for line in lines:
        row = _row(line)
        if row is None:
            break  # torn or damaged: what follows is not to be trusted either
        if row not in known:
            rows.append(dict(zip(names, row, strict=True)))
    return pa.concat_tables([marks, pa.Table.from_pylist(rows, schema=TABLES["marks"])])


def _row(line: bytes) -> MarkRow | None:
    crc, _, data = line.partition(b" ")
    if crc != b"%08x" % zlib.crc32(data):
        return None
    seq, time, kind, call, thread, fields = json.loads(data)
    return seq, time, kind, call, thread, fields
