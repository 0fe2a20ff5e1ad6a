"""Say which module call each op belongs to, and which calls are made again in the backward pass."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from opdrift.records import GRAD_ENABLED
from opdrift.tracefile.columns import Ints, OpColumns
from opdrift.tracefile.reader import Trace

Flags = npt.NDArray[np.bool_]


def recomputing(ops: OpColumns) -> Flags:
    """Ops that a module ran in the backward pass: checkpointing calls the module once more there."""
    found: Flags = (ops.phase == 1) & (ops.call > 0)
    return found


def home_calls(trace: Trace) -> Ints:
    """The call each op belongs to; a backward op belongs to the call of its forward op.

    The autograd node of an op is created before the op is dispatched, so the op recorded the number
    after its node's. Without autograd no node is created, and the number is that of an earlier one.
    """
    ops = trace.ops
    home = ops.call.copy()
    again = recomputing(ops)
    backward = np.flatnonzero((ops.phase == 1) & ~again & (ops.node < np.iinfo(np.int64).max))
    makes_nodes = ((ops.phase == 0) | again) & (ops.flags & GRAD_ENABLED != 0)
    forward = np.flatnonzero(makes_nodes & (ops.node > 0))
    if not len(backward) or not len(forward):
        return home
    number, first = np.unique(ops.node[forward], return_index=True)
    place = np.minimum(np.searchsorted(number, ops.node[backward] + 1), len(number) - 1)
    joined = number[place] == ops.node[backward] + 1
    home[backward[joined]] = ops.call[forward[first[place[joined]]]]
    return home
