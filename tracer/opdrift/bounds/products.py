"""Which tensors a matmul-like op multiplies, and over how many terms it adds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from opdrift.bounds.view import TINY, Operand, OpView

#: k / sqrt(K) where the norms are not known: independent random factors have k = sqrt(K); measured
#: activations and weights of encoders and decoders stay below 4.
ASSUMED_EXCESS: Final = 4.0


@dataclass(frozen=True, slots=True)
class Product:
    """`alpha * (left @ right) + beta * bias`, batched and unfolded as the op does it.

    Attributes:
        length: How many products make one output element (K).
        batch: How many independent products are computed; groups of a convolution count as such.
        area: Kernel area over stride product: how often an element is used by each output channel.
        rank: The largest rank that the factors can have.
    """

    left: Operand | None
    right: Operand | None
    length: int
    batch: int = 1
    area: float = 1.0
    rank: int = 1
    bias: Operand | None = None
    alpha: float = 1.0
    beta: float = 1.0

    def size(self) -> float | None:
        """||A|| ||B||, the largest norm that the product can have; None where a norm is not known.

        Batches are added in quadrature, as equal parts: their number divides by its root.
        """
        if self.left is None or self.right is None:
            return None
        left, right = self.left.l2, self.right.l2
        if left is None or right is None:
            return None
        return abs(self.alpha) * math.sqrt(self.area) * left * right / math.sqrt(self.batch)

    def conditioning(self, result: Operand) -> float | None:
        """Return k = ||A|| ||B|| / ||C||: how far the op magnifies rounding; None where a norm is not known."""
        size, norm = self.size(), result.l2
        return None if size is None or norm is None else size / max(norm, TINY)

    def excess(self, result: Operand) -> float:
        """The conditioning, or what is assumed for it."""
        found = self.conditioning(result)
        return ASSUMED_EXCESS * math.sqrt(self.length) if found is None else found

    def bias_part(self, result: Operand) -> float:
        """||bias||, broadcast to the result, over ||C||; 0 without a bias."""
        if self.bias is None or self.beta == 0:
            return 0.0
        bias, norm = self.bias.rms, result.l2
        if bias is None or norm is None:
            return 1.0
        return abs(self.beta) * bias * math.sqrt(result.n) / max(norm, TINY)


def product(view: OpView, output: int) -> Product:
    """The product that an output of a matmul-like op is."""
    return _EXTRACTORS[view.base_name](view, output)


def _mm(view: OpView, _output: int) -> Product:
    left, right = view.tensor("self", "mat1"), view.tensor("mat2", "vec", "tensor", "other")
    return _plain(left, right, None)


def _addmm(view: OpView, _output: int) -> Product:
    left = view.tensor("mat1", "batch1", "mat", "vec1")
    right = view.tensor("mat2", "batch2", "vec", "vec2")
    alpha, beta = view.number("alpha", 1.0), view.number("beta", 1.0)
    return _plain(left, right, view.tensor("self"), alpha, beta)


def _addbmm(view: OpView, output: int) -> Product:
    found = _addmm(view, output)
    left = found.left
    batch = left.size(0) if left else 1
    return Product(
        left,
        found.right,
        found.length * batch,
        rank=found.rank,
        bias=found.bias,
        alpha=found.alpha,
        beta=found.beta,
    )


def _plain(
    left: Operand | None,
    right: Operand | None,
    bias: Operand | None,
    alpha: float = 1.0,
    beta: float = 1.0,
) -> Product:
    length = left.size(-1) if left else 1
    rows = left.size(-2) if left else 1
    columns = right.size(-1) if right and len(right.meta.shape) > 1 else 1
    both = left is not None and right is not None
    batch = math.prod(left.meta.shape[:-2]) if both and left and len(left.meta.shape) > 2 else 1
    if right is not None and len(right.meta.shape) <= 2:
        batch = 1  # one right factor for the whole batch: a taller left factor
    return Product(
        left,
        right,
        length,
        batch=max(batch, 1),
        rank=max(min(rows, length, columns), 1),
        bias=bias,
        alpha=alpha,
        beta=beta,
    )


def _linear(view: OpView, _output: int) -> Product:
    left, right = view.tensor("input", "self"), view.tensor("weight", "mat2")
    length = left.size(-1) if left else 1
    rows = left.n // max(length, 1) if left else 1
    columns = right.size(0) if right else 1
    bias = view.tensor("bias")
    return Product(left, right, length, rank=max(min(rows, length, columns), 1), bias=bias)


def _packed(view: OpView, _output: int) -> Product:
    """Weights in a packed integer form: their norm is not that of the recorded integers."""
    left = view.operand(0)
    return Product(left, None, left.size(-1))


def _conv(view: OpView, _output: int) -> Product:
    image, weight = view.tensor("input", "self"), view.tensor("weight")
    return _windowed(view, image, weight, bool(view.arguments.get("transposed")), True)


def _conv_transpose(view: OpView, _output: int) -> Product:
    return _windowed(view, view.tensor("input", "self"), view.tensor("weight"), True, True)


def _conv_backward(view: OpView, output: int) -> Product:
    gradient, image, weight = (view.tensor(n) for n in ("grad_output", "input", "weight"))
    if output - view.mutated == 0:  # the input's gradient is the opposite convolution
        return _windowed(view, gradient, weight, not view.arguments.get("transposed"), False)
    base = _windowed(view, image, weight, bool(view.arguments.get("transposed")), False)
    # The weight's gradient adds over all positions of all samples.
    places = gradient.n // max(gradient.size(1), 1) if gradient else 1
    return Product(
        gradient,
        image,
        places,
        batch=base.batch,
        area=base.area,
        rank=max(min(places, base.rank), 1),
    )


def _windowed(
    view: OpView, image: Operand | None, weight: Operand | None, transposed: bool, biased: bool
) -> Product:
    """A convolution unfolded: K = input channels of a group x kernel area (/ strides if transposed)."""
    if weight is None:
        return Product(image, None, 1)
    kernel = math.prod(weight.meta.shape[2:])
    dims = len(weight.meta.shape) - 2
    stride = view.numbers("stride") or (1,)
    strides = math.prod(stride) if len(stride) == dims else stride[0] ** dims
    groups = max(int(view.number("groups", 1)), 1)
    if transposed:
        length = weight.size(0) // groups * max(kernel // max(strides, 1), 1)
    else:
        length = weight.size(1) * kernel
    return Product(
        image,
        weight,
        max(length, 1),
        batch=groups,
        area=kernel / max(strides, 1),
        rank=max(min(length, weight.n // max(length, 1)), 1),
        bias=view.tensor("bias") if biased else None,
    )


_Extractor = Callable[[OpView, int], Product]
_EXTRACTORS: Final[dict[str, _Extractor]] = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "vdot", "matmul", "_scaled_mm"), _mm),
    **dict.fromkeys(("addmm", "_addmm_activation", "addmv", "baddbmm", "addr"), _addmm),
    **dict.fromkeys(("linear", "mkldnn_linear", "_mkl_linear"), _linear),
    **dict.fromkeys(("_weight_int8pack_mm", "_weight_int4pack_mm", "_weight_int4pack_mm_for_cpu", "_dyn_quant_matmul_4bit"), _packed),
    **dict.fromkeys(
        (
            "convolution", "_convolution", "conv1d", "conv2d", "conv3d", "mkldnn_convolution",
            "cudnn_convolution", "cudnn_convolution_relu", "miopen_convolution", "_slow_conv2d_forward",
            "thnn_conv2d", "_conv_depthwise2d", "slow_conv3d_forward", "conv_depthwise3d",
        ),
        _conv,
    ),
    **dict.fromkeys(
        ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "cudnn_convolution_transpose", "slow_conv_transpose2d"),
        _conv_transpose,
    ),
    "addbmm": _addbmm,
    "convolution_backward": _conv_backward,
}  # fmt: skip

PRODUCT_OPS: Final = frozenset(_EXTRACTORS)
