"""How long comparing two traces takes, and how much memory, by their length and by how they differ.

Usage: python benchmarks/diff.py [--quick] [--ops N] [CASE ...]

The traces are made up, without torch: steps of a 12-layer decoder, 281 ops and 113 module calls a step,
each op with a scope, values, and a fingerprint with sketch and sample as a recording has them. Every
comparison runs in a process of its own, from the folders on disk to the diagnosis. Lower is better.

    identical   the same trace twice, under two names
    start       the right run has one more op, at its start
    every       the right run has one more op after every 1000
    changed     one op in the middle returns something else, and all that follow it
    both        every and changed together
    unrelated   another model: other names, another order of ops, nothing equal
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from opdrift.records import TRACE_SCHEMA
from opdrift.tokens import mix, word
from opdrift.tracefile.writer import TraceWriter, list_column

Ints = npt.NDArray[np.int64]

CASES: Final = ("identical", "start", "every", "changed", "both", "unrelated")
#: Runs in the process that is measured. Peak memory is that of the process, NumPy and Arrow included.
MEASURE: Final = """
import json, resource, sys, time
start, cpu = time.perf_counter(), time.process_time()
import opdrift
from opdrift.errors import IncomparableTracesError
try:
    found = opdrift.diff(sys.argv[1], sys.argv[2])
    what = found.verdict, found.first and found.first.seq.left, found.alignment.paired
except IncomparableTracesError:
    what = "not comparable", None, None
print(json.dumps([time.perf_counter() - start, time.process_time() - cpu,
    resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, *what]))
"""

# ---- programs ------------------------------------------------------------------------------------------


@dataclass
class Step:
    """One step of a program: its ops in order, with what they read.

    An input is the number of an op of the step, or -1 - n for parameter n; `BEFORE` is what the last op
    of the step before returned.
    """

    names: list[str] = field(default_factory=list)
    inputs: list[list[int]] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    #: Path and parent of each call of a module; call 0 is the root module's.
    paths: list[tuple[str, int]] = field(default_factory=lambda: [("", -1)])
    weights: list[str] = field(default_factory=list)

    def op(self, name: str, *inputs: int, call: int) -> int:
        self.names.append(name)
        self.inputs.append(list(inputs))
        self.calls.append(call)
        return len(self.names) - 1

    def call(self, name: str, parent: int) -> int:
        path = f"{self.paths[parent][0]}.{name}".lstrip(".")
        self.paths.append((path, parent))
        return len(self.paths) - 1

    def weight(self, name: str) -> int:
        self.weights.append(name)
        return -len(self.weights)

    def linear(self, name: str, value: int, parent: int) -> int:
        call = self.call(name, parent)
        path = self.paths[call][0]
        bias, weight = self.weight(f"{path}.bias"), self.weight(f"{path}.weight")
        return self.op("addmm", bias, value, self.op("t", weight, call=call), call=call)

    def norm(self, name: str, value: int, parent: int) -> int:
        call = self.call(name, parent)
        path = self.paths[call][0]
        return self.op(
            "native_layer_norm",
            value,
            self.weight(f"{path}.weight"),
            self.weight(f"{path}.bias"),
            call=call,
        )


BEFORE: Final = -1_000_000


def decoder(layers: int = 12) -> Step:
    """A decoder layer as torch runs it without fusing anything, 23 ops."""
    step = Step()
    embed = step.call("embed", 0)
    x = step.op("embedding", step.weight("embed.weight"), BEFORE, call=embed)
    for number in range(layers):
        layer = step.call(f"layers.{number}", 0)
        attention, feed = step.call("attention", layer), step.call("feed", layer)
        h = step.norm("before", x, layer)
        q, k, v = (
            step.op("view", step.linear(name, h, attention), call=attention) for name in "qkv"
        )
        weights = step.op("_softmax", step.op("bmm", q, k, call=attention), call=attention)
        mixed = step.op("bmm", weights, v, call=attention)
        x = step.op("add", x, step.linear("out", mixed, attention), call=layer)
        h = step.linear("up", step.norm("after", x, layer), feed)
        h = step.linear("down", step.op("gelu", h, call=feed), feed)
        x = step.op("add", x, h, call=layer)
    x = step.linear("head", step.norm("norm", x, 0), 0)
    step.op("argmax", x, call=0)
    return step


def other(layers: int = 12) -> Step:
    """Another model of the same ops in another order."""
    step = Step()
    x = step.op("embedding", step.weight("words"), BEFORE, call=0)
    for number in range(layers):
        stage = step.call(f"stages.{number}", 0)
        h = x
        for name in ("reduce", "mix", "widen", "gate", "mend"):
            h = step.op("gelu", step.linear(name, h, stage), call=stage)
            h = step.op("mul", h, step.op("sigmoid", h, call=stage), call=stage)
        x = step.norm("scale", step.op("add", h, x, call=stage), stage)
    step.op("argmax", step.op("mm", x, step.weight("out"), call=0), call=0)
    return step


@dataclass(frozen=True)
class Program:
    """The ops of a whole run.

    Attributes:
        step: What is repeated.
        origin: Per op its number in the run without inserted ops; what an op returns follows from it.
        inserted: Per op whether it is an inserted copy of what the op before returned.
        changed: From which number on ops return something else.
        salt: What contents follow from, besides.
    """

    step: Step
    origin: Ints
    inserted: npt.NDArray[np.bool_]
    changed: int
    salt: str = "a"


def program(step: Step, ops: int, *, every: int = 0, at_start: bool = False) -> Program:
    """A run of about `ops` ops, with copies inserted after every `every`th op, or after the first one."""
    count = max(1, round(ops / len(step.names))) * len(step.names)
    origin = np.arange(count)
    copies = origin[every - 1 :: every] if every else origin[: int(at_start)]
    where = np.insert(origin, copies + 1, copies)
    inserted = np.insert(np.zeros(count, np.bool_), copies + 1, True)
    return Program(step, where, inserted, changed=count)


def case(name: str, ops: int) -> tuple[Program, Program]:
    """The two programs of a case."""
    left = program(decoder(), ops)
    middle = len(left.origin) // 2
    if name == "identical":
        return left, left
    if name == "start":
        return left, program(decoder(), ops, at_start=True)
    if name == "every":
        return left, program(decoder(), ops, every=1000)
    if name == "changed":
        return left, replace(left, changed=middle)
    if name == "both":
        return left, replace(program(decoder(), ops, every=1000), changed=middle)
    assert name == "unrelated"
    return left, replace(program(other(), ops), salt="b")


# ---- traces --------------------------------------------------------------------------------------------

_VIEWS: Final = frozenset({"t", "view"})
_ARGUMENTS: Final = {
    "addmm": ("self", "mat1", "mat2"),
    "bmm": ("self", "mat2"),
    "native_layer_norm": ("input", "weight", "bias"),
}
_PART: Final = 50_000
_SHAPE: Final = [8, 64]


def write(program: Program, folder: Path) -> int:
    """Write a trace of the program; returns its number of ops."""
    header = {
        "schema": TRACE_SCHEMA, "fingerprint": "tfp1", "label": "", "created": "2026-01-01T00:00:00+00:00",
        "torch": "2.13.0", "device": "cpu", "rank": None, "world_size": None, "program": ["made up"],
        "flags": {}, "variables": {}, "versions": {}, "options": {"integrity": "auto"}, "engine": "numpy", "start_unix_ns": 0,
        "start_ns": 0,
    }  # fmt: skip
    folder.mkdir()
    writer = TraceWriter(folder, header)
    step, count = program.step, len(program.origin)
    names = sorted({*step.names, "clone"})
    first = len(step.weights) + 2  # value ids: parameters, the first tokens, then one an op
    _write_names(writer, step, names)
    _write_leaves(writer, program, first + count - 1)
    leaves = np.arange(1, first)
    zeros = np.zeros(len(leaves), np.int64)
    writer.append("values", [leaves, leaves, zeros, zeros, zeros + 1])
    _write_fingerprints(writer, leaves, program.salt, leaves)
    writer.check()
    for start in range(0, count, _PART):
        _write_part(writer, program, names, first, start, min(start + _PART, count))
        writer.check()
    writer.close({"ops": count, "ended": "ok", "exception": None, "failures": [], "notes": []})
    return count


def _write_names(writer: TraceWriter, step: Step, names: Sequence[str]) -> None:
    arity = {name: len(inputs) for name, inputs in zip(step.names, step.inputs, strict=True)}
    rows: list[tuple[str, int, str]] = [
        ("meta", 1, json.dumps([_SHAPE, [_SHAPE[1], 1], "float32", "cpu"]))
    ]
    for number, name in enumerate(names, 1):
        arguments = _ARGUMENTS.get(name, ("self", "other", "more"))[: arity.get(name, 1)]
        info = {
            "name": f"aten.{name}.default",
            "arguments": arguments,
            "is": ["view"] if name in _VIEWS else [],
        }
        rows.append(("op", number, json.dumps(info)))
        signature = {"op": number, "args": [], "kwargs": {a: {"t": 1} for a in arguments}}
        rows.append(("signature", number, json.dumps(signature)))
    for number, (path, _) in enumerate(step.paths, 1):
        rows.append(("path", number, json.dumps({"path": path, "type": "Module"})))
    writer.append("names", list(zip(*rows, strict=True)))


def _write_leaves(writer: TraceWriter, program: Program, last: int) -> None:
    names = [*program.step.weights, "tokens", "output"]
    kinds = ["parameter"] * len(program.step.weights) + ["input", "output"]
    whens = ["entry"] * (len(names) - 1) + ["return"]
    values = [*range(1, len(names)), last]
    seqs = [0] * (len(names) - 1) + [len(program.origin)]
    writer.append("leaves", [names, kinds, whens, values, seqs, [0] * len(names)])


def _write_part(
    writer: TraceWriter, program: Program, names: Sequence[str], first: int, start: int, end: int
) -> None:
    step = program.step
    size, calls = len(step.names), len(step.paths)
    index = np.arange(start, end)
    origin, copy = program.origin[start:end], program.inserted[start:end]
    of_step, place = origin // size, origin % size
    signature = np.array([names.index(name) + 1 for name in step.names])[place]
    signature[copy] = names.index("clone") + 1
    call = of_step * calls + np.array(step.calls)[place] + 1

    lengths, inputs = _inputs(program, first, index)
    values = first + index
    view = np.array([name in _VIEWS for name in step.names])[place] & ~copy
    source = inputs[np.cumsum(lengths) - lengths]
    # the copies change nothing: what they return is what the op before them returned
    zeros, ones = np.zeros(len(index), np.int64), np.ones(len(index), np.int64)
    writer.append(
        "ops",
        [index + 1, index * 1000, ones, zeros, zeros.astype(np.uint64), signature, call, zeros, zeros, zeros,
         zeros, zeros, list_column(lengths, inputs), list_column(ones, values)],
    )  # fmt: skip
    storage = np.where(view, source, values)
    writer.append("values", [values, storage, zeros, zeros, ones])
    content = origin[~view] + (origin[~view] >= program.changed) * len(program.origin) + first
    _write_fingerprints(writer, values[~view], program.salt, content)
    _write_calls(writer, program, index)


def _inputs(program: Program, first: int, index: Ints) -> tuple[Ints, Ints]:
    """How many inputs each op has, and their value ids."""
    step = program.step
    size = len(step.names)
    lengths = np.array([len(i) for i in step.inputs])[program.origin[index] % size]
    lengths[program.inserted[index]] = 1
    flat = np.array([r for refs in step.inputs for r in refs])
    starts = np.cumsum([0, *(len(refs) for refs in step.inputs)])[:-1]
    owner = np.repeat(index, lengths)
    within = np.arange(len(owner)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    origin = program.origin[owner]
    reference = flat[np.minimum(starts[origin % size] + within, len(flat) - 1)]
    before = reference == BEFORE
    op = np.where(before, origin // size * size - 1, origin // size * size + reference)
    op = np.where(program.inserted[owner], origin, op)  # a copy reads what it is a copy of
    leaf = np.where(before, first - 1, -reference)
    is_leaf = ((reference < 0) & ~before & ~program.inserted[owner]) | (op < 0)
    # an op reads a copy, if there is one, instead of the original
    places = np.searchsorted(program.origin, np.maximum(op, 0), "right") - 1
    places = np.where(program.inserted[owner], owner - 1, places)
    return lengths, np.where(is_leaf, leaf, first + places)


def _write_calls(writer: TraceWriter, program: Program, index: Ints) -> None:
    """The calls of the steps that begin in a part."""
    size, calls = len(program.step.names), len(program.step.paths)
    begin = program.origin[index] % size == 0
    steps = program.origin[index][begin & ~program.inserted[index]] // size
    local = np.tile(np.arange(calls), len(steps))
    parents = np.array([parent for _, parent in program.step.paths])[local]
    base = np.repeat(steps * calls + 1, calls)
    zeros = np.zeros(len(local), np.int64)
    writer.append(
        "calls",
        [base + local, np.where(parents < 0, 0, base + parents), local + 1, np.repeat(steps, calls), zeros, zeros, zeros],
    )  # fmt: skip


def _write_fingerprints(writer: TraceWriter, values: Ints, salt: str, contents: Ints) -> None:
    count = len(values)
    raw = mix(contents.astype(np.uint64), np.full(count, word(salt), np.uint64)) >> np.uint64(3)
    numbers = np.random.default_rng(0).standard_normal((4099, 32))
    own = (raw % np.uint64(len(numbers))).astype(np.int64)
    zeros, ones = np.zeros(count, np.int64), np.ones(count)
    n = np.full(count, _SHAPE[0] * _SHAPE[1])
    sketch = 16 * numbers[own]
    cut = sketch.view(np.uint8).reshape(count, 32, 8)[:, :, 3:].reshape(count, 160)
    sample = numbers[own].astype("<f4").view(np.uint8)
    writer.append(
        "tensors",
        [values, raw, n, zeros, -3 * ones, 3 * ones, 3 * ones, ones, n * ones, zeros, zeros, zeros, zeros, zeros,
         _binary(cut), _binary(sample.reshape(count, 128))],
    )  # fmt: skip


def _binary(rows: npt.NDArray[np.uint8]) -> pa.Array:
    offsets = np.arange(len(rows) + 1, dtype=np.int32) * rows.shape[1]
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(rows))]
    return pa.Array.from_buffers(pa.binary(), len(rows), buffers)


# ---- measuring -----------------------------------------------------------------------------------------


def measure(name: str, ops: int, scratch: Path) -> tuple[int, list[Any]]:
    """Ops of the left trace, and what the process that compared them said."""
    left, right = case(name, ops)
    folders = scratch / f"{name}-{ops}-left", scratch / f"{name}-{ops}-right"
    count = write(left, folders[0])
    write(right, folders[1])
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *map(str, folders)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{name}, {ops} ops: {done.stderr}")
    return count, json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "cases", nargs="*", help=f"{', '.join(CASES)}; all if none is named", metavar="CASE"
    )
    parser.add_argument("--quick", action="store_true", help="10,000 ops only")
    parser.add_argument("--ops", type=int, help="traces of about this many ops only")
    options = parser.parse_args()
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"no case {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    sizes = (
        [options.ops]
        if options.ops
        else [10_000]
        if options.quick
        else [10_000, 100_000, 1_000_000]
    )
    print(f"Python {platform.python_version()}, NumPy {np.__version__}, Arrow {pa.__version__}")
    print(f"{'case':10}{'ops':>10}{'seconds':>9}{'CPU s':>8}{'peak MB':>9}  {'paired':>9}  verdict")
    for size in sizes:
        for name in options.cases or CASES:
            with tempfile.TemporaryDirectory() as scratch:
                count, (wall, cpu, peak, verdict, first, paired) = measure(
                    name, size, Path(scratch)
                )
            where = "" if first is None else f", first at op {first}"
            pairs = "-" if paired is None else f"{paired:,}"
            print(
                f"{name:10}{count:>10,}{wall:>9.2f}{cpu:>8.2f}{peak / 1e6:>9.0f}  {pairs:>9}  {verdict}{where}",
                flush=True,
            )


if __name__ == "__main__":
    main()
