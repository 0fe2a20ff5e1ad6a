"""Parameters and buffers that every rank holds whole: which should be equal, and where they first are not."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np

from opdrift.contents import Contents
from opdrift.neighbours import Key
from opdrift.records import Leaf
from opdrift.replacements import Replacement, replacements
from opdrift.shards import sharding
from opdrift.tracefile.columns import Ints
from opdrift.tracefile.fingerprints import Fingerprint
from opdrift.tracefile.reader import Trace
from opdrift.wording import some
from opdrift.world.collectives import World
from opdrift.world.kept import collectives_behind, gives
from opdrift.world.moments import Holdings, reductions
from opdrift.world.results import minority

#: How ranks keep a leaf alike, the most telling first.
_GRADIENTS: Final = ("its gradient is reduced over",)
_WAYS: Final = (*_GRADIENTS, "it is itself reduced over", "it is broadcast to")
#: A model is taken to be a replica where parameters with this share of all elements are equal on all ranks.
#: Of a model that is split over ranks only norms and biases are, which are few.
_MOSTLY: Final = 0.9


@dataclass(frozen=True, slots=True)
class Replica:
    """A leaf that several ranks should hold alike.

    Attributes:
        name: Its name.
        kind: "parameter" or "buffer".
        ranks: The ranks that should hold it alike.
        certain: Its gradient is reduced over these ranks; else it is taken from the rest of the model.
        why: What says so, in words.
    """

    name: str
    kind: str
    ranks: tuple[int, ...]
    certain: bool
    why: str


@dataclass(frozen=True, slots=True)
class State:
    """A content that a leaf had: `step` 0 is what it was when the run began, each write that is known makes another."""

    step: int
    value: int
    key: Key


@dataclass(frozen=True, slots=True)
class Split:
    """Where a replica comes apart.

    Attributes:
        replica: Which.
        odd: Ranks that are not with most.
        usual: A rank of those that are.
        left: The usual rank's content there.
        right: The first odd rank's.
        before_training: Whether it is what a module first read of it, or what nothing read.
    """

    replica: Replica
    odd: tuple[int, ...]
    usual: int
    left: State
    right: State
    before_training: bool = False

    @property
    def step(self) -> int:
        """After how many writes; 0 where it was so when the run began."""
        return max(self.left.step, self.right.step)

    @property
    def lacks_writes(self) -> bool:
        """Whether one of the ranks has written it more often than the other."""
        return self.left.step != self.right.step


class Replicas:
    """What the ranks of a world hold in common."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._contents: dict[int, Contents] = {}
        self._held: dict[int, Holdings] = {}
        self._entries = {rank: _entries(trace) for rank, trace in world.traces.items()}
        self._replaced = {rank: replacements(trace) for rank, trace in world.traces.items()}
        self._cast = {rank: _cast(trace) for rank, trace in world.traces.items()}
        self._gradients = {rank: _gradients(trace) for rank, trace in world.traces.items()}
        self._sharded = {name for trace in world.traces.values() for name in sharded(trace)}

    def contents(self, rank: int) -> Contents:
        """Columns over the values of a rank."""
        if rank not in self._contents:
            self._contents[rank] = Contents(self._world.traces[rank])
        return self._contents[rank]

    def found(self) -> Iterator[Replica]:
        """Leaves that should be equal on several ranks, in the order of the first one's model."""
        shared = self._shared()
        mostly, share = self._mostly_equal(shared)
        for name, leaf in shared.items():
            behind = self._behind(name)
            if behind is not None:
                ranks, how = behind
                where = ", ".join(map(str, ranks))
                yield Replica(name, leaf.kind, ranks, how in _GRADIENTS, f"{how} ranks {where}")
            elif mostly:
                said = f"{share:.1%} of the parameters' elements are equal on all ranks"
                yield Replica(name, leaf.kind, tuple(self._entries), False, said)
            elif leaf.kind == "buffer" and self.sharing:
                where = ", ".join(map(str, self.sharing))
                said = f"ranks {where} share out the parameters of its model, and buffers stay as each rank has them"
                yield Replica(name, leaf.kind, self.sharing, False, said)

    @cached_property
    def sharing(self) -> tuple[int, ...]:
        """The ranks that share out a model's parameters; none where no integration saw that."""
        groups = {
            how.ranks for trace in self._world.traces.values() for how in sharding(trace).values()
        }
        return max(groups, key=len, default=())

    @cached_property
    def together(self) -> tuple[int, ...]:
        """The ranks that train one model together: each holds it whole, or they share out its parameters."""
        return next((each.ranks for each in self.found() if each.certain), self.sharing)

    def unjudged(self) -> Sequence[str]:
        """Names that differ on entry although nothing says whether they should: no gradient of theirs is reduced."""
        judged = {replica.name for replica in self.found()}
        return [
            name
            for name in self._shared()
            if name not in judged and len(set(self._keys(name, self._entries).values())) > 1
        ]

    def other_models(self) -> Iterator[str]:
        """In words, ranks whose models have other tensors than the first rank's, whole ones."""
        first, *others = self._entries
        own = self._whole(first)
        for rank in others:
            theirs = self._whole(rank)
            lacking = [name for name in own if name not in theirs]
            extra = [name for name in theirs if name not in own]
            other = [name for name in own if theirs.get(name, own[name]) != own[name]]
            said = [
                f"{some(names)} {what}"
                for names, what in (
                    (lacking, f"only on rank {first}"),
                    (extra, f"only on rank {rank}"),
                    (other, "of another shape or type"),
                )
                if names
            ]
            if said and own and theirs:
                yield f"rank {rank}'s model is another one than rank {first}'s: {'; '.join(said)}: these are not compared"

    def _whole(self, rank: int) -> dict[str, tuple[tuple[int, ...], str]]:
        """Name -> shape and type of what a rank is not known to hold a part of."""
        trace = self._world.traces[rank]
        metas = {name: trace.meta(leaf.value) for name, leaf in self._entries[rank].items()}
        return {n: (m.shape, m.dtype) for n, m in metas.items() if n not in self._sharded}

    def drifting(self) -> Sequence[str]:
        """Buffers that are equal on entry, not at the end, and never broadcast: each rank keeps them for itself."""
        ends = {rank: _ends(trace) for rank, trace in self._world.traces.items()}
        return [
            name
            for name, leaf in self._shared().items()
            if leaf.kind == "buffer"
            and len(set(self._keys(name, self._entries).values())) == 1
            and len(set(self._keys(name, ends).values())) > 1
            and not any(self._kept_alike(rank, name) for rank in self._entries)
        ]

    def split(self, replica: Replica) -> Split | None:
        """Where a replica first differs between its ranks."""
        if replica.kind == "parameter" and replica.certain:
            return self._split_in_training(replica)
        known = {
            rank: states for rank in replica.ranks if (states := self.history(rank, replica.name))
        }
        began = {rank: states[0] for rank, states in known.items()}
        if self._is_replaced(known, began):
            return None
        at = self._first_used(replica, known)
        if self._is_replaced(known, at):
            return None
        found = _split(replica, at)
        if found is not None:
            return replace(found, before_training=True)
        if replica.kind != "buffer":
            return None
        return self._written_alone(
            replica, {r: s[at[r].step :] if r in at else s for r, s in known.items()}
        )

    def _written_alone(
        self, replica: Replica, known: Mapping[int, Sequence[State]]
    ) -> Split | None:
        """Where some ranks wrote a buffer and others never did, from what modules first read of it to their ends.

        What all of them write may differ by right: statistics of each rank's own samples.
        """
        if len(known) < len(replica.ranks) or self._world.ended_early.intersection(known):
            return None
        alike = itertools.takewhile(
            lambda states: len({state.key for state in states}) == 1,
            zip(*known.values(), strict=False),
        )
        shared = sum(1 for _ in alike)
        if {len(states) > shared for states in known.values()} != {True, False}:
            return None
        if any(self._kept_alike(rank, replica.name) for rank in known):
            return None  # the next broadcast brings it back
        return _split(replica, {rank: states[-1] for rank, states in known.items()})

    def _first_used(
        self, replica: Replica, known: Mapping[int, Sequence[State]]
    ) -> dict[int, State]:
        """What modules first read of it: a load may have overwritten what it was when the run began.

        Where no module read it on some rank: what it was when the run began, if it differs to the end.
        """
        read = {
            rank: self._holdings(rank).first_read(self._named(rank, replica.name)) for rank in known
        }
        values = {rank: value for rank, value in read.items() if value is not None}
        if len(values) == len(known):
            return self._states(replica, values)
        last = {rank: states[-1] for rank, states in known.items()}
        return {} if _split(replica, last) is None else {r: s[0] for r, s in known.items()}

    def _split_in_training(self, replica: Replica) -> Split | None:
        """At the first reduction that other contents of it went into; at the end, where all ranks came to that."""
        moments = reductions(self._world, replica.ranks)
        held = [
            self._holdings(rank).at(self._named(rank, replica.name), moments[rank])
            for rank in replica.ranks
        ]
        for number in _unequal(
            [self._digests(rank, values) for rank, values in zip(replica.ranks, held, strict=True)]
        ):
            states = zip(replica.ranks, (int(values[number]) for values in held), strict=True)
            found = _split(replica, self._states(replica, dict(states)))
            if found is not None:
                return found
        if not self._world.ended_early.isdisjoint(replica.ranks):
            return None
        last = {r: self._holdings(r).last(self._latest(r, replica.name)) for r in replica.ranks}
        return _split(replica, self._states(replica, last))

    def _holdings(self, rank: int) -> Holdings:
        if rank not in self._held:
            self._held[rank] = Holdings(self.contents(rank), self._world.neighbours(rank))
        return self._held[rank]

    def _digests(self, rank: int, values: Ints) -> Ints:
        """The digest of each value; -1 where it is not known."""
        trace = self._world.traces[rank]
        rows = np.where(values > 0, trace.values.fingerprint[values], -1)
        return np.array(
            [int(trace.fingerprints.raw[r]) if r >= 0 else -1 for r in rows.tolist()], np.int64
        )

    def _states(self, replica: Replica, values: Mapping[int, int]) -> dict[int, State]:
        """The known ones among these contents of a leaf."""
        found = {}
        for rank, value in values.items():
            by_value = {state.value: state for state in self.history(rank, replica.name)}
            if value in by_value:
                found[rank] = by_value[value]
        return found

    def _is_replaced(self, known: Mapping[int, Sequence[State]], at: Mapping[int, State]) -> bool:
        """Whether on every rank the next content comes from a broadcast: what was there before does not count."""
        return all(
            state.step + 1 < len(known[rank])
            and self._is_handed(rank, known[rank][state.step + 1].value)
            for rank, state in at.items()
        )

    def _is_handed(self, rank: int, value: int) -> bool:
        """Whether a content is what a collective handed to all ranks, copied at most."""
        found = collectives_behind(self._world, rank, self.contents(rank), [value], 1, copied=True)
        return any(found)

    def history(self, rank: int, name: str) -> Sequence[State]:
        """The contents of a leaf over the run, as far as they are known, in the order of the writes."""
        near, named = self._world.neighbours(rank), self._named(rank, name)
        write = self._world.traces[rank].values.write
        known = (
            (value, near.key(value))
            for leaf in named
            for value in near.versions(leaf.value).tolist()
            # what a tensor held before it was put in the place of another is no content of the leaf
            if leaf is named[0] or write[value] >= write[leaf.value]
        )
        return [State(step, v, key) for step, (v, key) in enumerate(known) if key is not None]

    def replacement(self, rank: int, value: int) -> Replacement | None:
        """How a tensor came in the place of another, where a value is what it then held."""
        trace = self._world.traces[rank]
        every = (each for found in self._replaced[rank].values() for each in found)
        return next((each for each in every if each.holds(trace, value)), None)

    def _named(self, rank: int, name: str) -> Sequence[Leaf]:
        """The rows under which the tensors of a leaf were first met, in order."""
        leaf = self._entries[rank].get(name)
        later = [each.after for each in self._replaced[rank].get(name, ())]
        later += self._cast[rank].get(name, ())
        return [] if leaf is None else [leaf, *later]

    def _latest(self, rank: int, name: str) -> Leaf:
        """Of these the one whose tensor the leaf is when the trace ends."""
        trace, named = self._world.traces[rank], self._named(rank, name)
        if len(named) == 1:
            return named[0]
        storage = trace.values.storage
        ends = {
            int(storage[leaf.value])
            for leaf in trace.leaves
            if leaf.name == name and leaf.when == "exit" and leaf.kind == named[0].kind
        }
        return next((each for each in named if int(storage[each.value]) in ends), named[-1])

    def print(self, rank: int, state: State) -> Fingerprint:
        """The fingerprint of a content."""
        found = self._world.traces[rank].fingerprint(state.value)
        assert found is not None  # a state is known by it
        return found

    # ---- which ------------------------------------------------------------------------------------------

    def _shared(self) -> Mapping[str, Leaf]:
        """Parameters and buffers that all ranks have in one layout, whole."""
        if len(self._entries) < 2:
            return {}
        first, *others = self._entries.values()
        traces = list(self._world.traces.values())
        found = {}
        for name, leaf in first.items():
            meta = traces[0].meta(leaf.value)
            same = all(
                name in other and _alike(trace, other[name], meta.shape, meta.dtype)
                for trace, other in zip(traces[1:], others, strict=True)
            )
            if same and name not in self._sharded:
                found[name] = leaf
        return found

    def _keys(self, name: str, leaves: Mapping[int, Mapping[str, Leaf]]) -> dict[int, Key]:
        keys = {
            rank: self._world.neighbours(rank).key(by_name[name].value)
            for rank, by_name in leaves.items()
            if name in by_name
        }
        return {rank: key for rank, key in keys.items() if key is not None}

    def _mostly_equal(self, shared: Mapping[str, Leaf]) -> tuple[bool, float]:
        """Whether almost all that the ranks hold is equal, and the share; constants are no evidence."""
        total = equal = 0
        trace = next(iter(self._world.traces.values()))
        for name, leaf in shared.items():
            found = trace.fingerprint(leaf.value)
            if leaf.kind != "parameter" or found is None or found.min == found.max:
                continue
            total += found.n
            equal += found.n * (len(set(self._first_keys(name).values())) == 1)
        share = equal / total if total else 0.0
        return share >= _MOSTLY, share

    def _first_keys(self, name: str) -> dict[int, Key]:
        """Rank -> what a module first read of a leaf; where none did, what it was when the run began."""
        near = {rank: self._world.neighbours(rank) for rank in self._entries}
        read = {r: self._holdings(r).first_read(self._named(r, name)) for r in self._entries}
        keys = {r: near[r].key(value) for r, value in read.items() if value}
        return self._keys(name, self._entries) | {r: k for r, k in keys.items() if k is not None}

    def _behind(self, name: str) -> tuple[tuple[int, ...], str] | None:
        """Over which ranks a leaf is kept alike, and how, if every rank says the same of the ranks."""
        found: dict[tuple[int, ...], set[str]] = {}
        for rank in self._entries:
            how = self._kept_alike(rank, name)
            if how is None:
                return None
            found.setdefault(how[0], set()).add(how[1])
        if len(found) != 1:
            return None
        ((ranks, ways),) = found.items()
        return tuple(r for r in ranks if r in self._entries), min(ways, key=_WAYS.index)

    def _kept_alike(self, rank: int, name: str) -> tuple[tuple[int, ...], str] | None:
        """The ranks of the collectives that a leaf, or its gradient, is a result of, and what those do."""
        trace, contents = self._world.traces[rank], self.contents(rank)
        leaf = self._entries[rank][name]
        size = math.prod(trace.meta(leaf.value).shape)
        starts = [
            *self._gradients[rank].get(name, ()),
            *(state.value for state in self.history(rank, name)),
        ]
        told: list[tuple[int, tuple[int, ...], str]] = []
        for meeting in collectives_behind(self._world, rank, contents, starts, size):
            how = "it is broadcast to"
            if meeting.what == "all_reduce":
                own = gives(self._world, rank, contents, meeting, leaf.value)
                how = "it is itself reduced over" if own else "its gradient is reduced over"
            told.append((_WAYS.index(how), meeting.ranks, how))
        return min(told)[1:] if told else None


def _split(replica: Replica, at: Mapping[int, State]) -> Split | None:
    odd, usual = minority({rank: state.key for rank, state in at.items()})
    return Split(replica, odd, usual, at[usual], at[odd[0]]) if odd else None


def _unequal(digests: Sequence[Ints]) -> Iterator[int]:
    """The places at which known digests differ, in order."""
    table = np.stack(digests)
    known = table >= 0
    highest = table.max(axis=0, initial=-1)
    lowest = np.where(known, table, np.iinfo(np.int64).max).min(axis=0)
    yield from np.flatnonzero((known.sum(axis=0) > 1) & (highest != lowest)).tolist()


def sharded(trace: Trace) -> frozenset[str]:
    """Names of leaves of which each rank holds a part: the recorder says so of tensors, integrations of gathers."""
    told = (mark.fields.get("sharded") or () for mark in trace.marks if mark.kind == "model")
    return frozenset(sharding(trace)).union(*told)


def _entries(trace: Trace) -> dict[str, Leaf]:
    """Name -> what a parameter or buffer was when it was first seen."""
    found: dict[str, Leaf] = {}
    for leaf in trace.leaves:
        if leaf.kind in ("parameter", "buffer") and leaf.when in ("entry", "use") and leaf.name:
            found.setdefault(leaf.name, leaf)
    return found


def _cast(trace: Trace) -> dict[str, list[Leaf]]:
    """Name of a buffer -> what a library put in its place, in another type."""
    cast = {mark.fields.get("name") for mark in trace.marks if mark.kind == "buffer-cast"}
    found: dict[str, list[Leaf]] = {}
    for leaf in trace.leaves:
        if leaf.kind == "buffer" and leaf.when == "gather" and leaf.name in cast:
            found.setdefault(leaf.name, []).append(leaf)
    return found


def _gradients(trace: Trace) -> dict[str, list[int]]:
    """Name of a parameter -> its gradients at the end."""
    found: dict[str, list[int]] = {}
    for leaf in trace.leaves:
        if leaf.kind == "gradient":
            found.setdefault(leaf.name, []).append(leaf.value)
    return found


def _ends(trace: Trace) -> dict[str, Leaf]:
    return {
        leaf.name: leaf for leaf in trace.leaves if leaf.when == "exit" and leaf.kind == "buffer"
    }


def _alike(trace: Trace, leaf: Leaf, shape: tuple[int, ...], dtype: str) -> bool:
    meta = trace.meta(leaf.value)
    return (meta.shape, meta.dtype) == (shape, dtype)
