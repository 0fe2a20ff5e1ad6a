"""Two distributed runs of which one ended early: why it did, as its ranks show together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

from opdrift.causes.structure import end_of
from opdrift.diagnose.divergences import between_ranks
from opdrift.errors import IncomparableTracesError
from opdrift.records import Cause, Diagnosis, Divergence, Finding, Sides
from opdrift.tracefile.reader import Trace
from opdrift.world.causes import last_op, of_disagreement
from opdrift.world.collectives import Disagreement, World
from opdrift.world.ends import End, ends
from opdrift.world.findings import end_findings, odd_ones
from opdrift.world.one_run import of_another_run

#: Compares one rank of two runs as far as both traces go.
Compare = Callable[[int], Diagnosis]


class Endings:
    """How two runs of the same ranks ended, where one of them came to its end early.

    Args:
        left: All traces of the left run.
        right: Those of the right run.
    """

    def __init__(self, left: Mapping[int, Trace], right: Mapping[int, Trace]) -> None:
        self._sides = (_Ending("left", left), _Ending("right", right))

    def explained(self, rank: int, one: Diagnosis) -> Diagnosis:
        """A rank's diagnosis; where its first difference is that one run ended, the reason comes first.

        What a rank raises as another one is gone tells nothing of that one.
        """
        first = one.first
        if first is None:
            return one
        for side in self._sides:
            footer = side.traces[rank].footer
            said = footer is not None and first.cause.summary.startswith(end_of(side.name, footer))
            if (said or side.ended_in(rank, first)) and side.reason is not None:
                return _because(one, first, side.reason)
        for side, other in (self._sides, self._sides[::-1]):
            cause = side.disagreed(rank, first, other)
            if cause is not None:
                return _because(one, first, cause)
        return one

    def unfinished(self, rank: int, compare: Compare) -> Diagnosis | None:
        """The diagnosis of a rank that nothing differs on until its trace ends; None where that leaves it open.

        It is told as a difference where other ranks of the run waited for one that had ended: the run is over, and
        what is missing never came.
        """
        for number, side in enumerate(self._sides):
            trace, cause = side.traces[rank], side.reason
            if trace.complete or cause is None or not side.is_over:
                continue
            try:
                one = compare(rank)
            except IncomparableTracesError:
                return None  # more than its end keeps it from being compared
            last = last_op(trace)
            seq = last.seq if last is not None else None
            first = between_ranks(
                "structure",
                cause,
                None,
                op=last.name if last is not None else None,
                module=last.call.path if last is not None else "",
                source=str(last.source) if last is not None and last.source is not None else None,
                outside=last is not None and not last.call.id,
                seq=Sides(None, seq) if number else Sides(seq, None),
            )
            return replace(
                one,
                verdict="diverged",
                first=first,
                first_bitwise=first,
                origins=(first,),
                causes=(cause,),
            )
        return None

    def is_of(self, rank: int, cause: Cause) -> bool:
        """Whether a cause tells of this very rank that it ended."""
        return any(
            side.found is not None and side.reason == cause and side.found.rank == rank
            for side in self._sides
        )

    def said(self) -> Iterator[str]:
        """In words, which ranks ended early, and which collectives ended a run."""
        for side in self._sides:
            if side.reason is not None:
                yield side.reason.summary[0].upper() + side.reason.summary[1:]


def _because(one: Diagnosis, first: Divergence, cause: Cause) -> Diagnosis:
    """The same diagnosis, with another cause of its first difference."""
    changed = replace(first, cause=cause)
    origins = tuple(changed if origin is first else origin for origin in one.origins)
    causes = tuple(dict.fromkeys([cause, *(origin.cause for origin in origins)]))
    return replace(one, first=changed, origins=origins, causes=causes)


class _Ending:
    """How one run ended."""

    def __init__(self, name: str, traces: Mapping[int, Trace]) -> None:
        self.name = name
        self.traces = traces

    @cached_property
    def found(self) -> Finding | None:
        """The first rank that ended, or what its ranks did not agree about; None if nothing shows that."""
        if of_another_run(list(self.traces.values())) is not None:
            return None  # nothing between them means anything
        return next(iter(end_findings(self._world)), None)

    @cached_property
    def reason(self) -> Cause | None:
        """The same as a cause, with the run's name."""
        if self.found is None:
            return None
        cause = self.found.cause
        return replace(cause, summary=f"in the {self.name} run, {cause.summary}")

    def ended_in(self, rank: int, origin: Divergence) -> bool:
        """Whether an origin is the collective that a rank waited in for others, and ended in.

        What it left in its tensors is no result: it may hold a part of one.
        """
        end = self._ends.get(rank)
        if end is None or not end.follows or end.waited_in is None:
            return False
        if origin.kind != "op" or origin.inputs_match is False:
            return False
        return end.waited_in.seq == self._seq(origin)

    def disagreed(self, rank: int, origin: Divergence, other: _Ending) -> Cause | None:
        """What ranks asked differently of the collective that an origin is, if they agreed in the other run."""
        if origin.kind != "op" or origin.inputs_match is False:
            return None
        for found in self._disagreements:
            part = found.members.get(rank)
            if part is None or found.about == "missing" or part.seq != self._seq(origin):
                continue
            if any(
                (d.group, d.number) == (found.group, found.number) for d in other._disagreements
            ):
                continue
            cause = of_disagreement(self._world, found, odd_ones(found))
            return replace(cause, summary=f"in the {self.name} run, {cause.summary}")
        return None

    def _seq(self, origin: Divergence) -> int | None:
        return origin.seq.left if self.name == "left" else origin.seq.right

    @cached_property
    def _ends(self) -> Mapping[int, End]:
        if of_another_run(list(self.traces.values())) is not None:
            return {}
        return ends(self._world)

    @cached_property
    def _disagreements(self) -> Sequence[Disagreement]:
        if of_another_run(list(self.traces.values())) is not None:
            return ()
        return tuple(self._world.disagreements)

    @cached_property
    def is_over(self) -> bool:
        """Whether a rank ended in waiting for another one: then no trace is still being recorded."""
        return any(end.follows for end in ends(self._world).values())

    @cached_property
    def _world(self) -> World:
        return World(self.traces.values())
