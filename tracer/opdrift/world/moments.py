"""What a rank held of a parameter at the moments at which all ranks that hold it must hold the same.

Such a moment is a reduction among the ranks: what each adds up was computed with the contents that its modules read
last before. Between two of them a rank may write what the others get later (an optimizer that shares out its work), or
read other weights for a while (an evaluation on one rank).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from opdrift.contents import Contents
from opdrift.neighbours import Neighbours
from opdrift.records import Leaf
from opdrift.tracefile.columns import Ints
from opdrift.tracefile.reader import Trace
from opdrift.world.collectives import World

#: What adds up the parts of ranks.
REDUCTIONS: Final = frozenset({"all_reduce", "reduce_scatter"})


def reductions(world: World, ranks: Sequence[int]) -> dict[int, Ints]:
    """Rank -> the numbers of its ops that are reductions among these ranks, in one order on all of them.

    A reduction whose op is not on disk on every rank is left out: what came before it may be lost, too.
    """
    met = [
        meeting
        for meeting in world.meetings
        if meeting.what in REDUCTIONS
        and set(ranks) <= meeting.members.keys()
        and all(part.index is not None for part in meeting.members.values())
    ]
    met.sort(key=lambda meeting: meeting.members[ranks[0]].seq)
    return {rank: np.array([m.members[rank].seq for m in met], np.int64) for rank in ranks}


@dataclass(frozen=True, slots=True)
class _Reads:
    """Reads of storages within modules, sorted by storage and op: the op's number, and the write count that it read."""

    storage: Ints
    seq: Ints
    write: Ints

    @classmethod
    def of(cls, trace: Trace) -> _Reads:
        ops, values = trace.ops, trace.values
        rows, read = ops.inputs.rows(), ops.inputs.values
        inside = (ops.call[rows] > 0) & (read > 0)
        rows, read = rows[inside], read[inside]
        storage, seq = values.storage[read], ops.seq[rows]
        order = np.lexsort((seq, storage))
        return cls(storage[order], seq[order], values.write[read[order]])

    def in_storage(self, storage: int) -> tuple[Ints, Ints]:
        start, end = np.searchsorted(self.storage, np.array([storage, storage + 1]))
        return self.seq[start:end], self.write[start:end]


class Holdings:
    """The contents of one rank's parameters over its run.

    Args:
        contents: Columns over its values.
        near: Which of them lie together.
    """

    def __init__(self, contents: Contents, near: Neighbours) -> None:
        self._contents = contents
        self._near = near
        self._reads = _Reads.of(contents.trace)

    def at(self, named: Sequence[Leaf], seqs: Ints) -> Ints:
        """The value that modules last read of a leaf before each of these ops; 0 where none did since the one before.

        A rank that ran out of inputs (`Join`) answers what the others reduce, with parameters that it does not use
        until the last of the others hands it theirs. Where no module ever read a leaf: the one that was there.

        Args:
            named: The rows under which its tensors were first met: more than one where it was replaced.
            seqs: Numbers of ops, in order.
        """
        found, latest = np.zeros(len(seqs), np.int64), np.full(len(seqs), -1, np.int64)
        for leaf in named:
            when, values, was_read = self._of_one(leaf, replaces=leaf is not named[0])
            since = np.concatenate(([0], seqs[:-1])) if was_read else np.zeros_like(seqs)
            last = np.searchsorted(when, seqs) - 1
            known = np.maximum(last, 0)
            later = (last >= 0) & (when[known] > latest) & (when[known] >= since)
            found[later], latest[later] = values[known][later], when[known][later]
        return found

    def _of_one(self, leaf: Leaf, *, replaces: bool) -> tuple[Ints, Ints, bool]:
        """When a tensor of a leaf was read, which value it then was (0: not known), and whether it ever was."""
        trace = self._contents.trace
        parts = self._near.parts(leaf.value)
        writes = trace.values.write[parts]
        when, held = self._reads.in_storage(int(trace.values.storage[leaf.value]))
        was_read = len(when) > 0
        if replaces:  # it has the name from here on, whoever read it before
            later, was_read = when > leaf.seq, True
            when = np.concatenate([np.array([leaf.seq]), when[later]])
            held = np.concatenate([trace.values.write[[leaf.value]], held[later]])
        elif not was_read:
            makers = self._contents.maker[parts]
            when, held = np.where(makers >= 0, trace.ops.seq[makers], 0), writes
        place = np.searchsorted(writes, held, side="right") - 1
        return when, np.where(place >= 0, parts[np.maximum(place, 0)], 0), was_read

    def first_read(self, named: Sequence[Leaf]) -> int | None:
        """The value that a module first read of a leaf (0: not known); None where no module ever did.

        Args:
            named: As in `at`.
        """
        found: list[tuple[int, int]] = []
        for leaf in named:
            storage = int(self._contents.trace.values.storage[leaf.value])
            if not len(self._reads.in_storage(storage)[0]):
                continue
            when, values, _ = self._of_one(leaf, replaces=False)
            place = int(np.searchsorted(when, 0 if leaf is named[0] else leaf.seq))
            if place < len(when):
                found.append((int(when[place]), int(values[place])))
        return min(found)[1] if found else None

    def last(self, leaf: Leaf) -> int:
        """What a leaf was when its trace ends, if this is the row under which its tensor was met."""
        return int(self._near.parts(leaf.value)[-1])
