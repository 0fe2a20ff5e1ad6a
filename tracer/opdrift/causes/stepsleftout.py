"""A step of an optimizer that one run makes, and the other leaves out behind the same backward pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from opdrift.case import Case, Side
from opdrift.causes.evidence import SIDES, Evidence, cause, counted, some
from opdrift.flow import is_collective
from opdrift.gradients import Gradients
from opdrift.records import Cause
from opdrift.steps import OptimizerStep, optimizer_steps

REMEDY = (
    "Step the optimizer behind every backward pass in both runs and on all ranks alike: look for a branch around"
    " optimizer.step(), an accumulation that counts otherwise, a GradScaler that skipped a step, and a condition on the rank or on"
    " what a rank computed."
)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A step that only one run makes.

    Attributes:
        number: The run that makes it, 0 or 1.
        step: That step.
        index: Which of the run's steps it is, from 0.
        totals: How many steps each run makes.
        behind: The last op of a backward pass before it that both runs have, in the run that leaves it out.
    """

    number: int
    step: OptimizerStep
    index: int
    totals: tuple[int, int]
    behind: int


class StepsLeftOut:
    """The steps that only one run makes, worked out once."""

    def __init__(self, case: Case) -> None:
        self._sides = case.left, case.right
        self._steps = [optimizer_steps(side.trace) for side in self._sides]
        self.found = list(_steps_left_out(case, self._steps))

    def behind(self, e: Evidence) -> LeftOut | None:
        """The step that an origin is an op of, or that lies before the one that it is an op of.

        A step that is left out shifts those behind it: they are paired with earlier ones, and read other moments and counters.
        """
        for found in self.found:
            if any(self._is_of(e, found, number) for number in (0, 1)):
                return found
        return None

    def _is_of(self, e: Evidence, found: LeftOut, number: int) -> bool:
        side, steps = self._sides[number], self._steps[number]
        since = found.step.begin if number == found.number else side.seq(found.behind)
        seqs = [side.seq(op) for op in e.ops_of(number)]
        return any(step.begin <= seq <= step.end for seq in seqs if seq >= since for step in steps)


def _steps_left_out(case: Case, steps: Sequence[Sequence[OptimizerStep]]) -> Iterator[LeftOut]:
    sides = case.left, case.right
    # a run that has none may step by other means; one that has as many goes backward more often for each
    if not steps[0] or not steps[1] or len(steps[0]) == len(steps[1]):
        return
    for n, side in enumerate(sides):
        partner = (case.pairing.right_of, case.pairing.left_of)[n]
        other = sides[1 - n]
        begins = np.array([step.begin for step in steps[1 - n]], np.int64)
        for index, step in enumerate(steps[n]):
            around = _around(side, partner, step)
            if around is None:
                continue
            before, after = around
            behind = int(partner[before])
            first = other.seq(behind)
            last = other.seq(int(partner[after])) if after is not None else np.iinfo(np.int64).max
            if after is None and not _ended_well(other):
                continue
            if not ((begins > first) & (begins < last)).any():
                totals = len(steps[0]), len(steps[1])
                yield LeftOut(n, step, index, totals, behind)


def _around(side: Side, partner: np.ndarray, step: OptimizerStep) -> tuple[int, int | None] | None:
    """The last paired op of a backward pass before a step and the first paired one of a forward pass behind it.

    None where the other run may not have come there: what is done between the two differs in more than the step.
    """
    ops = side.trace.ops
    paired = partner >= 0
    forward = (ops.call != 0) & (ops.phase == 0)
    before = np.flatnonzero((ops.seq < step.begin) & paired & (forward | (ops.phase == 1)))
    if not len(before) or ops.phase[before[-1]] != 1:
        return None
    passed = np.flatnonzero((ops.seq < step.begin) & forward)
    own = passed[passed > before[-1]]
    if any(not is_collective(side.name(int(op))) for op in own.tolist()):
        return None
    after = np.flatnonzero((ops.seq > step.end) & paired & forward)
    return int(before[-1]), int(after[0]) if len(after) else None


def _ended_well(side: Side) -> bool:
    footer = side.trace.footer
    return side.trace.complete and footer is not None and footer.ended == "ok"


def step_left_out(e: Evidence) -> Cause | None:
    """What differs is done in a step of the optimizer that the other run leaves out, or is what comes of that."""
    found = e.shared.once(StepsLeftOut).behind(e)
    if found is None:
        return None
    n, step = found.number, found.step
    name, side, _ = e.sides[n]
    other_name, other, _ = e.sides[1 - n]
    inside = np.flatnonzero((side.trace.ops.seq > step.begin) & (side.trace.ops.seq < step.end))
    header = other.trace.header
    who = f"rank {header.rank} makes" if header.rank is not None and (header.world_size or 1) > 1 else "the program makes"  # fmt: skip
    names = updated_in(side.gradients, inside.tolist())
    return cause(
        "structure",
        "certain",
        f"in the {other_name} run, {who} no optimizer step where {step.optimizer}.step number {found.index + 1} is in the {name}"
        f" run: {counted(len(inside), 'op')} of it are in that run only",
        [
            f"{name}: the step is ops {step.begin} to {step.end}, first {side.place(int(inside[0]))}"
            if len(inside)
            else "",
            f"{other_name}: none behind the backward pass that ends with {other.place(found.behind)}",
            f"{SIDES[0]}: {counted(found.totals[0], 'optimizer step')}",
            f"{SIDES[1]}: {counted(found.totals[1], 'optimizer step')}",
            f"it updates {some(names)}" if names else "",
        ],
        REMEDY,
    )


def is_of_step_left_out(e: Evidence) -> bool:
    """Whether an origin is what a step does that only one run makes, or what comes of that in later steps."""
    return e.shared.once(StepsLeftOut).behind(e) is not None


def updated_in(gradients: Gradients, ops: Iterable[int]) -> tuple[str, ...]:
    """The parameters that ops of a step write."""
    outputs = gradients.trace.ops.outputs
    updated = (gradients.of(outputs[op].tolist()) for op in ops)
    parameters = (one for one in updated if one is not None and one.role == "parameter")
    return tuple(dict.fromkeys(name for one in parameters for name in one.names))
