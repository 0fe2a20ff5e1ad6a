"""Rules for fused attention and recurrent layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from opdrift.batches.calls import Call, Operand, Placed, Shape, line_up, moved
from opdrift.tracefile.axes import BATCH, MIXED, UNKNOWN, Position


def attention(rows: int, features: int = -1) -> Callable[[Call, int], Placed]:
    """softmax(q @ k.T) @ v in one op.

    Args:
        rows: The dim of the queries and keys, from the end: -2, or -3 where heads come after them.
        features: The dim of the features.

    Returns:
        The rule. Samples stay apart unless the batch lies among the keys or features. Output 0 is laid
        out like the queries; of the others, which the backward needs, what fits is kept.
    """

    def rule(call: Call, k: int) -> Placed:
        q, key, value = list(call.operands)[:3]
        shape = call.outputs[k]
        mixed = 0
        for operand in (key, value):
            if any(p.dim == operand.ndim + rows for p in operand.batch):
                mixed = MIXED
        if any(p.dim == o.ndim + features for o in (q, key) for p in o.batch):
            mixed = MIXED
        found = [p for p in q.positions if p.dim != q.ndim + features]
        for operand in (key, value):
            found += _as_heads(operand, shape, (operand.ndim + rows, operand.ndim + features))
        if k == 0:
            _line_up_mask(call, q, key, rows)
            found += [p for p in value.positions if p.dim == value.ndim + features]
        else:
            found = [p for p in found if p.dim < len(shape) and _same(p, shape)]
        return Placed(tuple(found), mixed, (q.index,))

    return rule


def _same(p: Position, shape: Shape) -> bool:
    return shape[p.dim] == p.outer * p.size * p.inner


def _as_heads(operand: Operand, shape: Shape, taken: Sequence[int]) -> list[Position]:
    """Where an axis that keys or values carry lies in the output; grouped heads are repeated."""
    found = []
    for p in operand.positions:
        if p.dim in taken or p.dim >= len(shape):
            continue
        repeats, rest = divmod(shape[p.dim], operand.shape[p.dim])
        if not rest and repeats:
            found.append(p._replace(inner=p.inner * repeats))
    return found


def _line_up_mask(call: Call, q: Operand, key: Operand, rows: int) -> None:
    """A mask is broadcast to (..., queries, keys)."""
    mask = call.tensor("attn_mask") or call.tensor("attn_bias")
    if mask is None or rows != -2:
        return
    shape = (*q.shape[:-1], key.shape[-2])
    found = [p for p in q.positions if p.dim < q.ndim - 1]
    found += [moved(p, q.ndim - 1) for p in key.positions if p.dim == key.ndim - 2]
    line_up(call, mask, shape, found)


def encoder_layer(call: Call, k: int) -> Placed:
    """A whole encoder layer, or multi-head attention, of (batch, length, features)."""
    first = next(call.operands)
    shape = call.outputs[k]
    mixed = MIXED if any(p.dim != 0 for p in first.batch) else 0
    kept = [p for p in first.positions if p.dim < first.ndim - 1]
    if len(shape) != first.ndim or shape[: first.ndim - 1] != first.shape[: first.ndim - 1]:
        kept = [p for p in kept if p.axis == BATCH and p.dim == 0]
    return Placed(tuple(kept), mixed)


def recurrent_layer(call: Call, k: int) -> Placed:
    """One layer over (length, batch, features): all steps, then the last states."""
    first = next(call.operands)
    shape = call.outputs[k]
    if len(shape) == first.ndim and shape[:2] == first.shape[:2]:
        return Placed(tuple(p for p in first.positions if p.dim < 2), _not_at(first, 1))
    if len(shape) < 2:
        return _workspace(first)
    states = [moved(p, len(shape) - 2) for p in first.batch if p.dim == 1]
    return Placed(tuple(states), _not_at(first, 1))


def recurrent_stack(call: Call, k: int) -> Placed:
    """lstm, gru as one op (inference_mode shows them whole): batch_first says which dim is the batch."""
    first = next(call.operands)
    shape = call.outputs[k]
    batch = 0 if call.value("batch_first", False) else 1
    flags = _not_at(first, batch) if first.ndim == 3 else _in_features(first)
    if k == 0:
        return Placed(tuple(p for p in first.positions if p.dim < first.ndim - 1), flags)
    if k > 2:
        return _workspace(first)
    return Placed(tuple(moved(p, len(shape) - 2) for p in first.batch if p.dim == batch), flags)


def recurrent_cell(call: Call, k: int) -> Placed:
    """One step of a fused cell: every operand's dims but the last."""
    found = [
        p
        for operand in call.operands
        for p in operand.positions
        if operand.ndim == len(call.outputs[k]) and p.dim < operand.ndim - 1
    ]
    return Placed(tuple(found))


def _workspace(operand: Operand) -> Placed:
    """Memory that the backward needs, laid out as the library likes."""
    return Placed((), UNKNOWN if operand.batch else 0)


def _not_at(operand: Operand, dim: int) -> int:
    """Samples that lie elsewhere than in the dim of the batch are steps or features of each other."""
    return MIXED if any(p.dim != dim for p in operand.batch) else 0


def _in_features(operand: Operand) -> int:
    return MIXED if any(p.dim == operand.ndim - 1 for p in operand.batch) else 0
