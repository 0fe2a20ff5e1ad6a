"""Say whether an op combines what lies along the batch or a padded length, or works on each place by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from opdrift.case import Side
from opdrift.records import Argument
from opdrift.tokens import base
from opdrift.tracefile.axes import Position

#: Along the dim that an argument names.
_ALONG_DIM: Final = frozenset(
    [
        "_softmax",
        "_log_softmax",
        "_safe_softmax",
        "softmax",
        "log_softmax",
        "cumsum",
        "cumprod",
        "logcumsumexp",
        "cummax",
        "cummin",
        "sort",
        "argsort",
        "topk",
        "sum",
        "mean",
        "amax",
        "amin",
        "max",
        "min",
        "var",
        "std",
        "var_mean",
        "std_mean",
        "any",
        "all",
        "prod",
        "logsumexp",
        "argmax",
        "argmin",
        "norm",
        "linalg_vector_norm",
        "count_nonzero",
        "median",
        "nanmedian",
        "nansum",
        "nanmean",
        "kthvalue",
        "mode",
        "aminmax",
        "_fft_r2c",
        "_fft_c2r",
        "_fft_c2c",
        "roll",
        "renorm",
        "softmin",
        "unfold",
    ]
)
#: Over everything behind the channels: windows, pools and norms of feature maps.
_SPATIAL: Final = (
    "conv",
    "pool",
    "upsample",
    "group_norm",
    "instance_norm",
    "batch_norm",
    "grid_sampler",
    "im2col",
)
_RECURRENT: Final = ("rnn", "lstm", "gru")
_LEFT_PRODUCTS: Final = frozenset(["mm", "addmm", "bmm", "baddbmm", "matmul", "mv", "linear"])


def attends(name: str) -> bool:
    """Whether an op of this name is a whole attention, or a layer that has one in it."""
    return "attention" in name or "encoder_layer_fwd" in name


def combines(side: Side, op: int, slot: int, position: Position) -> bool:
    """Whether what an op computes at one place of an axis depends on other places of it.

    Args:
        side: The side of the op.
        op: Its index.
        slot: Position of the operand among its tensor arguments.
        position: Where the axis lies in the operand.
    """
    record = side.op(op)
    name = base(record.name).removesuffix("_")
    info = record.signature.op
    value = record.inputs[slot]
    ndim = len(side.trace.meta(value).shape)
    if info.pointwise:
        return False
    arguments = dict(record.signature.arguments)
    if "backward" in name:
        return False
    if attends(name):
        return True
    if any(word in name for word in _RECURRENT):
        # lstm and gru say where their steps lie; a single layer (mkldnn_rnn_layer) has them in front
        stack = name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
        steps = 1 if stack and arguments.get("batch_first") is True else 0
        return slot == 0 and position.dim == steps
    if any(word in name for word in _SPATIAL):
        return slot == 0 and position.dim >= 1
    if "layer_norm" in name or "rms_norm" in name:
        shape = arguments.get("normalized_shape")
        dims = len(shape) if isinstance(shape, tuple) else 1
        return slot == 0 and position.dim >= ndim - dims
    if name in _LEFT_PRODUCTS:
        return _contracts(name, slot, position, ndim, arguments)
    if name in _ALONG_DIM or info.reduction:
        return position.dim in _dims(arguments, ndim)
    return False


def _dims(arguments: Mapping[str, Argument], ndim: int) -> set[int]:
    """The dims that an op works along; all if it names none."""
    for name in ("dim", "dims", "dimension"):
        given = arguments.get(name)
        if isinstance(given, int) and not isinstance(given, bool):
            return {given % max(ndim, 1)}
        if isinstance(given, tuple) and given:
            return {d % max(ndim, 1) for d in given if isinstance(d, int)}
    return set(range(ndim))


def _contracts(
    name: str, slot: int, position: Position, ndim: int, arguments: Mapping[str, Argument]
) -> bool:
    """Whether the axis is the one that a product sums over."""
    first = 1 if name in ("addmm", "baddbmm") else 0
    if name == "linear":
        return slot == 0 and position.dim == ndim - 1
    if slot == first:
        return position.dim == ndim - 1
    return slot == first + 1 and position.dim == max(ndim - 2, 0)
