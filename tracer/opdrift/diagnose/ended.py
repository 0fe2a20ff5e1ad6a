"""Two distributed runs of which one ended early: why it did, as its ranks show together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property

from opdrift.causes.structure import end_of
from opdrift.diagnose.divergences import between_ranks
from opdrift.errors import IncomparableTracesError
from opdrift.records import Cause, Diagnosis, Finding, Sides
from opdrift.tracefile.reader import Trace
from opdrift.world.causes import last_op
from opdrift.world.collectives import World
from opdrift.world.ends import ends
from opdrift.world.findings import end_findings
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
            if footer is None or not first.cause.summary.startswith(end_of(side.name, footer)):
                continue
            cause = side.reason
            if cause is not None:
                changed = replace(first, cause=cause)
                origins = tuple(changed if origin is first else origin for origin in one.origins)
                causes = tuple(dict.fromkeys([cause, *(origin.cause for origin in origins)]))
                return replace(one, first=changed, origins=origins, causes=causes)
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

    @cached_property
    def is_over(self) -> bool:
        """Whether a rank ended in waiting for another one: then no trace is still being recorded."""
        return any(end.follows for end in ends(self._world).values())

    @cached_property
    def _world(self) -> World:
        return World(self.traces.values())
