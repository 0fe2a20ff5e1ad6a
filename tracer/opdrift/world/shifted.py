"""Collectives of different steps that met: a rank issued fewer of them in a step than the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from opdrift.steps import Steps
from opdrift.world.collectives import Meeting, World


def met_in_other_steps(world: World) -> list[str]:
    """In words, the first collective that is of other steps on other ranks, and in which step the ranks issued other numbers.

    Nothing raises an error for it: the k-th of a rank meets the k-th of the others, whatever it was meant for. It is evidence
    where something is wrong already; ranks that do not step alike may mean it.
    """
    of = {rank: Steps(trace) for rank, trace in world.traces.items()}
    for meeting in world.meetings:
        steps = _steps(of, meeting)
        if steps is not None and len(set(steps.values())) > 1:
            part = next(iter(meeting.members.values()))
            said = " and ".join(f"of step {step} on rank {rank}" for rank, step in steps.items())
            return [*_issued(world, of, meeting, min(steps.values())), f"{part.place} is {said}"]
    return []


def _steps(of: Mapping[int, Steps], meeting: Meeting) -> dict[int, int] | None:
    """Rank -> the step in which it issued a collective; None where that is not known of all."""
    found = {}
    for rank, part in meeting.members.items():
        step = of[rank].known_at(part.seq)
        if step is None:
            return None
        found[rank] = step
    return found


def _issued(world: World, of: Mapping[int, Steps], meeting: Meeting, step: int) -> list[str]:
    """How many collectives of the group each rank issued in the step in which they first came apart."""
    counts: Mapping[int, Counter[int | None]] = {
        rank: Counter(
            of[rank].known_at(part.seq)
            for part in world.collectives[rank]
            if (part.group, part.ranks) == (meeting.group, meeting.ranks)
        )
        for rank in meeting.members
    }
    issued = {rank: count[step] for rank, count in counts.items()}
    if len(set(issued.values())) == 1:
        return []
    said = " and ".join(f"{number} on rank {rank}" for rank, number in issued.items())
    return [
        f"in step {step}, collectives of group {meeting.group} were issued {said}: what a rank did not reduce there (no_sync(), a"
        " branch) makes all later ones meet those of another step"
    ]
