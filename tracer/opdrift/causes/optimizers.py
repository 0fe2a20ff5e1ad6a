"""What an optimizer's step is: ops outside every module, behind a backward pass, that end in a parameter."""

from __future__ import annotations

from typing import Final

import numpy as np

from opdrift.case import Side
from opdrift.causes.evidence import scope
from opdrift.records import OUTSIDE

#: Between a moment's update and the write of the last parameter that it goes into: Adam of one tensor takes 10 ops.
_NEAR: Final = 64
COMPARE_OPTIMIZERS: Final = (
    "Print optimizer.param_groups (lr, weight_decay, eps, betas, momentum) in both runs, with the scheduler's lr at this"
    " step: this number is made of them."
)


def scope_of(side: Side, op: int) -> str:
    """Where an op ran, in words."""
    call = side.call(op)
    return scope(call.path) if call.id else OUTSIDE


def updates_parameters(side: Side, op: int) -> bool:
    """Whether an op is part of an optimizer's step: outside modules and behind a backward pass, it ends in a parameter."""
    trace, of = side.trace, side.contents.states.of
    if side.call(op).id or trace.ops.phase[op] or not (trace.ops.phase[:op] == 1).any():
        return False
    made: set[int] = set()
    for i in range(op, min(op + _NEAR, len(trace.ops))):
        if side.call(i).id or trace.ops.phase[i]:
            return False
        inputs = trace.ops.inputs[i].tolist()
        if i > op and not made.intersection(of[inputs].tolist() if inputs else ()):
            continue
        outputs = trace.ops.outputs[i]
        written = outputs[side.contents.states.writer[of[outputs]] == i]
        made.update(np.asarray(of[written]).tolist())
        if any(_is_parameter(side, int(v)) for v in written):
            return True
    return False


def _is_parameter(side: Side, value: int) -> bool:
    leaf = side.leaves.of_storage(value)
    return leaf is not None and leaf.kind == "parameter"
