"""Casts that are kept although what they were made of has changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from opdrift.case import Side
from opdrift.causes.evidence import Evidence, cause, scope
from opdrift.records import Cause
from opdrift.tokens import base

_CASTS: Final = frozenset(["_to_copy", "to"])


@dataclass(frozen=True, slots=True)
class Kept:
    """A cast that an op reads after its source was written.

    Attributes:
        cast: Index of the op that cast.
        writer: The first op that wrote into the source since.
        name: The source's name.
    """

    cast: int
    writer: int
    name: str


def autocast_cache(e: Evidence) -> Cause | None:
    """One run reads the cast of a parameter as it was, the other casts it as it is.

    Autocast casts a parameter once and keeps that until the outermost autocast region ends; what is written
    into the parameter meanwhile does not reach the cast.
    """
    if e.origin.kind == "leaf":
        return None
    reader, values = e.consumer(), e.origin.values
    found = [
        (name, side, kept_cast(side, value, op))
        for name, side, value, op in (
            ("left", e.case.left, values.left, reader.left),
            ("right", e.case.right, values.right, reader.right),
        )
        if value is not None and op is not None
    ]
    stale = [(name, side, kept) for name, side, kept in found if kept is not None]
    if len(stale) != 1:
        return None
    name, side, kept = stale[0]
    op = reader.left if name == "left" else reader.right
    assert op is not None
    what = kept.name or "a tensor"
    return cause(
        "autocast-cache",
        "certain" if _under_autocast(side) else "likely",
        f"{side.name(op)} in {scope(side.module(op))} reads a cast of {what} that was made before {what} was written, in"
        f" the {name} run only",
        [
            f"{name}: {side.place(kept.cast)} cast {what}",
            f"{name}: {side.place(kept.writer)} wrote into {what} afterwards",
            f"{name}: {side.place(op)} reads the cast, which is the old one",
            "the other run casts it anew, or reads it as it is",
        ],
        "Leave the autocast region before weights are written (an optimizer step, an EMA, a load) and enter a new one"
        " afterwards; or call torch.clear_autocast_cache(), or use torch.autocast(..., cache_enabled=False).",
    )


def kept_cast(side: Side, value: int, reader: int) -> Kept | None:
    """The cast that a value is, or is a view of, if its source was written between the cast and the reader."""
    states, trace = side.contents.states, side.trace
    cast = int(states.writer[states.of[value]])
    if cast < 0 or base(side.name(cast)) not in _CASTS or not len(trace.ops.inputs[cast]):
        return None
    source = int(trace.ops.inputs[cast][0])
    storage = trace.values.storage
    if storage[source] == storage[value]:
        return None  # nothing was cast
    later = np.unique(states.of[storage == storage[source]])
    writers = sorted(int(w) for w in states.writer[later] if cast < int(w) < reader)
    if not writers:
        return None
    leaf = side.leaves.of_storage(source)
    return Kept(cast, writers[0], leaf.name if leaf is not None else "")


def _under_autocast(side: Side) -> bool:
    """Whether autocast was on at any time of a run."""
    if any(side.trace.header.flags.get(f"autocast.{device}") is True for device in ("cpu", "cuda")):
        return True
    return any(
        new is True
        for mark in side.trace.marks
        if mark.kind == "flags"
        for name, (_, new) in mark.fields.items()
        if name in ("autocast.cpu", "autocast.cuda")
    )
