"""What a run starts from: the content of a parameter when it is first computed with, draws and loads before that included.

What a parameter was when the recording began does not count where the program initialises or loads it after that, nor does
it matter whether that is a whole tensor, or parts from which one is gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np

from opdrift.compare import is_cast
from opdrift.contents import Contents
from opdrift.leaves import LeafTable
from opdrift.neighbours import Neighbours
from opdrift.provenance import Lineage
from opdrift.provenance.ops import COPIES, DRAWS, FILLS, operator
from opdrift.records import Leaf
from opdrift.tracefile.columns import Ints

#: Ways in which a parameter may have been made during the run and still count as what the run started from.
MADE_BEFORE_USE: Final = frozenset(["drawn", "filled", "copied", "leaf", "uninitialised"])
#: Writes that are followed from what a parameter was on entry to what is read: an initialisation, a load.
_WRITES: Final = 16
_MODEL: Final = frozenset({"parameter", "buffer"})
#: What hands contents on or makes them of nothing computes with no parameter.
_NO_ARITHMETIC: Final = COPIES | DRAWS | FILLS


@dataclass(frozen=True, slots=True)
class Start:
    """What a run starts from under one name.

    Attributes:
        leaf: The row under which it was met, with the content that is first computed with.
        met: That row as it is in the trace: what it was when it was met.
        writers: The ops that wrote it between the two.
        source: The row of the tensor that it was gathered from or is a cast of, likewise; None where it is none.
        later: The rows of the name that follow: gathered again, put in its place.
        settled: Whether nothing else wrote it before it was computed with, such as what is computed.
    """

    leaf: Leaf
    met: Leaf
    writers: tuple[int, ...]
    source: Start | None
    later: tuple[Leaf, ...]
    settled: bool

    @property
    def loads(self) -> tuple[int, ...]:
        """The ops that wrote it, or what it was gathered from, before it was first computed with."""
        return (*(self.source.writers if self.source is not None else ()), *self.writers)


class Starts:
    """What one run starts from, by name.

    Args:
        contents: Columns over the run's values.
        leaves: Its named values.
        lineage: Where contents came from.
    """

    def __init__(self, contents: Contents, leaves: LeafTable, lineage: Lineage) -> None:
        self._contents = contents
        self._trace = contents.trace
        self._leaves = leaves
        self._lineage = lineage
        self._known: dict[str, Start | None] = {}

    def of(self, name: str) -> Start | None:
        """What a parameter or buffer starts as; None for other names."""
        if name not in self._known:
            rows = [leaf for leaf in self._leaves.by_name.get(name, ()) if leaf.kind in _MODEL]
            self._known[name] = self._start(rows) if rows else None
        return self._known[name]

    def since(self, name: str) -> int:
        """The number of the last op that a parameter was drawn or loaded by, or was met after; 0 for other names."""
        start = self.of(name)
        if start is None:
            return 0
        return max(start.met.seq, *(int(self._trace.ops.seq[op]) for op in start.writers[-1:]), 0)

    def _start(self, rows: Sequence[Leaf]) -> Start:
        read = next((n for n, leaf in enumerate(rows) if self._is_read(leaf)), 0)
        found = self._loaded(rows[read], rows[read + 1 :])
        if not read:
            return found
        source = self._loaded(rows[0], rows[1:])
        return replace(found, source=source if self._becomes(source.leaf, found.leaf) else None)

    def _becomes(self, source: Leaf, result: Leaf) -> bool:
        """Whether a tensor is known to have the content of another one, or to be a cast of that."""
        words, dtypes = self._contents.by_place, self._contents.layouts.dtype
        if dtypes.at(source.value) == dtypes.at(result.value):
            return bool(words[source.value] and words[source.value] == words[result.value])
        a, b = (self._contents.fingerprint(leaf.value) for leaf in (source, result))
        return a is not None and b is not None and is_cast(a, b) is True

    def _is_read(self, leaf: Leaf) -> bool:
        """Whether the run computes with the tensor of a row, with this content or one that was written into it."""
        return bool((self._seqs_of_reads(leaf) >= leaf.seq).any())

    def _loaded(self, met: Leaf, later: Sequence[Leaf]) -> Start:
        """A row as it is once it is loaded."""
        leaf, writers, every, settled = met, tuple[int, ...](), list[int](), True
        end = self._until(met, later)
        for state, writer in self._writes(met):
            made = self._lineage.of(self._contents.value_of_state(state)).kind
            if writer >= end:
                break
            settled = False
            if made not in MADE_BEFORE_USE:
                break
            every.append(writer)
            value = self._alike(met, state)
            if value is not None:
                leaf, writers, settled = replace(met, value=value), tuple(every), True
        following = tuple(row for row in later if row.value != met.value)
        return Start(leaf, met, writers, None, following, settled)

    def _until(self, leaf: Leaf, later: Sequence[Leaf]) -> int:
        """The op from which on a tensor is in use: it is computed with, or was gathered or copied elsewhere."""
        seqs, storage = self._seqs_of_reads(leaf), self._trace.values.storage
        first = seqs[seqs >= leaf.seq].tolist()[:1]
        first += [r.seq for r in later if storage[r.value] != storage[leaf.value]][:1]
        return (
            int(np.searchsorted(self._trace.ops.seq, min(first))) if first else len(self._trace.ops)
        )

    def _writes(self, leaf: Leaf) -> Iterator[tuple[int, int]]:
        """The states of a tensor after the one that it was met in, and who wrote each, outside of all modules."""
        states, calls = self._contents.states, self._trace.ops.call
        state = int(states.of[leaf.value])
        for _ in range(_WRITES):
            state += 1  # states are in the order of storages and writes
            if state == len(states.before) or int(states.before[state]) != state - 1:
                return
            writer = int(states.writer[state])
            if writer < 0 or int(calls[writer]) > 0:
                return
            yield state, writer

    def _alike(self, leaf: Leaf, state: int) -> int | None:
        """The value of a state that is the whole tensor of a row and of which the content is known."""
        columns = self._trace.values
        values = self._near.in_state(self._contents.value_of_state(state))
        same = values[
            (columns.offset[values] == columns.offset[leaf.value])
            & (columns.meta[values] == columns.meta[leaf.value])
            & (self._contents.by_place[values] != 0)
        ]
        return int(same[0]) if len(same) else None

    @cached_property
    def _near(self) -> Neighbours:
        return Neighbours(self._trace)

    # ---- reads -------------------------------------------------------------------------------------------

    def _seqs_of_reads(self, leaf: Leaf) -> Ints:
        """The numbers of the ops that compute with the tensor of a row: those of modules, else those outside of them."""
        storages, ops = self._reads
        storage = int(self._trace.values.storage[leaf.value])
        start, end = np.searchsorted(storages, np.array([storage, storage + 1]))
        own = ops[start:end]
        inside = own[self._trace.ops.call[own] > 0]
        if not len(inside):
            kept = [op for op in own.tolist() if self._computes_with(op, storage)]
            inside = np.array(kept, np.int64)
        found: Ints = self._trace.ops.seq[inside]
        return found

    def _computes_with(self, op: int, storage: int) -> bool:
        """Whether an op makes something else of a tensor: no copy of it, and no initialiser that goes on to write it."""
        name = self._trace.op_info(int(self._trace.ops.signature[op])).name
        written = self._trace.values.storage[self._trace.ops.outputs[op]]
        return operator(name) not in _NO_ARITHMETIC and storage not in written.tolist()

    @cached_property
    def _reads(self) -> tuple[Ints, Ints]:
        """Storages that are read, sorted, and the ops that do, in order."""
        ops = self._trace.ops
        counted = self._contents.counted & (ops.inputs.values > 0)
        rows, read = ops.inputs.rows()[counted], ops.inputs.values[counted]
        storage = self._trace.values.storage[read]
        order = np.lexsort((rows, storage))
        return storage[order], rows[order]
