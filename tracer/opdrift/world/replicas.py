"""Parameters and buffers that every rank holds whole: which should be equal, and where they first are not."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from opdrift.contents import Contents
from opdrift.neighbours import Key
from opdrift.provenance.ops import COPIES, operator
from opdrift.records import Leaf
from opdrift.shards import sharding
from opdrift.tracefile.fingerprints import Fingerprint
from opdrift.tracefile.reader import Trace
from opdrift.world.collectives import World
from opdrift.world.results import minority

#: Back from a gradient, so many ops are followed to the collective that it came from.
_WALK: Final = 64
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
    """

    replica: Replica
    odd: tuple[int, ...]
    usual: int
    left: State
    right: State


class Replicas:
    """What the ranks of a world hold in common."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._contents: dict[int, Contents] = {}
        self._entries = {rank: _entries(trace) for rank, trace in world.traces.items()}
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
        reduced = {name: self._reduced_over(name) for name in shared}
        mostly, share = self._mostly_equal(shared)
        for name, leaf in shared.items():
            ranks = reduced[name]
            if ranks:
                where = ", ".join(map(str, ranks))
                yield Replica(
                    name, leaf.kind, ranks, True, f"its gradient is reduced over ranks {where}"
                )
            elif mostly:
                said = f"{share:.1%} of the parameters' elements are equal on all ranks"
                yield Replica(name, leaf.kind, tuple(self._entries), False, said)
            elif leaf.kind == "buffer" and self._sharing:
                where = ", ".join(map(str, self._sharing))
                said = f"ranks {where} share out the parameters of its model, and buffers stay as each rank has them"
                yield Replica(name, leaf.kind, self._sharing, False, said)

    @cached_property
    def _sharing(self) -> tuple[int, ...]:
        """The ranks that share out a model's parameters; none where no integration saw that."""
        groups = {
            how.ranks for trace in self._world.traces.values() for how in sharding(trace).values()
        }
        return max(groups, key=len, default=())

    def unjudged(self) -> Sequence[str]:
        """Names that differ on entry although nothing says whether they should: no gradient of theirs is reduced."""
        judged = {replica.name for replica in self.found()}
        return [
            name
            for name in self._shared()
            if name not in judged and len(set(self._keys(name, self._entries).values())) > 1
        ]

    def drifting(self) -> Sequence[str]:
        """Buffers that are equal on entry, not at the end, and never broadcast: each rank keeps them for itself."""
        ends = {rank: _ends(trace) for rank, trace in self._world.traces.items()}
        return [
            name
            for name, leaf in self._shared().items()
            if leaf.kind == "buffer"
            and len(set(self._keys(name, self._entries).values())) == 1
            and len(set(self._keys(name, ends).values())) > 1
            and not any(self._reduced_on(rank, name) for rank in self._entries)
        ]

    def split(self, replica: Replica) -> Split | None:
        """Where a replica first differs between its ranks, at a moment that all that are compared came to."""
        histories = {rank: self.history(rank, replica.name) for rank in replica.ranks}
        known = {rank: states for rank, states in histories.items() if states}
        last = max(map(len, known.values()), default=0)
        # buffers are written by what each rank computes of its own samples
        for step in range(last if replica.kind == "parameter" and replica.certain else 1):
            if self._is_replaced(known, step):
                continue
            at = self._held_at(replica, known, step)
            odd, usual = minority({rank: state.key for rank, state in at.items()})
            if odd:
                return Split(replica, odd, usual, at[usual], at[odd[0]])
        return None

    def _held_at(
        self, replica: Replica, known: Mapping[int, Sequence[State]], step: int
    ) -> dict[int, State]:
        """What each rank held once it was written so often.

        A rank that wrote it less often counts with its last content, but not if its trace ends before it can be told
        whether it would have written it again.
        """
        wrote = {rank: states[step] for rank, states in known.items() if step < len(states)}
        moment = min(self._before(rank, state, replica.ranks) for rank, state in wrote.items())
        went_on = {
            rank: states[-1]
            for rank, states in known.items()
            if rank not in wrote and self._world.has_passed(rank, moment, replica.ranks)
        }
        return dict(sorted((wrote | went_on).items()))

    def _before(self, rank: int, state: State, ranks: Sequence[int]) -> int:
        """How many collectives of these ranks were issued before a content was written."""
        maker = int(self.contents(rank).maker[state.value])
        if maker < 0:
            return 0
        return self._world.issued(rank, int(self._world.traces[rank].ops.seq[maker]), ranks)

    def _is_replaced(self, known: Mapping[int, Sequence[State]], step: int) -> bool:
        """Whether on every rank the next content comes from a broadcast: what was there before does not count."""
        return all(
            step + 1 < len(states) and self._is_handed(rank, states[step + 1].value)
            for rank, states in known.items()
        )

    def _is_handed(self, rank: int, value: int) -> bool:
        """Whether a content is what a collective handed to all ranks, copied at most."""
        contents = self.contents(rank)
        found = _collective_behind(self._world, rank, contents, [value], 1, copied=True)
        return bool(found)

    def history(self, rank: int, name: str) -> Sequence[State]:
        """The contents of a leaf over the run, as far as they are known, in the order of the writes."""
        leaf = self._entries[rank].get(name)
        if leaf is None:
            return ()
        near = self._world.neighbours(rank)
        known = ((value, near.key(value)) for value in near.versions(leaf.value).tolist())
        return [State(step, v, key) for step, (v, key) in enumerate(known) if key is not None]

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
            equal += found.n * (len(set(self._keys(name, self._entries).values())) == 1)
        share = equal / total if total else 0.0
        return share >= _MOSTLY, share

    def _reduced_over(self, name: str) -> tuple[int, ...]:
        """The ranks over which every rank reduces the gradient of a parameter; none if that is not seen."""
        found: set[tuple[int, ...]] = set()
        for rank in self._entries:
            ranks = self._reduced_on(rank, name)
            if not ranks:
                return ()
            found.add(ranks)
        if len(found) != 1:
            return ()
        return tuple(r for r in found.pop() if r in self._entries)

    def _reduced_on(self, rank: int, name: str) -> tuple[int, ...]:
        trace, contents = self._world.traces[rank], self.contents(rank)
        leaf = self._entries[rank][name]
        size = math.prod(trace.meta(leaf.value).shape)
        starts = [
            *self._gradients[rank].get(name, ()),
            *(state.value for state in self.history(rank, name)),
        ]
        return _collective_behind(self._world, rank, contents, starts, size)


def _collective_behind(
    world: World,
    rank: int,
    contents: Contents,
    values: Sequence[int],
    size: int,
    *,
    copied: bool = False,
) -> tuple[int, ...]:
    """The ranks of the all_reduce or broadcast that values are results of; none if there is none.

    Args:
        world: All ranks.
        rank: Whose values.
        contents: That rank's.
        values: Where to begin.
        size: So many elements at least the collective has.
        copied: The values are copies of the result; else also what elementwise ops made of it.
    """
    trace = contents.trace
    waiting, seen = list(values), set(values)
    for _ in range(_WALK):
        if not waiting:
            break
        value = waiting.pop(0)
        op = int(contents.maker[value])
        if op < 0:
            continue
        info = trace.op_info(int(trace.ops.signature[op]))
        meeting = world.by_op.get((rank, int(trace.ops.seq[op])))
        if meeting is not None:
            part = meeting.members[rank]
            elements = sum(n for _, n in part.got or part.given or ())
            # a norm for clipping is reduced, too, and multiplied in
            if meeting.what in ("all_reduce", "broadcast") and elements >= size:
                return meeting.ranks
            continue
        plain = operator(info.name)
        moved = info.view or plain in COPIES
        computed = info.pointwise or plain.startswith(("_foreach_", "_fused_"))
        if moved or (computed and not copied):
            inputs = trace.ops.inputs[op].tolist()
            if plain == "copy":  # what it writes into is gone
                inputs = inputs[-1:]
            fresh = [v for v in inputs if v and v not in seen]
            seen.update(fresh)
            waiting += fresh
    return ()


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
