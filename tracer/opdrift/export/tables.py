"""A trace as tables that can be queried: every name and layout beside what it belongs to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from opdrift.export.kineto import encoded
from opdrift.export.opslices import LOOKED_UP, argument_value, looked_up, pick_fact
from opdrift.export.output import file_size
from opdrift.export.tableschema import COUNTS, IDS, NUMBERS, TABLES, TIME, repeating, rising
from opdrift.plugins import OP_STATUSES, Export, Process
from opdrift.records import RAISED
from opdrift.render.trace_json import flag_words
from opdrift.render.words import count, plural
from opdrift.steps import Steps
from opdrift.tfp1 import Code
from opdrift.tracefile.columns import Ints, Ragged

#: Rows that are put together and written at a time.
_ROWS: Final = 1 << 17

Columns = dict[str, Any]


def write_tables(export: Export, folder: Path) -> str:
    """Write all tables of all processes into a folder, and say how much that is."""
    ops, cut = 0, False
    with ExitStack() as stack:
        # names are dictionaries within Parquet; to readers they are plain texts
        files = {
            name: stack.enter_context(
                pq.ParquetWriter(
                    folder / f"{name}.parquet",
                    schema,
                    compression="zstd",
                    store_schema=False,
                    use_dictionary=repeating(schema),
                    column_encoding=rising(schema),
                )
            )
            for name, schema in TABLES.items()
        }
        total = len(export.processes)
        for number in range(total):
            process = export.processes[number]
            made = _Tables(process)
            for name, columns in made.all():
                files[name].write_table(_table(name, columns, made.rank))
                if name == "ops":
                    share = made.written / max(len(process.ops), 1)
                    export.progress(int(1000 * (number + share)), 1000 * total)
            ops += len(process.ops)
            cut |= len(process.ops) > LOOKED_UP
            del process, made  # before the next one is read
    size = sum(path.stat().st_size for path in folder.iterdir())
    ranks = f" of {total} ranks" if total > 1 else ""
    kernels = f" (kernels of the first {count(LOOKED_UP)})" if cut else ""
    return f"wrote {plural(ops, 'op')}{ranks}{kernels} into {plural(len(TABLES), 'table')}, {file_size(size)}"


def _table(name: str, columns: Columns, rank: int) -> pa.Table:
    """Columns that are not given are null."""
    schema = TABLES[name]
    rows = len(next(iter(columns.values())))
    given = {"rank": pa.array(np.full(rows, rank, np.int32)), **columns}
    return pa.table(
        [_array(given.get(field.name), field.type, rows) for field in schema], schema=schema
    )


def _array(values: Any, type_: pa.DataType, rows: int) -> pa.Array:
    if values is None:
        return pa.nulls(rows, type_)
    found = values if isinstance(values, pa.Array) else pa.array(values)
    return found if found.type == type_ else found.cast(type_)


class _Tables:
    """The tables of one process."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._trace = trace = process.trace
        self._clock = trace.header.start_unix_ns - trace.header.start_ns
        self.rank = trace.header.rank or 0
        #: Ops that are in a table already.
        self.written = 0

    def all(self) -> Iterator[tuple[str, Columns]]:
        """Name of a table and some of its rows."""
        yield "runs", self._run()
        yield from (("ops", part) for part in self._parts(self._process.ops, self._ops()))
        yield from (("tensors", part) for part in self._parts(self._values(), self._tensors))
        yield "leaves", self._leaves()
        yield "marks", self._marks()
        yield from (("calls", part) for part in self._parts(self._call_ids(), self._calls))

    def _parts(self, chosen: Ints, rows: Callable[[Ints], Columns]) -> Iterator[Columns]:
        for at in range(0, len(chosen), _ROWS):
            yield rows(chosen[at : at + _ROWS])

    # ---- ops ---------------------------------------------------------------------------------------------

    def _ops(self) -> Callable[[Ints], Columns]:
        trace, columns = self._trace, self._trace.ops
        steps = Steps(trace)
        picked = looked_up(self._process)
        picks = {index: pick_fact(pick) for index, pick in picked.items()}
        last_pick = max(picks, default=-1)

        def rows(ops: Ints) -> Columns:
            self.written += len(ops)
            paths = trace.call_columns.path[columns.call[ops]]
            sources = columns.source[ops]
            known = int(ops[0]) <= last_pick
            told = [picks.get(index, {}) for index in ops.tolist()] if known else None
            rng = columns.rng[ops]
            return {
                "seq": columns.seq[ops],
                "op": _texts(columns.signature[ops], lambda s: trace.op_info(s).name),
                "module": self._path(paths),
                "module_type": self._type(paths),
                "call": columns.call[ops],
                "phase": _texts(columns.phase[ops], lambda p: "backward" if p else "forward"),
                "step": [steps.at(seq) for seq in columns.seq[ops].tolist()]
                if steps.numbers
                else None,
                "thread": columns.thread[ops],
                "start": pa.array(columns.start[ops] + self._clock).cast(TIME),
                "duration_ns": columns.duration[ops],
                **self._source(sources),
                "arguments": _texts(columns.signature[ops], self._arguments),
                "inputs": _lists(columns.inputs, ops),
                "outputs": _lists(columns.outputs, ops),
                "mutated": columns.mutated[ops],
                "raised": (columns.flags[ops] & RAISED) > 0,
                "flags": _texts(columns.flags[ops], lambda f: ",".join(flag_words(f))),
                "node": columns.node[ops],
                "rng": _hex(rng, rng > 0),
                "kernel": _maybe(told, "name"),
                "library": _maybe(told, "library"),
                "backend": _maybe(told, "backend"),
                "reason": _maybe(told, "reason"),
                **self._compared(ops),
            }

        return rows

    def _arguments(self, signature: int) -> str:
        found = self._trace.signature(signature).arguments
        return encoded({name: argument_value(value) for name, value in found})

    def _compared(self, ops: Ints) -> Columns:
        comparison = self._process.comparison
        if comparison is None:
            return {}
        partner = comparison.counterpart[ops]
        return {
            "status": _texts(comparison.status[ops].astype(np.int64), lambda s: OP_STATUSES[s]),
            "counterpart": pa.array(
                np.append(comparison.baseline.ops.seq, 0)[partner], mask=partner < 0
            ),
        }

    # ---- values ------------------------------------------------------------------------------------------

    def _values(self) -> Ints:
        """The values that these ops read or wrote; of a whole run also those that no op touched."""
        if self._process.whole:
            return np.flatnonzero(self._trace.values.meta > 0)
        columns, ops = self._trace.ops, self._process.ops
        lists = [columns.inputs, columns.outputs]
        found = np.unique(np.concatenate([_flat(each, ops)[1] for each in lists]))
        return found[found > 0]

    def _tensors(self, chosen: Ints) -> Columns:
        trace, values, prints = self._trace, self._trace.values, self._trace.fingerprints
        rows = values.fingerprint[chosen]
        known = rows >= 0
        maker = trace.producer[chosen]
        metas = values.meta[chosen]
        found: Columns = {
            "value": chosen,
            "maker": pa.array(np.append(trace.ops.seq, 0)[maker], mask=maker < 0),
            "dtype": _texts(metas, lambda m: trace.meta_of(m).dtype),
            "shape": _layouts(metas, lambda m: trace.meta_of(m).shape),
            "stride": _layouts(metas, lambda m: trace.meta_of(m).stride),
            "offset": values.offset[chosen],
            "device": _texts(metas, lambda m: trace.meta_of(m).device),
            "storage": values.storage[chosen],
            "write": values.write[chosen],
        }
        if not len(prints):
            return found
        code = _texts(prints.code[rows], lambda c: Code(c).name.lower())
        numbers = {
            name: pa.array(prints.number(name)[rows], mask=~known) for name in (*NUMBERS, *COUNTS)
        }
        return {
            **found,
            "digest": _hex(prints.raw[rows], known),
            "components": pa.array(prints.n[rows], mask=~known),
            "code": pa.array(code.to_numpy(zero_copy_only=False), pa.string(), mask=~known),
            **numbers,
        }

    def _leaves(self) -> Columns:
        leaves = self._trace.leaves
        if not self._process.whole:
            kept = set(self._values().tolist())
            leaves = [leaf for leaf in leaves if leaf.value in kept]
        return {
            "name": pa.array([leaf.name for leaf in leaves], pa.string()),
            "kind": pa.array([leaf.kind for leaf in leaves], pa.string()),
            "when": pa.array([leaf.when for leaf in leaves], pa.string()),
            "value": pa.array([leaf.value for leaf in leaves], pa.int64()),
            "seq": pa.array([leaf.seq for leaf in leaves], pa.int64()),
            "module": self._path(self._paths([leaf.call for leaf in leaves])),
        }

    # ---- marks, calls, the run ------------------------------------------------------------------------------

    def _marks(self) -> Columns:
        marks = self._trace.marks
        times = np.array([mark.time_ns for mark in marks], np.int64) + self._clock
        return {
            "seq": pa.array([mark.seq for mark in marks], pa.int64()),
            "time": pa.array(times).cast(TIME),
            "kind": pa.array([mark.kind for mark in marks], pa.string()),
            "module": self._path(self._paths([mark.call for mark in marks])),
            "thread": pa.array([mark.thread for mark in marks], pa.int32()),
            "fields": pa.array([encoded(mark.fields) for mark in marks], pa.string()),
        }

    def _call_ids(self) -> Ints:
        """Of a part of a run the calls that its ops ran in, and those around them."""
        parents = self._trace.call_columns.parent
        if self._process.whole:
            return np.arange(1, len(parents), dtype=np.int64)
        found = np.unique(self._trace.ops.call[self._process.ops])
        while len(more := np.setdiff1d(parents[found], found)):
            found = np.union1d(found, more)
        return found[found > 0]

    def _calls(self, chosen: Ints) -> Columns:
        columns = self._trace.call_columns
        paths = columns.path[chosen]
        return {
            "call": chosen,
            "parent": columns.parent[chosen],
            "module": self._path(paths),
            "module_type": self._type(paths),
            "number": columns.number[chosen],
            "training": columns.training[chosen] > 0,
            "thread": columns.thread[chosen],
            **self._source(columns.source[chosen]),
        }

    def _run(self) -> Columns:
        header, footer = self._trace.header, self._trace.footer
        start = pa.array([header.start_unix_ns]).cast(TIME)
        return {
            "label": [_clean(header.label)],
            "created": [header.created],
            "start": start,
            "torch": [header.torch],
            "device": [header.device],
            "world_size": pa.array([header.world_size], pa.int32()),
            "program": [encoded(list(header.program))],
            "flags": [encoded(header.flags)],
            "variables": [encoded(header.variables)],
            "versions": [encoded(header.versions)],
            "incomplete": pa.array([self._trace.incomplete], pa.string()),
            "ended": pa.array([None if footer is None else footer.ended], pa.string()),
            "exception": pa.array([None if footer is None else footer.exception], pa.string()),
        }

    # ---- names -----------------------------------------------------------------------------------------------

    def _paths(self, calls: Sequence[int]) -> Ints:
        return self._trace.call_columns.path[np.array(calls, np.int64)]

    def _path(self, paths: Ints) -> pa.Array:
        return _texts(paths, lambda p: self._trace.call_name(p)[0])

    def _type(self, paths: Ints) -> pa.Array:
        return _texts(paths, lambda p: self._trace.call_name(p)[1])

    def _source(self, sources: Ints) -> Columns:
        lines = self._trace.source
        return {
            "file": _texts(sources, lambda s: None if (x := lines(s)) is None else x.file),
            "line": _numbers(sources, lambda s: None if (x := lines(s)) is None else x.line),
            "function": _texts(sources, lambda s: None if (x := lines(s)) is None else x.function),
        }


def _texts(numbers: Ints, of: Callable[[int], str | None]) -> pa.Array:
    """The text of each number; each is asked for once."""
    return _each(numbers, of, pa.string())


def _numbers(numbers: Ints, of: Callable[[int], int | None]) -> pa.Array:
    return _each(numbers, of, pa.int64())


def _layouts(metas: Ints, of: Callable[[int], tuple[int, ...]]) -> pa.Array:
    return _each(metas, lambda m: list(of(m)), IDS)


def _each(numbers: Ints, of: Callable[[int], Any], type_: pa.DataType) -> pa.Array:
    found, places = np.unique(numbers, return_inverse=True)
    values = [of(number) for number in found.tolist()]
    known = [_clean(value) if isinstance(value, str) else value for value in values]
    return pa.array(known, type_).take(pa.array(places))


def _maybe(told: Sequence[Mapping[str, Any]] | None, key: str) -> pa.Array | None:
    return None if told is None else pa.array([each.get(key) for each in told], pa.string())


def _flat(lists: Ragged, rows: Ints) -> tuple[Ints, Ints]:
    """Offsets and values of some of the lists."""
    counts = lists.offsets[rows + 1] - lists.offsets[rows]
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], counts)
    return offsets, lists.values[np.repeat(lists.offsets[rows], counts) + within]


def _lists(lists: Ragged, rows: Ints) -> pa.Array:
    offsets, values = _flat(lists, rows)
    return pa.ListArray.from_arrays(pa.array(offsets.astype(np.int32)), pa.array(values))


def _hex(numbers: npt.NDArray[np.uint64], known: npt.NDArray[np.bool_]) -> pa.Array:
    """Sixteen hexadecimal digits each, as reports write digests; null where nothing is known."""
    digits = np.frombuffer(b"".join(b"%02x" % n for n in range(256)), "S2")
    found = digits[numbers.astype(">u8").view(np.uint8)].view("S16")
    return pa.array(found.astype("U16"), pa.string(), mask=~known)


def _clean(text: str) -> str:
    """A text that UTF-8 can hold: half of a surrogate pair as its escape."""
    return text.encode("utf-8", "backslashreplace").decode()
