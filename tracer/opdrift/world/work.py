"""What each rank of one run does of its own: in which mode its modules ran, and whether its work was another one's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from opdrift.records import Cause
from opdrift.tracefile.reader import Trace
from opdrift.wording import listed, some
from opdrift.world.collectives import Meeting, World
from opdrift.world.handed import Handed, given
from opdrift.world.moments import REDUCTIONS
from opdrift.world.replicas import Replicas


@dataclass(frozen=True, slots=True)
class OtherMode:
    """Modules that some ranks had in training mode in all of their calls, and others in none.

    Attributes:
        names: The modules.
        training: Ranks on which they trained.
        evaluating: Ranks on which they did not.
        calls: Rank -> the first call of the first module there.
    """

    names: tuple[str, ...]
    training: tuple[int, ...]
    evaluating: tuple[int, ...]
    calls: dict[int, int]

    @property
    def usual(self) -> tuple[int, ...]:
        """The ranks that do as most; of as many, those with the lowest one."""
        return max(self.training, self.evaluating, key=lambda ranks: (len(ranks), -ranks[0]))

    @property
    def odd(self) -> tuple[int, ...]:
        """The others."""
        return self.evaluating if self.usual == self.training else self.training


def other_modes(world: World, replicas: Replicas) -> Iterator[OtherMode]:
    """Of ranks that train one model together; one that evaluates now and then has modules in both modes."""
    together = replicas.together
    modes = {rank: _modes(world.traces[rank]) for rank in together}
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], list[str]] = {}
    for name in modes[together[0]] if together else ():
        if any(len(modes[rank].get(name, {})) != 1 for rank in together):
            continue
        training = tuple(rank for rank in together if True in modes[rank][name])
        evaluating = tuple(rank for rank in together if rank not in training)
        if training and evaluating:
            found.setdefault((training, evaluating), []).append(name)
    for (training, evaluating), names in found.items():
        calls = {rank: next(iter(modes[rank][names[0]].values())) for rank in together}
        yield OtherMode(tuple(names), training, evaluating, calls)


def of_other_mode(found: OtherMode, world: World) -> Cause:
    """That ranks train one model together, and some of its modules train on some of them only."""
    evidence = []
    for ranks, mode in ((found.training, True), (found.evaluating, False)):
        call = world.traces[ranks[0]].calls[found.calls[ranks[0]]]
        line = f" at {call.source}" if call.source is not None else ""
        evidence.append(
            f"on {listed(ranks)}, {found.names[0]} ran with training={mode} in all of its calls, first{line}"
        )
    few = len(found.names) == 1
    return Cause(
        "train-mode",
        "likely",
        f"{some(found.names)} {'was' if few else 'were'} in training mode on {listed(found.training)}, and in evaluation mode"
        f" on {listed(found.evaluating)}",
        tuple(evidence),
        "Call model.train() (or .eval()) on all ranks alike, after everything that builds, loads or copies the model: dropout"
        " and batch statistics else differ between the ranks.",
    )


def _modes(trace: Trace) -> dict[str, dict[bool, int]]:
    """Path of a module -> the modes that it was called in, and the first call of each."""
    columns = trace.call_columns
    keys, first = np.unique(columns.path[1:] * 2 + columns.training[1:], return_index=True)
    found: dict[str, dict[bool, int]] = {}
    for key, call in zip(keys.tolist(), (first + 1).tolist(), strict=True):
        found.setdefault(trace.call_name(key // 2)[0], {})[bool(key % 2)] = call
    return found


def same_work(world: World) -> Iterator[str]:
    """In words, ranks of which each gave the same to every reduction: they had the same data."""
    groups: dict[tuple[int, ...], list[Meeting]] = {}
    for meeting in world.meetings:
        if meeting.what in REDUCTIONS and meeting.is_whole and len(meeting.ranks) > 1:
            groups.setdefault(meeting.ranks, []).append(meeting)
    for ranks, meetings in groups.items():
        told = [tells for meeting in meetings if (tells := _are_equal(world, meeting)) is not None]
        if told and all(told):
            yield (
                f"{listed(ranks)} gave the same to all {len(told)} reductions between them, bit for bit: they computed on the"
                " same data. Where each should have a share of its own, look at the sampler (DistributedSampler) and at the"
                " seeds of what shuffles and draws"
            )


def _are_equal(world: World, meeting: Meeting) -> bool | None:
    """Whether all ranks gave the same; None where that is not known, or where it tells nothing: one number throughout."""
    parts = [given(world, part) for part in meeting.members.values()]
    if any(len(mine) != len(parts[0]) for mine in parts):
        return None
    found = [_is_same(tensor) for tensor in zip(*parts, strict=True)]
    if False in found:
        return False
    return None if None in found or not found else True


def _is_same(given_by_ranks: Sequence[Handed | None]) -> bool | None:
    """The same of one tensor."""
    known = [each for each in given_by_ranks if each is not None]
    if not any(map(_tells, known)):
        return None
    if any(each.key != known[0].key for each in known):
        return False
    return True if len(known) == len(given_by_ranks) else None


def _tells(handed: Handed) -> bool:
    return any(part.min != part.max for part in handed.parts)


def notes_of_work(traces: Sequence[Trace]) -> list[str]:
    """Sentences about ranks that are no error for certain."""
    return list(same_work(World(traces))) if len(traces) > 1 else []
