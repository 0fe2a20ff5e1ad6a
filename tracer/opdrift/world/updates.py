"""What ranks call to update the parameters that they share out: by one rule, on the part that each of them has."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from opdrift.causes.gradients import BEFORE_THE_STEP, told
from opdrift.causes.optimizers import COMPARE_OPTIMIZERS, numbers_in_words
from opdrift.contents import Contents
from opdrift.flow import is_collective
from opdrift.gradients import Gradients, Updated
from opdrift.origins.updates import Step, step_in
from opdrift.provenance.ops import COPIES, operator
from opdrift.records import Cause, Op
from opdrift.shards import sharding
from opdrift.wording import listed, some
from opdrift.world.collectives import World
from opdrift.world.results import minority

#: What a rank calls more often than this at one moment is not followed to what it updates.
_FOLLOWED: Final = 4096

#: What is called between the n-th and the next collective of the ranks: (n, step).
Called = tuple[int, Step]


@dataclass(frozen=True, slots=True)
class UnlikeUpdate:
    """Parameters that ranks update by other calls.

    Attributes:
        updated: Which, and what of them the first of these calls makes.
        odd: Ranks that are not with most.
        usual: A rank of those that are.
        ops: Rank -> the index of its op, of those two that stand for both sides; None where the rank has none.
        steps: The same of what was called.
    """

    updated: Updated
    odd: tuple[int, ...]
    usual: int
    ops: Mapping[int, int | None]
    steps: Mapping[int, Step | None]


def unlike_updates(world: World) -> Iterator[UnlikeUpdate]:
    """The first calls of an update that are not the same on all ranks which have a part of the parameter.

    Ranks that do not agree about their collectives are not compared: nothing tells which step of one is which of another.
    """
    shared = _shared_out(world)
    if len(shared) < 2 or world.disagreements or world.ended_early:
        return
    made = {rank: _Calls(world, rank, tuple(shared)) for rank in shared}
    counts = {rank: Counter({c: len(ops) for c, ops in calls.of.items()}) for rank, calls in made.items()}  # fmt: skip
    every = set().union(*counts.values())
    unequal = sorted(
        (c for c in every if len({count[c] for count in counts.values()}) > 1),
        key=lambda c: (c[0], c[1].name, str(c[1].numbers)),
    )
    for moment in dict.fromkeys(number for number, _ in unequal):
        found = list(_at(made, shared, [c for c in unequal if c[0] == moment]))
        if found:
            yield from found
            return  # what follows in later steps follows from it, or is the same again


def _shared_out(world: World) -> dict[int, frozenset[str]]:
    """Rank -> the parameters of which it has a part that an integration followed."""
    found = {}
    for rank, trace in world.traces.items():
        how = sharding(trace)
        held = {
            leaf.name
            for leaf in trace.leaves
            if leaf.kind == "shard" and 0 not in trace.meta(leaf.value).shape
        }
        names = frozenset(n for n in held if n in how and how[n].layout != "unknown")
        if names:
            found[rank] = names
    return found


@dataclass(frozen=True, slots=True)
class _Made:
    """Calls of one sort that update a parameter: the first op, what it makes of the parameter, and how many there are."""

    op: int
    updated: Updated
    times: int


class _Calls:
    """What one rank calls outside of modules and of backward passes, once it went backward."""

    def __init__(self, world: World, rank: int, ranks: Sequence[int]) -> None:
        self.trace = world.traces[rank]
        ops = self.trace.ops
        self.gradients = Gradients(Contents(self.trace))
        backward = np.flatnonzero(ops.phase == 1)
        outside = (ops.call == 0) & (ops.phase == 0)
        outside[: int(backward[0]) if len(backward) else len(outside)] = False
        fences = sorted(
            meeting.members[rank].seq
            for meeting in world.meetings
            if set(ranks) <= meeting.members.keys()
        )
        steps = {
            signature: self._step(signature)
            for signature in np.unique(ops.signature[outside]).tolist()
        }
        self.of: dict[Called, list[int]] = defaultdict(list)
        for op in np.flatnonzero(outside).tolist():
            step = steps[int(ops.signature[op])]
            if step is not None:
                number = int(np.searchsorted(fences, int(ops.seq[op])))
                self.of[number, step].append(op)

    def _step(self, signature: int) -> Step | None:
        """What ops of a signature are called with; None of those that compute nothing."""
        info = self.trace.op_info(signature)
        plain = operator(info.name)
        if info.view or info.uninitialised or is_collective(info.name) or plain in COPIES:
            return None
        return step_in(self.trace.signature(signature))

    def by_name(self, called: Called, names: frozenset[str]) -> dict[str, _Made]:
        """Parameter -> the ops so called that update it."""
        found: dict[str, _Made] = {}
        for op in self.of.get(called, ()):
            updated = self.gradients.of(self.trace.ops.outputs[op].tolist())
            for name in updated.names if updated is not None else ():
                assert updated is not None
                if name in names:
                    before = found.get(name, _Made(op, updated, 0))
                    found[name] = replace(before, times=before.times + 1)
        return found


def _at(
    made: Mapping[int, _Calls], shared: Mapping[int, frozenset[str]], called: Sequence[Called]
) -> Iterator[UnlikeUpdate]:
    """What ranks call differently at one moment, parameters that show it alike together."""
    has: dict[str, dict[int, dict[Step, _Made]]] = defaultdict(lambda: defaultdict(dict))
    for each in called:
        if any(len(calls.of.get(each, ())) > _FOLLOWED for calls in made.values()):
            continue
        for rank, calls in made.items():
            for name, op in calls.by_name(each, shared[rank]).items():
                has[name][rank][each[1]] = op
    groups: dict[object, list[tuple[str, UnlikeUpdate]]] = defaultdict(list)
    for name, by_rank in has.items():
        ranks = [rank for rank in made if name in shared[rank]]
        odd, usual = minority(
            {rank: frozenset(_times(by_rank.get(rank, {})).items()) for rank in ranks}
        )
        if odd:
            found = _between(name, odd, usual, by_rank)
            key = odd, usual, *found.steps.values(), found.updated.role
            groups[key].append((name, found))
    for group in groups.values():
        names = tuple(name for name, _ in group)
        first = group[0][1]
        yield UnlikeUpdate(
            Updated(names, first.updated.role), first.odd, first.usual, first.ops, first.steps
        )


def _between(
    name: str,
    odd: tuple[int, ...],
    usual: int,
    by_rank: Mapping[int, Mapping[Step, _Made]],
) -> UnlikeUpdate:
    """The first call of two ranks that only one of them makes, and the other's with other numbers."""
    mine, theirs = by_rank.get(usual, {}), by_rank.get(odd[0], {})
    only = [
        {s: made for s, made in own.items() if made.times > _times(other).get(s, 0)}
        for own, other in ((mine, theirs), (theirs, mine))
    ]
    pairs = [
        (a, b)
        for a in only[0]
        for b in only[1]
        if a.name == b.name and [n for n, _ in a.numbers] == [n for n, _ in b.numbers]
    ]
    a, b = (_first(side) for side in only)
    if pairs:
        a, b = min(pairs, key=lambda pair: only[0][pair[0]].op)
    left = None if a is None else only[0][a]
    right = None if b is None else only[1][b]
    shown = right or left
    assert shown is not None
    return UnlikeUpdate(
        Updated((name,), shown.updated.role),
        odd,
        usual,
        {usual: None if left is None else left.op, odd[0]: None if right is None else right.op},
        {usual: a, odd[0]: b},
    )


def _times(made: Mapping[Step, _Made]) -> dict[Step, int]:
    return {step: each.times for step, each in made.items()}


def _first(side: Mapping[Step, _Made]) -> Step | None:
    return min(side, key=lambda step: side[step].op, default=None)


def of_unlike_update(world: World, found: UnlikeUpdate) -> Cause:
    """That ranks update their parts of a parameter by other calls, or with other numbers."""
    ops = {rank: _op(world, rank, index) for rank, index in found.ops.items()}
    called = {
        rank: f"{op.name}{numbers_in_words(step)}"
        for rank, op in ops.items()
        if op is not None and (step := found.steps[rank]) is not None
    }
    odd, usual = found.odd[0], found.usual
    what, of_gradient = told(found.updated), found.updated.role == "gradient"
    evidence = [
        f"on rank {rank}: {called[rank]}, op {op.seq}{f' at {op.source}' if op.source is not None else ''}"
        if op is not None
        else f"on rank {rank}: no such call between the same two collectives"
        for rank, op in ops.items()
    ]
    evidence.append(
        f"each rank has a part of {some(found.updated.names)}, and all parts are updated by one rule"
    )
    if len(called) == 2:
        where = (
            f"on {what}" if of_gradient else f"in an optimizer step of {some(found.updated.names)}"
        )
        one = next(op for op in ops.values() if op is not None)
        numbers = " and ".join(
            f"{numbers_in_words(found.steps[rank])[2:-1]} on rank {rank}" for rank in (usual, odd)
        )
        summary = f"{one.name} {where} was called with other arguments: {numbers}"
        return Cause(
            "op-args",
            "likely",
            summary,
            tuple(evidence),
            BEFORE_THE_STEP if of_gradient else COMPARE_OPTIMIZERS,
        )
    several = len(found.odd) > 1
    if odd in called:
        summary = f"{listed(found.odd)} change{'' if several else 's'} {what} by {called[odd]}, rank {usual} does not"
    else:
        leave = "leave" if several else "leaves"
        summary = (
            f"{listed(found.odd)} {leave} out {called[usual]}, by which rank {usual} changes {what}"
        )
    return Cause(
        "structure",
        "likely",
        summary,
        tuple(evidence),
        "Let all ranks update their parts alike: look for a branch on the rank, or on what a rank computed, around the line"
        " above: clipping by a rank's own norm, a step that one rank leaves out.",
    )


def _op(world: World, rank: int, index: int | None) -> Op | None:
    return None if index is None else world.traces[rank].op(index)
