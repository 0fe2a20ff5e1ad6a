"""Ranks whose models are not the same: what they gather tells, where nothing of them is held whole."""

from __future__ import annotations

from collections.abc import Iterator

from opdrift.shards import GATHERS
from opdrift.tracefile.reader import Trace
from opdrift.wording import some
from opdrift.world.collectives import World


def other_models(world: World) -> Iterator[str]:
    """Parameters that a rank has gathered otherwise than the first one, in words; what is lost of a trace tells nothing."""
    held = {rank: _gathered(trace) for rank, trace in world.traces.items() if trace.footer}
    held = {rank: shapes for rank, shapes in held.items() if shapes}
    first, *others = held or [0]
    for rank in others:
        mine, theirs = held[first], held[rank]
        shaped = [name for name in mine if theirs.get(name, mine[name]) != mine[name]]
        for name in shaped[:1]:
            more = f" ({some(shaped)} differ)" if len(shaped) > 1 else ""
            yield f"{name} is {list(mine[name])} on rank {first} and {list(theirs[name])} on rank {rank}: their models differ{more}"
        for one, other, lacking in (
            (rank, first, [name for name in theirs if name not in mine]),
            (first, rank, [name for name in mine if name not in theirs]),
        ):
            if lacking:
                yield (
                    f"rank {one} has gathered {some(lacking)}, rank {other} has not:"
                    " look whether they built the same model"
                )


def _gathered(trace: Trace) -> dict[str, tuple[int, ...]]:
    """Name and shape of each parameter that was gathered; not of those that tensor parallelism splits."""
    return {
        str(name): tuple(shape)
        for mark in trace.marks
        if mark.kind in GATHERS
        for name, _, shape in mark.fields.get("parameters") or ()
        if name not in (mark.fields.get("split") or ())
    }
