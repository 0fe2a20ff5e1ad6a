"""Rules for backward ops: the gradient of an activation lies as it does, that of a weight adds up the batch."""

from __future__ import annotations

from opdrift.batches.calls import Call, Placed, dim_of, moved
from opdrift.batches.movement import kept
from opdrift.tracefile.axes import BATCH, LENGTH_UNKNOWN, MIXED, UNKNOWN


def gradient(call: Call, k: int) -> Placed:
    """A gradient with the shape of something that carries the batch lies as that does.

    Every other one is that of a weight: it adds up the samples.
    """
    shape = call.outputs[k]
    for operand in call.operands:
        if operand.shape == shape and operand.batch:
            return Placed(operand.positions)
    return Placed((), MIXED if any(operand.batch for operand in call.operands) else 0)


def weight_gradient(call: Call, k: int) -> Placed:
    """The gradient of a table of embeddings."""
    return Placed((), MIXED if any(operand.batch for operand in call.operands) else 0)


def norm_gradient(call: Call, k: int) -> Placed:
    """Of a batch norm: also the input's gradient depends on the other samples, if it trains."""
    placed = gradient(call, k)
    trains = bool(call.value("train", True)) and "no_training" not in call.name
    first = next(call.operands)
    mixed = any(p.dim != 1 for p in first.batch)
    return Placed(placed.positions, placed.flags | (MIXED if trains and mixed else 0))


def slice_gradient(call: Call, k: int) -> Placed:
    """slice_backward: the dims of what was sliced."""
    first = next(call.operands)
    dim = dim_of(call.value("dim"), first.ndim)
    return kept_but(call, k, dim)


def kept_but(call: Call, k: int, dim: int) -> Placed:
    """All but what lies in one dim, unless it kept its size."""
    first = next(call.operands)
    if first.shape == call.outputs[k]:
        return Placed(first.positions)
    lost = 0
    for p in first.positions:
        if p.dim == dim:
            lost |= UNKNOWN if p.axis == BATCH else LENGTH_UNKNOWN
    return Placed(tuple(p for p in first.positions if p.dim != dim), lost)


def select_gradient(call: Call, k: int) -> Placed:
    """select_backward: the dim that was selected from comes back."""
    first = next(call.operands)
    dim = dim_of(call.value("dim"), first.ndim + 1)
    return Placed(tuple(moved(p, p.dim + (p.dim >= dim)) for p in first.positions))


#: Nothing that lies in a dim beyond the first can be followed.
first_dim_only = kept(lambda operand: 1)
