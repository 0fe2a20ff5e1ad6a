"""Ops that call none of the CPU's libraries: a line at one of these was printed by another thread.

Torch 2.13 ran all samples with which it tests its ops (float32, forward and backward, with gradients and under
inference_mode) while both libraries were verbose: MKL said nothing at any of these.
"""

from __future__ import annotations

from typing import Final

#: Ops that call neither library, whatever their tensors.
_NEITHER: Final = frozenset(
    """abs addcdiv addcmul arange cos detach div embedding eq exp expand gt index_select lerp log lt mean ne neg
    pow rsqrt select sin slice sqrt sub sum unsqueeze where""".split()  # noqa: SIM905
)
#: Ops that may call oneDNN on tensors in its own layouts, and never MKL: they multiply no matrices.
_NOT_MKL: Final = frozenset(
    """_adaptive_avg_pool2d _adaptive_avg_pool2d_backward _batch_norm_with_update _local_scalar_dense _log_softmax
    _log_softmax_backward_data _native_batch_norm_legit _softmax _softmax_backward_data _unsafe_view
    adaptive_avg_pool2d add alias all amax amin any argmax argmin as_strided avg_pool2d avg_pool2d_backward
    batch_norm bernoulli bitwise_and bitwise_not bitwise_or cat ceil clamp clamp_max clamp_min constant_pad_nd
    cumsum dropout elu embedding_dense_backward empty empty_like erf fill floor full full_like gather ge gelu
    gelu_backward glu group_norm hardsigmoid hardswish hardtanh isinf isnan layer_norm le leaky_relu log_softmax
    logical_and logical_not logical_or logsumexp masked_fill max max_pool2d_with_indices
    max_pool2d_with_indices_backward maximum min minimum mish mse_loss mul native_batch_norm
    native_batch_norm_backward native_dropout_backward native_group_norm native_group_norm_backward
    native_layer_norm native_layer_norm_backward new_empty new_ones new_zeros nll_loss_backward nll_loss_forward
    ones ones_like permute prod reciprocal relu relu6 repeat reshape rms_norm scatter scatter_add select_backward
    sigmoid sigmoid_backward sign silu silu_backward slice_backward softmax softplus split split_with_sizes square
    squeeze stack std t tanh tanh_backward threshold_backward topk transpose tril triu unbind
    upsample_bilinear2d upsample_nearest2d var var_mean view zero zeros zeros_like""".split()  # noqa: SIM905
)
_MKL: Final = "MKL_VERBOSE "


def why_not_its_own(name: str, lines: list[str]) -> str | None:
    """Why an op cannot have made one of these calls, so that another thread of the program did.

    Args:
        name: The op's, `aten.relu_.default`.
        lines: What was printed while it ran.

    Returns:
        What is said of the op, as `never calls MKL`; None if all may be its own.
    """
    namespace, _, rest = name.partition(".")
    base = rest.partition(".")[0].rstrip("_")
    if namespace != "aten" or not lines:
        return None
    if base in _NEITHER:
        return "calls neither"
    says_mkl = any(line.startswith(_MKL) for line in lines)
    return "never calls MKL" if says_mkl and base in _NOT_MKL else None
