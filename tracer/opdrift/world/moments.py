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

    def at(self, value: int, seqs: Ints) -> Ints:
        """The value that modules last read of a leaf before each of these ops; 0 where none did since the one before.

        A rank that ran out of inputs (`Join`) answers what the others reduce, with parameters that it does not use
        until the last of the others hands it theirs. Where no module ever read a leaf: the one that was there.

        Args:
            value: One of the leaf's.
            seqs: Numbers of ops, in order.
        """
        trace = self._contents.trace
        parts = self._near.parts(value)
        writes = trace.values.write[parts]
        when, held = self._reads.in_storage(int(trace.values.storage[value]))
        if not len(when):
            makers = self._contents.maker[parts]
            when, held = np.where(makers >= 0, trace.ops.seq[makers], 0), writes
            since = np.zeros_like(seqs)
        else:
            since = np.concatenate(([0], seqs[:-1]))
        last = np.searchsorted(when, seqs) - 1
        used = (last >= 0) & (when[np.maximum(last, 0)] >= since)
        place = np.searchsorted(writes, held[np.maximum(last, 0)], side="right") - 1
        found: Ints = np.where(used & (place >= 0), parts[np.maximum(place, 0)], 0)
        return found

    def last(self, value: int) -> int:
        """What a leaf was when its trace ends."""
        return int(self._near.parts(value)[-1])
