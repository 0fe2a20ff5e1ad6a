"""Read a trace from disk into columns; tolerate torn and damaged tails."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast, overload

import numpy as np
import pyarrow as pa

from opdrift.batch import Batch
from opdrift.records import (
    Argument,
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
from opdrift.tracefile.columns import Ints, call_columns, ints, op_columns, value_columns
from opdrift.tracefile.fingerprints import Fingerprint, FingerprintColumns
from opdrift.tracefile.graphs import graph_of
from opdrift.tracefile.samples import Followed, SampleTable
from opdrift.tracefile.stored import StoredRows


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
        self.ops = op_columns(tables["ops"])
        self.fingerprints = FingerprintColumns(tables["tensors"], stored)
        self.values = value_columns(tables["values"], self.fingerprints.value)
        self.call_columns = call_columns(tables["calls"])
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
                region=graph_of(data.get("region")),
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


def _texts(table: pa.Table) -> dict[tuple[str, int], str]:
    columns = table.to_pydict()
    return {
        (kind, ident): text
        for kind, ident, text in zip(columns["kind"], columns["id"], columns["text"], strict=True)
    }
