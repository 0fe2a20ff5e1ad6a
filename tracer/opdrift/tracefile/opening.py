"""Open a trace: check its parts, and read what is whole."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.ipc as ipc

from opdrift.errors import DamagedTraceError, NotATraceError, TraceVersionError
from opdrift.records import TRACE_SCHEMA, Footer, Header
from opdrift.tracefile.columns import ints, ragged
from opdrift.tracefile.journal import with_journal
from opdrift.tracefile.reader import Trace
from opdrift.tracefile.schema import CHECKS, FOOTER, HEADER, TABLES, checksum
from opdrift.tracefile.stored import StoredRows, split

#: The table whose long columns stay on disk until a row is asked for.
_PARTLY: Final = "tensors"
#: Bytes that are read at a time to be checked.
_CHUNK: Final = 1 << 20


def rank_folders(path: Path) -> dict[int, Path]:
    """Rank -> folder of a distributed trace; empty for a trace of one process."""
    return {
        int(p.name[5:]): p
        for p in sorted(path.glob("rank-*"))
        if p.name[5:].isdecimal() and (p / HEADER).exists()
    }


def load(path: str | Path, *, rank: int | None = None) -> Trace:
    """Open a trace.

    Args:
        path: The folder that `record` made.
        rank: Which rank of a distributed trace; None takes rank 0's, or the only one.

    Raises:
        NotATraceError: The path does not exist or holds no trace.
        TraceVersionError: The trace is of a newer schema.
        DamagedTraceError: The header cannot be read.
    """
    try:
        return _load(Path(path), rank)
    except OSError as error:
        raise DamagedTraceError(
            f"{path} cannot be read: {error.strerror or error}. Check the permissions of the folder and its files."
        ) from error


def _load(folder: Path, rank: int | None) -> Trace:
    if not folder.exists():
        raise NotATraceError(
            f"{folder} does not exist. Give the folder that opdrift.record() or `opdrift run -o` wrote."
        )
    ranks = rank_folders(folder) if folder.is_dir() else {}
    if ranks:
        chosen = min(ranks) if rank is None else rank
        if chosen not in ranks:
            raise NotATraceError(
                f"{folder} has no rank {chosen}; it holds ranks {', '.join(map(str, ranks))}."
            )
        return load(ranks[chosen])
    if not folder.is_dir() or not (folder / HEADER).exists():
        what = "is a file" if folder.is_file() else f"has no {HEADER}"
        raise NotATraceError(
            f"{folder} {what}, so it is no opdrift trace. A trace is a folder that opdrift.record() made."
        )
    header = _header(folder)
    if rank is not None and rank != (header.rank or 0):
        raise NotATraceError(
            f"{folder} is of rank {header.rank or 0}, not {rank}. Leave --rank out."
        )
    lengths, damage = _verified_lengths(folder)
    tables = {
        name: _table(folder / f"{name}.arrows", name, lengths.get(name, 0))
        for name in TABLES
        if name != _PARTLY
    }
    tables[_PARTLY], stored = _thin_table(
        folder / f"{_PARTLY}.arrows", _PARTLY, lengths.get(_PARTLY, 0)
    )
    footer, trouble = _footer(folder)
    incomplete = damage or trouble
    if incomplete is None and footer is not None and footer.failures:
        first = footer.failures[0]
        incomplete = (
            f"opdrift itself failed at {len(footer.failures)} places while recording,"
            f" first at {first['where']} ({first['error']})"
        )
    if incomplete is None and footer is not None and footer.ops != tables["ops"].num_rows:
        incomplete = f"the footer counts {footer.ops} ops, the table holds {tables['ops'].num_rows}"
    if footer is None:
        tables["marks"] = with_journal(folder, tables["marks"])
    if incomplete is not None:
        tables = _consistent(tables)
        last = ints(tables["ops"], "seq").max(initial=0)
        incomplete = f"incomplete at op {last}: {incomplete}"
    return Trace(folder, header, footer, tables, incomplete, stored=stored)


def _consistent(tables: dict[str, pa.Table]) -> dict[str, pa.Table]:
    """Cut an incomplete trace before the first op that refers to something another thread never wrote."""
    ops = tables["ops"]
    known = np.append(ints(tables["values"], "value"), 0)
    first = np.iinfo(np.int64).max
    seq = ints(ops, "seq")
    for name in ("inputs", "outputs"):
        ids = ragged(ops, name, np.arange(len(seq)))
        missing = ids.rows()[~np.isin(ids.values, known)]
        first = min(first, int(seq[missing].min(initial=first)))
    calls = np.append(ints(tables["calls"], "call"), 0)
    first = min(first, int(seq[~np.isin(ints(ops, "call"), calls)].min(initial=first)))
    return {
        **tables,
        "ops": ops.filter(pa.array(seq < first)),
        **{
            name: tables[name].filter(pa.array(np.isin(ints(tables[name], "value"), known)))
            for name in ("tensors", "samples", "axes", "leaves")
        },
    }


def _header(folder: Path) -> Header:
    try:
        data = json.loads((folder / HEADER).read_text(encoding="utf-8"))
        schema = data["schema"]
        crc = data.pop("crc", None)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedTraceError(
            f"{folder / HEADER} cannot be read ({error}). Record the run again."
        ) from None
    if schema != TRACE_SCHEMA:
        raise TraceVersionError(
            f"{folder} has the schema {schema!r}; this opdrift reads {TRACE_SCHEMA!r}."
            " Upgrade opdrift (`pip install -U opdrift`), or record the run again with this version."
        )
    if crc != checksum(data):
        raise DamagedTraceError(
            f"{folder / HEADER} is damaged: its checksum does not match. Record the run again."
        )
    data["program"] = tuple(data["program"])
    data.setdefault("launch", None)  # a later addition
    return Header(**{field.name: data[field.name] for field in fields(Header)})


def _footer(folder: Path) -> tuple[Footer | None, str | None]:
    if not (folder / FOOTER).exists():
        return None, "the run was killed or is still being recorded (there is no footer)"
    try:
        data = json.loads((folder / FOOTER).read_text(encoding="utf-8"))
        crc = data.pop("crc")
        if crc != checksum(data):
            raise ValueError("its checksum does not match")
        return Footer(
            data["ops"],
            data["ended"],
            data["exception"],
            data.get("raised_at"),  # a later addition
            tuple(data["failures"]),
            tuple(data["notes"]),
        ), None
    except (ValueError, KeyError, AttributeError, TypeError, OSError) as error:
        return None, f"the footer cannot be read ({error})"


def _verified_lengths(folder: Path) -> tuple[dict[str, int], str | None]:
    """How many bytes of each table belong to flushes that are whole, and what is wrong after them."""
    good: dict[str, int] = {}
    files = {name: _File(folder / f"{name}.arrows") for name in TABLES}
    for number, line in enumerate(_check_lines(folder), 1):
        try:
            parts: dict[str, list[int]] = json.loads(line)
            # a table that this version does not know is a later addition: what is known stays readable
            ends = {name: part for name, part in parts.items() if name in files}
            whole = all(
                files[name].matches(good.get(name, 0), end, crc)
                for name, (end, crc) in ends.items()
            )
        except (ValueError, KeyError, TypeError):
            whole = False
        if not whole:
            return good, f"its {number}. part is damaged or cut off"
        good.update({name: end for name, (end, _) in ends.items()})
    if any(f.size > good.get(name, 0) for name, f in files.items()):
        return good, "its last part was cut off"
    return good, None


def _check_lines(folder: Path) -> Iterator[bytes]:
    try:
        data = (folder / CHECKS).read_bytes()
    except OSError:
        return
    yield from data.splitlines()


class _File:
    """A table's bytes, to be held against the checksums of its parts; only one part is in memory at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.size = path.stat().st_size if path.exists() else 0

    def matches(self, start: int, end: int, crc: int) -> bool:
        if not start <= end <= self.size:
            return False
        found = 0
        with self._path.open("rb") as file:
            file.seek(start)
            for at in range(start, end, _CHUNK):
                found = zlib.crc32(file.read(min(_CHUNK, end - at)), found)
        return found == crc


def _table(path: Path, name: str, length: int) -> pa.Table:
    """The batches within the first `length` bytes of a stream."""
    schema = TABLES[name]
    batches: list[pa.RecordBatch] = []
    if length:
        stream = ipc.open_stream(_prefix(path, length))
        while True:
            try:
                batches.append(stream.read_next_batch())
            except (StopIteration, pa.ArrowInvalid, OSError):
                break  # a prefix of a stream has no end mark
    return pa.Table.from_batches(batches, schema=schema)


def _thin_table(path: Path, name: str, length: int) -> tuple[pa.Table, StoredRows | None]:
    """The same without its long columns, and where those are; they are most of a trace."""
    if not length:
        return _table(path, name, length), None
    return split(_prefix(path, length), TABLES[name], ("sketch", "sample"))


def _prefix(path: Path, length: int) -> pa.Buffer:
    with pa.memory_map(str(path)) as source:
        return source.read_buffer(length)
