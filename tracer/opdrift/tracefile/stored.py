"""Keep a table's long columns on disk until a row of them is asked for: of most rows nobody asks."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.ipc as ipc

from opdrift.tracefile.arrays import array

#: Parts of a table that are kept decompressed; readers go through a trace from its start to its end.
_KEPT: Final = 32


class StoredRows:
    """Columns of a table that lies on disk, row by row.

    Args:
        data: The stream, or the whole parts that it begins with.
        schema: Of the stream.
        names: The columns.
        starts: Where in the stream each part begins.
        rows: The first row of each part, and the number of rows.
    """

    def __init__(
        self,
        data: pa.Buffer,
        schema: pa.Schema,
        names: tuple[str, ...],
        starts: list[int],
        rows: npt.NDArray[np.int64],
    ) -> None:
        self._data = data
        self._schema = schema
        self._names = names
        self._starts = starts
        self._rows = rows
        self._parts: OrderedDict[int, list[pa.Array]] = OrderedDict()

    def __getitem__(self, row: int) -> tuple[bytes, ...]:
        """What a row holds in each of the columns."""
        number = int(np.searchsorted(self._rows, row, "right")) - 1
        within = row - int(self._rows[number])
        return tuple(column[within].as_py() or b"" for column in self._part(number))

    def _part(self, number: int) -> list[pa.Array]:
        found = self._parts.get(number)
        if found is None:
            source = pa.BufferReader(self._data)
            source.seek(self._starts[number])
            batch = ipc.read_record_batch(ipc.read_message(source), self._schema)
            found = self._parts[number] = [batch.column(name) for name in self._names]
            if len(self._parts) > _KEPT:
                self._parts.popitem(last=False)
        else:
            self._parts.move_to_end(number)
        return found


def split(
    data: pa.Buffer, schema: pa.Schema, names: tuple[str, ...]
) -> tuple[pa.Table, StoredRows]:
    """A table without some columns, and those columns where they lie.

    The table has a column `stored` instead: the row in `StoredRows`.
    """
    kept = [i for i, name in enumerate(schema.names) if name not in names]
    thin = pa.schema([schema.field(i) for i in kept])
    source = pa.BufferReader(data)
    stream = ipc.open_stream(source, options=ipc.IpcReadOptions(included_fields=kept))
    batches: list[pa.RecordBatch] = []
    starts: list[int] = []
    while True:
        start = source.tell()
        try:
            batch = stream.read_next_batch()
        except (StopIteration, pa.ArrowInvalid, OSError):
            break  # a prefix of a stream has no end mark
        batches.append(batch)
        starts.append(start)
    lengths = np.array([batch.num_rows for batch in batches], np.int64)
    rows = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    table = pa.Table.from_batches(batches, schema=thin)
    table = table.append_column("stored", array(np.arange(rows[-1]), pa.int64()))
    return table, StoredRows(data, schema, names, starts, rows)
