"""Positions that are counted otherwise, on their way to a table or to angles."""

from __future__ import annotations

from typing import Final

import numpy as np

from opdrift.case import Side
from opdrift.causes.evidence import Evidence, cause, scope
from opdrift.records import Cause
from opdrift.tokens import base

_COUNTING: Final = frozenset(["arange", "cumsum"])
#: Ops that read positions: as rows of a table, or as angles.
_READING: Final = frozenset(["embedding", "cos", "sin", "polar"])
#: Ops that positions pass on the way: products with frequencies, and what brings them into shape.
_THROUGH: Final = frozenset(
    ["mul", "bmm", "mm", "add", "cat", "stack", "clone", "_to_copy", "repeat"]
)
#: Ops between the count and its reader, and readers that are looked at.
_HOPS: Final = 8
_READERS: Final = 32


def counted_otherwise(e: Evidence) -> Cause | None:
    """A count begins elsewhere, and what comes of it is looked up in a table or turned into angles."""
    region, settings = e.origin.region, e.origin.settings
    if e.origin.story != "factory" or not region.left or not region.right:
        return None
    left, right = e.case.left, e.case.right
    if base(left.name(region.left[0])) not in _COUNTING or not any(
        s.name == "start" for s in settings
    ):
        return None
    reader = position_reader(left, region.left[0])
    if reader is None:
        return None
    return cause(
        "position-ids",
        "certain",
        f"{left.name(reader)} in {scope(left.module(reader))} reads positions that are counted otherwise:"
        f" {', '.join(f'{s.name} {s.left} against {s.right}' for s in settings)}",
        [
            *(f"{s.name}: {s.left} against {s.right}" for s in settings),
            f"left: {left.place(region.left[0])} counts",
            f"right: {right.place(region.right[0])} counts",
            f"left: {left.place(reader)} reads what comes of it",
        ],
        "Begin to count at the same position in both runs: compare the offset of padded or cached tokens"
        " (cumsum(mask) - 1, cache_position) where the positions are made.",
    )


def position_reader(side: Side, op: int) -> int | None:
    """The first op that reads an op's result as positions, past products with frequencies."""
    states, trace = side.contents.states.of, side.trace
    front = {int(states[v]) for v in trace.ops.outputs[op].tolist()}
    seen: set[int] = set()
    inputs = trace.ops.inputs
    for _ in range(_HOPS):
        seen |= front
        hits = np.flatnonzero(np.isin(states[inputs.values], np.array(sorted(front))))
        readers = [r for r in inputs.rows()[hits][:_READERS].tolist() if r > op]
        front = set()
        for reader in readers:
            name = base(side.name(reader)).rstrip("_")
            if name in _READING:
                return int(reader)
            if name in _THROUGH or side.contents.tokens.view[reader]:
                front |= {int(states[v]) for v in trace.ops.outputs[reader].tolist()}
        front -= seen
        if not front:
            return None
    return None
