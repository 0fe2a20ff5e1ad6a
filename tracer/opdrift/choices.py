"""What steers torch's choice of an implementation and is in no argument: looked at where torch has chosen.

Whether an operand requires grad, and the words in which torch.nn says why it did not take a fast path.
Those are locals of three functions (notes: kernels, 4), so nothing is put in front of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, Final

import torch
from torch import Tensor, nn

from opdrift.records import MASK_GRAD, OPERAND_GRAD

#: What to look at, by op.
ADDS: Final = 1  #: whether what is added requires grad: it may be the mask of torch's math path
PATHS: Final = 2  #: why not the fast path around it
ATTENTION: Final = 3  #: that, switches that changed, and whether operands require grad
STEERED: Final = 4  #: switches that changed, no more

_PATHS: Final = frozenset(
    {"_softmax", "softmax", "_native_multi_head_attention", "_transformer_encoder_layer_fwd"}
)
_ATTENTION: Final = frozenset(
    {
        "scaled_dot_product_attention",
        "_safe_softmax",
        "_flash_attention_forward",
        "_efficient_attention_forward",
    }
)
#: id of a function's code -> (whose it is, the local that holds torch's words).
_WORDS: Final = {
    id(kind.forward.__code__): (kind.__name__, local)
    for kind, local in (
        (nn.MultiheadAttention, "why_not_fast_path"),
        (nn.TransformerEncoderLayer, "why_not_sparsity_fast_path"),
        (nn.TransformerEncoder, "why_not_sparsity_fast_path"),
    )
}
#: An attention of torch.nn is at most so many frames below the function that decided on a fast path, and
#: that one below the function of the module around it (calls of modules with hooks are four frames).
_NEAR: Final = 8
_AROUND: Final = 16
#: Ops whose implementation follows from switches: products, layers that a library computes, and those of
#: torch's list of nondeterministic ops that run on CPUs, too.
_STEERED: Final = frozenset(
    """
    mm addmm bmm baddbmm mv addmv dot vdot linear matmul _int_mm _scaled_mm einsum
    convolution convolution_overrideable convolution_backward conv1d conv2d conv3d
    conv_transpose1d conv_transpose2d conv_transpose3d
    lstm gru rnn_tanh rnn_relu mkldnn_rnn_layer _cudnn_rnn
    index_put index_put_ _index_put_impl_ index_add index_add_ index_copy index_copy_
    scatter scatter_ scatter_add scatter_add_ scatter_reduce scatter_reduce_ put put_ cumsum
    """.split()  # noqa: SIM905 (a literal would take a line a name)
)
#: State that steers choices, by getters of `torch._C` of which none raises. What reaches every op comes first.
_FOR_ALL: Final = ("get_num_threads", "_get_deterministic_algorithms")
_FOR_SOME: Final = (
    "_get_flash_sdp_enabled",
    "_get_mem_efficient_sdp_enabled",
    "_get_math_sdp_enabled",
    "_get_cudnn_sdp_enabled",
    "_get_sdp_priority_order",
    "_get_math_sdp_allow_fp16_bf16_reduction",
    "_get_mkldnn_enabled",
    "_get_mkldnn_deterministic",
    "_get_nnpack_enabled",
    "_get_cpu_allow_fp16_reduced_precision_reduction",
    "_get_qengine",
)
_FOR_CUDA: Final = (
    "_get_cudnn_enabled",
    "_get_cudnn_benchmark",
    "_get_cudnn_deterministic",
    "_get_cublas_allow_fp16_reduced_precision_reduction",
    "_get_cublas_allow_bf16_reduced_precision_reduction",
)
_precision: Final = getattr(torch._C, "_get_fp32_precision_getter", None)
_PRECISIONS: Final = (
    ("mkldnn", "matmul"),
    *((("cuda", "matmul"), ("cuda", "conv")) if torch.backends.cuda.is_built() else ()),
)


def _getters(*names: str) -> tuple[Callable[[], object], ...]:
    """Those of the getters that this torch has."""
    found = [getattr(torch._C, name, None) for name in names]
    return tuple([getter for getter in found if getter is not None])


_general: Final = _getters(*_FOR_ALL)
_switches: Final = _getters(
    *_FOR_ALL, *_FOR_SOME, *(_FOR_CUDA if torch.backends.cuda.is_built() else ())
)


def what_to_ask(name: str, overload: str) -> int:
    """What an op of `aten` has to be asked; 0 for nothing."""
    if name == "add":
        return ADDS if overload == "Tensor" else 0
    if name in _PATHS:
        return PATHS
    if name in _STEERED:
        return STEERED
    fused = name.startswith("_scaled_dot_product_") and not name.endswith("_backward")
    return ATTENTION if fused or name in _ATTENTION else 0


def switches() -> tuple[object, ...]:
    """What steers choices, as it is now in this thread; 1 us."""
    found = [getter() for getter in _switches]
    if _precision is not None:
        found += [_precision(*names) for names in _PRECISIONS]
    return tuple(found)


def general_switches() -> tuple[object, ...]:
    """The first of `switches`, those that reach every op; 0.2 us."""
    return tuple([getter() for getter in _general])


def added_requires_grad(args: tuple[Any, ...]) -> int:
    """The flag of an `add` whose second operand requires grad."""
    other = args[1]
    return MASK_GRAD if isinstance(other, Tensor) and other.requires_grad else 0


def operands_require_grad(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """The flags of an attention op: query, key and value come first, a mask after them."""
    flags = 0
    for position, argument in enumerate((*args, *kwargs.values())):
        if isinstance(argument, Tensor) and argument.requires_grad:
            flags |= OPERAND_GRAD if position < 3 else MASK_GRAD
    return flags


def why_not_fast(frame: FrameType | None) -> dict[str, str]:
    """Words of torch, from `frame` outwards: the class of the module -> why not its fast path."""
    found: dict[str, str] = {}
    left = _NEAR
    while frame is not None and left:
        left -= 1
        known = _WORDS.get(id(frame.f_code))
        if known is not None:
            left = _AROUND
            kind, local = known
            names = frame.f_locals
            words = names.get(local)
            if type(names) is dict:
                names.clear()  # up to Python 3.12 it is a copy, which would keep tensors alive
            if words and kind not in found:
                found[kind] = str(words)
        frame = frame.f_back
    return found
