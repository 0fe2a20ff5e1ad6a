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
        return Placed(first.positions, _mixes(first, [dim]))

    return rule


def ordered(call: Call, k: int) -> Placed:
    """Sorting and top-k: items move along the dim, so what lies there is lost."""
    first = next(call.operands)
    dim = dim_of(call.value("dim", -1), first.ndim)
    kept = tuple(p for p in first.positions if p.dim != dim)
    return Placed(kept, lost_along(first, [dim]))


def lost_along(operand: Operand, dims: Iterable[int]) -> int:
    """Flags for what an operand carries in dims whose items cannot be followed."""
    dims = set(dims)
    found = 0
    for p in operand.positions:
        if p.dim in dims:
            found |= UNKNOWN if p.axis == BATCH else LENGTH_UNKNOWN
    return found


def _mixes(operand: Operand, dims: Iterable[int]) -> int:
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
    return Placed(tuple(kept), _mixes(operand, dims))


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
    mixed = _mixes(a, [0]) | _mixes(b, [0])
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
    mixed = _mixes(a, [a.ndim - 1]) | _mixes(b, [0])
    rows = [p for p in a.positions if p.dim < a.ndim - 1]
    rest = [p for operand in bias for p in aligned(operand, call.outputs[k])]
    return Placed((*rows, *rest), mixed)


def matmul(call: Call, k: int) -> Placed:
    """Matmul as one op (inference_mode shows it whole): vectors get a dim, the others broadcast."""
    a, b = list(call.operands)[:2]
    shape = call.outputs[k]
    if a.ndim > 1 and b.ndim > 1:
        return product(a, b, shape)
    mixed = _mixes(a, [a.ndim - 1]) | _mixes(b, [max(b.ndim - 2, 0)])
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
    return Placed(tuple(p for p in first.positions if p.dim < last), _mixes(first, [last]))


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


# ---- norms -------------------------------------------------------------------------------------------


def trailing_norm(call: Call, k: int) -> Placed:
    """layer_norm, rms_norm: statistics over the last dims."""
    first = next(call.operands)
    over = range(first.ndim - len(call.args[1]), first.ndim)
    kept = [p for p in first.positions if p.dim not in over or call.outputs[k] == first.shape]
    return Placed(tuple(kept), _mixes(first, over))


def group_norm(call: Call, k: int) -> Placed:
    """Statistics over all dims but the first, which is kept in them."""
    first = next(call.operands)
    kept = [p for p in first.positions if p.dim == 0 or call.outputs[k] == first.shape]
    return Placed(tuple(kept), _mixes(first, range(1, first.ndim)))


def batch_norm(call: Call, k: int) -> Placed:
    """Statistics over all dims but the channels, from this batch if it trains.

    instance_norm lays the batch into the channels and mixes nothing.
    """
    first = next(call.operands)
    dims = [d for d in range(first.ndim) if d != 1]
    trains = _trains(call)
    mixed = _mixes(first, dims) if trains else 0
    if k == 0:
        return Placed(first.positions, mixed)
    if not trains:
        return Placed()
    return Placed(reduced(first, dims, call.outputs[k]).positions, mixed)


def _trains(call: Call) -> bool:
    if "no_training" in call.name or "no_update" in call.name:
        return False
    if call.name == "_batch_norm_with_update":
        return True
    return bool(call.value("training", call.value("train", call.value("use_input_stats", True))))


# ---- windows over spatial dims ------------------------------------------------------------------------


def convolution(call: Call, k: int) -> Placed:
    """The batch is kept, in dim 0 or in groups of channels; padded lengths shrink as their dim does."""
    x, weight = list(call.operands)[:2]
    if weight.positions:
        return Placed((), UNKNOWN | LENGTH_UNKNOWN)
    shape = call.outputs[k]
    found = [p for p in x.positions if p.dim == 0]
    flags = _mixes(x, range(2, x.ndim))
    for p in x.positions:
        if p.dim == 1:
            channels = _grouped(p, x.shape[1], shape[1], int(call.value("groups", 1)))
            found += channels
            flags |= MIXED if p.axis == BATCH and not channels else 0
    spatial = [
        Window(*sizes)
        for sizes in zip(
            weight.shape[2:],
            *(
                _sizes(call.value(name, default), x.ndim - 2)
                for name, default in (("stride", 1), ("padding", 0), ("dilation", 1))
            ),
            strict=True,
        )
    ]
    transposed = bool(call.value("transposed", False))
    windows, lost = _windows(call, x, shape, spatial, transposed=transposed)
    return Placed((*found, *windows), flags | lost)


def _grouped(p: Position, channels: int, outputs: int, groups: int) -> list[Position]:
    """An axis in the channels of a grouped convolution; none if a group holds several items of it."""
    size = channels // groups
    if p.inner % size:
        return []
    return [p._replace(inner=p.inner // size * (outputs // groups))]


class Window:
    """A window along one dim."""

    def __init__(
        self, kernel: int, stride: int, padding: int, dilation: int, *, up: bool = False
    ) -> None:
        self.reach = dilation * (kernel - 1)
        self.stride, self.padding, self.up = stride, padding, up

    def outputs(self, n: int) -> int:
        """Outputs for n inputs (torch's formula for convolutions and pooling)."""
        free = n + 2 * self.padding - self.reach - 1
        return (-(-free // self.stride) if self.up else free // self.stride) + 1

    def transposed_outputs(self, n: int) -> int:
        """Outputs of a transposed convolution, without output padding."""
        return (n - 1) * self.stride - 2 * self.padding + self.reach + 1


def _windows(
    call: Call, x: Operand, shape: Shape, spatial: Sequence[Window], *, transposed: bool
) -> tuple[list[Position], int]:
    """Padded lengths in the spatial dims, after the windows; LENGTH_UNKNOWN if one is lost."""
    found, lost = [], 0
    first = x.ndim - len(spatial)
    for p in x.lengths:
        if p.dim < first:
            continue
        window = spatial[p.dim - first]
        axis = None
        if p.outer == p.inner == 1:
            change = call.lengths.transposed_window if transposed else call.lengths.window
            outputs = window.transposed_outputs if transposed else window.outputs
            axis = change(p.axis, shape[p.dim], stride=window.stride, outputs=outputs)
        if axis is None:
            lost = LENGTH_UNKNOWN
        else:
            found.append(Position(p.dim, 1, shape[p.dim], 1, axis))
    return found, lost


def pooling(dims: int) -> Callable[[Call, int], Placed]:
    """Pooling over the last dims: what is before is kept."""

    def rule(call: Call, k: int) -> Placed:
        x = next(call.operands)
        kernel = _sizes(call.value("kernel_size"), dims)
        stride = _sizes(call.value("stride") or kernel, dims)
        padding = _sizes(call.value("padding", 0), dims)
        dilation = _sizes(call.value("dilation", 1), dims)
        up = bool(call.value("ceil_mode", False))
        spatial = [
            Window(*sizes, up=up) for sizes in zip(kernel, stride, padding, dilation, strict=True)
        ]
        windows, lost = _windows(call, x, call.outputs[k], spatial, transposed=False)
        kept = [p for p in x.positions if p.dim < x.ndim - dims]
        return Placed((*kept, *windows), lost | _mixes(x, range(x.ndim - dims, x.ndim)))

    return rule


def _sizes(value: Any, dims: int) -> list[int]:
    """A size for each dim; one stands for all."""
    items = list(value) if isinstance(value, list | tuple) else [value]
    return [int(v) for v in (items * dims if len(items) == 1 else items)]


def resampled(dims: int) -> Callable[[Call, int], Placed]:
    """Upsampling and adaptive pooling over the last dims: a length stretches by whole factors only."""

    def rule(call: Call, k: int) -> Placed:
        x = next(call.operands)
        shape = call.outputs[k]
        kept = [p for p in x.positions if p.dim < x.ndim - dims]
        flags = _mixes(x, range(x.ndim - dims, x.ndim))
        for p in x.lengths:
            if p.dim < x.ndim - dims:
                continue
            factor, rest = divmod(shape[p.dim], p.size)
            axis = None
            if p.outer == p.inner == 1 and not rest and factor:
                axis = call.lengths.stretched(p.axis, shape[p.dim], factor=factor)
            if axis is not None:
                kept.append(Position(p.dim, 1, shape[p.dim], 1, axis))
            elif shape[p.dim] > 1:
                flags |= LENGTH_UNKNOWN
        return Placed(tuple(kept), flags)

    return rule
