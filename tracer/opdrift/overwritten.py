"""Parameters that were loaded and, before anything read them, drawn or filled again."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from opdrift.neighbours import Neighbours
from opdrift.provenance import Lineage
from opdrift.provenance.ops import COPIES, DRAWS, FILLS, operator
from opdrift.records import Cause, Finding
from opdrift.tracefile.columns import Ints
from opdrift.tracefile.reader import Trace
from opdrift.wording import some


def overwritten(trace: Trace, step_at: Callable[[int | None], int | None]) -> Iterator[Finding]:
    """One finding for all that one line of the program overwrote.

    Args:
        trace: The trace of one process.
        step_at: The step of the program that an op belongs to.
    """
    names = _parameters(trace)
    lineage, near = Lineage(trace), Neighbours(trace)
    groups: dict[object, list[tuple[str, int, int]]] = {}
    for index in _draws(trace):
        value = int(trace.ops.outputs[index][0])
        name = names.get(int(trace.values.storage[value]))
        load = _unread_load(trace, lineage, near, index, value) if name is not None else None
        if name is not None and load is not None:
            key = int(trace.ops.source[index]), int(trace.ops.signature[load])
            groups.setdefault(key, []).append((name, load, index))
    for found in groups.values():
        yield _finding(trace, found, step_at)


def _parameters(trace: Trace) -> dict[int, str]:
    """Storage -> the name of the parameter in it."""
    return {
        int(trace.values.storage[leaf.value]): leaf.name
        for leaf in trace.leaves
        if leaf.kind == "parameter" and leaf.name
    }


def _draws(trace: Trace) -> list[int]:
    """Ops that draw or fill what they write."""
    named = [
        ident
        for ident in np.unique(trace.ops.signature).tolist()
        if operator(trace.op_info(ident).name) in DRAWS | FILLS
    ]
    hits = np.isin(trace.ops.signature, np.array(named, np.int64)) & (trace.ops.mutated > 0)
    return [int(i) for i in np.flatnonzero(hits)]


def _unread_load(
    trace: Trace, lineage: Lineage, near: Neighbours, index: int, value: int
) -> int | None:
    """The op that copied what an op overwrites wholly, if nothing read it in between."""
    columns, before = trace.values, near.of(value)
    before = before[
        (columns.write[before] == columns.write[value] - 1)
        & (columns.offset[before] == columns.offset[value])
        & (columns.meta[before] == columns.meta[value])
    ]
    if not len(before):
        return None
    load = int(trace.producer[before[0]])
    if load < 0 or operator(trace.op(load).name) not in COPIES:
        return None
    if lineage.of(int(before[0])).kind != "copied" or _is_read(trace, before, load, index):
        return None
    return load


def _is_read(trace: Trace, values: Ints, load: int, index: int) -> bool:
    """Whether an op between two others took one of the values."""
    inputs = trace.ops.inputs
    between = inputs.values[inputs.offsets[load + 1] : inputs.offsets[index]]
    storage, write = trace.values.storage, trace.values.write
    same = (storage[between] == storage[values[0]]) & (write[between] == write[values[0]])
    return bool(same.any())


def _finding(
    trace: Trace,
    found: list[tuple[str, int, int]],
    step_at: Callable[[int | None], int | None],
) -> Finding:
    name, load, index = found[0]
    loaded, drawn = trace.op(load), trace.op(index)
    names = [each for each, _, _ in found]
    said = some(names)
    word = "were" if len(names) > 1 else "was"
    where = [f" at {op.source}" if op.source is not None else "" for op in (loaded, drawn)]
    cause = Cause(
        "weights",
        "certain",
        f"{said} {word} loaded, and overwritten by {drawn.name} before anything read it",
        (
            f"{loaded.name} (op {loaded.seq}{where[0]}) copied {name} in",
            f"{drawn.name} (op {drawn.seq}{where[1]}) wrote all of it; no op read it in between",
        ),
        "Initialise before the checkpoint is loaded, not after: look at the line of the second op.",
    )
    return Finding(
        "overwritten",
        cause,
        name,
        drawn.name,
        drawn.call.path or name.rpartition(".")[0],
        drawn.seq,
        step_at(drawn.seq),
        trace.header.rank,
    )
