"""Build a trace op by op."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import pyarrow as pa

from opdrift.records import (
    COMPILED,
    READ_UNINITIALISED,
    REREAD,
    TRACE_SCHEMA,
    Footer,
    Header,
    LeafKind,
    LeafWhen,
)
from opdrift.testing.contents import (
    Array,
    Change,
    changed,
    dense,
    fingerprint_row,
    noise,
    rounded,
    seed,
)
from opdrift.tokens import family
from opdrift.tracefile.reader import Trace
from opdrift.tracefile.schema import TABLES

#: Names of the tensor arguments of the ops that tests use most; others get `self, other, arg2, ...`.
_ARGUMENTS: Final[dict[str, tuple[str, ...]]] = {
    "mm": ("self", "mat2"),
    "bmm": ("self", "mat2"),
    "addmm": ("self", "mat1", "mat2"),
    "embedding": ("weight", "indices"),
    "native_layer_norm": ("input", "normalized_shape", "weight", "bias", "eps"),
    "scaled_dot_product_attention": ("query", "key", "value", "attn_mask"),
    "_scaled_dot_product_flash_attention_for_cpu": ("query", "key", "value"),
    "_scaled_dot_product_flash_attention": ("query", "key", "value"),
    "_scaled_dot_product_efficient_attention": ("query", "key", "value", "attn_bias"),
    "_scaled_dot_product_cudnn_attention": ("query", "key", "value", "attn_bias"),
    "_efficient_attention_forward": ("query", "key", "value", "bias"),
    "copy_": ("self", "src"),
}
_VIEWS: Final = frozenset(
    [
        "t",
        "view",
        "transpose",
        "permute",
        "slice",
        "select",
        "detach",
        "expand",
        "unsqueeze",
        "split",
    ]
)
_FACTORIES: Final = frozenset(["arange", "full", "zeros", "ones", "scalar_tensor"])
_RANDOM: Final = frozenset(
    [
        "bernoulli_",
        "uniform_",
        "normal_",
        "random_",
        "rand",
        "randn",
        "rand_like",
        "randn_like",
        "native_dropout",
    ]
)
_EMPTY: Final = frozenset(["empty", "empty_like"])


@dataclass(slots=True)
class _Value:
    storage: int
    write: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    content: Array | None
    printed: bool


@dataclass(slots=True)
class _Scope:
    call: int
    path: str
    numbers: dict[str, int] = field(default_factory=dict)


class Builder:
    """Build a trace op by op.

        build = Builder()
        x = build.leaf("x", kind="input")
        w = build.leaf("fc.weight")
        with build.scope("fc"):
            y = build.op("mm", x, w)
        build.output(y)
        left = build.build()

    Args:
        label: As of a recording.
        flags: Flags of the header, besides the defaults.
        variables: Environment variables of the header.
        versions: Versions of the header, besides the defaults.
        device: Where all tensors are, as `cuda:0`.
        fingerprint: Kind of the fingerprints.
        complete: False leaves out the footer, as after a kill.
        exception: What the body of the `with` raised.
        raised_at: Where in the program: `file:line in function`.
        rank: Of a distributed run.
        world_size: How many ranks such a run has.
        launch: What tells its launch from others.
    """

    def __init__(
        self,
        *,
        label: str = "",
        flags: Mapping[str, Any] | None = None,
        variables: Mapping[str, str] | None = None,
        versions: Mapping[str, str] | None = None,
        device: str = "cpu",
        fingerprint: str = "tfp1",
        complete: bool = True,
        exception: str | None = None,
        raised_at: str | None = None,
        rank: int | None = None,
        world_size: int = 2,
        launch: str | None = None,
    ) -> None:
        self._header = Header(
            schema=TRACE_SCHEMA,
            fingerprint=fingerprint,
            label=label,
            created="2026-01-01T00:00:00+00:00",
            torch="2.13.0",
            device=device,
            rank=rank,
            world_size=None if rank is None else world_size,
            program=("hand",),
            flags={"num_threads": 1, **(flags or {})},
            variables=dict(variables or {}),
            versions={"python": "3.11", **(versions or {})},
            options={},
            engine="numpy",
            start_unix_ns=0,
            start_ns=0,
            launch=launch,
        )
        self._device = device
        self._complete = complete
        self._exception = exception
        self._raised_at = raised_at
        self._values: list[_Value] = []
        self._rows: dict[str, list[dict[str, Any]]] = {name: [] for name in TABLES}
        self._names: dict[tuple[str, str], int] = {}
        self._counts: dict[str, int] = {}
        self._scopes = [_Scope(0, "")]
        self._storages = 0
        self._seq = 0
        self._rng = 1
        self._reread: set[int] = set()

    # ---- what a run does -------------------------------------------------------------------------------

    def leaf(
        self,
        name: str,
        *,
        kind: LeafKind = "parameter",
        when: LeafWhen = "entry",
        shape: Sequence[int] = (4, 8),
        dtype: str = "float32",
        content: str | Array | None = None,
        stride: Sequence[int] | None = None,
    ) -> int:
        """A value that no op made; its content follows from the name, or from a text, or is given.

        Its elements lie in row-major order, or by the strides that are given.
        """
        array = (
            content
            if isinstance(content, np.ndarray)
            else noise(f"leaf {content or name}", shape, dtype)
        )
        value = self._new(array, dtype)
        if stride is not None:
            self._values[value - 1].stride = tuple(stride)
        self.name(value, name, kind=kind, when=when)
        return value

    def name(
        self, value: int, name: str, *, kind: LeafKind = "parameter", when: LeafWhen = "entry"
    ) -> None:
        """Give a value one more name."""
        self._rows["leaves"].append(
            {
                "name": name,
                "kind": kind,
                "when": when,
                "value": value,
                "seq": self._seq,
                "call": self._scopes[-1].call,
            }
        )

    def op(
        self,
        name: str,
        *inputs: int,
        change: Change = "",
        shape: Sequence[int] | None = None,
        dtype: str | None = None,
        offset: int = 0,
        content: Array | None = None,
        settings: Mapping[str, Any] | None = None,
        outputs: int = 1,
        rng: int | None = None,
        phase: Literal["forward", "backward"] = "forward",
        compiled: bool = False,
        source: tuple[str, int, str] | None = None,
        read_uninitialised: bool = False,
        flags: int = 0,
    ) -> int:
        """Run an op on values and return its (first) output; a name with a trailing "_" writes into its first input.

        Args:
            name: `mm`, or in full `aten.mm.default`.
            inputs: Values of its tensor arguments.
            change: "*" another output, "~" one that differs in the last bits.
            shape: Of the outputs; the first input's if not given.
            dtype: Of the outputs; the first input's if not given.
            offset: Of a view: where it starts, from the start of what it is taken of.
            content: The content of the output, instead of one that follows from the inputs.
            settings: Its other arguments.
            outputs: How many it returns; their value ids follow each other.
            rng: State of the generator before a random op; a counter if not given.
            phase: Of the run.
            compiled: Called from compiled code.
            source: File, line and function.
            read_uninitialised: It read memory that nothing had written.
            flags: Further flags of the op.
        """
        full = (
            name
            if name.startswith(("aten.", "c10d.", "fsdp.")) or name.count(".") > 1
            else f"aten.{name}"
        )
        full = full if full.count(".") > 1 else f"{full}.default"
        short = full.split(".")[1]
        in_place = short.endswith("_") and not short.endswith("__")
        random = short in _RANDOM
        state = 0
        if random:
            state = rng if rng is not None else self._rng
            self._rng += 1
        first = self._values[inputs[0] - 1] if inputs else None
        if self._reread.intersection(inputs):
            flags |= REREAD
            self._reread.difference_update(inputs)
        made: list[int] = []
        if short in _VIEWS and first is not None:
            made = [self._view(inputs[0], shape, offset, content) for _ in range(outputs)]
        else:
            for i in range(outputs):
                array = content
                if array is None and short not in _EMPTY:
                    array = self._compute(
                        full, inputs, settings, f"{state}/{i}", change, shape, dtype, in_place
                    )
                out_dtype = dtype or (first.dtype if first else "float32")
                if in_place:
                    made.append(self._write(inputs[0], array))
                else:
                    size = tuple(shape) if shape is not None else (first.shape if first else (4, 8))
                    made.append(self._new(array, out_dtype, size))
        self._record(full, inputs, made, settings or {}, in_place=in_place, state=state, phase=phase, source=source,
                     flags=flags | (COMPILED if compiled else 0) | (READ_UNINITIALISED if read_uninitialised else 0))  # fmt: skip
        return made[0]

    def hidden_write(
        self, value: int, name: str, *, content: str | Array, kind: LeafKind = "buffer"
    ) -> int:
        """The memory of a leaf got another content without an op; returns the value it is read as from now on."""
        old = self._values[value - 1]
        array = content if isinstance(content, np.ndarray) else noise(content, old.shape, old.dtype)
        written = self._write(value, array)
        self.name(written, name, kind=kind, when="changed")
        self._reread.add(written)
        return written

    def again(self, value: int, *, printed: bool = False, content: Array | None = None) -> int:
        """The same place in memory as `value`, as it is after the writes since; not an op's output.

        Args:
            value: Where to look.
            printed: The recorder read it again and knows its fingerprint.
            content: What is there, if it is needed.
        """
        old = self._values[value - 1]
        write = max(v.write for v in self._values if v.storage == old.storage)
        self._values.append(
            _Value(
                old.storage, write, old.offset, old.shape, old.stride, old.dtype, content, printed
            )
        )
        return len(self._values)

    @contextmanager
    def scope(self, path: str, *, type: str = "Module", training: bool = False) -> Iterator[None]:
        """Ops inside run in a call of the module `path`, below the present one."""
        outer = self._scopes[-1]
        full = f"{outer.path}.{path}" if outer.path and path else path or outer.path
        numbers = self._scopes[0].numbers
        number = numbers.get(full, 0)
        numbers[full] = number + 1
        call = len(self._rows["calls"]) + 1
        text = json.dumps({"path": full, "type": type})
        self._rows["calls"].append(
            {"call": call, "parent": outer.call, "path": self._intern("path", text), "number": number, "source": 0,
             "training": int(training), "thread": 0}
        )  # fmt: skip
        self._scopes.append(_Scope(call, full))
        try:
            yield
        finally:
            self._scopes.pop()

    def output(self, value: int, name: str = "output") -> None:
        """The root module returned a value."""
        self.name(value, name, kind="output", when="return")

    def alive(self, value: int) -> None:
        """A value's storage still lived at the end of the run."""
        self.name(value, "", kind="alive", when="exit")

    def mark(self, kind: str, **fields: Any) -> None:
        """Something that is no op."""
        self._rows["marks"].append(
            {"seq": self._seq, "time": self._seq, "kind": kind, "call": self._scopes[-1].call, "thread": 0,
             "fields": json.dumps(fields)}
        )  # fmt: skip

    def content(self, value: int) -> Array:
        """The content of a value."""
        found = self._values[value - 1].content
        assert found is not None
        return found

    def build(self, path: str = "hand-built.trace") -> Trace:
        """The trace, as `opdrift.load` would give it."""
        footer = Footer(
            ops=len(self._rows["ops"]),
            ended="ok" if self._exception is None else "raised",
            exception=self._exception,
            raised_at=self._raised_at,
            failures=(),
            notes=(),
        )
        incomplete = None if self._complete else f"incomplete at op {self._seq}: there is no footer"
        for value in range(1, len(self._values) + 1):
            self._meta(value)  # interns the layout, before the names are written
        tables = {name: _table(name, self._table_rows(name)) for name in TABLES}
        return Trace(
            Path(path), self._header, footer if self._complete else None, tables, incomplete
        )

    # ---- values ----------------------------------------------------------------------------------------

    def _new(self, content: Array | None, dtype: str, shape: Sequence[int] | None = None) -> int:
        self._storages += 1
        size = tuple(shape if shape is not None else content.shape if content is not None else ())
        self._values.append(
            _Value(self._storages, 0, 0, size, dense(size), dtype, content, content is not None)
        )
        return len(self._values)

    def _view(
        self, value: int, shape: Sequence[int] | None, offset: int, content: Array | None
    ) -> int:
        of = self._values[value - 1]
        size = tuple(shape) if shape is not None else of.shape[::-1]
        stride = of.stride[::-1] if size == of.shape[::-1] and len(size) > 1 else dense(size)
        array = content
        if array is None and of.content is not None:
            flat = of.content.reshape(-1)[offset : offset + math.prod(size)]
            turned = size == of.shape[::-1] and not offset
            array = of.content.T if turned else flat.reshape(size)
        place = of.offset + offset
        self._values.append(
            _Value(of.storage, of.write, place, size, stride, of.dtype, array, printed=False)
        )
        return len(self._values)

    def _write(self, value: int, content: Array | None) -> int:
        old = self._values[value - 1]
        write = 1 + max(v.write for v in self._values if v.storage == old.storage)
        self._values.append(
            _Value(
                old.storage,
                write,
                old.offset,
                old.shape,
                old.stride,
                old.dtype,
                content,
                printed=True,
            )
        )
        return len(self._values)

    def _compute(
        self,
        name: str,
        inputs: Sequence[int],
        settings: Mapping[str, Any] | None,
        state: str,
        change: Change,
        shape: Sequence[int] | None,
        dtype: str | None,
        in_place: bool,
    ) -> Array:
        """A content that follows from name, settings and inputs, with a gain of about 1."""
        operands = [self._values[v - 1] for v in inputs]
        first = operands[0] if operands else None
        size = tuple(shape) if shape is not None else (first.shape if first else (4, 8))
        out_dtype = dtype or (first.dtype if first else "float32")
        short = name.split(".")[1]
        overwrites = (in_place and short in ("copy_", "fill_", "zero_")) or short in _RANDOM
        # an op and its in-place form compute the same
        recipe = f"{family(name)} {json.dumps(dict(settings or {}), sort_keys=True)} {state}"
        if short in _FACTORIES or not operands or (overwrites and short != "copy_"):
            result = noise(recipe, size, out_dtype)
        elif short in ("copy_", "_to_copy", "clone"):
            source = operands[-1].content
            assert source is not None
            result = rounded(np.resize(source, size), out_dtype)
        else:
            total = np.zeros(math.prod(size))
            for i, operand in enumerate(operands):
                if operand.content is not None:
                    flat = np.resize(operand.content.astype(np.float64).reshape(-1), total.size)
                    random = np.random.default_rng(seed(f"{recipe} {i}"))
                    total += random.permutation(flat) * random.choice((-1.0, 1.0), total.size)
            result = rounded((total / math.sqrt(len(operands))).reshape(size), out_dtype)
        return changed(result, change)

    # ---- rows ------------------------------------------------------------------------------------------

    def _record(
        self,
        name: str,
        inputs: Sequence[int],
        made: Sequence[int],
        settings: Mapping[str, Any],
        *,
        in_place: bool,
        state: int,
        phase: str,
        source: tuple[str, int, str] | None,
        flags: int,
    ) -> None:
        self._seq += 1
        short = name.split(".")[1]
        names = _ARGUMENTS.get(short, ("self", "other"))
        names = (*names, *(f"arg{i}" for i in range(len(names), len(inputs))))
        tags = [
            tag
            for tag, holds in (
                ("view", short in _VIEWS),
                ("uninitialised", short in _EMPTY),
                ("seeded", short in _RANDOM),
            )
            if holds
        ]
        tensor_names = [n for n in names if n not in settings][: len(inputs)]
        info = {
            "name": name,
            "arguments": [*names, *(s for s in settings if s not in names)],
            "is": tags,
        }
        if in_place:
            info["mutates"] = [tensor_names[0]]
        arguments = {n: {"t": self._meta(v)} for n, v in zip(tensor_names, inputs, strict=True)}
        signature = {
            "op": self._intern("op", json.dumps(info)),
            "args": [],
            "kwargs": {**arguments, **{n: _argument(a) for n, a in settings.items()}},
        }
        self._rows["ops"].append(
            {
                "seq": self._seq,
                "start": self._seq * 1000,
                "duration": 1000,
                "node": 0,
                "rng": state,
                "signature": self._intern("signature", json.dumps(signature)),
                "call": self._scopes[-1].call,
                "source": 0 if source is None else self._intern("source", json.dumps(source)),
                "thread": 0,
                "phase": int(phase == "backward"),
                "flags": flags,
                "mutated": int(in_place),
                "inputs": list(inputs),
                # an in-place op returns what it wrote
                "outputs": [*made, *made] if in_place else list(made),
            }
        )

    def _meta(self, value: int) -> int:
        v = self._values[value - 1]
        return self._intern("meta", json.dumps([v.shape, v.stride, v.dtype, self._device]))

    def _intern(self, kind: str, text: str) -> int:
        found = self._names.get((kind, text))
        if found is None:
            found = self._names[kind, text] = self._counts.get(kind, 0) + 1
            self._counts[kind] = found
        return found

    def _table_rows(self, table: str) -> list[dict[str, Any]]:
        if table == "names":
            return [
                {"kind": kind, "id": ident, "text": text}
                for (kind, text), ident in self._names.items()
            ]
        if table == "values":
            rows = []
            for ident, v in enumerate(self._values, 1):
                rows.append(
                    {
                        "value": ident,
                        "storage": v.storage,
                        "offset": v.offset,
                        "write": v.write,
                        "meta": self._meta(ident),
                    }
                )
            return rows
        if table == "tensors":
            return [
                fingerprint_row(ident, v.content, v.dtype)
                for ident, v in enumerate(self._values, 1)
                if v.printed and v.content is not None
            ]
        return self._rows[table]


def _table(name: str, rows: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(rows, schema=TABLES[name])


def _argument(value: Any) -> Any:
    """An argument as the trace's JSON holds it."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"f": str(value)}
    return [_argument(v) for v in value] if isinstance(value, list | tuple) else value
