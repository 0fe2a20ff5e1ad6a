"""Words for what optimizers do, and where they do it: outside every module, behind a backward pass."""

from __future__ import annotations

from typing import Final

from opdrift.case import Side
from opdrift.causes.evidence import scope
from opdrift.origins.updates import Step
from opdrift.records import OUTSIDE

COMPARE_OPTIMIZERS: Final = (
    "Print optimizer.param_groups (lr, weight_decay, eps, betas, momentum) in both runs, with the scheduler's lr at this"
    " step: this number is made of them."
)


def in_words(side: Side, op: int, step: Step) -> str:
    """An op of an update with its numbers: `aten.mul_.Tensor (other: 0.5)`."""
    return side.name(op) + numbers_in_words(step)


def numbers_in_words(step: Step | None) -> str:
    """What a step is called with: ` (other: 0.5)`; empty where it has no numbers."""
    numbers = ", ".join(f"{name}: {number!r}" for name, number in (step.numbers if step else ()))
    return f" ({numbers})" if numbers else ""


def scope_of(side: Side, op: int) -> str:
    """Where an op ran, in words."""
    call = side.call(op)
    return scope(call.path) if call.id else OUTSIDE


def outside_modules(side: Side, op: int) -> bool:
    """Whether an op ran outside of modules and of backward passes, behind one: where gradients are changed and optimizers step."""
    ops = side.trace.ops
    return not int(ops.call[op]) and not ops.phase[op] and bool((ops.phase[:op] == 1).any())
