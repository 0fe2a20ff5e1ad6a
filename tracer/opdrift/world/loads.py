"""Parameters that one rank loaded within the recording while another one kept what it drew."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from opdrift.provenance import Lineage, Provenance
from opdrift.records import Sides
from opdrift.shards import sharding
from opdrift.tracefile.reader import Trace
from opdrift.world.collectives import World

#: What stands for a weight that nobody loaded.
_FRESH: Final = frozenset({"drawn", "filled", "uninitialised"})


@dataclass(frozen=True, slots=True)
class LoadedDifferently:
    """A parameter that came from elsewhere on one rank, and from a generator or a constant on another.

    Attributes:
        name: Its name.
        loaded: A rank that copied it from a tensor that was there before.
        drawn: A rank that did not.
        how: How it came to be on the former (left) and on the latter (right).
    """

    name: str
    loaded: int
    drawn: int
    how: Sides[Provenance]


def loaded_differently(world: World) -> Iterator[LoadedDifferently]:
    """Parameters of which the ranks' provenance differs so.

    Also those that each rank holds a part of, where no integration told how (`gathers` judges the others).
    """
    made = {rank: _made(trace) for rank, trace in world.traces.items()}
    told = {name for trace in world.traces.values() for name in sharding(trace)}
    for name in dict.fromkeys(name for by_name in made.values() for name in by_name):
        found = {rank: by_name[name] for rank, by_name in made.items() if name in by_name}
        loaded = next((rank for rank, made in found.items() if made.how.kind == "copied"), None)
        drawn = next((rank for rank, made in found.items() if made.how.kind in _FRESH), None)
        if loaded is None or drawn is None or name in told:
            continue
        keys = [world.neighbours(rank).key(found[rank].value) for rank in (loaded, drawn)]
        if keys[0] is None or keys[0] != keys[1]:  # else one rank's was broadcast to the others
            yield LoadedDifferently(name, loaded, drawn, Sides(found[loaded].how, found[drawn].how))


@dataclass(frozen=True, slots=True)
class _Made:
    """What a parameter was when it was first seen, and how it came to be that."""

    value: int
    how: Provenance


def _made(trace: Trace) -> dict[str, _Made]:
    """Name -> how a parameter came to be when it was first seen; those that no op wrote are left out."""
    lineage = Lineage(trace)
    values = trace.values
    found: dict[str, _Made] = {}
    for leaf in trace.leaves:
        known = leaf.name in found or leaf.kind != "parameter" or leaf.when not in ("entry", "use")
        if known or not (values.write[leaf.value] or trace.producer[leaf.value] >= 0):
            continue
        found[leaf.name] = _Made(leaf.value, lineage.of(leaf.value))
    return found
