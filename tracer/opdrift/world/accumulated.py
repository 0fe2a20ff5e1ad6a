"""Gradients that some ranks of one run add to what an earlier backward pass left, and others start from nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from opdrift.causes.gradients import NOT_ZERO, told
from opdrift.contents import Contents
from opdrift.gradients import ADDING, Gradients, Updated
from opdrift.provenance.ops import operator
from opdrift.records import Cause, Op
from opdrift.steps import optimizer_steps
from opdrift.tracefile.reader import Trace
from opdrift.wording import listed
from opdrift.world.collectives import World
from opdrift.world.replicas import Replicas
from opdrift.world.results import minority


@dataclass(frozen=True, slots=True)
class Accumulated:
    """Gradients of one step that ranks do not treat alike.

    Attributes:
        adding: Ranks that add to what is there.
        odd: Ranks that do not as most do; they may be those that start from nothing.
        usual: The first of the others.
        step: Before which step of the optimizer, counted from 0.
        names: The parameters, on the first of those that add.
        op: The first op there that adds.
        ops: All that do, of all ranks, as rank and number.
    """

    adding: tuple[int, ...]
    odd: tuple[int, ...]
    usual: int
    step: int
    names: tuple[str, ...]
    op: Op
    ops: frozenset[tuple[int, int]]

    def explains(self, rank: int, seq: int) -> bool:
        """Whether an op of a rank is one of those that add."""
        return (rank, seq) in self.ops


def accumulated_apart(world: World, replicas: Replicas) -> Iterator[Accumulated]:
    """The first step before which some ranks of those that train one model together add to earlier gradients.

    They must have gone backward as often: a rank with fewer parts of a batch accumulates less by right.
    """
    ranks = [rank for rank in replicas.together if rank in world.traces]
    if len(ranks) < 2 or world.disagreements or world.ended_early:
        return
    of = {rank: _OfRank(world.traces[rank]) for rank in ranks}
    if len({each.steps for each in of.values()}) > 1:
        return  # a step that is left out says more
    for step in range(next(iter(of.values())).steps + 1):
        added = {rank: each.added.get(step, {}) for rank, each in of.items()}
        odd, usual = minority({rank: bool(found) for rank, found in added.items()})
        if not odd:
            continue
        if len({each.passes(step) for each in of.values()}) > 1:
            return
        adding = tuple(rank for rank, found in added.items() if found)
        found = added[adding[0]]
        names = tuple(dict.fromkeys(name for each in found.values() for name in each.names))
        op = world.traces[adding[0]].op(next(iter(found)))
        every = frozenset((rank, seq) for rank, each in of.items() for seq in each.seqs())
        yield Accumulated(adding, odd, usual, step, names, op, every)
        return  # what follows in later steps follows from it, or is the same again


class _OfRank:
    """What one rank adds to earlier gradients, and how often it goes backward, by the steps of its optimizer."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._ends = np.array([step.end for step in optimizer_steps(trace)], np.int64)
        self.steps = len(self._ends)
        self.added = self._added()

    def _added(self) -> dict[int, dict[int, Updated]]:
        """Step -> op -> the gradients to which it adds."""
        ops, gradients = self._trace.ops, Gradients(Contents(self._trace))
        names = {s: self._trace.op_info(s).name for s in np.unique(ops.signature).tolist()}
        adding = [s for s, name in names.items() if operator(name) in ADDING]
        outside = (ops.phase == 1) | (ops.call == 0)
        found: dict[int, dict[int, Updated]] = {}
        for op in np.flatnonzero(np.isin(ops.signature, adding) & outside).tolist():
            updated = gradients.added_to_earlier(op)
            if updated is not None:
                step = int(np.searchsorted(self._ends, int(ops.seq[op])))
                found.setdefault(step, {})[op] = updated
        return found

    def seqs(self) -> Iterator[int]:
        """The numbers of the ops that add."""
        for ops in self.added.values():
            yield from (int(self._trace.ops.seq[op]) for op in ops)

    def passes(self, step: int) -> int:
        """How many backward passes it makes before a step, each behind a forward one."""
        ops = self._trace.ops
        inside = np.searchsorted(self._ends, ops.seq) == step
        told = inside & ((ops.phase == 1) | (ops.call != 0))
        phase = ops.phase[told] == 1
        return int((phase[1:] & ~phase[:-1]).sum())


def of_accumulated(found: Accumulated, world: World) -> Cause:
    """That ranks add to gradients which an earlier backward pass left, and others do not."""
    others = tuple(r for r in world.traces if r not in found.adding)
    at = f" at {found.op.source}" if found.op.source is not None else ""
    return Cause(
        "structure",
        "likely",
        f"on {listed(found.adding)}, a backward pass adds to {told(Updated(found.names, 'gradient'))} what an earlier one left"
        f" there; on {listed(others)} it starts from nothing",
        (
            f"on rank {found.adding[0]}: first by {found.op.name}, op {found.op.seq}{at}",
            f"all ranks made as many backward passes before that step, number {found.step + 1} of the optimizer",
        ),
        NOT_ZERO,
    )
