"""Ops that read what a collective or a copy was still filling."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from opdrift.records import PENDING, READ_IN_FLIGHT, Cause, Finding, Op
from opdrift.tracefile.reader import Trace


def races(trace: Trace, step_at: Callable[[int | None], int | None]) -> Iterator[Finding]:
    """The first reader of each result that was still under way; what follows from it is not said again.

    Those that one line of the program issued and one line read, in a loop over parameters or in every step, are one.

    Args:
        trace: The trace of one process.
        step_at: The step of the program that an op belongs to.
    """
    seen: set[int] = set()
    alike: dict[object, list[tuple[Op, Op]]] = {}
    for index in np.flatnonzero(trace.ops.flags & READ_IN_FLIGHT).tolist():
        op = trace.op(index)
        source = filling(trace, op)
        if source is None or source.index in seen:
            continue
        seen.add(source.index)
        known = None not in (source.source, op.source)
        lines = (str(source.source), str(op.source), source.name, op.name, op.call.path)
        alike.setdefault(lines if known else op.seq, []).append((op, source))
    for found in alike.values():
        yield _finding(trace, found, step_at)


def filling(trace: Trace, op: Op) -> Op | None:
    """The op under way that last wrote into one of an op's inputs."""
    columns, outputs = trace.values, trace.ops.outputs
    for value in op.inputs:
        same = (columns.storage == columns.storage[value]) & (columns.write == columns.write[value])
        ops = np.unique(outputs.rows()[np.isin(outputs.values, np.flatnonzero(same))])
        under_way = ops[(trace.ops.flags[ops] & PENDING) != 0]
        if value and len(under_way):
            return trace.op(int(under_way[0]))
    return None


def _finding(
    trace: Trace,
    found: Sequence[tuple[Op, Op]],
    step_at: Callable[[int | None], int | None],
) -> Finding:
    op, source = found[0]
    lines = [f" at {each.source}" if each.source is not None else "" for each in (source, op)]
    cause = Cause(
        "race",
        "certain",
        f"{op.name} in {op.call.path or 'the root module'} read what {source.name} was still filling",
        (
            f"{source.name} (op {source.seq}{lines[0]}) was issued without waiting for it",
            f"{op.name} (op {op.seq}{lines[1]}) read its result, and it was not done",
            *_more(found),
        ),
        "Wait for it before its result is read: work.wait() for a collective, torch.cuda.synchronize() or an event for a"
        " copy with non_blocking=True. OPDRIFT_SYNCHRONISED=1 records the run with every wait in place.",
    )
    return Finding(
        "race", cause, None, op.name, op.call.path, op.seq, step_at(op.seq), trace.header.rank
    )


def _more(found: Sequence[tuple[Op, Op]]) -> Iterator[str]:
    """How many more results were read so."""
    if len(found) > 1:
        op, source = found[-1]
        yield (
            f"so were {len(found) - 1} more results that the same line issued, the last one that of op {source.seq}, by op"
            f" {op.seq}"
        )
