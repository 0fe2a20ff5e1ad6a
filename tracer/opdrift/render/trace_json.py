"""A trace as JSON, schema `opdrift.trace/1`: one object with header, ops, marks, leaves, findings."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from opdrift.picks import Picks
from opdrift.records import (
    FLAG_WORDS,
    TRACE_SCHEMA,
    Argument,
    Finding,
    Leaf,
    Mark,
    Op,
    Pick,
    TensorArgument,
)
from opdrift.render.json import finding_object, pick_object, safe
from opdrift.render.kernels import group_object, kernel_groups
from opdrift.render.regions import compiled_object
from opdrift.render.timeline_text import event_object
from opdrift.timeline import Timelines
from opdrift.tracefile.fingerprints import FingerprintColumns
from opdrift.tracefile.reader import Trace


def render(
    trace: Trace,
    ops: Sequence[int],
    leaves: Sequence[Leaf],
    findings: Sequence[Finding],
    *,
    marks: Sequence[Mark],
    kernels: bool = False,
    timelines: bool = False,
) -> Iterator[str]:
    """The document in pieces, one record a line, so that a long trace needs no memory.

    Args:
        trace: The trace.
        ops: Indices of the ops to list.
        leaves: The leaves to list.
        findings: What `opdrift.findings` found.
        marks: The marks to list.
        kernels: Whether ops get the field `kernel`, and the document `kernels`, by module with counts.
        timelines: Whether the document gets `timeline`: what became of each parameter and buffer among `leaves`.
    """
    picks = Picks(trace).among(ops) if kernels else None
    yield f'{{"schema": "{TRACE_SCHEMA}",\n"header": {_dump(header_object(trace))},\n'
    yield from _list("ops", (_op(trace, i, picks) for i in ops))
    if picks is not None:
        yield from _list("kernels", (group_object(g) for g in kernel_groups(trace, picks)))
    yield from _list("marks", (mark_object(m) for m in marks))
    compiled = compiled_object(trace) if ops else None
    if compiled is not None:
        yield f'"compiled": {_dump(compiled)},\n'
    yield from _list("leaves", (leaf_object(trace, leaf) for leaf in leaves))
    if timelines:
        yield from _list("timeline", _timelines(trace, leaves))
    yield from _list("findings", (finding_object(f) for f in findings), last=True)
    yield "}\n"


def _timelines(trace: Trace, leaves: Sequence[Leaf]) -> Iterator[dict[str, Any]]:
    lines = Timelines(trace)
    by_name: dict[tuple[str, str], list[Leaf]] = {}
    for leaf in leaves:
        if leaf.kind in ("parameter", "buffer"):
            by_name.setdefault((leaf.name, leaf.kind), []).append(leaf)
    for (name, kind), rows in by_name.items():
        events = [event_object(event) for event in lines.of(name, rows)]
        yield {"name": name, "kind": kind, "events": events}


def _dump(data: object) -> str:
    try:
        return json.dumps(data, allow_nan=False)
    except ValueError:  # a number that JSON has no word for: rare, and looking for it first is slow
        return json.dumps(safe(data), allow_nan=False)


def _list(key: str, records: Iterator[dict[str, Any]], *, last: bool = False) -> Iterator[str]:
    yield f'"{key}": ['
    separator = "\n"
    for record in records:
        yield separator + _dump(record)
        separator = ",\n"
    yield "]\n" if last else "],\n"


def header_object(trace: Trace) -> dict[str, Any]:
    """The header's fields, and how the recording ended."""
    footer = trace.footer
    return {
        **asdict(trace.header),
        "path": str(trace.path),
        "complete": trace.complete,
        "incomplete": trace.incomplete,
        "footer": None if footer is None else asdict(footer),
    }


def _op(trace: Trace, index: int, picks: Mapping[int, Pick] | None) -> dict[str, Any]:
    found = op_object(trace, trace.op(index))
    if picks is not None:
        found["kernel"] = pick_object(picks.get(index))
    return found


def op_object(trace: Trace, op: Op) -> dict[str, Any]:
    """One op; `inputs` and `outputs` hold values as in `value_object`."""
    return {
        "seq": op.seq,
        "op": op.name,
        "module": op.call.path,
        "type": op.call.type,
        "call": op.call.number,
        "phase": op.phase,
        "source": None if op.source is None else str(op.source),
        "arguments": {name: argument_object(a) for name, a in op.signature.arguments},
        "inputs": [value_object(trace, v) for v in op.inputs],
        "outputs": [value_object(trace, v) for v in op.outputs],
        "mutated": op.mutated,
        "flags": flag_words(op.flags),
        "thread": op.thread,
        "start_ns": op.start_ns,
        "duration_ns": op.duration_ns,
        "rng": f"{op.rng:016x}" if op.rng else None,
        "node": op.node,
    }


def flag_words(flags: int) -> list[str]:
    """The names of the bits that are set."""
    return [word for bit, word in FLAG_WORDS.items() if flags & bit]


def argument_object(argument: Argument) -> Any:
    """A non-tensor argument as JSON; a tensor by its layout, its value is among the inputs."""
    if isinstance(argument, TensorArgument):
        return {"tensor": str(argument.meta)}
    if isinstance(argument, tuple):
        return [argument_object(a) for a in argument]
    return argument


def value_object(trace: Trace, value: int) -> dict[str, Any] | None:
    """A value: its id, layout and fingerprint; null for an absent one."""
    if not value:
        return None
    meta = trace.meta(value)
    return {
        "value": value,
        "shape": meta.shape,
        "stride": meta.stride,
        "dtype": meta.dtype,
        "device": meta.device,
        "fingerprint": _fingerprint_object(
            trace.fingerprints, int(trace.values.fingerprint[value])
        ),
    }


def _fingerprint_object(columns: FingerprintColumns, row: int) -> dict[str, Any] | None:
    """Digest and statistics from the columns: sketch and sample, which would be decoded, are left out."""
    if row < 0:
        return None
    number = columns.number
    return {
        "digest": f"{columns.raw[row]:016x}",
        "n": int(columns.n[row]),
        **{
            name: number(name)[row].item() for name in ("min", "max", "absmax", "sum", "ssq", "nan")
        },
        "inf": int(number("pinf")[row] + number("ninf")[row]),
        **{name: number(name)[row].item() for name in ("zero", "subnormal")},
    }


def digest(trace: Trace, value: int) -> str | None:
    """The exact digest in hex, None where the content was not fingerprinted."""
    row = int(trace.values.fingerprint[value])
    return None if row < 0 else f"{trace.fingerprints.raw[row]:016x}"


def mark_object(mark: Mark) -> dict[str, Any]:
    """One mark."""
    return asdict(mark)


def leaf_object(trace: Trace, leaf: Leaf) -> dict[str, Any]:
    """One sighting of a leaf: {name, kind, when, seq, module, value}."""
    return {
        "name": leaf.name,
        "kind": leaf.kind,
        "when": leaf.when,
        "seq": leaf.seq,
        "module": trace.calls[leaf.call].path,
        "value": value_object(trace, leaf.value),
    }
