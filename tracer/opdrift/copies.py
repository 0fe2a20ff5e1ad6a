"""Copies of one run whose result is not what they were made from, within a device or between two."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from opdrift import tfp1
from opdrift.provenance.ops import operator
from opdrift.records import READ_IN_FLIGHT, Cause, Finding, Op
from opdrift.tracefile.columns import Ints
from opdrift.tracefile.reader import Trace

#: Ops that give all of one input once more -> which of their inputs it is.
_COPIES: Final = {"copy": 1, "_to_copy": 0, "clone": 0, "lift_fresh_copy": 0, "_pin_memory": 0}


def copies(trace: Trace, step_at: Callable[[int | None], int | None]) -> Iterator[Finding]:
    """Each copy that did not arrive as it was sent: it was torn, or its source had been written with no op.

    Only what keeps dtype and shape is compared: its fingerprint must be that of its source.

    Args:
        trace: The trace of one process.
        step_at: The step of the program that an op belongs to.
    """
    seen: set[int] = set()
    for index, source, arrived in zip(*_differing(trace, np.arange(len(trace.ops))), strict=True):
        if int(source) in seen or not _is_kept(trace, int(source), int(arrived)):
            continue
        seen.add(int(source))
        op, ends = trace.op(int(index)), (int(source), int(arrived))
        yield Finding(
            "move" if _moved(trace, *ends) else "hidden-write",
            _cause(trace, op, *ends),
            _name(trace, ends[0]),
            op.name,
            op.call.path,
            op.seq,
            step_at(op.seq),
            trace.header.rank,
        )


def _differing(trace: Trace, index: Ints) -> tuple[Ints, Ints, Ints]:
    """Those ops among some that copied a content that is known, what they copied, and what arrived and is something else."""
    ops, values, of = trace.ops, trace.values, trace.fingerprints
    place = np.full(int(ops.signature.max(initial=-1)) + 1, -1, np.int64)
    for ident in np.unique(ops.signature[index]).tolist():
        place[ident] = _COPIES.get(operator(trace.op_info(ident).name), -1)
    at = place[ops.signature[index]]
    # what was read before it was there is told as such
    at[(ops.flags[index] & READ_IN_FLIGHT) != 0] = -1
    starts, results = ops.inputs.offsets, ops.outputs.offsets
    whole = (at >= 0) & (starts[index + 1] - starts[index] > at)
    whole &= results[index + 1] > results[index]
    index, at = index[whole], at[whole]
    source = ops.inputs.values[starts[index] + at]
    arrived = ops.outputs.values[results[index]]
    one, other = values.fingerprint[source], values.fingerprint[arrived]
    differs = (one >= 0) & (other >= 0) & (of.raw[one] != of.raw[other])
    differs &= (of.n[one] == of.n[other]) & (of.code[one] == of.code[other])
    return index[differs], source[differs], arrived[differs]


def _is_kept(trace: Trace, source: int, arrived: int) -> bool:
    """Whether a copy is to hold the very components of its source: neither cast nor repeated."""
    before, after = trace.meta(source), trace.meta(arrived)
    # conjugate views lie in memory as what they are not
    return (before.dtype, before.shape) == (after.dtype, after.shape) and (
        "complex" not in before.dtype
    )


def wrong_copy(trace: Trace, index: int) -> Cause | None:
    """Why what an op copied is not what arrived; None where it arrived, where that is not known, and of other ops.

    Args:
        trace: The trace of one process.
        index: Position of the op in the trace.
    """
    found = zip(*_differing(trace, np.array([index])), strict=True)
    for _, source, arrived in found:
        if _is_kept(trace, int(source), int(arrived)):
            return _cause(trace, trace.op(index), int(source), int(arrived))
    return None


def _cause(trace: Trace, op: Op, source: int, arrived: int) -> Cause:
    before, after = trace.fingerprint(source), trace.fingerprint(arrived)
    assert before is not None
    assert after is not None
    where = f" at {op.source}" if op.source is not None else ""
    maker = int(trace.producer[source])
    made = f"after {trace.op(maker).name} (op {trace.op(maker).seq})" if maker >= 0 else "at first"
    evidence = [
        f"{op.name} (op {op.seq}{where}) copied it{_moved(trace, source, arrived)}",
        f"its digest was {before.raw:016x} {made}, and is {after.raw:016x} in the copy",
        "no op that was recorded wrote it in between",
    ]
    element = tfp1.changed_element(before.raw, after.raw, before.n, before.code)
    if element is not None:
        evidence.insert(2, f"one element differs: {element:,} of {before.n:,}")
    what = _name(trace, source) or f"a {trace.meta(source)}"
    return Cause(
        "race",
        "likely",
        f"{what}: its copy is not what it held when it was last written",
        tuple(evidence),
        "Look for a write that the dispatcher cannot see, before the copy or while it was made: another thread, a copy"
        " that nobody waited for, numpy, .data, a custom kernel. Wait for it before the tensor is copied.",
    )


def _moved(trace: Trace, source: int, arrived: int) -> str:
    """From where to where, if that is not the same device."""
    there, here = trace.meta(source).device, trace.meta(arrived).device
    return f" from {there} to {here}" if there != here else ""


def _name(trace: Trace, value: int) -> str | None:
    """The name of the very memory that a value lies in."""
    columns = trace.values
    for leaf in trace.leaves:
        if leaf.name and all(
            column[leaf.value] == column[value]
            for column in (columns.storage, columns.offset, columns.meta)
        ):
            return leaf.name
    return None
