"""The named values of a trace: what came in, what went out, and which op used it first."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from opdrift.align.sequence import Level, refine
from opdrift.contents import Contents
from opdrift.records import Leaf, LeafKind
from opdrift.tokens import Words

#: Kinds of values that a run starts from, and moments at which they are seen before it changed them.
STARTS: Final[frozenset[LeafKind]] = frozenset({"parameter", "buffer", "input", "constant"})
BEFORE: Final = frozenset({"entry", "use", "gather"})
AFTER: Final = frozenset({"return", "exit"})


@dataclass(frozen=True, slots=True)
class Use:
    """An op that reads a leaf.

    Attributes:
        op: Index of the first op that computes with it, views passed over.
        seen: Index of the first op that took it at all.
        value: What that op took: the leaf, or a view of it.
    """

    op: int
    seen: int
    value: int


def match_rows(
    left: Sequence[Leaf], right: Sequence[Leaf], words: tuple[Words, Words]
) -> tuple[list[tuple[Leaf, Leaf]], list[Leaf], list[Leaf]]:
    """Match the rows of one name: in order if both runs have as many, else equal contents first.

    Args:
        left: Rows of the left run, in order.
        right: Rows of the right run.
        words: Content word of each value, per side.

    Returns:
        Pairs in the order of the left run, and what is left over on each side.
    """
    if len(left) == len(right):
        return list(zip(left, right, strict=True)), [], []
    contents = (
        words[0][np.array([leaf.value for leaf in left], np.int64)],
        words[1][np.array([leaf.value for leaf in right], np.int64)],
    )
    anything = np.ones(len(left), np.uint64), np.ones(len(right), np.uint64)
    found = refine([Level(*contents), Level(*anything)])
    pairs = [
        (left[i], right[j]) for i, j in zip(found.left.tolist(), found.right.tolist(), strict=True)
    ]
    taken = set(found.left.tolist()), set(found.right.tolist())
    return (
        pairs,
        [leaf for i, leaf in enumerate(left) if i not in taken[0]],
        [leaf for j, leaf in enumerate(right) if j not in taken[1]],
    )


class LeafTable:
    """Names of the states of one trace."""

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self._uses: dict[int, list[tuple[int, int, bool]]] = {}
        rows = contents.trace.leaves
        self.starts = [leaf for leaf in rows if leaf.kind in STARTS and leaf.when in BEFORE]
        self.changed = [leaf for leaf in rows if leaf.when == "changed"]
        self.generated = [leaf for leaf in rows if leaf.when == "generated"]
        self.outputs = [leaf for leaf in rows if leaf.when in AFTER and leaf.kind != "alive"]
        self.alive = [leaf for leaf in rows if leaf.kind == "alive"]

    @cached_property
    def by_state(self) -> dict[int, list[Leaf]]:
        """Rows of leaves, by the state of their value."""
        found: dict[int, list[Leaf]] = defaultdict(list)
        for leaf in [*self.starts, *self.changed, *self.generated]:
            found[int(self._contents.states.of[leaf.value])].append(leaf)
        return found

    @cached_property
    def by_name(self) -> dict[str, list[Leaf]]:
        """Rows of leaves seen before the run changed them, by name, in order."""
        found: dict[str, list[Leaf]] = defaultdict(list)
        for leaf in self.starts:
            if leaf.name:
                found[leaf.name].append(leaf)
        return found

    @cached_property
    def shards(self) -> dict[str, Leaf]:
        """By name the first row of this rank's part of a parameter that is gathered."""
        rows = self._contents.trace.leaves
        return {leaf.name: leaf for leaf in reversed(rows) if leaf.kind == "shard"}

    @cached_property
    def sizes(self) -> frozenset[int]:
        """Of how many elements parameters, and this rank's parts of them, are."""
        trace = self._contents.trace
        rows = (leaf for leaf in trace.leaves if leaf.kind in ("parameter", "shard"))
        return frozenset(math.prod(trace.meta(leaf.value).shape) for leaf in rows)

    def of(self, value: int) -> list[Leaf]:
        """Leaf rows that a value is, or is a view of."""
        return self.by_state.get(int(self._contents.states.of[value]), [])

    def of_storage(self, value: int) -> Leaf | None:
        """The first named leaf in the storage of a value, at whatever write count."""
        storage = self._contents.trace.values.storage
        rows = self._by_storage.get(int(storage[value]))
        return rows[0] if rows else None

    def parts_in(self, value: int) -> set[str]:
        """Names of the parameters of which this rank's parts lie in the storage of a value."""
        return self._parts_by_storage.get(int(self._contents.trace.values.storage[value]), set())

    @cached_property
    def _parts_by_storage(self) -> dict[int, set[str]]:
        storage = self._contents.trace.values.storage
        found: dict[int, set[str]] = defaultdict(set)
        for leaf in self._contents.trace.leaves:
            if leaf.kind == "shard":
                found[int(storage[leaf.value])].add(leaf.name)
        return found

    @cached_property
    def _by_storage(self) -> dict[int, list[Leaf]]:
        storage = self._contents.trace.values.storage
        found: dict[int, list[Leaf]] = defaultdict(list)
        for leaf in self.starts:
            if leaf.name:
                found[int(storage[leaf.value])].append(leaf)
        return found

    def best(self, value: int, module: str) -> Leaf | None:
        """The row that names a value best for a reader in `module`.

        One storage may have several names: tied weights, a slot that all layers share. The name of the
        module that uses it is preferred, then the smallest tensor that it is a part of.
        """
        rows = self.of(value)
        if not rows:
            return None

        def rank(leaf: Leaf) -> tuple[bool, int, int, int, int]:
            owner = leaf.name.rpartition(".")[0]
            inside = module == owner or module.startswith(f"{owner}.") or not owner
            exact = leaf.value == value
            size = int(self._contents.layouts.size.at(leaf.value))
            return (not leaf.name, -len(owner) if inside else 1, -int(exact), size, leaf.seq)

        return min(rows, key=rank)

    def first_use(
        self, state: int, live: bytearray | None, *, only: int | None = None
    ) -> Use | None:
        """The first op whose result depends on a state.

        Args:
            state: The content of a storage.
            live: Only ops marked here count, if given.
            only: Only ops that read this very value count: one of several parts of the storage.
        """
        seen: int | None = None
        for op, value, counted in self._uses_of(state):
            if live is not None and not live[op]:
                continue
            if only is not None and value != only:
                continue
            if not counted:
                continue
            seen = op if seen is None else seen
            if not self._contents.tokens.view[op]:
                return Use(op, seen, value)
        return None

    def use_at(self, state: int, op: int, live: bytearray | None) -> Use | None:
        """The use of a state by one op, if that op computes with it."""
        for each, value, counted in self._uses_of(state):
            if each == op and counted and (live is None or live[op]):
                return Use(op, op, value)
        return None

    def look_up(self, states: Iterable[int]) -> None:
        """Find the uses of many states in one pass."""
        wanted = sorted({s for s in states if s not in self._uses})
        if not wanted:
            return
        inputs = self._contents.trace.ops.inputs
        of = self._contents.states.of[inputs.values]
        hits = np.flatnonzero(np.isin(of, np.array(wanted, np.int64)))
        rows, counted = inputs.rows()[hits], self._contents.counted[hits]
        for state in wanted:
            self._uses[state] = []
        for state, op, value, counts in zip(
            of[hits].tolist(),
            rows.tolist(),
            inputs.values[hits].tolist(),
            counted.tolist(),
            strict=True,
        ):
            self._uses[state].append((op, value, counts))

    def _uses_of(self, state: int) -> list[tuple[int, int, bool]]:
        if state not in self._uses:
            self.look_up([state])
        return self._uses[state]
