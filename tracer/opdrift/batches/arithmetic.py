"""Rules for ops that compute: element by element, products, reductions, norms, convolutions, attention."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from opdrift.batches.calls import (
    COUNT,
    Call,
    Operand,
    Placed,
    Shape,
    aligned,
    dim_of,
    line_up,
    moved,
)
from opdrift.tracefile.axes import BATCH, LENGTH_UNKNOWN, MIXED, UNKNOWN, Position

# ---- element by element ------------------------------------------------------------------------------


def pointwise(call: Call, k: int) -> Placed:
    """Everything that the operands carry, broadcast."""
    shape = call.outputs[k]
    operands = list(call.operands)
    found = [p for operand in operands for p in aligned(operand, shape)]
    if k == 0:
        for operand in operands:
            if operand.ndim <= len(shape):
                line_up(call, operand, shape, found)
    return Placed((*found, *_still_counts(call)))


def _still_counts(call: Call) -> list[Position]:
    """`arange(n) + 0`, as caches without an offset compute it, counts as before."""
    first = next(call.operands, None)
    if first is None or first.counts is None or call.name != "add" or call.args[1] != 0:
        return []
    return [Position(first.counts, 1, first.shape[first.counts], 1, COUNT)]


def like_first(call: Call, k: int) -> Placed:
    """The output has the dims of the first operand; what lies in a dim of another size is lost."""
    first = next(call.operands)
    shape = call.outputs[k]
    return Placed(first.positions if first.ndim == len(shape) else ())


def foreach(call: Call, k: int) -> Placed:
    """Item k of each list, element by element."""
    items = [a[k] for a in call.args if isinstance(a, list | tuple) and k < len(a)]
    return Placed(
        tuple(p for a in items if isinstance(a, Operand) for p in aligned(a, call.outputs[k]))
    )


def along(name: str, default: int = -1) -> Callable[[Call, int], Placed]:
    """Keeps the shape, and mixes along one dim (softmax, cumsum)."""

    def rule(call: Call, k: int) -> Placed:
        first = next(call.operands)
        dim = dim_of(call.value(name, default), first.ndim)
        return Placed(first.positions, mixes(first, [dim]))

    return rule


def ordered(call: Call, k: int) -> Placed:
    """Sorting and top-k: items move along the dim, so what lies there is lost."""
    first = next(call.operands)
    dim = dim_of(call.value("dim", -1), first.ndim)
    kept = tuple(p for p in first.positions if p.dim != dim)
    return Placed(kept, lost_along(first, [dim]))


def transformed(default: Any = None) -> Callable[[Call, int], Placed]:
    """Fourier transforms: each result along some dims, all by default, is made of all items there."""

    def rule(call: Call, k: int) -> Placed:
        first = next(call.operands)
        dims = _dims(call.value("dim", default), first.ndim)
        kept = tuple(p for p in first.positions if p.dim not in dims)
        padded = any(p.dim in dims for p in first.lengths)
        return Placed(kept, mixes(first, dims) | (LENGTH_UNKNOWN if padded else 0))

    return rule


def lost_along(operand: Operand, dims: Iterable[int]) -> int:
    """Flags for what an operand carries in dims whose items cannot be followed."""
    dims = set(dims)
    found = 0
    for p in operand.positions:
        if p.dim in dims:
            found |= UNKNOWN if p.axis == BATCH else LENGTH_UNKNOWN
    return found


def mixes(operand: Operand, dims: Iterable[int]) -> int:
    """MIXED if the batch lies in one of these dims."""
    dims = set(dims)
    return MIXED if any(p.dim in dims for p in operand.batch) else 0


# ---- reductions --------------------------------------------------------------------------------------


def reduction(call: Call, k: int) -> Placed:
    """The dims that it reduces over are gone, or of size 1; over the batch it mixes."""
    first = next(call.operands)
    dims = _dims(call.value("dim"), first.ndim)
    return reduced(first, dims, call.outputs[k])


def reduced(operand: Operand, dims: Sequence[int], shape: Shape) -> Placed:
    """An operand reduced over some dims, to this shape."""
    keeps = len(shape) == operand.ndim
    kept = [p for p in operand.positions if p.dim not in dims]
    if not keeps:
        kept = [moved(p, p.dim - sum(d < p.dim for d in dims)) for p in kept]
    return Placed(tuple(kept), mixes(operand, dims))


def _dims(dims: Any, ndim: int) -> list[int]:
    if dims is None or (isinstance(dims, list | tuple) and not dims):
        return list(range(ndim))
    return [dim_of(d, ndim) for d in (dims if isinstance(dims, list | tuple) else [dims])]


def loss(call: Call, k: int) -> Placed:
    """A loss with `reduction`: 0 keeps an element each, else all of them are reduced to one number."""
    if call.outputs[k]:
        return pointwise(call, k)
    return _everything(call)


def class_loss(call: Call, k: int) -> Placed:
    """A loss over classes: dim 1 is gone, the rest is kept without reduction."""
    if not call.outputs[k]:
        return _everything(call)
    first = next(call.operands)
    return reduced(first, [1] if first.ndim > 1 else [0], call.outputs[k])


def _everything(call: Call) -> Placed:
    return Placed((), MIXED if any(operand.batch for operand in call.operands) else 0)


# ---- products ----------------------------------------------------------------------------------------


def product(a: Operand, b: Operand, shape: Shape) -> Placed:
    """A @ b; the dims before the last two are matched, or broadcast, from the right."""
    rows, columns = len(shape) - 2, len(shape) - 1
    found: list[Position] = []
    mixed = 0
    for p in a.positions:
        if p.dim == a.ndim - 1:
            mixed |= MIXED if p.axis == BATCH else 0
        else:
            found.append(moved(p, p.dim + rows - (a.ndim - 2)))
    for p in b.positions:
        if p.dim == b.ndim - 2:
            mixed |= MIXED if p.axis == BATCH else 0
        elif p.dim == b.ndim - 1:
            found.append(moved(p, columns))
        else:
            found.append(moved(p, p.dim + rows - (b.ndim - 2)))
    return Placed(tuple(found), mixed)


def matrix_product(call: Call, k: int) -> Placed:
    """mm, bmm and their relatives without a bias."""
    a, b = list(call.operands)[:2]
    return product(a, b, call.outputs[k])


def biased_product(call: Call, k: int) -> Placed:
    """addmm, baddbmm: bias + a @ b."""
    bias, a, b = list(call.operands)[:3]
    found = product(a, b, call.outputs[k])
    line_up(call, bias, call.outputs[k], found.positions)
    return found._replace(
        positions=(*found.positions, *aligned(bias, call.outputs[k])),
    )


def summed_product(call: Call, k: int) -> Placed:
    """addbmm: the sum of a batch of products."""
    bias, a, b = list(call.operands)[:3]
    inner = product(_without(a, 0), _without(b, 0), call.outputs[k])
    mixed = mixes(a, [0]) | mixes(b, [0])
    return Placed((*inner.positions, *aligned(bias, call.outputs[k])), inner.flags | mixed)


def _without(operand: Operand, dim: int) -> Operand:
    """The operand without a leading dim."""
    return Operand(
        operand.index,
        operand.shape[1:],
        tuple(moved(p, p.dim - 1) for p in operand.positions if p.dim != dim),
        operand.flags,
    )


def vector_product(call: Call, k: int) -> Placed:
    """mv, dot, addmv: a matrix or vector with a vector."""
    *bias, a, b = list(call.operands)[:3]
    mixed = mixes(a, [a.ndim - 1]) | mixes(b, [0])
    rows = [p for p in a.positions if p.dim < a.ndim - 1]
    rest = [p for operand in bias for p in aligned(operand, call.outputs[k])]
    return Placed((*rows, *rest), mixed)


def matmul(call: Call, k: int) -> Placed:
    """Matmul as one op (inference_mode shows it whole): vectors get a dim, the others broadcast."""
    a, b = list(call.operands)[:2]
    shape = call.outputs[k]
    if a.ndim > 1 and b.ndim > 1:
        return product(a, b, shape)
    mixed = mixes(a, [a.ndim - 1]) | mixes(b, [max(b.ndim - 2, 0)])
    left = [p for p in a.positions if p.dim != a.ndim - 1]
    right = [
        p if p.dim < b.ndim - 2 else moved(p, p.dim - 1)
        for p in b.positions
        if p.dim != max(b.ndim - 2, 0)
    ]
    return Placed((*left, *right), mixed)


def linear(call: Call, k: int) -> Placed:
    """X @ weight.T + bias as one op: the last dim is replaced."""
    first = next(call.operands)
    last = first.ndim - 1
    return Placed(tuple(p for p in first.positions if p.dim < last), mixes(first, [last]))


def einsum(call: Call, k: int) -> Placed:
    """Einsum as one op: an axis follows its letter."""
    equation = str(call.args[0]).replace(" ", "")
    terms, arrow, result = equation.partition("->")
    operands = list(call.operands)
    names = terms.split(",")
    if not arrow or "." in equation or len(names) != len(operands):
        return Placed((), UNKNOWN | LENGTH_UNKNOWN)
    found, mixed = [], 0
    for letters, operand in zip(names, operands, strict=True):
        for p in operand.positions:
            if letters[p.dim] in result:
                found.append(moved(p, result.index(letters[p.dim])))
            elif p.axis == BATCH:
                mixed = MIXED
    return Placed(tuple(found), mixed)


def distances(call: Call, k: int) -> Placed:
    """cdist: rows of one against rows of the other."""
    a, b = list(call.operands)[:2]
    turned = Operand(
        b.index,
        b.shape,
        tuple(
            moved(p, {b.ndim - 1: b.ndim - 2, b.ndim - 2: b.ndim - 1}.get(p.dim, p.dim))
            for p in b.positions
        ),
    )
    return product(a, turned, call.outputs[k])
