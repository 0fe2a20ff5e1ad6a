"""What a program declares to be the same on several ranks (a DTensor's placements): is it?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from opdrift.compare import Difference, describe, difference
from opdrift.records import Cause, Finding, Op
from opdrift.tfp1 import Code
from opdrift.tracefile.columns import Ints
from opdrift.tracefile.reader import Trace
from opdrift.wording import listed
from opdrift.world.apart import Apart, came_apart
from opdrift.world.collectives import World
from opdrift.world.replicas import Replicas
from opdrift.world.results import TOLERANCE, minority

#: (collectives of these ranks issued before, op, module, which of these, which of its inputs)
_Place = tuple[int, str, str, int, int]

_SAME: Final = (
    "Give all ranks that share a model's tensors the same data, and the same content of what each of them holds whole: a"
    " sampler by data-parallel rank (not by global rank), one seed or one checkpoint for all of them, and no change of a"
    " parameter or gradient on one rank alone."
)


@dataclass(frozen=True, slots=True)
class Declared:
    """A value that an op is given, of which the program says that several ranks hold the same."""

    seq: int
    op: str
    module: str
    value: int


@dataclass(frozen=True, slots=True)
class Unequal:
    """The first of these that ranks do not hold alike.

    Attributes:
        ranks: All that should.
        usual: A rank of those that agree with most.
        odd: The ranks that do not.
        given: What each rank's op was given.
        apart: Where the contents of `usual` and of the first odd rank came apart.
        name: The parameter, buffer or input nearest to that; None where there is none on the way.
        gap: How far those two differ.
    """

    ranks: tuple[int, ...]
    usual: int
    odd: tuple[int, ...]
    given: Mapping[int, Declared]
    apart: Apart
    name: str | None
    gap: Difference

    @property
    def ops(self) -> tuple[Op | None, ...]:
        """The ops at which they came apart, of the usual and the odd rank."""
        return self.apart.ops or (None, None)


class DeclaredAlike:
    """The values that the programs of a world declare to be the same on several ranks.

    Args:
        world: All ranks.
        replicas: What they hold in common.
    """

    def __init__(self, world: World, replicas: Replicas) -> None:
        self._world = world
        self._replicas = replicas
        #: ranks -> place -> rank -> what it was given there
        self._places: dict[tuple[int, ...], dict[_Place, dict[int, Declared]]] = {}
        for rank, trace in world.traces.items():
            for ranks, place, declared in _declared(world, rank, trace):
                by_place = self._places.setdefault(ranks, {})
                by_place.setdefault(place, {})[rank] = declared

    @property
    def compared(self) -> int:
        """How many of them two ranks have."""
        return sum(len(given) > 1 for each in self._places.values() for given in each.values())

    def unequal(self, told: Collection[str]) -> Iterator[Unequal]:
        """For each set of ranks the first that differs by more than rounding; what follows from it differs, too.

        Args:
            told: Parameters and buffers of which it is told already that they differ.
        """
        for ranks, places in self._places.items():
            for given in places.values():
                found = self._differs(ranks, given)
                if found is not None:
                    if found.name not in told:
                        yield found
                    break

    def _differs(self, ranks: tuple[int, ...], given: Mapping[int, Declared]) -> Unequal | None:
        prints = {
            rank: found
            for rank, each in given.items()
            if (found := self._replicas.contents(rank).fingerprint(each.value)) is not None
        }
        odd, usual = minority({rank: found.key for rank, found in prints.items()})
        if not odd:
            return None
        gap = difference(prints[usual], prints[odd[0]])
        if gap.relative is not None and gap.relative <= TOLERANCE.get(Code(prints[usual].code), 0):
            return None
        values = given[usual].value, given[odd[0]].value
        what = f"what {given[usual].op} in {given[usual].module or 'the root module'} was given"
        apart = came_apart(self._world, self._replicas, (usual, odd[0]), values, what)
        name = self._name(usual, apart.path)
        return Unequal(ranks, usual, odd, given, apart, name, gap)

    def _name(self, rank: int, path: Sequence[int]) -> str | None:
        """The parameter, buffer or input that the last of these values with a name is a content of."""
        trace = self._world.traces[rank]
        storage = trace.values.storage
        named = {
            int(storage[leaf.value]): leaf.name
            for leaf in reversed(trace.leaves)
            if leaf.name and leaf.kind in ("parameter", "buffer", "input") and leaf.value
        }
        names = (named.get(int(storage[value])) for value in reversed(path))
        return next((name for name in names if name is not None), None)


def is_told_before(found: Unequal, findings: Collection[Finding]) -> bool:
    """Whether a gather before it showed already that ranks hold other parts of the same parameter."""
    for each in findings:
        given = None if each.rank is None else found.given.get(each.rank)
        same = each.kind == "replica" and found.name in each.names
        if same and given is not None and each.seq is not None and each.seq <= given.seq:
            return True
    return False


def of_unequal(found: Unequal) -> Cause:
    """That ranks do not hold alike what their program says they do."""
    one, other = found.given[found.usual], found.given[found.odd[0]]
    where = f" in {one.module}" if one.module else ""
    what = found.name or f"what {one.op}{where} is given"
    return Cause(
        "replica",
        "certain",
        f"{what} differs between {listed(sorted((found.usual, *found.odd)))}, and should be the same on them",
        (
            f"{one.op}{where} (op {one.seq} on rank {found.usual}, op {other.seq} on rank {found.odd[0]}) is given a tensor whose"
            f" placement (Replicate) says that {listed(found.ranks)} hold the same: {describe(found.gap)}",
            *found.apart.told,
        ),
        _SAME,
    )


def _declared(
    world: World, rank: int, trace: Trace
) -> Iterator[tuple[tuple[int, ...], _Place, Declared]]:
    """Ranks, a place that they have in common, and what an op of this rank was given there."""
    issued: dict[tuple[int, ...], Ints] = {}
    seen: dict[tuple[int, str, str, tuple[int, ...]], int] = defaultdict(int)
    for mark in trace.marks:
        if mark.kind != "replicated":
            continue
        ranks, op = tuple(mark.fields["ranks"]), mark.fields["op"]
        module = trace.calls[mark.call].path if mark.call < len(trace.calls) else ""
        if ranks not in issued:
            among = [c.seq for c in world.collectives[rank] if set(ranks) <= set(c.ranks)]
            issued[ranks] = np.array(among, np.int64)
        before = int(np.searchsorted(issued[ranks], mark.seq, side="right"))
        key = before, op, module, ranks
        seen[key] += 1
        for slot, value in enumerate(mark.fields["values"]):
            yield (
                ranks,
                (before, op, module, seen[key], slot),
                Declared(mark.seq + 1, op, module, value),
            )
