"""Where a run ended early: that it lacks what the other went on to do is one difference, not one a result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from opdrift.case import Case
from opdrift.origins.kinds import computes
from opdrift.origins.leaves import order_of
from opdrift.origins.model import Origin
from opdrift.records import Sides


@dataclass(frozen=True, slots=True)
class End:
    """A run that ended with an exception, while the other did not.

    Attributes:
        case: Both runs.
        number: 0 if it is the left one, 1 if it is the right one.
        reached: The last op of the other run that it came to, -1 if it came to none.
    """

    case: Case
    number: int
    reached: int

    def explains(self, origin: Origin) -> bool:
        """Whether an origin at a result consists of nothing but ops that the run did not come to."""
        if origin.row >= 0 or any(op != self._last for op in _ops(origin, self.number)):
            return False
        return min(_ops(origin, 1 - self.number), default=-1) > self.reached

    def origin(self, explained: Sequence[Origin]) -> Origin:
        """One origin for all that the end explains: at the first op that the run did not come to."""
        number = 1 - self.number
        side = (self.case.left, self.case.right)[number]
        source = min(explained, key=lambda each: min(_ops(each, number)))
        ops = tuple(sorted(_ops(source, number)))
        first = next((op for op in ops if computes(side, op)), ops[0])
        stands = self._sides(first)
        return Origin(
            kind="structure",
            story="region",
            op=stands,
            row=-1,
            values=self._sides((source.values.left, source.values.right)[number]),
            slot=None,
            order=order_of(self.case, stands),
            region=Sides(ops, ()) if number == 0 else Sides((), ops),
        )

    def by_itself(self) -> Origin | None:
        """That the run raised, where it lacks no result of the other; None where that is not sure."""
        trace, other = (self.case.left.trace, self.case.right.trace)[:: -1 if self.number else 1]
        if trace.footer is None or not trace.footer.failed or not len(trace.ops):
            return None
        if not other.complete:
            return None  # it may have raised, too
        last = self._last
        stands = Sides(None, last) if self.number else Sides(last, None)
        return Origin(
            kind="structure",
            story="region",
            op=stands,
            row=-1,
            values=Sides(None, None),
            slot=None,
            order=order_of(self.case, stands),
            region=Sides((), (last,)) if self.number else Sides((last,), ()),
            on_right=self.number == 1,
        )

    @property
    def _last(self) -> int:
        return len((self.case.left, self.case.right)[self.number].trace.ops) - 1

    def _sides(self, other: int | None) -> Sides[int | None]:
        """What only the other run has."""
        return Sides(other, None) if self.number else Sides(None, other)


def early_end(case: Case) -> End | None:
    """The run that ended early, if it is one of the two."""
    footers = case.left.trace.footer, case.right.trace.footer
    raised = [footer is not None and footer.ended == "raised" for footer in footers]
    if case.by_sample or raised[0] == raised[1]:
        return None
    number = raised.index(True)
    paired = (case.pairing.right, case.pairing.left)[number]
    # what makes no tensor, such as the marks of a profiler, may be paired with one that comes much later
    offsets = (case.right, case.left)[number].trace.ops.outputs.offsets
    made = paired[offsets[paired + 1] > offsets[paired]]
    return End(case, number, int(made.max(initial=-1)))


def _ops(origin: Origin, number: int) -> tuple[int, ...]:
    region = (origin.region.left, origin.region.right)[number]
    own = (origin.op.left, origin.op.right)[number]
    return region or ((own,) if own is not None else ())
