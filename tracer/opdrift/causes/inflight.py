"""An op read what a collective or a copy was still filling."""

from __future__ import annotations

from opdrift.causes.evidence import Evidence, cause, scope
from opdrift.races import filling
from opdrift.records import READ_IN_FLIGHT, Cause


def read_in_flight(e: Evidence) -> Cause | None:
    """A run read a result before it was there: what it got depends on time."""
    found = [
        (name, side, op)
        for name, side, op in e.sides
        if op is not None and side.trace.ops.flags[op] & READ_IN_FLIGHT
    ]
    if not found:
        return None
    _, side, op = found[0]
    evidence = []
    for name, each, reader in found:
        source = filling(each.trace, each.op(reader))
        if source is not None:
            evidence.append(f"{name}: {each.place(source.index)} was not waited for")
        evidence.append(f"{name}: {each.place(reader)} read its result, and it was not done")
    return cause(
        "race",
        "certain",
        f"{side.name(op)} in {scope(side.module(op))} read what was still being filled",
        evidence,
        "Wait for it before its result is read: work.wait() for a collective, an event or a synchronisation for a copy with"
        " non_blocking=True.",
    )
