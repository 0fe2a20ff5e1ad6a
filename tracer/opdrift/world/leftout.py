"""Steps of an optimizer that some ranks of one run make and others leave out, though all train one model together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from opdrift.causes.stepsleftout import REMEDY, updated_in
from opdrift.contents import Contents
from opdrift.gradients import Gradients
from opdrift.records import Cause, Op
from opdrift.steps import OptimizerStep, optimizer_steps
from opdrift.tracefile.reader import Trace
from opdrift.wording import counted, listed, some
from opdrift.world.collectives import World
from opdrift.world.replicas import Replicas
from opdrift.world.results import minority


@dataclass(frozen=True, slots=True)
class RankLeftOut:
    """A step that ranks leave out.

    Attributes:
        lacking: They.
        odd: Ranks that do not as most do; they may be those that make it.
        usual: The first of the others.
        maker: A rank that makes it.
        step: It, there.
        index: Which of that rank's steps it is, from 0.
        op: The first op of it.
        names: The parameters that it updates.
        totals: Rank -> how many steps it makes.
    """

    lacking: tuple[int, ...]
    odd: tuple[int, ...]
    usual: int
    maker: int
    step: OptimizerStep
    index: int
    op: Op | None
    names: tuple[str, ...]
    totals: dict[int, int]

    def explains(self, rank: int, seq: int) -> bool:
        """Whether an op of a rank lies in the step."""
        return rank == self.maker and self.step.begin <= seq <= self.step.end


def ranks_left_out(world: World, replicas: Replicas) -> Iterator[RankLeftOut]:
    """The first step that ranks which train one model together do not all make, between the same two of their collectives.

    A rank that has no more data, and only answers the others' collectives, goes backward no more, and leaves nothing out.
    """
    ranks = [rank for rank in replicas.together if rank in world.traces]
    if len(ranks) < 2 or world.disagreements or world.ended_early:
        return
    steps = {rank: optimizer_steps(world.traces[rank]) for rank in ranks}
    totals = {rank: len(found) for rank, found in steps.items()}
    if not all(totals.values()) or len(set(totals.values())) == 1:
        return
    fences = {rank: _fences(world, rank, ranks) for rank in ranks}
    places = {
        rank: np.searchsorted(fences[rank], [step.begin for step in steps[rank]]) for rank in ranks
    }
    for moment in sorted(set(np.concatenate(list(places.values())).tolist())):
        made = {rank: int((places[rank] == moment).sum()) for rank in ranks}
        most = max(made.values())
        lacking = tuple(rank for rank in ranks if made[rank] < most)
        if not lacking:
            continue
        if not all(_goes_backward(world.traces[r], fences[r], moment) for r in lacking):
            return
        maker = next(rank for rank in ranks if made[rank] == most)
        index = int(np.flatnonzero(places[maker] == moment)[made[lacking[0]]])
        step = steps[maker][index]
        trace = world.traces[maker]
        inside = np.flatnonzero((trace.ops.seq > step.begin) & (trace.ops.seq < step.end))
        names = updated_in(Gradients(Contents(trace)), inside.tolist())
        if not all(_holds(world.traces[rank], names) for rank in lacking):
            continue  # a model of its own, such as a probe
        odd, usual = minority(made)
        op = trace.op(int(inside[0])) if len(inside) else None
        yield RankLeftOut(lacking, odd, usual, maker, step, index, op, names, totals)
        return  # what follows in later steps follows from it, or is the same again


def _holds(trace: Trace, names: tuple[str, ...]) -> bool:
    """Whether a rank has a parameter, or a part of one, of these names."""
    held = {leaf.name for leaf in trace.leaves if leaf.kind in ("parameter", "shard")}
    return not held.isdisjoint(names)


def _fences(world: World, rank: int, ranks: list[int]) -> list[int]:
    met = (m.members[rank].seq for m in world.meetings if m.members.keys() >= set(ranks))
    return sorted(met)


def _goes_backward(trace: Trace, fences: list[int], moment: int) -> bool:
    """Whether a rank goes backward since the step before, as far as its collectives tell: in what leads to this moment."""
    seqs, phase = trace.ops.seq, trace.ops.phase
    end = fences[moment] if moment < len(fences) else int(seqs[-1]) + 1
    before = [step.end for step in optimizer_steps(trace) if step.end < end]
    begin = before[-1] if before else 0
    return bool(((seqs > begin) & (seqs < end) & (phase == 1)).any())


def of_rank_left_out(found: RankLeftOut) -> Cause:
    """That ranks leave out a step which others make."""
    several = len(found.lacking) > 1
    who, step = listed(found.lacking), found.step
    at = f", first at {found.op.source}" if found.op is not None and found.op.source else ""
    return Cause(
        "structure",
        "likely",
        f"{who} {'make' if several else 'makes'} no optimizer step where rank {found.maker} makes"
        f" {step.optimizer}.step number {found.index + 1}",
        (
            f"on rank {found.maker}: ops {step.begin} to {step.end}{at}",
            f"on {who}: no step between the same two collectives of the ranks",
            f"it updates {some(found.names)}",
            *(
                f"rank {rank}: {counted(total, 'optimizer step')}"
                for rank, total in found.totals.items()
            ),
        ),
        REMEDY,
    )
