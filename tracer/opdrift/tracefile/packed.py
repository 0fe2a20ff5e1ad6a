"""A trace in one small file that can be kept beside tests: all that a comparison needs, nothing of the machine's clock.

The file is a zip archive of the trace's folder; unpacked, it is a trace like any other.
"""

from __future__ import annotations

import io
import json
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.ipc as ipc

from opdrift.errors import DamagedTraceError, NotATraceError
from opdrift.tracefile.arrays import array, numbers
from opdrift.tracefile.columns import column
from opdrift.tracefile.schema import CHECKS, FOOTER, HEADER, TABLES, checksum

#: All archives carry this date, so that equal runs give equal bytes.
_DATE: Final = (1980, 1, 1, 0, 0, 0)
#: The traces are written once and read often.
_ZSTD_LEVEL: Final = 19


def pack(
    folder: Path, file: Path, *, program: tuple[str, ...], shorten: Callable[[str], str]
) -> int:
    """Write a whole trace of one process into one file; return how many bytes it has.

    Times become an order: when an op ran, and for how long, is of no use to a comparison and would make every file
    another one.

    Args:
        folder: The trace. It must be whole.
        file: Where to; the file is replaced once the new one is written.
        program: What the header names as the program, instead of a command line with paths of this machine.
        shorten: Paths of source files, made such that they mean the same elsewhere.
    """
    tables = {name: _read(folder, name) for name in TABLES}
    tables["names"] = _with_short_paths(tables["names"], shorten)
    tables["ops"], tables["marks"] = _without_times(tables["ops"], tables["marks"])
    parts = {f"{name}.arrows": _stream(table) for name, table in tables.items() if table.num_rows}
    checks = {name.removesuffix(".arrows"): [len(b), zlib.crc32(b)] for name, b in parts.items()}
    header = json.loads((folder / HEADER).read_text(encoding="utf-8"))
    header |= {"program": list(program), "start_ns": 0}
    parts[HEADER] = _json(header)
    parts[CHECKS] = json.dumps(checks).encode() + b"\n"
    parts[FOOTER] = (folder / FOOTER).read_bytes()
    archive = _archive(parts)
    partial = file.with_name(f".{file.name}.partial")
    partial.write_bytes(archive)
    partial.replace(file)
    return len(archive)


def unpack(file: Path, folder: Path) -> None:
    """Make a packed trace a folder again.

    Raises:
        NotATraceError: The file is no packed trace.
        DamagedTraceError: It is one, and cannot be read whole.
    """
    known = {HEADER, CHECKS, FOOTER, *(f"{name}.arrows" for name in TABLES)}
    try:
        with zipfile.ZipFile(file) as archive:
            names = set(archive.namelist())
            if HEADER not in names:
                raise NotATraceError(f"{file} is no packed trace: it has no {HEADER}.")
            # of an archive that somebody else made no other file is unpacked, wherever it wants to go
            parts = {name: archive.read(name) for name in sorted(names & known)}
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise DamagedTraceError(
            f"{file} cannot be read as a packed trace ({error}). Is it a pointer of git-lfs, or half a merge? Make it anew."
        ) from None
    folder.mkdir(parents=True)
    for name, data in parts.items():
        (folder / name).write_bytes(data)


def _read(folder: Path, name: str) -> pa.Table:
    with pa.memory_map(str(folder / f"{name}.arrows")) as source:
        return ipc.open_stream(source).read_all()


def _with_short_paths(names: pa.Table, shorten: Callable[[str], str]) -> pa.Table:
    texts = names["text"].to_pylist()
    for row, kind in enumerate(names["kind"].to_pylist()):
        if kind == "source":
            path, *rest = json.loads(texts[row])
            texts[row] = json.dumps([shorten(path), *rest])
    return _replaced(names, text=texts)


def _without_times(ops: pa.Table, marks: pa.Table) -> tuple[pa.Table, pa.Table]:
    """Moments as their ranks: what began before what is still known."""
    start, time = (
        numbers(column(table, name)) for table, name in ((ops, "start"), (marks, "time"))
    )
    order = np.unique(np.concatenate([start, time]), return_inverse=True)[1].astype(np.int64)
    return (
        _replaced(ops, start=order[: len(start)], duration=np.zeros(len(start), np.int64)),
        _replaced(marks, time=order[len(start) :]),
    )


def _replaced(table: pa.Table, **columns: Any) -> pa.Table:
    for name, values in columns.items():
        at = table.schema.get_field_index(name)
        field = table.schema.field(at)
        table = table.set_column(at, field, array(values, field.type))
    return table


def _stream(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    options = ipc.IpcWriteOptions(compression=pa.Codec("zstd", compression_level=_ZSTD_LEVEL))
    with ipc.new_stream(sink, table.schema, options=options) as stream:
        stream.write_table(table.combine_chunks())
    return sink.getvalue()


def _json(data: Mapping[str, Any]) -> bytes:
    data = {name: value for name, value in data.items() if name != "crc"}
    return json.dumps({**data, "crc": checksum(data)}, indent=1).encode()


def _archive(parts: Mapping[str, bytes]) -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, data in parts.items():
            info = zipfile.ZipInfo(name, _DATE)
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, data)
    return sink.getvalue()
