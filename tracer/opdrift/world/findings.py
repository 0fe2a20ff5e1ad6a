"""What the ranks of one run show to be wrong between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from opdrift.records import RAISED, RANK_ENDED, Cause, Finding, Op
from opdrift.steps import Steps
from opdrift.tracefile.reader import Trace
from opdrift.world.accumulated import Accumulated, accumulated_apart, of_accumulated
from opdrift.world.causes import (
    last_op,
    of_another_run,
    of_disagreement,
    of_end,
    of_loads,
    of_message,
    of_split,
    of_waiting,
    of_wrong_message,
    of_wrong_results,
)
from opdrift.world.collectives import Collective, Disagreement, World
from opdrift.world.declared import DeclaredAlike, Unequal, is_told_before, of_unequal
from opdrift.world.ends import End, ends, first_ends
from opdrift.world.handed import given
from opdrift.world.leftout import RankLeftOut, of_rank_left_out, ranks_left_out
from opdrift.world.loads import LoadedDifferently, loaded_differently
from opdrift.world.messages import Message, disagreements
from opdrift.world.passed import wrong_messages
from opdrift.world.replicas import Replicas, Split
from opdrift.world.results import WrongResult, by_place, minority, wrong_results
from opdrift.world.updates import UnlikeUpdate, of_unlike_update, unlike_updates
from opdrift.world.work import of_other_mode, other_modes


def world_findings(world: World, gathered: Sequence[Finding] = ()) -> Iterator[Finding]:
    """Collectives that disagree or went wrong, replicas that differ, ranks that ended early.

    Args:
        world: All ranks.
        gathered: What is wrong with their gathers.
    """
    if len(world.traces) < 2:
        return
    yield from end_findings(world)
    yield from _contents(world, gathered)


def end_findings(world: World) -> Iterator[Finding]:
    """Ranks that ended early, and collectives and messages that the ranks do not agree about: what ends a run."""
    if len(world.traces) < 2:
        return
    first = [end for end in first_ends(world) if not _died_in(world, end.rank)]
    for end in first:
        yield _end(world, end)
    for disagreement in world.disagreements:
        if not follows_from_an_end(disagreement, world, first):
            yield _disagreement(world, disagreement)
    yield from _of_messages(world, first)


def _contents(world: World, gathered: Sequence[Finding]) -> Iterator[Finding]:
    for wrong in by_place(wrong_results(world)):
        yield _wrong_results(world, wrong)
    for message in wrong_messages(world):
        yield _at(of_wrong_message(message), world.traces[message.received.rank], message.received)
    replicas = Replicas(world)
    splits = [
        split for replica in replicas.found() if (split := replicas.split(replica)) is not None
    ]
    for group in grouped([split for split in splits if not _is_hidden(world, split)]):
        yield _split(world, replicas, group)
    left_out = list(ranks_left_out(world, replicas))
    for found in left_out:
        yield _of_step(
            world, of_rank_left_out(found), found.odd, found.maker, found.op, found.step.begin
        )
    accumulated = list(accumulated_apart(world, replicas))
    for added in accumulated:
        cause = of_accumulated(added, world)
        yield _of_step(world, cause, added.odd, added.adding[0], added.op, added.op.seq)
    for update in unlike_updates(world):
        if not is_told_in_steps(world, update, [*left_out, *accumulated]):
            yield _update(world, update)
    told = {split.replica.name for split in splits}
    for unequal in DeclaredAlike(world, replicas).unequal(told):
        if not is_told_before(unequal, gathered):
            yield _unequal(world, unequal)
    for mode in other_modes(world, replicas):
        name = mode.names[0]
        cause = of_other_mode(mode, world)
        yield _finding(
            "replica", cause, world.traces[mode.odd[0]], seq=None, name=name, module=name
        )
    differently = loads_apart(world, splits)
    if differently:
        trace = world.traces[differently[0].drawn]
        name = differently[0].name
        cause = of_loads(differently)
        yield _finding("replica", cause, trace, seq=None, name=name, module=name.rpartition(".")[0])


def _is_hidden(world: World, split: Split) -> bool:
    """Whether ranks differ by what no op wrote on one of them: its trace alone shows that, with the step."""
    sides = (split.usual, split.left.value), (split.odd[0], split.right.value)
    return any(
        leaf.when == "changed" and leaf.value == value
        for rank, value in sides
        for leaf in world.traces[rank].leaves
    )


def loads_apart(world: World, splits: Sequence[Split]) -> list[LoadedDifferently]:
    """Parameters that one rank loaded and another one drew, but for those that are told as replicas that differ."""
    told = {split.replica.name for split in splits}
    return [found for found in loaded_differently(world) if found.name not in told]


def _update(world: World, found: UnlikeUpdate) -> Finding:
    rank = next(r for r in (found.odd[0], found.usual) if found.ops[r] is not None)
    trace, index = world.traces[rank], found.ops[rank]
    assert index is not None
    op, name = trace.op(index), found.updated.names[0]
    cause = of_unlike_update(world, found)
    return replace(
        _finding("update", cause, trace, seq=op.seq, name=name, op=op.name), rank=found.odd[0]
    )


def _of_step(
    world: World, cause: Cause, odd: tuple[int, ...], maker: int, op: Op | None, seq: int
) -> Finding:
    """What ranks do differently in a step, by an op of a rank that another one lacks."""
    name = op.name if op is not None else None
    told = _finding("update", cause, world.traces[maker], seq=seq, op=name)
    return replace(told, rank=odd[0])


def is_told_in_steps(
    world: World, update: UnlikeUpdate, told: Sequence[RankLeftOut | Accumulated]
) -> bool:
    """Whether what ranks call differently in an update is a part of a step that some leave out, or adds to earlier gradients."""
    ops = [
        (rank, int(world.traces[rank].ops.seq[index]))
        for rank, index in update.ops.items()
        if index is not None
    ]
    return any(all(found.explains(*op) for op in ops) for found in told)


def another_run(trace: Trace, said: str) -> Finding:
    """The trace of a rank that is of another run."""
    return _finding("other-run", of_another_run(trace, said), trace, seq=None)


def _died_in(world: World, rank: int) -> bool:
    """Whether a rank's last collective is one that the ranks do not agree about."""
    issued = world.collectives[rank]
    return bool(issued) and any(d.members.get(rank) is issued[-1] for d in world.disagreements)


def follows_from_an_end(found: Disagreement, world: World, first: Sequence[End]) -> bool:
    """Whether ranks lack a collective because one of them ended, or waited elsewhere for one that did."""
    if found.about != "missing" or not first:
        return False
    ended, all_ends = {end.rank for end in first}, ends(world)
    return all(rank in ended or all_ends[rank].follows for rank in found.absent)


def unmet(world: World, first: Sequence[End]) -> Iterator[Message]:
    """The first message of each rank that it ended in, though no rank's end explains that.

    One that a rank passed by itself may have met its other part before or after the recording.
    """
    ended, all_ends = {end.rank for end in first}, ends(world)
    told: set[int] = set()
    for message in world.messages.alone:
        end = all_ends[message.rank]
        explained = message.peer in ended or message.peer in told
        if end.follows and end.waited_in is message and not explained:
            told.add(message.rank)
            yield message


def _of_messages(world: World, first: Sequence[End]) -> Iterator[Finding]:
    for sent, received in disagreements(world.messages):
        yield _at(of_message(sent, received), world.traces[received.rank], received)
    for message in unmet(world, first):
        yield _at(of_waiting(world, message), world.traces[message.rank], message)


def _end(world: World, end: End) -> Finding:
    trace = world.traces[end.rank]
    last = last_op(trace)
    raised = last if last is not None and last.flags & RAISED else None
    found = _finding(
        RANK_ENDED,
        of_end(world, end),
        trace,
        seq=last.seq if last is not None else None,
        op=raised.name if raised is not None else None,
        module=raised.call.path if raised is not None else "",
    )
    return replace(found, step=_step_of_end(world, end.rank, found.step))


def _step_of_end(world: World, rank: int, step: int | None) -> int | None:
    """The step in which a rank ended: what was lost with it, others tell of the last collective that it issued."""
    issued = world.collectives[rank]
    meeting = world.by_op.get((rank, issued[-1].seq)) if issued else None
    met = meeting.members.items() if meeting is not None else ()
    told = [Steps(world.traces[each]).known_at(part.seq) for each, part in met]
    return max((each for each in [step, *told] if each is not None), default=None)


def without_handed(world: World, found: Sequence[Finding]) -> list[Finding]:
    """Leave out NaN and infinities that first appear in what a rank was handed by others: they have them, too."""
    return [each for each in found if each.kind != "nan" or not _is_handed(world, each)]


def _is_handed(world: World, finding: Finding) -> bool:
    if len(world.traces) < 2 or finding.seq is None:
        return False
    here = finding.rank or 0, finding.seq
    meeting = world.by_op.get(here)
    givers: list[Collective | Message] = [
        sent for sent, received in world.messages.met if (received.rank, received.seq) == here
    ]
    if meeting is not None:
        givers += [member for rank, member in meeting.members.items() if rank != finding.rank]
    return any(
        part.nonfinite
        for giver in givers
        for handed in given(world, giver)
        if handed is not None
        for part in handed.parts
    )


def grouped(splits: Sequence[Split]) -> list[list[Split]]:
    """Splits of one sort, together: of the same ranks, at the same number of writes."""
    found: dict[object, list[Split]] = {}
    for split in splits:
        key = split.replica.kind, split.replica.certain, split.odd, split.usual, split.step
        found.setdefault(key, []).append(split)
    return list(found.values())


def odd_ones(disagreement: Disagreement) -> tuple[int, ...]:
    """Ranks that do something else than most; those that lack the collective, if any do."""
    if disagreement.absent:
        return disagreement.absent
    asked = {
        rank: (c.what, c.given, c.reduction, c.root) for rank, c in disagreement.members.items()
    }
    return minority(asked)[0] or tuple(disagreement.members)


def _disagreement(world: World, found: Disagreement) -> Finding:
    rank = odd_ones(found)[0]
    part = found.members.get(rank)
    trace = world.traces[rank]
    cause = of_disagreement(world, found, odd_ones(found))
    if part is None:
        last = int(trace.ops.seq[-1]) if len(trace.ops) else None
        return _finding("collective", cause, trace, seq=last)
    return _at(cause, trace, part)


def _wrong_results(world: World, found: Sequence[WrongResult]) -> Finding:
    rank = found[0].ranks[0]
    return _at(of_wrong_results(found), world.traces[rank], found[0].meeting.members[rank])


def _split(world: World, replicas: Replicas, group: Sequence[Split]) -> Finding:
    first = group[0]
    rank, value = first.odd[0], first.right.value
    trace = world.traces[rank]
    writer = int(replicas.contents(rank).maker[value]) if first.right.step else -1
    replacement = replicas.replacement(rank, value)
    if replacement is not None:
        met = trace.index_of(replacement.until)
        writer = -1 if met is None else met
    op = trace.op(writer) if writer >= 0 else None
    found = _finding(
        "replica",
        of_split(world, replicas, group),
        trace,
        seq=op.seq if op is not None else None,
        name=first.replica.name,
        op=op.name if op is not None else None,
        module=first.replica.name.rpartition(".")[0],
    )
    if first.lacks_writes:  # the step that a rank left out is told by the one that made it
        maker = int(replicas.contents(first.usual).maker[first.left.value])
        other = world.traces[first.usual]
        step = Steps(other).known_at(int(other.ops.seq[maker])) if maker >= 0 else None
        found = replace(
            found, step=max((s for s in (found.step, step) if s is not None), default=None)
        )
    return found


def _unequal(world: World, found: Unequal) -> Finding:
    op = found.ops[1]
    given = found.given[found.odd[0]]
    return _finding(
        "replica",
        of_unequal(found),
        world.traces[found.odd[0]],
        seq=op.seq if op is not None else given.seq,
        name=found.name,
        op=op.name if op is not None else given.op,
        module=op.call.path if op is not None else given.module,
    )


def _at(cause: Cause, trace: Trace, part: Collective | Message) -> Finding:
    return _finding("collective", cause, trace, seq=part.seq, op=part.op, module=part.module)


def _finding(
    kind: str,
    cause: Cause,
    trace: Trace,
    *,
    seq: int | None,
    name: str | None = None,
    op: str | None = None,
    module: str = "",
) -> Finding:
    step = Steps(trace).known_at(seq)
    return Finding(kind, cause, name, op, module, seq, step, trace.header.rank)
