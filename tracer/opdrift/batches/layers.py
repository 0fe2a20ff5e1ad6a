"""Rules for norms, and for windows over spatial dims: convolutions, pooling, resampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from opdrift.batches.arithmetic import lost_along, mixes, reduced
from opdrift.batches.calls import Call, Operand, Placed, Shape
from opdrift.tracefile.axes import BATCH, LENGTH_UNKNOWN, MIXED, Position

# ---- norms -------------------------------------------------------------------------------------------


def trailing_norm(call: Call, k: int) -> Placed:
    """layer_norm, rms_norm: statistics over the last dims."""
    first = next(call.operands)
    over = range(first.ndim - len(call.args[1]), first.ndim)
    kept = [p for p in first.positions if p.dim not in over or call.outputs[k] == first.shape]
    return Placed(tuple(kept), mixes(first, over))


def group_norm(call: Call, k: int) -> Placed:
    """Statistics over all dims but the first, which is kept in them."""
    first = next(call.operands)
    kept = [p for p in first.positions if p.dim == 0 or call.outputs[k] == first.shape]
    return Placed(tuple(kept), mixes(first, range(1, first.ndim)))


def batch_norm(call: Call, k: int) -> Placed:
    """Statistics over all dims but the channels, from this batch if it trains.

    instance_norm lays the batch into the channels and mixes nothing.
    """
    first = next(call.operands)
    dims = [d for d in range(first.ndim) if d != 1]
    trains = _trains(call)
    mixed = mixes(first, dims) if trains else 0
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
        lost = lost_along(x, range(x.ndim)) | lost_along(weight, range(weight.ndim))
        return Placed((), lost)
    shape = call.outputs[k]
    found = [p for p in x.positions if p.dim == 0]
    flags = mixes(x, range(2, x.ndim))
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
    transposed = bool(call.value("transposed", False)) or "transpose" in call.name
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
        return Placed((*kept, *windows), lost | mixes(x, range(x.ndim - dims, x.ndim)))

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
        flags = mixes(x, range(x.ndim - dims, x.ndim))
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
