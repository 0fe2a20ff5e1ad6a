"""One distributed run, held against itself: is equal on all ranks what should be?"""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import shorten
from typing import Final

import numpy as np

from opdrift.compare import Difference, difference
from opdrift.diagnose.divergences import between_ranks
from opdrift.diagnose.surroundings import environment_of, summary_of
from opdrift.errors import IncomparableTracesError
from opdrift.gathers import gather_findings
from opdrift.records import (
    ACROSS_RANKS,
    Alignment,
    Cause,
    Diagnosis,
    Divergence,
    DivergenceKind,
    EnvironmentDifference,
    Finding,
    Op,
    Sides,
)
from opdrift.steps import Steps
from opdrift.tracefile.opening import load, rank_folders
from opdrift.tracefile.reader import Trace
from opdrift.wording import listed, some
from opdrift.world.accumulated import accumulated_apart, of_accumulated
from opdrift.world.causes import (
    last_op,
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
from opdrift.world.ends import End, first_ends
from opdrift.world.findings import (
    end_findings,
    follows_from_an_end,
    grouped,
    is_told_in_steps,
    loads_apart,
    odd_ones,
    unmet,
)
from opdrift.world.leftout import of_rank_left_out, ranks_left_out
from opdrift.world.loads import LoadedDifferently
from opdrift.world.messages import Message, disagreements
from opdrift.world.one_run import of_another_run
from opdrift.world.passed import wrong_messages
from opdrift.world.replicas import Replicas, Split
from opdrift.world.results import WrongResult, by_place, unread, wrong_results
from opdrift.world.updates import UnlikeUpdate, of_unlike_update, unlike_updates
from opdrift.world.work import OtherMode, of_other_mode, other_modes, same_work

#: Of what a rank raised so much is quoted.
_LONGEST: Final = 200


def across_ranks(path: str | os.PathLike[str]) -> Diagnosis:
    """Check within one distributed run that what should be equal on all ranks is.

    Parameters that every rank holds whole, results of collectives, what ranks ask of a collective, and what a
    gather puts together. In the answer, and in each `Divergence`, left stands for the ranks that most others agree
    with and right for those that do not: `ranks` of a divergence names them.

    Args:
        path: The folder of the run, with a folder a rank in it.

    Raises:
        IncomparableTracesError: The trace is of one process, or nothing differs and a rank's trace is incomplete.
        NotATraceError: The path holds no trace.
    """
    folder = Path(path)
    ranks = rank_folders(folder) if folder.is_dir() else {}
    if len(ranks) < 2:
        load(folder)  # a path that holds nothing is told as such
        raise IncomparableTracesError(_alone(folder, ranks))
    return diagnose_world([load(each) for each in ranks.values()])


def _alone(folder: Path, ranks: Mapping[int, Path]) -> str:
    """Why a folder has no two ranks to be compared, and what to do."""
    lost = sorted(p.name for p in folder.glob("rank-*") if p not in ranks.values())
    for rank, path in ranks.items():
        size = load(path).header.world_size or 1
        without = (
            f"; {', '.join(lost)} {'holds' if len(lost) == 1 else 'hold'} no trace" if lost else ""
        )
        return (
            f"{folder} holds the trace of rank {rank} alone, of {size}{without}. Record all ranks into one folder, on a"
            " disk that all of them see, or copy theirs into it."
        )
    return (
        f"{folder} holds the trace of one process, so there is nothing to compare across ranks. Give the folder of a"
        " distributed run, with a folder a rank in it."
    )


def _nothing_checked(check: _Check) -> str:
    """That no answer can be given, and why."""
    world = check.world
    ranks = tuple(world.traces)
    notes = (*_raised(world), *check.notes((), ()))
    said = "".join(f" {each}." for each in notes)
    return (
        f"Nothing of {listed(ranks)} could be held against each other: they met in no collective, sent each other nothing, and"
        f" no parameter is known to be the same on all of them.{said} Record with model=, or a step of training; if they"
        f" run one program on the same data, compare two of them: diff-trace {_quoted(world, ranks[0])} {_quoted(world, ranks[1])}"
    )


def _quoted(world: World, rank: int) -> str:
    return shlex.quote(str(world.traces[rank].path))


def _raised(world: World) -> Iterator[str]:
    """In words, the ranks that an exception ended, those of one exception together."""
    by_end: dict[str, list[int]] = {}
    for rank, trace in world.traces.items():
        if trace.footer is not None and trace.footer.failed:
            place = f" at {trace.footer.raised_at}" if trace.footer.raised_at is not None else ""
            by_end.setdefault(f"{trace.footer.exception}{place}", []).append(rank)
    for end, ranks in by_end.items():
        yield f"{listed(ranks)} ended with {shorten(end, _LONGEST, placeholder=' ...')}"


def diagnose_world(traces: Sequence[Trace]) -> Diagnosis:
    """The same of traces that are open, one a rank."""
    mixed = of_another_run(traces)
    if mixed is not None:
        raise IncomparableTracesError(
            f"{mixed[1]}. Delete the folder and record the run again, each run into a folder of its own."
        )
    check = _Check(World(traces))
    found = sorted(check.divergences(), key=lambda each: each.order)
    ended = [rank for rank, trace in check.world.traces.items() if not trace.complete]
    if not found and ended:
        trace = check.world.traces[ended[0]]
        said = "".join(f"; {each.cause.summary}" for each in end_findings(check.world))
        raise IncomparableTracesError(
            f"{trace.path} is {trace.incomplete}{said}. Nothing differs in what the ranks have, but what is missing may."
            " Record the run again, and let it end by itself."
        )
    if not found and not check.checked:
        raise IncomparableTracesError(_nothing_checked(check))
    left, right = check.sides(found)
    divergences = tuple(each.divergence for each in found)
    first = divergences[0] if divergences else None
    return Diagnosis(
        verdict="diverged" if found else "identical",
        left=summary_of(left),
        right=summary_of(right),
        first=first,
        first_bitwise=first,
        origins=divergences,
        amplifiers=(),
        causes=tuple(dict.fromkeys(d.cause for d in divergences)),
        environment=_environment(left, right),
        unpaired=Sides((), ()),
        alignment=Alignment(check.checked, 0, 0, ACROSS_RANKS, None),
        notes=(
            *_step(first, Sides(left, right)),
            *(() if found else _raised(check.world)),
            *check.notes(ended, {divergence.name for divergence in divergences}),
        ),
    )


@dataclass(frozen=True, slots=True)
class _Placed:
    """A divergence, and where it stands among others: (epoch, seq), and the ranks whose traces it quotes."""

    divergence: Divergence
    order: tuple[int, int]
    ranks: Sides[int]


class _Check:
    """What is checked of one world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._replicas = Replicas(world)
        self._judged = list(self._replicas.found())
        self._declared = DeclaredAlike(world, self._replicas)

    @property
    def checked(self) -> int:
        """How many replicas, declared values, collectives, messages and gathers were held against each other."""
        world = self.world
        gathers = sum(len(world.gathers(rank)) for rank in world.traces)
        met = len(world.meetings) + len(world.messages.met)
        return len(self._judged) + self._declared.compared + met + gathers

    def sides(self, found: Sequence[_Placed]) -> tuple[Trace, Trace]:
        """The traces that the first divergence quotes; the first two ranks if there is none."""
        traces = self.world.traces
        ranks = found[0].ranks if found else Sides(*sorted(traces)[:2])
        return traces[ranks.left], traces[ranks.right]

    def divergences(self) -> Iterator[_Placed]:
        """Everything that differs and should not."""
        splits = [s for replica in self._judged if (s := self._replicas.split(replica)) is not None]
        for group in grouped(splits):
            yield self._of_split(group)
        loads = loads_apart(self.world, splits)
        if loads:
            yield self._of_loads(loads)
        gathered = list(gather_findings(list(self.world.traces.values())))
        for unequal in self._declared.unequal({split.replica.name for split in splits}):
            if not is_told_before(unequal, gathered):
                yield self._of_unequal(unequal)
        for wrong in by_place(wrong_results(self.world)):
            yield self._of_results(wrong)
        yield from self._disagreements()
        yield from self._messages()
        for mode in other_modes(self.world, self._replicas):
            yield self._of_mode(mode)
        left_out = list(ranks_left_out(self.world, self._replicas))
        for step in left_out:
            yield self._of_step(
                of_rank_left_out(step), step.odd, step.usual, step.maker, step.op, step.step.begin
            )
        accumulated = list(accumulated_apart(self.world, self._replicas))
        for added in accumulated:
            yield self._of_step(
                of_accumulated(added, self.world),
                added.odd,
                added.usual,
                added.adding[0],
                added.op,
                added.op.seq,
            )
        for update in unlike_updates(self.world):
            if not is_told_in_steps(self.world, update, [*left_out, *accumulated]):
                yield self._of_update(update)
        for finding in gathered:
            yield self._of_gather(finding)

    def notes(self, ended: Sequence[int], told: Collection[str | None]) -> Iterator[str]:
        """What could not be judged, and what differs by right.

        Args:
            ended: Ranks whose traces are incomplete.
            told: What is found to differ.
        """
        world = self.world
        if world.missing:
            yield f"{listed(world.missing)} of {world.size} left no trace here"
        for rank in ended:
            yield f"rank {rank} is {world.traces[rank].incomplete}; what it did until then is checked"
        yield from self._replicas.other_models()
        unjudged = [name for name in self._replicas.unjudged() if name not in told]
        if unjudged:
            yield (
                f"{some(unjudged)} differ{'s' * (len(unjudged) == 1)} between ranks, and nothing recorded says whether that is"
                " right: no gradient is reduced, and too little of the model is equal to take it for a replica"
            )
        drifting = self._replicas.drifting()
        if drifting:
            yield (
                f"{some(drifting)} {'is' if len(drifting) == 1 else 'are'} kept by each rank for itself: equal at the start, and"
                " no longer at the end"
            )
        yield from same_work(world)
        late = unread(world)
        if late:
            yield f"the results of {late} of {len(world.meetings)} collectives are not known: nothing read them once they were there"

    # ---- each sort -------------------------------------------------------------------------------------

    def _of_split(self, group: Sequence[Split]) -> _Placed:
        first = group[0]
        ranks = Sides(first.usual, first.odd[0])
        ops = Sides(self._writer(first.usual, first.left.value, first.left.step),
                    self._writer(first.odd[0], first.right.value, first.right.step))  # fmt: skip
        kind: DivergenceKind = "leaf"
        known = sum(op is not None for op in (ops.left, ops.right))
        if known == 2 or (known and first.lacks_writes):
            kind = "op"
        elif first.step and not first.before_training:
            kind = "hidden-write"
        usual = tuple(rank for rank in first.replica.ranks if rank not in first.odd)
        return self._placed(
            kind,
            of_split(self.world, self._replicas, group),
            ranks,
            Sides(usual, first.odd),
            ops,
            name=first.replica.name,
            members=tuple(split.replica.name for split in group[1:]),
            gap=difference(
                self._replicas.print(first.usual, first.left),
                self._replicas.print(first.odd[0], first.right),
            ),
        )

    def _writer(self, rank: int, value: int, step: int) -> Op | None:
        if not step:
            return None
        index = int(self._replicas.contents(rank).maker[value])
        return self.world.traces[rank].op(index) if index >= 0 else None

    def _of_results(self, found: Sequence[WrongResult]) -> _Placed:
        wrong = found[0]
        usual = tuple(rank for rank in wrong.meeting.members if rank not in wrong.ranks)
        ranks = Sides(usual[0] if usual else wrong.ranks[0], wrong.ranks[0])
        return self._of_parts(
            of_wrong_results(found), wrong.meeting.members, ranks, Sides(usual, wrong.ranks), "op"
        )

    def _of_unequal(self, found: Unequal) -> _Placed:
        ranks = Sides(found.usual, found.odd[0])
        usual = tuple(rank for rank in found.given if rank not in found.odd)
        ops = Sides(*found.ops)
        return self._placed(
            "op" if None not in (ops.left, ops.right) else "leaf",
            of_unequal(found),
            ranks,
            Sides(usual, found.odd),
            ops,
            name=found.name,
            members=(),
            gap=found.gap,
        )

    def _of_mode(self, found: OtherMode) -> _Placed:
        ranks = Sides(found.usual[0], found.odd[0])
        name = found.names[0]
        divergence = between_ranks(
            "structure",
            of_other_mode(found, self.world),
            Sides(found.usual, found.odd),
            op=None,
            module=name,
            members=found.names[1:],
            seq=Sides(*(self._first_op(r, found.calls[r]) for r in (ranks.left, ranks.right))),
        )
        return _Placed(divergence, self._order(ranks.left, divergence.seq.left or 0), ranks)

    def _of_update(self, found: UnlikeUpdate) -> _Placed:
        odd = found.odd[0]
        ops = Sides(
            *(
                None if (i := found.ops[r]) is None else self.world.traces[r].op(i)
                for r in (found.usual, odd)
            )
        )
        one = ops.right or ops.left
        assert one is not None
        divergence = between_ranks(
            "structure",
            of_unlike_update(self.world, found),
            Sides(tuple(r for r in self.world.traces if r not in found.odd), found.odd),
            op=one.name,
            module="",
            name=found.updated.names[0],
            members=found.updated.names[1:],
            source=str(one.source) if one.source is not None else None,
            outside=True,
            seq=Sides(*(None if op is None else op.seq for op in (ops.left, ops.right))),
        )
        rank = found.usual if ops.right is None else odd
        return _Placed(divergence, self._order(rank, one.seq), Sides(found.usual, odd))

    def _of_step(
        self, cause: Cause, odd: tuple[int, ...], usual: int, maker: int, op: Op | None, seq: int
    ) -> _Placed:
        """What ranks do differently in a step, where a rank does it by an op that another one lacks."""
        ranks = Sides(usual, odd[0])
        divergence = between_ranks(
            "structure",
            cause,
            Sides(tuple(r for r in self.world.traces if r not in odd), odd),
            op=op.name if op is not None else None,
            module="",
            source=str(op.source) if op is not None and op.source is not None else None,
            outside=True,
            seq=Sides(*(seq if r == maker else None for r in (ranks.left, ranks.right))),
        )
        return _Placed(divergence, self._order(maker, seq), ranks)

    def _first_op(self, rank: int, call: int) -> int | None:
        """The first op in a module call."""
        ops = self.world.traces[rank].ops
        within = np.flatnonzero(ops.call == call)
        return int(ops.seq[within[0]]) if len(within) else None

    def _disagreements(self) -> Iterator[_Placed]:
        """What ranks ask of a collective, and ranks that ended while others waited for them."""
        first = first_ends(self.world)
        told: set[int] = set()
        for found in self.world.disagreements:
            if not follows_from_an_end(found, self.world, first):
                odd = odd_ones(found)
                yield self._of_disagreement(found, odd, of_disagreement(self.world, found, odd))
                continue
            end = next((each for each in first if each.rank in found.absent), None)
            if end is not None and end.rank not in told:
                told.add(end.rank)
                yield self._of_disagreement(found, (end.rank,), of_end(self.world, end))
        for end in first:
            if end.how == "raised" and end.rank not in told:
                yield self._of_end(end)

    def _messages(self) -> Iterator[_Placed]:
        """Messages that two ranks do not agree about, that did not arrive as they were sent, or that met nothing."""
        for sent, received in disagreements(self.world.messages):
            yield self._of_message(sent, received, of_message(sent, received), "structure")
        for wrong in wrong_messages(self.world):
            yield self._of_message(wrong.sent, wrong.received, of_wrong_message(wrong), "op")
        for message in unmet(self.world, first_ends(self.world)):
            ranks = Sides(message.peer, message.rank)
            cause = of_waiting(self.world, message)
            yield self._of_parts(cause, {message.rank: message}, ranks, _each(ranks), "structure")

    def _of_message(
        self, sent: Message, received: Message, cause: Cause, kind: DivergenceKind
    ) -> _Placed:
        ranks = Sides(sent.rank, received.rank)
        parts = {sent.rank: sent, received.rank: received}
        return self._of_parts(cause, parts, ranks, _each(ranks), kind)

    def _of_loads(self, found: Sequence[LoadedDifferently]) -> _Placed:
        ranks = Sides(found[0].loaded, found[0].drawn)
        names = [each.name for each in found]
        divergence = between_ranks(
            "leaf",
            of_loads(found),
            _each(ranks),
            op=None,
            module=names[0].rpartition(".")[0],
            name=names[0],
            members=tuple(names[1:]),
            seq=Sides(None, None),
        )
        return _Placed(divergence, (0, 0), ranks)

    def _of_disagreement(self, found: Disagreement, odd: tuple[int, ...], cause: Cause) -> _Placed:
        usual = tuple(rank for rank in found.members if rank not in odd) or odd
        return self._of_parts(
            cause, found.members, Sides(usual[0], odd[0]), Sides(usual, odd), "structure"
        )

    def _of_end(self, end: End) -> _Placed:
        """A rank that raised while no other one waited for it."""
        last = last_op(self.world.traces[end.rank])
        usual = tuple(rank for rank in self.world.traces if rank != end.rank)
        seq = last.seq if last is not None else 0
        divergence = between_ranks(
            "structure",
            of_end(self.world, end),
            Sides(usual, (end.rank,)),
            op=last.name if last is not None else None,
            module=last.call.path if last is not None else "",
            source=str(last.source) if last is not None and last.source is not None else None,
            outside=last is not None and not last.call.id,
            seq=Sides(None, seq),
        )
        return _Placed(divergence, self._order(end.rank, seq), Sides(usual[0], end.rank))

    def _of_parts(
        self,
        cause: Cause,
        members: Mapping[int, Collective | Message],
        ranks: Sides[int],
        sides: Sides[tuple[int, ...]],
        kind: DivergenceKind,
    ) -> _Placed:
        parts = Sides(members.get(ranks.left), members.get(ranks.right))
        told = parts.left or parts.right
        assert told is not None
        divergence = between_ranks(
            kind,
            cause,
            sides,
            op=told.op,
            module=told.module,
            source=told.source,
            seq=Sides(
                *(part.seq if part is not None else None for part in (parts.left, parts.right))
            ),
        )
        return _Placed(divergence, self._order(told.rank, told.seq), ranks)

    def _of_gather(self, finding: Finding) -> _Placed:
        rank = finding.rank or 0
        others = tuple(r for r in self.world.traces if r != rank)
        divergence = between_ranks(
            "leaf",
            finding.cause,
            Sides(others, (rank,)),
            op=None,
            module=finding.module,
            name=finding.name,
            seq=Sides(None, finding.seq),
        )
        return _Placed(divergence, self._order(rank, finding.seq or 0), Sides(others[0], rank))

    def _placed(
        self,
        kind: DivergenceKind,
        cause: Cause,
        ranks: Sides[int],
        sides: Sides[tuple[int, ...]],
        ops: Sides[Op | None],
        *,
        name: str | None,
        members: tuple[str, ...],
        gap: Difference,
    ) -> _Placed:
        op = ops.left or ops.right
        divergence = between_ranks(
            kind,
            cause,
            sides,
            op=op.name if op is not None else None,
            module=op.call.path if op is not None else (name or "").rpartition(".")[0],
            source=str(op.source) if op is not None and op.source is not None else None,
            outside=op is not None and op.call.id == 0,
            name=name,
            members=members,
            seq=Sides(*(each.seq if each is not None else None for each in (ops.left, ops.right))),
            gap=gap,
        )
        rank = ranks.left if ops.left is not None else ranks.right
        order = self._order(rank, op.seq) if op is not None else (0, 0)
        return _Placed(divergence, order, ranks)

    def _order(self, rank: int, seq: int) -> tuple[int, int]:
        """Where an op of a rank stands: the collectives before it order the ranks, its number the rest."""
        return sum(each.seq < seq for each in self.world.collectives[rank]), seq


def _step(first: Divergence | None, traces: Sides[Trace]) -> list[str]:
    """In which step the first difference lies, as the rank tells that differs, or else the others."""
    if first is None:
        return []
    sides = ((traces.right, first.seq.right), (traces.left, first.seq.left))
    steps = [step for trace, seq in sides if (step := Steps(trace).known_at(seq)) is not None]
    return [f"the first difference lies in step {steps[0]}"] if steps else []


def _each(ranks: Sides[int]) -> Sides[tuple[int, ...]]:
    return Sides((ranks.left,), (ranks.right,))


def _environment(left: Trace, right: Trace) -> tuple[EnvironmentDifference, ...]:
    """Settings that differ between the two ranks; seeds do so by right."""
    found = environment_of(left.header, right.header)
    return tuple(each for each in found if not each.name.startswith("seed."))
