"""Read a trace from disk into columns; tolerate torn and damaged tails."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, cast, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from opdrift.records import (
    Argument,
    Batch,
    Call,
    Footer,
    Header,
    Leaf,
    LeafKind,
    LeafWhen,
    Mark,
    Op,
    OpInfo,
    Signature,
    Source,
    TensorArgument,
    TensorMeta,
)
from opdrift.tfp1 import Code
from opdrift.tracefile.axes import Extents
from opdrift.tracefile.samples import Followed, SampleTable
from opdrift.tracefile.schema import (
    BUCKET_NARROW_BYTES,
    BUCKET_WIDE_BYTES,
)
from opdrift.tracefile.stored import StoredRows

Ints = npt.NDArray[np.int64]
_WIDTH = {0: 4, 1: 8, 2: 2, 3: 2, 4: 1, 5: 1, 6: 1, 7: 2, 8: 2, 9: 4, 10: 4, 11: 8, 12: 8, 13: 1}


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


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The tfp1 record of one value (notes/fingerprint section 7).

    `sketch` has `tfp1.stored_buckets` buckets; None for at most 32 components,
    whose `sample` (component bits, zero-extended) is the whole content. `fp8` is the dtype of code 4, which
    stands for several formats; empty for other codes, and where it is not known.
    """

    raw: int
    n: int
    code: int
    min: float
    max: float
    absmax: float
    sum: float
    ssq: float
    nan: int
    pinf: int
    ninf: int
    zero: int
    subnormal: int
    sketch: npt.NDArray[np.float64] | None
    sample: npt.NDArray[np.uint64]
    fp8: str = ""

    @property
    def key(self) -> tuple[int, int, int]:
        """Equal exactly for equal contents (up to 2**-61)."""
        return (self.raw, self.n, self.code)

    @property
    def nonfinite(self) -> int:
        """How many components are NaN or infinite."""
        return self.nan + self.pinf + self.ninf


class FingerprintColumns:
    """All fingerprints of a trace; scalars as arrays, sketches and samples decoded on demand.

    Args:
        table: As in the schema; or without sketches and samples, with a column `stored` instead.
        stored: Where the sketches and samples of such a table are.
    """

    def __init__(self, table: pa.Table, stored: StoredRows | None = None) -> None:
        self.value: Ints = ints(table, "value")
        self.raw = (
            _column(table, "raw").to_numpy(zero_copy_only=False).astype(np.uint64, copy=False)
        )
        self.n: Ints = ints(table, "n")
        self.code: Ints = ints(table, "code")
        self._numbers = {
            name: _column(table, name).to_numpy(zero_copy_only=False)
            for name in (
                "min",
                "max",
                "absmax",
                "sum",
                "ssq",
                "nan",
                "pinf",
                "ninf",
                "zero",
                "subnormal",
            )
        }
        self._stored = stored
        if stored is None:
            self._sketch = _column(table, "sketch")
            self._sample = _column(table, "sample")
        else:
            self._row: Ints = ints(table, "stored")

    def __len__(self) -> int:
        return len(self.value)

    def number(self, name: str) -> npt.NDArray[Any]:
        """The column of a statistic: min, max, absmax, sum, ssq, nan, pinf, ninf, zero, subnormal."""
        return cast("npt.NDArray[Any]", self._numbers[name])

    def __getitem__(self, row: int) -> Fingerprint:
        number = self._numbers
        code = int(self.code[row])
        sketch, sample = self._long(row)
        return Fingerprint(
            raw=int(self.raw[row]),
            n=int(self.n[row]),
            code=code,
            min=float(number["min"][row]),
            max=float(number["max"][row]),
            absmax=float(number["absmax"][row]),
            sum=float(number["sum"][row]),
            ssq=float(number["ssq"][row]),
            nan=int(number["nan"][row]),
            pinf=int(number["pinf"][row]),
            ninf=int(number["ninf"][row]),
            zero=int(number["zero"][row]),
            subnormal=int(number["subnormal"][row]),
            sketch=decode_sketch(sketch),
            sample=_decode_sample(sample, _WIDTH[code]),
        )

    def _long(self, row: int) -> tuple[bytes, ...]:
        if self._stored is not None:
            return self._stored[int(self._row[row])]
        return self._sketch[row].as_py() or b"", self._sample[row].as_py() or b""


def decode_sketch(data: bytes) -> npt.NDArray[np.float64] | None:
    """The buckets of a stored sketch; None where none was stored."""
    buckets = _BUCKETS_OF.get(len(data))
    if buckets is None:
        return None
    if len(data) == buckets * BUCKET_NARROW_BYTES:
        return np.frombuffer(data, "<f4").astype(np.float64)
    cut = np.zeros((buckets, 8), np.uint8)
    cut[:, 8 - BUCKET_WIDE_BYTES :] = np.frombuffer(data, np.uint8).reshape(buckets, -1)
    return cut.view("<f8").reshape(buckets).astype(np.float64)


#: Length of a stored sketch -> its buckets.
_BUCKETS_OF: Final = {
    **{n * BUCKET_WIDE_BYTES: n for n in (16, 32)},
    **{n * BUCKET_NARROW_BYTES: n for n in (32, 64)},
}


def _decode_sample(data: bytes, width: int) -> npt.NDArray[np.uint64]:
    return np.frombuffer(data, f"<u{width}").astype(np.uint64)


class Trace:
    """One process's recorded run. Open with `opdrift.load`.

    Columns are numpy arrays indexed by op index, value id or call id; the methods expand single
    records for people. `complete` is False when the end is missing, and `incomplete` says why.
    """

    def __init__(
        self,
        path: Path,
        header: Header,
        footer: Footer | None,
        tables: Mapping[str, pa.Table],
        incomplete: str | None,
        *,
        stored: StoredRows | None = None,
    ) -> None:
        self.path = path
        self.header = header
        self.footer = footer
        self.incomplete = incomplete
        self._texts = _texts(tables["names"])
        self.ops = _op_columns(tables["ops"])
        self.fingerprints = FingerprintColumns(tables["tensors"], stored)
        self.values = _value_columns(tables["values"], self.fingerprints)
        self.call_columns = _call_columns(tables["calls"])
        self._leaves = tables["leaves"]
        self._marks = tables["marks"]
        self._samples = tables["samples"]
        self._axes = tables["axes"]
        self._call_names: dict[int, tuple[str, str]] = {0: ("", "")}
        self._signatures: dict[int, Signature] = {}
        self._infos: dict[int, OpInfo] = {}
        self._metas: dict[int, TensorMeta] = {}

    @property
    def complete(self) -> bool:
        """Whether the trace was closed and every table is whole."""
        return self.incomplete is None

    # ---- interned records ------------------------------------------------------------------------

    def meta(self, value: int) -> TensorMeta:
        """The layout of a value."""
        return self.meta_of(int(self.values.meta[value]))

    def meta_of(self, meta: int) -> TensorMeta:
        """The layout with this meta id."""
        found = self._metas.get(meta)
        if found is None:
            shape, stride, dtype, device = json.loads(self._texts["meta", meta])
            found = self._metas[meta] = TensorMeta(tuple(shape), tuple(stride), dtype, device)
        return found

    def op_info(self, signature: int) -> OpInfo:
        """What is known of the op of a signature id."""
        return self.signature(signature).op

    def signature(self, signature: int) -> Signature:
        """The signature with this id."""
        found = self._signatures.get(signature)
        if found is None:
            data = json.loads(self._texts["signature", signature])
            info = self._op_info(data["op"])
            positional = [
                (info.arguments[i] if i < len(info.arguments) else str(i), self._argument(a))
                for i, a in enumerate(data["args"])
            ]
            named = [(name, self._argument(a)) for name, a in data["kwargs"].items()]
            found = self._signatures[signature] = Signature(info, tuple(positional + named))
        return found

    def _op_info(self, ident: int) -> OpInfo:
        found = self._infos.get(ident)
        if found is None:
            data = json.loads(self._texts["op", ident])
            found = self._infos[ident] = OpInfo(
                name=data["name"],
                arguments=tuple(data.get("arguments", ())),
                defaults={name: self._argument(a) for name, a in data.get("defaults", {}).items()},
                mutates=tuple(data.get("mutates", ())),
                **{
                    flag: flag in data.get("is", ())
                    for flag in (
                        "view",
                        "uninitialised",
                        "seeded",
                        "pointwise",
                        "reduction",
                        "higher_order",
                    )
                },
            )
        return found

    def _argument(self, data: Any) -> Argument:
        if isinstance(data, list):
            return tuple(self._argument(a) for a in data)
        if isinstance(data, dict):
            if "t" in data:
                return TensorArgument(self.meta_of(data["t"]))
            if "f" in data:
                return float(data["f"])
            return cast("str", data["x"])
        return cast("Argument", data)

    def source(self, ident: int) -> Source | None:
        """The source line with this id; None for 0."""
        if not ident:
            return None
        return Source(*json.loads(self._texts["source", ident]))

    # ---- calls, leaves, marks ----------------------------------------------------------------------

    @cached_property
    def calls(self) -> Sequence[Call]:
        """Module calls, indexed by call id; call 0 is the program outside every module."""
        return _Calls(self)

    @property
    def module_types(self) -> dict[str, str]:
        """Type of each module that was called, by its path."""
        return dict(map(self.call_name, np.unique(self.call_columns.path).tolist()))

    def call_name(self, path: int) -> tuple[str, str]:
        """Path and type of the module with this path id; both are "" for 0."""
        found = self._call_names.get(path)
        if found is None:
            name = json.loads(self._texts["path", path])
            found = self._call_names[path] = name["path"], name["type"]
        return found

    @cached_property
    def leaves(self) -> Sequence[Leaf]:
        """Leaves, outputs, gradients and what lived at exit, in the order in which they were seen."""
        columns = self._leaves.to_pydict()
        return [
            Leaf(name, cast("LeafKind", kind), cast("LeafWhen", when), value, seq, call)
            for name, kind, when, value, seq, call in zip(
                *(columns[c] for c in ("name", "kind", "when", "value", "seq", "call")), strict=True
            )
        ]

    @cached_property
    def marks(self) -> Sequence[Mark]:
        """Marks, by seq and time."""
        columns = self._marks.to_pydict()
        found = [
            Mark(seq, time, kind, call, thread, json.loads(fields))
            for seq, time, kind, call, thread, fields in zip(
                *(columns[c] for c in ("seq", "time", "kind", "call", "thread", "fields")),
                strict=True,
            )
        ]
        return sorted(found, key=lambda m: (m.seq, m.time_ns))

    # ---- single records ------------------------------------------------------------------------------

    def op(self, index: int) -> Op:
        """The op at an index (not a seq), expanded."""
        o = self.ops
        return Op(
            index=index,
            seq=int(o.seq[index]),
            signature=self.signature(int(o.signature[index])),
            call=self.calls[int(o.call[index])],
            source=self.source(int(o.source[index])),
            inputs=tuple(o.inputs[index].tolist()),
            outputs=tuple(o.outputs[index].tolist()),
            mutated=int(o.mutated[index]),
            phase="backward" if o.phase[index] else "forward",
            flags=int(o.flags[index]),
            thread=int(o.thread[index]),
            start_ns=int(o.start[index]),
            duration_ns=int(o.duration[index]),
            rng=int(o.rng[index]),
            node=int(o.node[index]),
        )

    def fingerprint(self, value: int) -> Fingerprint | None:
        """The fingerprint of a value, None if its content was not fingerprinted (views, `empty`)."""
        row = int(self.values.fingerprint[value])
        if row < 0:
            return None
        found = self.fingerprints[row]
        return found if found.code != Code.FP8 else replace(found, fp8=self.meta(value).dtype)

    # ---- single samples ------------------------------------------------------------------------------

    @property
    def batch(self) -> Batch | None:
        """What the run was told of its batch; None if it was recorded without `batch=`."""
        return self.samples.batch

    def batch_of(self, value: int) -> Followed | None:
        """Where the batch and padded lengths lie in a value; None if it carries none, or nobody looked.

        A view's place is worked out from what is known of its storage. In a batch of one, the batch itself
        lies nowhere.
        """
        return self.samples.followed(value)

    def sample(self, value: int, sample: int) -> Fingerprint | None:
        """What one sample of a value holds, without its padding.

        It is the fingerprint that the value has in a run of that sample alone. In a batch of one it is
        that of the whole value, unless that is padded.

        Returns:
            None if the value does not carry the batch, if where it lies is not known, or if the value was not
            fingerprinted (a view, unwritten memory).
        """
        found = self.samples.fingerprint(value, sample)
        if found is not None:
            return found
        if self.batch is None or self.batch.size > 1 or sample:
            return None
        followed = self.samples.own.get(value)
        if followed is not None and (
            followed.length_unknown
            or any(self.extents(p.axis).is_padded(0) for p in followed.lengths)
        ):
            return None
        return self.fingerprint(value)

    def extents(self, axis: int) -> Extents:
        """Which part of a padded axis is valid for each sample; `axis` as in `Followed.lengths`."""
        return self.samples.extents(axis)

    @cached_property
    def samples(self) -> SampleTable:
        """The records of single samples."""
        return SampleTable(
            FingerprintColumns(self._samples),
            ints(self._samples, "item"),
            self._axes,
            values=self.values,
            meta=self.meta,
            text=self._texts,
            options=self.header.options,
        )

    def index_of(self, seq: int) -> int | None:
        """The index of the op with this seq."""
        i = int(np.searchsorted(self.ops.seq, seq))
        return i if i < len(self.ops) and self.ops.seq[i] == seq else None

    # ---- who made what -------------------------------------------------------------------------------

    @cached_property
    def producer(self) -> Ints:
        """Per value id, the index of the op that made it (as new output, view or write); -1 for leaves."""
        found = np.full(len(self.values.storage), -1, np.int64)
        rows, values = self.ops.outputs.rows(), self.ops.outputs.values
        # the first op that lists a value as output made it; later ones returned an alias of it
        found[values[::-1]] = rows[::-1]
        return found


class _Calls(Sequence[Call]):
    """The calls of a trace, each made when it is asked for: a long run has hundreds of thousands."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._made: dict[int, Call] = {}

    def __len__(self) -> int:
        return len(self._trace.call_columns)

    @overload
    def __getitem__(self, index: int) -> Call: ...
    @overload
    def __getitem__(self, index: slice) -> list[Call]: ...
    def __getitem__(self, index: int | slice) -> Call | list[Call]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        found = self._made.get(index)
        return found if found is not None else self._make(index)

    def _make(self, index: int) -> Call:
        columns, trace = self._trace.call_columns, self._trace
        ident = range(len(self))[index]  # what is out of range is said as a list says it
        path, type_ = trace.call_name(int(columns.path[ident]))
        found = self._made[index] = Call(
            ident,
            int(columns.parent[ident]),
            path,
            type_,
            int(columns.number[ident]),
            bool(columns.training[ident]),
            trace.source(int(columns.source[ident])),
            int(columns.thread[ident]),
        )
        return found


# ---- columns -----------------------------------------------------------------------------------------


def _column(table: pa.Table, name: str) -> pa.Array:
    column = table.column(name).combine_chunks()
    return column.chunk(0) if isinstance(column, pa.ChunkedArray) else column


def ints(table: pa.Table, name: str) -> Ints:
    """A column of integers."""
    return cast(
        "Ints", _column(table, name).to_numpy(zero_copy_only=False).astype(np.int64, copy=False)
    )


def ragged(table: pa.Table, name: str, order: Ints) -> Ragged:
    """A column of lists of ids, its rows in this order."""
    column = _column(table, name)
    offsets = column.offsets.to_numpy().astype(np.int64)
    values = column.values.to_numpy(zero_copy_only=False).astype(np.int64, copy=False)
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


def _op_columns(table: pa.Table) -> OpColumns:
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
    rng = _column(table, "rng").to_numpy(zero_copy_only=False).astype(np.uint64, copy=False)[order]
    return OpColumns(
        **columns,
        rng=rng,
        inputs=ragged(table, "inputs", order),
        outputs=ragged(table, "outputs", order),
    )


def _call_columns(table: pa.Table) -> CallColumns:
    ids = ints(table, "call")

    def spread(name: str) -> Ints:
        out = np.zeros(int(ids.max(initial=0)) + 1, np.int64)
        out[ids] = ints(table, name)
        return out

    return CallColumns(
        *(spread(n) for n in ("parent", "path", "number", "source", "training", "thread"))
    )


def _value_columns(table: pa.Table, fingerprints: FingerprintColumns) -> ValueColumns:
    ids = ints(table, "value")
    size = int(max(ids.max(initial=0), fingerprints.value.max(initial=0))) + 1

    def spread(source: Ints) -> Ints:
        out = np.zeros(size, np.int64)
        out[ids] = source
        return out

    rows = np.full(size, -1, np.int64)
    rows[fingerprints.value] = np.arange(len(fingerprints), dtype=np.int64)
    return ValueColumns(
        storage=spread(ints(table, "storage")),
        offset=spread(ints(table, "offset")),
        write=spread(ints(table, "write")),
        meta=spread(ints(table, "meta")),
        fingerprint=rows,
    )


def _texts(table: pa.Table) -> dict[tuple[str, int], str]:
    columns = table.to_pydict()
    return {
        (kind, ident): text
        for kind, ident, text in zip(columns["kind"], columns["id"], columns["text"], strict=True)
    }
