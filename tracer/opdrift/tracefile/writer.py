"""Write a trace: a header first, appended tables with a checksum a flush, a footer last."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from io import RawIOBase
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.ipc as ipc

from opdrift.errors import TraceNotWritableError
from opdrift.tfp1 import FOLDED_BELOW
from opdrift.tracefile.arrays import array
from opdrift.tracefile.claiming import CHECKS, FOOTER, HEADER, reason_of
from opdrift.tracefile.journal import Journal, MarkRow
from opdrift.tracefile.lock import hold
from opdrift.tracefile.schema import (
    BUCKET_NARROW_BYTES,
    BUCKET_WIDE_BYTES,
    SKETCHED_SAMPLES,
    TABLES,
    checksum,
)

Columns = Sequence[Any]
_UPPER_40 = np.uint64(1 << 23)
_DROPPED = np.uint64(24)
#: Bytes of a component, by component code (tfp1).
_WIDTHS = np.array([4, 8, 2, 2, 1, 1, 1, 2, 2, 4, 4, 8, 8, 1])


class _Checked(RawIOBase):
    """A file that knows its length and the CRC-32 of what came since the last check."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = path.open("xb", buffering=0)
        self.end = 0
        self.crc = 0
        self.checked = -1

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            done += self._file.write(view[done:]) or 0
        self.end += done
        self.crc = zlib.crc32(view, self.crc)
        return done

    def close(self) -> None:
        self._file.close()
        super().close()


class TraceWriter:
    """The open files of one trace. Not thread-safe: the recorder holds a lock around `append` and `check`."""

    def __init__(self, folder: Path, header: Mapping[str, Any]) -> None:
        """Write the header and open the tables.

        Raises:
            TraceNotWritableError: A file cannot be written.
        """
        self.folder = folder
        self._journal = Journal(folder)
        # one thread: Arrow's pool only costs here (notes: recorder, Q7)
        options = ipc.IpcWriteOptions(
            compression=pa.Codec("zstd", compression_level=1), use_threads=False
        )
        try:
            (folder / HEADER).write_text(
                json.dumps({**header, "crc": checksum(header)}, indent=1), encoding="utf-8"
            )
            self._files = {name: _Checked(folder / f"{name}.arrows") for name in TABLES}
            self._streams = {
                name: ipc.new_stream(self._files[name], schema, options=options)
                for name, schema in TABLES.items()
            }
            self._checks = (folder / CHECKS).open("xb", buffering=0)
            hold(self._checks)  # so that nobody replaces the trace before it is closed
        except OSError as error:
            raise TraceNotWritableError(
                f"{folder} cannot be written: {reason_of(error)}. Choose a path that you may write to."
            ) from error

    def append(self, table: str, columns: Columns) -> None:
        """Append rows to a table; columns in the order of its schema."""
        schema = TABLES[table]
        arrays = [
            c if isinstance(c, pa.Array) else array(c, field.type)
            for c, field in zip(columns, schema, strict=True)
        ]
        self._streams[table].write_batch(pa.record_batch(arrays, schema=schema))

    def announce(self, mark: MarkRow) -> None:
        """Put a mark on disk at once, beside the tables; it is still to be appended to its own."""
        self._journal.append(mark)

    def check(self) -> None:
        """Close a part: from here on a reader can tell that all tables are whole up to this point.

        Marks that were announced are in their table by now.
        """
        parts = {}
        for name, file in self._files.items():
            if file.end != file.checked:
                parts[name] = [file.end, file.crc]
                file.crc, file.checked = 0, file.end
        self._checks.write(json.dumps(parts).encode() + b"\n")
        self._journal.clear()

    def close(self, footer: Mapping[str, Any] | None) -> None:
        """Close every file; write the footer, unless the trace is not whole."""
        try:
            for stream in self._streams.values():
                stream.close()
            self.check()
            if footer is not None:
                (self.folder / FOOTER).write_text(
                    json.dumps({**footer, "crc": checksum(footer)}, indent=1), encoding="utf-8"
                )
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close the files as they are: what was appended stays, and reads as incomplete."""
        for file in self._files.values():
            file.close()
        self._checks.close()
        self._journal.close()


def list_column(lengths: npt.NDArray[Any], values: npt.NDArray[np.int64]) -> pa.Array:
    """A column of lists of ids, from the length of each and all elements in a row."""
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return pa.ListArray.from_arrays(array(offsets, pa.int32()), array(values, pa.int64()))


def int_list_column(rows: Sequence[Sequence[int]]) -> pa.Array:
    """A column of lists of integers."""
    return list_column(
        np.array([len(row) for row in rows], np.int64),
        np.array([n for row in rows for n in row], np.int64),
    )


def fingerprint_columns(rows: npt.NDArray[Any]) -> Columns:
    """Columns of the table `tensors` from tfp1 rows of 640 bytes (`opdrift.fingerprint`)."""
    return [np.ascontiguousarray(rows["value"]), *_fingerprints(rows)]


def sample_columns(rows: npt.NDArray[Any]) -> Columns:
    """Columns of the table `samples` from tfp1 rows; later samples of a batch lose their sketch."""
    item = np.ascontiguousarray(rows["item"])
    return [
        np.ascontiguousarray(rows["value"]),
        item,
        *_fingerprints(rows, sketched=item < SKETCHED_SAMPLES),
    ]


def _fingerprints(rows: npt.NDArray[Any], sketched: npt.NDArray[Any] | None = None) -> Columns:
    width = _WIDTHS[rows["code"]]
    count = rows["n"].astype(np.int64)
    names = ("min", "max", "absmax", "sum", "ssq", "nan", "pinf", "ninf", "zero", "sub")
    return [
        np.ascontiguousarray(rows["raw"]),
        count,
        rows["code"].astype(np.uint8),
        *(np.ascontiguousarray(rows[name]) for name in names),
        _sketches(rows, width, count if sketched is None else count * sketched),
        _samples(rows, width, count),
    ]


def _sketches(rows: npt.NDArray[Any], width: npt.NDArray[Any], count: npt.NDArray[Any]) -> pa.Array:
    """Doubles cut to 40 bits, rounded; few buckets for small contents, none where the sample is everything."""
    sketch = np.ascontiguousarray(rows["sketch"])
    wide, small = width >= 4, count < FOLDED_BELOW
    doubles = _folded(sketch.view(np.float64).reshape(len(rows), 32), small)
    bits = (doubles.view(np.uint64) + _UPPER_40) >> _DROPPED
    cut = bits.view(np.uint8).reshape(len(rows), 32, 8)[:, :, :BUCKET_WIDE_BYTES]
    packed = _folded(sketch.view(np.float32).reshape(len(rows), 64), small).view(np.uint8)
    packed[wide, : 32 * BUCKET_WIDE_BYTES] = cut.reshape(len(rows), 32 * BUCKET_WIDE_BYTES)[wide]
    length = np.where(wide, 32 * BUCKET_WIDE_BYTES, 64 * BUCKET_NARROW_BYTES)
    return _binary(packed, np.where(count > 32, np.where(small, length // 2, length), 0))


def _folded(buckets: npt.NDArray[Any], small: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Rows of buckets, with those of small contents folded into their first half."""
    found, half = buckets.copy(), buckets.shape[1] // 2
    # bits of another type are read as doubles and as floats here, and thrown away
    with np.errstate(all="ignore"):
        found[small, :half] += found[small, half:]
    return found


def _samples(rows: npt.NDArray[Any], width: npt.NDArray[Any], count: npt.NDArray[Any]) -> pa.Array:
    """Samples packed to the width of a component."""
    sample = np.ascontiguousarray(rows["sample"])
    packed = np.zeros((len(rows), 256), np.uint8)
    for one in np.unique(width):
        mask = width == one
        packed[mask, : 32 * one] = sample[mask].astype(f"<u{one}").view(np.uint8)
    return _binary(packed, np.minimum(count, 32) * width)


def _binary(packed: npt.NDArray[np.uint8], lengths: npt.NDArray[Any]) -> pa.Array:
    """The first `lengths[i]` bytes of each row i, as a binary column."""
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    data = packed[np.arange(packed.shape[1]) < lengths[:, None]]
    return pa.Array.from_buffers(
        pa.binary(), len(lengths), [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    )
