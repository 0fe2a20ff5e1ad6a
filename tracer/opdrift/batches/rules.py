"""One row an op: which rule says what becomes of the batch and of padded lengths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch._ops import OpOverload

from opdrift.batches import arithmetic as a
from opdrift.batches import attention as n
from opdrift.batches import gradients as g
from opdrift.batches import layers as w
from opdrift.batches import movement as m
from opdrift.batches.calls import Call, Placed, Rule
from opdrift.tracefile.axes import LENGTH_UNKNOWN, UNKNOWN


def nothing(call: Call, k: int) -> Placed:
    """Made of nothing that is followed: constants, random numbers, layouts."""
    return Placed(constant=True)


def layout(call: Call, k: int) -> Placed:
    """Other content in the layout of the first operand (zeros_like, fill_)."""
    first = next(call.operands)
    return Placed(first.positions if call.outputs[k] == first.shape else (), constant=True)


def guess(call: Call, k: int) -> Placed:
    """An op that no row knows: as the first operand of its shape that carries something, and unsure."""
    carried = [operand for operand in call.operands if operand.positions]
    same = [operand for operand in carried if operand.shape == call.outputs[k]]
    placed = same[0].positions if same else ()
    flags = UNKNOWN if any(operand.batch for operand in carried) else 0
    return Placed(placed, flags | (LENGTH_UNKNOWN if any(o.lengths for o in carried) else 0))


#: Rule -> the ops that it holds for, by their names without namespace and overload; a trailing
#: underscore (in place) and `_copy` (of a view op) are left out.
_ROWS: Final[tuple[tuple[Rule, str], ...]] = (
    # element by element, where torch's own tag does not say so
    (
        a.pointwise,
        "copy where masked_fill square floor_divide threshold_backward hardtanh hardtanh_backward"
        " gelu_backward silu_backward sigmoid_backward tanh_backward leaky_relu_backward elu_backward softplus_backward"
        " native_dropout_backward bucketize log_sigmoid_forward log_sigmoid_backward prelu rrelu_with_noise isclose"
        " mish_backward hardswish hardswish_backward hardsigmoid_backward logit_backward polar complex fake_quantize"
        " bernoulli poisson binomial normal",
    ),
    (
        a.like_first,
        "_to_copy to type_as isin contiguous lift_fresh detach alias native_dropout dropout feature_dropout tril triu uniform exponential"
        " random geometric cauchy log_normal expand_as _conj_physical dequantize nan_to_num channel_shuffle"
        " quantize_per_tensor _nested_tensor_from_mask cumulative_trapezoid",
    ),
    (
        layout,
        "zeros_like ones_like full_like empty_like rand_like randn_like randint_like fill zero",
    ),
    (
        nothing,
        "empty zeros ones full rand randn randint randperm arange eye linspace logspace scalar_tensor tril_indices"
        " triu_indices empty_strided empty_permuted new_empty new_zeros new_ones new_full new_empty_strided hann_window"
        " hamming_window _efficientzerotensor is_same_size",
    ),
    # reductions, where torch's own tag does not say so
    (
        a.reduction,
        "sum mean amax amin max min var std var_mean std_mean any all prod logsumexp argmax argmin norm linalg_vector_norm"
        " count_nonzero median nanmedian nansum nanmean kthvalue mode aminmax linalg_norm _is_all_true _is_any_true equal",
    ),
    (
        a.along("dim"),
        "_softmax _log_softmax _safe_softmax softmax log_softmax cumsum cumprod logcumsumexp cummax cummin",
    ),
    (a.ordered, "sort argsort topk msort"),
    (a.transformed(), "_fft_r2c _fft_c2r _fft_c2c fft_fftn fft_ifftn fft_rfftn fft_irfftn"),
    (a.transformed(-1), "fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft"),
    (a.transformed((-2, -1)), "fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2"),
    (
        a.loss,
        "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div soft_margin_loss",
    ),
    (
        a.class_loss,
        "nll_loss_forward nll_loss2d_forward nll_loss cross_entropy_loss nll_loss_nd multi_margin_loss multilabel_margin_loss_forward",
    ),
    # products
    (a.matrix_product, "mm bmm _int_mm _scaled_mm"),
    (a.biased_product, "addmm baddbmm _addmm_activation"),
    (a.summed_product, "addbmm"),
    (a.vector_product, "mv dot vdot addmv inner"),
    (a.matmul, "matmul"),
    (
        a.linear,
        "linear mkldnn_linear _mkl_linear _weight_int8pack_mm _weight_int4pack_mm _weight_int4pack_mm_for_cpu _grouped_mm",
    ),
    (a.einsum, "einsum"),
    (a.distances, "_cdist_forward cdist _euclidean_dist"),
    # norms
    (w.trailing_norm, "native_layer_norm layer_norm rms_norm _fused_rms_norm fused_layer_norm"),
    (w.group_norm, "native_group_norm group_norm instance_norm"),
    (
        w.batch_norm,
        "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training cudnn_batch_norm miopen_batch_norm"
        " _batch_norm_with_update _batch_norm_no_update _batch_norm_impl_index batch_norm",
    ),
    # windows
    (
        w.convolution,
        "convolution _convolution mkldnn_convolution cudnn_convolution conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d thnn_conv2d _slow_conv2d_forward"
        " _conv_depthwise2d slow_conv3d slow_conv3d_forward convolution_overrideable miopen_convolution",
    ),
    (w.pooling(1), "avg_pool1d max_pool1d"),
    (w.pooling(2), "avg_pool2d max_pool2d max_pool2d_with_indices"),
    (w.pooling(3), "avg_pool3d max_pool3d max_pool3d_with_indices"),
    (
        w.resampled(1),
        "upsample_nearest1d _upsample_nearest_exact1d upsample_linear1d adaptive_avg_pool1d adaptive_max_pool1d",
    ),
    (
        w.resampled(2),
        "upsample_nearest2d _upsample_nearest_exact2d upsample_bilinear2d upsample_bicubic2d _upsample_bilinear2d_aa"
        " _upsample_bicubic2d_aa _adaptive_avg_pool2d adaptive_avg_pool2d adaptive_max_pool2d",
    ),
    (
        w.resampled(3),
        "upsample_nearest3d _upsample_nearest_exact3d upsample_trilinear3d _adaptive_avg_pool3d adaptive_avg_pool3d"
        " adaptive_max_pool3d",
    ),
    (g.first_dim_only, "im2col col2im grid_sampler_2d grid_sampler_3d affine_grid_generator"),
    (m.kept(lambda x: x.ndim - 3), "pixel_shuffle pixel_unshuffle"),
    # attention and recurrent layers
    (
        n.attention(-2),
        "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention"
        " _scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable _scaled_dot_product_attention_math"
        " scaled_dot_product_attention _scaled_dot_product_attention_math_for_mps",
    ),
    (
        n.attention(-3),
        "_flash_attention_forward _efficient_attention_forward _cudnn_attention_forward",
    ),
    (
        n.encoder_layer,
        "_transformer_encoder_layer_fwd _native_multi_head_attention _triton_multi_head_attention",
    ),
    (n.recurrent_layer, "mkldnn_rnn_layer"),
    (n.recurrent_stack, "lstm gru rnn_tanh rnn_relu _cudnn_rnn miopen_rnn"),
    (
        n.recurrent_cell,
        "_thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell",
    ),
    # movement
    (m.cat, "cat concat concatenate"),
    (m.stack, "stack"),
    (m.split, "unsafe_split unsafe_chunk unsafe_split_with_sizes"),
    (m.reshaped, "_unsafe_view view reshape reshape_as _reshape_alias flatten unflatten ravel"),
    (m.repeated, "repeat tile"),
    (m.interleaved, "repeat_interleave"),
    (m.masked_scatter, "masked_scatter"),
    (m.flipped, "flip"),
    (m.rolled, "roll"),
    (
        m.padded,
        "constant_pad_nd pad reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d",
    ),
    (m.halved, "glu"),
    (m.embedding, "embedding"),
    (m.embedding_bag, "_embedding_bag _embedding_bag_forward_only embedding_bag"),
    (m.index_select, "index_select"),
    (m.gather, "gather take_along_dim"),
    (m.scatter, "scatter scatter_add scatter_reduce slice_scatter"),
    (m.index_add, "index_add index_copy index_fill index_reduce"),
    (m.index, "index _unsafe_index"),
    (m.index_put, "index_put _index_put_impl _unsafe_index_put"),
    (
        m.by_content,
        "nonzero nonzero_static masked_select _unique2 unique_dim unique_consecutive bincount histc _pack_padded_sequence take",
    ),
    (m.kept(lambda x: x.ndim), "one_hot"),
    # over the last dims, apart for each item of the others
    (m.kept(lambda x: x.ndim - 1), "multinomial searchsorted"),
    (
        m.kept(lambda x: x.ndim - 2),
        "linalg_inv linalg_inv_ex linalg_cholesky linalg_cholesky_ex linalg_svd linalg_eigh linalg_det linalg_slogdet linalg_solve _linalg_svd linalg_qr _linalg_eigh _linalg_det _linalg_slogdet _linalg_solve_ex"
        " linalg_lu_factor_ex linalg_eig linalg_eigvals _linalg_eigvals linalg_matrix_exp linalg_lu_solve cholesky_solve triangular_solve linalg_solve_triangular cholesky inverse",
    ),
    # gradients; every other op whose name ends in _backward has the rule `gradient`
    (g.weight_gradient, "embedding_dense_backward embedding_backward"),
    (
        g.norm_gradient,
        "native_batch_norm_backward cudnn_batch_norm_backward batch_norm_backward miopen_batch_norm_backward",
    ),
    (g.slice_gradient, "slice_backward"),
    (g.select_gradient, "select_backward"),
)
_BY_NAME: Final[Mapping[str, Rule]] = {
    name: rule for rule, names in _ROWS for name in names.split()
}
#: Names under which inference_mode shows ops of another name.
_ALIASES: Final = {
    "absolute": "abs",
    "arctan2": "atan2",
    "clip": "clamp",
    "divide": "div",
    "fix": "trunc",
    "greater": "gt",
    "greater_equal": "ge",
    "less": "lt",
    "less_equal": "le",
    "multiply": "mul",
    "negative": "neg",
    "not_equal": "ne",
    "subtract": "sub",
    "true_divide": "div",
    "__and__": "bitwise_and",
    "__iand__": "bitwise_and",
    "__ior__": "bitwise_or",
    "__or__": "bitwise_or",
    "__xor__": "bitwise_xor",
}
#: Views that copy where they must; under inference_mode they are seen whole.
_VIEWS_OR_COPIES: Final = frozenset(
    ["reshape", "reshape_as", "flatten", "unflatten", "ravel", "contiguous", "to", "type_as"]
)
#: These change what a tensor object shows of its storage, not the storage.
_RELABELLING: Final = frozenset(
    [
        "transpose_",
        "t_",
        "squeeze_",
        "unsqueeze_",
        "swapaxes_",
        "swapdims_",
        "as_strided_",
        "detach_",
        "requires_grad_",
        "rename_",
        "resize_",
        "resize_as_",
        "set_",
        "_resize_output_",
        "moveaxis_",
    ]
)


def rule_for(func: Any) -> Rule | None:
    """The rule of an overload; None if nothing needs to be done: views, and ops that move no content."""
    if not isinstance(func, OpOverload):
        return guess
    name = base_name(func)
    if (func.is_view and name not in _VIEWS_OR_COPIES) or name in _RELABELLING:
        return None
    found = _BY_NAME.get(plain_name(name))
    if found is not None and not _is_elementwise_overload(func, found):
        return found
    if name.startswith(("_foreach_", "_fused_", "_amp_")):
        return a.foreach
    if torch.Tag.pointwise in func.tags or _has_tagged_overload(plain_name(name)):
        return a.pointwise
    if torch.Tag.reduction in func.tags:
        return a.reduction
    if "_backward" in name:
        return g.gradient
    return found or guess


def _has_tagged_overload(name: str) -> bool:
    """Whether another overload is tagged element by element: in-place and number-only ones often are not."""
    packet = getattr(torch.ops.aten, _ALIASES.get(name, name), None)
    overloads = packet.overloads() if packet is not None else ()
    return any(torch.Tag.pointwise in getattr(packet, each).tags for each in overloads)


def _is_elementwise_overload(func: OpOverload, rule: Rule) -> bool:
    """`max.other` is element by element, though `max.dim` is a reduction."""
    return rule is a.reduction and torch.Tag.pointwise in func.tags


def base_name(func: OpOverload) -> str:
    """The name without namespace and overload."""
    return str(func._schema.name).partition("::")[2]


def plain_name(name: str) -> str:
    """The name without what marks an in-place op or a copying view."""
    name = name.removesuffix("_") if not name.startswith("__") else name
    return name.removesuffix("_copy") if name not in ("_to_copy", "index_copy") else name
