"""The tables of a trace as columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from opdrift.tracefile.arrays import numbers

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Ragged:
    """Lists of ids, one a row, as one array and its offsets."""

    offsets: Ints
    values: Ints

    def __getitem__(self, row: int) -> Ints:
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    def rows(self) -> Ints:
        """The row that each element of `values` belongs to."""
        return np.repeat(np.arange(len(self.offsets) - 1, dtype=np.int64), np.diff(self.offsets))


@dataclass(frozen=True, slots=True)
class OpColumns:
    """The ops of a trace, sorted by seq; position `i` is the op's index everywhere in the reading half."""

    seq: Ints
    start: Ints
    duration: Ints
    node: Ints
    rng: npt.NDArray[np.uint64]
    signature: Ints
    call: Ints
    source: Ints
    thread: Ints
    phase: Ints
    flags: Ints
    mutated: Ints
    inputs: Ragged
    outputs: Ragged

    def __len__(self) -> int:
        return len(self.seq)


@dataclass(frozen=True, slots=True)
class CallColumns:
    """Module calls, indexed by call id (row 0 is the program outside every module); `path` is a name's id."""

    parent: Ints
    path: Ints
    number: Ints
    source: Ints
    training: Ints
    thread: Ints

    def __len__(self) -> int:
        return len(self.parent)


@dataclass(frozen=True, slots=True)
class ValueColumns:
    """Values, indexed by value id (row 0 stands for "none").

    `fingerprint` is the row in the fingerprint columns, -1 where the content was not fingerprinted.
    """

    storage: Ints
    offset: Ints
    write: Ints
    meta: Ints
    fingerprint: Ints


def column(table: pa.Table, name: str) -> pa.Array:
    """A column as one array."""
    found = table.column(name)
    if not found.num_chunks:
        return pa.nulls(0, found.type)
    column = found.combine_chunks()
    return column.chunk(0) if isinstance(column, pa.ChunkedArray) else column


def ints(table: pa.Table, name: str) -> Ints:
    """A column of integers."""
    return numbers(column(table, name)).astype(np.int64, copy=False)


def ragged(table: pa.Table, name: str, order: Ints) -> Ragged:
    """A column of lists of ids, its rows in this order."""
    lists = column(table, name)
    offsets = numbers(lists.offsets).astype(np.int64)
    values = numbers(lists.values).astype(np.int64, copy=False)
    lengths = np.diff(offsets)
    if len(order) and np.any(order[1:] < order[:-1]):
        starts = np.repeat(offsets[:-1][order], lengths[order])
        within = np.arange(len(starts)) - np.repeat(
            np.cumsum(lengths[order]) - lengths[order], lengths[order]
        )
        values, lengths = values[starts + within], lengths[order]
    else:
        values = values[offsets[0] : offsets[-1]] if len(offsets) > 1 else values[:0]
    return Ragged(np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]), values)


def op_columns(table: pa.Table) -> OpColumns:
    """The ops, in order of their `seq`."""
    order = np.argsort(ints(table, "seq"), kind="stable")
    names = (
        "seq",
        "start",
        "duration",
        "node",
        "signature",
        "call",
        "source",
        "thread",
        "phase",
        "flags",
        "mutated",
    )
    columns = {name: ints(table, name)[order] for name in names}
    rng = numbers(column(table, "rng")).astype(np.uint64, copy=False)[order]
    return OpColumns(
        **columns,
        rng=rng,
        inputs=ragged(table, "inputs", order),
        outputs=ragged(table, "outputs", order),
    )


def call_columns(table: pa.Table) -> CallColumns:
    """The module calls, by id."""
    ids = ints(table, "call")

    def spread(name: str) -> Ints:
        out = np.zeros(int(ids.max(initial=0)) + 1, np.int64)
        out[ids] = ints(table, name)
        return out

    return CallColumns(
        *(spread(n) for n in ("parent", "path", "number", "source", "training", "thread"))
    )


def value_columns(table: pa.Table, fingerprinted: Ints) -> ValueColumns:
    """The values, by id; `fingerprinted` holds the value of each fingerprint."""
    ids = ints(table, "value")
    size = int(max(ids.max(initial=0), fingerprinted.max(initial=0))) + 1

    def spread(source: Ints) -> Ints:
        out = np.zeros(size, np.int64)
        out[ids] = source
        return out

    rows = np.full(size, -1, np.int64)
    rows[fingerprinted] = np.arange(len(fingerprinted), dtype=np.int64)
    return ValueColumns(
        storage=spread(ints(table, "storage")),
        offset=spread(ints(table, "offset")),
        write=spread(ints(table, "write")),
        meta=spread(ints(table, "meta")),
        fingerprint=rows,
    )
