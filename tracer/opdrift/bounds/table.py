"""The table: one row a family of ops, with its rounding bound and its gain limit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Final

from opdrift.bounds import formulas as f
from opdrift.bounds import gains as g
from opdrift.bounds.products import PRODUCT_OPS
from opdrift.bounds.view import OpView

Term = Callable[[OpView, int], float]


def constant(value: float) -> Term:
    """A term that does not depend on the op's tensors."""
    return lambda _view, _output: value


_ZERO: Final = constant(0)
_ORDER: Final = constant(4)
_INTERMEDIATE: Final = constant(1.5)
_GAIN: Final = constant(4)


@dataclass(frozen=True, slots=True)
class Family:
    """Ops whose rounding follows one rule.

    Attributes:
        name: As in docs and reports.
        ops: Base names (no namespace, overload, trailing underscore or `_foreach_`).
        order: A: another order of the same arithmetic, in units of 2**-24.
        intermediate: L: an intermediate rounded to the output's dtype, in units of twice the roundoff.
        gain: How far the op may magnify a difference of its inputs.
        cap: The gain that typical networks stay below (measured on 17,110 receivers).
        exact: Equal inputs give equal bits, whatever the kernel.
        fused: One multiply-add, rounded once or twice.
        unbounded: The record does not hold what the error depends on.
        discrete: Its output jumps where its input crosses a threshold.
    """

    name: str
    ops: frozenset[str]
    order: Term = _ORDER
    intermediate: Term = _INTERMEDIATE
    gain: Term = _GAIN
    cap: float = 4.0
    exact: bool = False
    fused: bool = False
    unbounded: bool = False
    discrete: bool = False


def _ops(text: str) -> frozenset[str]:
    return frozenset(text.split())


FAMILIES: Final = (
    Family("matmul", PRODUCT_OPS, f.product_order, f.product_intermediate, g.product_gain),
    Family(
        "attention",
        _ops(
            "scaled_dot_product_attention _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention"
            " _scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention _scaled_dot_product_attention_math"
            " _scaled_dot_product_fused_attention_overrideable _scaled_dot_product_attention_math_for_mps"
            " _flash_attention_forward _efficient_attention_forward _cudnn_attention_forward"
            " _scaled_dot_product_flash_attention_for_cpu_backward _scaled_dot_product_flash_attention_backward"
            " _scaled_dot_product_efficient_attention_backward _scaled_dot_product_cudnn_attention_backward"
            " _scaled_dot_product_fused_attention_overrideable_backward _flash_attention_backward _efficient_attention_backward"
        ),
        f.attention_order,
        f.attention_intermediate,
        g.attention_gain,
        cap=12,
    ),
    Family(
        "fused layer",
        _ops("_transformer_encoder_layer_fwd _native_multi_head_attention"),
        f.fused_layer_order,
        constant(8),
        g.unlimited_gain,
        cap=12,
    ),
    Family(
        "softmax",
        _ops("softmax _softmax _safe_softmax _masked_softmax special_softmax"),
        f.softmax_order,
        constant(2),
        g.softmax_gain,
        cap=8,
    ),
    Family("softmax", _ops("_softmax_backward_data _masked_softmax_backward"), f.softmax_backward_order, constant(2), g.softmax_gain, cap=8),
    Family(
        "log_softmax",
        _ops("log_softmax _log_softmax logsumexp logcumsumexp cross_entropy_loss special_log_softmax logaddexp logaddexp2"),
        f.log_softmax_order,
        gain=g.softmax_gain,
        cap=8,
    ),
    Family("log_softmax", _ops("_log_softmax_backward_data"), f.log_softmax_backward_order, gain=g.softmax_gain, cap=8),
    Family(
        "loss",
        _ops(
            "nll_loss nll_loss_forward nll_loss2d_forward mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy"
            " binary_cross_entropy_with_logits soft_margin_loss multi_margin_loss kl_div _ctc_loss"
        ),
        f.loss_order,
    ),
    Family("layer_norm", _ops("layer_norm native_layer_norm"), f.layer_norm_order, f.norm_intermediate, g.norm_gain, cap=12),
    Family("group_norm", _ops("group_norm native_group_norm instance_norm"), f.group_norm_order, f.norm_intermediate, g.norm_gain, cap=12),
    Family("rms_norm", _ops("rms_norm _fused_rms_norm"), f.rms_norm_order, gain=g.norm_gain, cap=12),
    Family(
        "batch_norm",
        _ops(
            "batch_norm native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training cudnn_batch_norm"
            " miopen_batch_norm _batch_norm_with_update _batch_norm_no_update _batch_norm_impl_index batch_norm_stats"
        ),
        f.batch_norm_order,
        constant(2),
        g.norm_gain,
        cap=12,
    ),
    Family(
        "norm backward",
        _ops(
            "native_layer_norm_backward native_group_norm_backward native_batch_norm_backward _fused_rms_norm_backward"
            " cudnn_batch_norm_backward miopen_batch_norm_backward batch_norm_backward"
        ),
        f.norm_backward_order,
        f.norm_intermediate,
        g.norm_gain,
        cap=12,
    ),
    Family("sum", _ops("sum nansum trace segment_reduce _embedding_bag embedding_bag sum_to_size"), f.sum_order, f.sum_intermediate, g.sum_gain),
    Family("mean", _ops("mean nanmean avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d _adaptive_avg_pool2d _adaptive_avg_pool3d"), f.mean_order, f.mean_intermediate, g.sum_gain),
    Family("cumsum", _ops("cumsum"), f.cumsum_order, f.sum_intermediate, g.sum_gain),
    Family("var", _ops("var std var_mean std_mean"), f.var_order, f.var_intermediate),
    Family("vector_norm", _ops("linalg_vector_norm norm renorm embedding_renorm _weight_norm_interface frobenius_norm"), f.root_length_order),
    Family("prod", _ops("prod cumprod"), f.root_length_order, f.root_length_order),
    Family(
        "index_add",
        _ops(
            "index_add scatter_add scatter_reduce index_reduce embedding_dense_backward _embedding_bag_dense_backward put"
            " col2im avg_pool2d_backward avg_pool3d_backward _adaptive_avg_pool2d_backward max_pool2d_with_indices_backward"
            " upsample_nearest2d_backward upsample_bilinear2d_backward reflection_pad1d_backward reflection_pad2d_backward"
        ),
        f.scatter_order,
        f.scatter_intermediate,
        g.sum_gain,
    ),
    Family("rnn", _ops("lstm gru rnn_tanh rnn_relu _cudnn_rnn miopen_rnn mkldnn_rnn_layer"), f.rnn_order, constant(2), cap=12),
    Family("rnn backward", _ops("mkldnn_rnn_layer_backward _cudnn_rnn_backward miopen_rnn_backward"), f.rnn_backward_order, constant(2), cap=12),
    Family("exp", _ops("exp exp2 expm1 sin cos tan sinh cosh pow softplus special_expit logit xlogy"), f.periodic_order, gain=g.periodic_gain),
    Family(
        "gelu",
        _ops(
            "gelu silu elu celu selu erf erfc mish log_sigmoid_forward glu _thnn_fused_lstm_cell _thnn_fused_gru_cell"
            " gelu_backward silu_backward elu_backward mish_backward tanh_backward sigmoid_backward softplus_backward"
            " log_sigmoid_backward glu_backward logit_backward hardswish_backward hardsigmoid_backward"
        ),
        f.tailed_order,
    ),
    Family(
        "transcendental",
        _ops(
            "tanh sigmoid log log2 log10 log1p rsqrt acos asin atan atan2 acosh asinh atanh erfinv lgamma digamma polygamma sinc"
            " hypot cbrt i0 angle log_normal exponential cauchy geometric mse_loss_backward smooth_l1_loss_backward"
            " huber_loss_backward nll_loss_backward binary_cross_entropy_backward polar complex"
            " _fused_adam _fused_adamw _fused_sgd _fused_adagrad rrelu_with_noise"
        ),
    ),
    Family("interpolation", _ops("upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d grid_sampler_2d grid_sampler_3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa"), f.interpolation_order),
    Family("fft", _ops("_fft_r2c _fft_c2r _fft_c2c"), f.fft_order, constant(2)),
    Family("distance", _ops("_cdist_forward _euclidean_dist _pdist_forward"), f.distance_order, constant(4), g.unlimited_gain),
    Family(
        "linear algebra",
        _ops(
            "_linalg_svd _linalg_eigh linalg_eig linalg_inv_ex linalg_lu_factor_ex linalg_lu linalg_cholesky_ex _linalg_solve_ex"
            " linalg_qr linalg_lstsq linalg_solve_triangular triangular_solve cholesky_inverse cholesky_solve geqrf ormqr"
            " linalg_householder_product _linalg_det _linalg_slogdet linalg_ldl_factor_ex linalg_matrix_exp linalg_pinv"
        ),
        gain=g.unlimited_gain,
        unbounded=True,
    ),
    Family("fused multiply-add", _ops("addcdiv"), constant(1), fused=True, gain=g.added_quotient_gain),
    Family("fused multiply-add", _ops("addcmul lerp hardswish hardsigmoid linspace logspace"), constant(1), fused=True, gain=g.addition_gain),
    Family("addition", _ops("add sub rsub"), constant(1), fused=True, gain=g.addition_gain),
    # One correctly rounded operation: equal in float32 in every kernel that was tried; float16 kernels
    # that go through float32 give one unit in the last place in a few elements.
    Family("square root", _ops("sqrt"), _ZERO, fused=True),
    Family(
        "threshold",
        _ops(
            "argmax argmin sort topk kthvalue median nanmedian mode eq ne lt le gt ge sign sgn signbit floor ceil round trunc frac"
            " heaviside bucketize searchsorted isclose unique_dim _unique2 unique_consecutive nonzero isnan isinf isfinite"
            " logical_and logical_or logical_not logical_xor floor_divide fmod remainder quantize_per_tensor quantize_per_channel"
            " fake_quantize_per_tensor_affine_cachemask fake_quantize_per_channel_affine_cachemask _fake_quantize_learnable_per_tensor_affine"
            " multinomial bernoulli histc bincount any all equal _local_scalar_dense item is_nonzero"
        ),
        _ZERO,
        exact=True,
        discrete=True,
    ),
    Family("exact", _ops("div"), _ZERO, gain=g.quotient_gain, exact=True),
    Family(
        "exact",
        _ops(
            "mul neg abs reciprocal square relu relu6 leaky_relu prelu hardtanh hardshrink softshrink threshold clamp clamp_min"
            " clamp_max maximum minimum max min amax amin aminmax fmax fmin where masked_fill masked_scatter nan_to_num copysign"
            " positive ldexp frexp nextafter real imag conj _conj conj_physical view_as_real view_as_complex"
            " threshold_backward hardtanh_backward leaky_relu_backward native_dropout native_dropout_backward dropout"
            " _to_copy to copy clone contiguous detach alias lift lift_fresh lift_fresh_copy view _unsafe_view reshape t transpose"
            " permute expand squeeze unsqueeze select slice narrow split split_with_sizes chunk unbind unfold as_strided diagonal"
            " movedim flatten unflatten swapaxes repeat repeat_interleave tile roll flip rot90 tril triu tril_indices triu_indices"
            " cat concat stack hstack vstack embedding index index_select gather take take_along_dim scatter index_copy index_fill"
            " index_put _index_put_impl _unsafe_index select_scatter slice_scatter diagonal_scatter as_strided_scatter"
            " constant_pad_nd pad reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d pixel_shuffle pixel_unshuffle"
            " channel_shuffle im2col max_pool1d max_pool2d max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d"
            " upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact2d cummax cummin bitwise_and"
            " bitwise_or bitwise_xor bitwise_not bitwise_left_shift bitwise_right_shift empty empty_like empty_strided new_empty"
            " new_empty_strided zeros zeros_like new_zeros ones ones_like new_ones full full_like new_full fill zero arange eye"
            " scalar_tensor one_hot rand randn rand_like randn_like randint randint_like randperm uniform normal random"
            " normal_functional resize set resolve_conj resolve_neg dequantize _amp_foreach_non_finite_check_and_unscale"
            " ger outer diag diag_embed slice_backward select_backward unfold_backward split_with_sizes_copy"
            " detach_copy view_copy expand_copy permute_copy transpose_copy t_copy slice_copy select_copy unsqueeze_copy"
            " squeeze_copy as_strided_copy alias_copy unbind_copy"
            # what lays tensors into a buffer of a collective, or takes them out of it, and further moves of elements
            " all_gather_copy_in chunk_cat _copy_from _copy_from_and_resize _pin_memory narrow_copy split_copy unfold_copy"
            " _reshape_alias _reshape_copy swapdims column_stack dstack block_diag masked_select tensor_split hsplit vsplit dsplit"
            " fill_diagonal meshgrid _pad_circular concatenate broadcast_to"
        ),
        _ZERO,
        gain=g.addition_gain,
        exact=True,
    ),
)  # fmt: skip

UNKNOWN: Final = Family(
    "unknown", frozenset(), f.unknown_order, constant(2), g.unlimited_gain, cap=12
)
UNKNOWN_POINTWISE: Final = Family(
    "unknown", frozenset(), f.tailed_order, constant(2), g.periodic_gain
)
UNKNOWN_REDUCTION: Final = Family(
    "unknown", frozenset(), f.sum_order, f.sum_intermediate, g.sum_gain
)

_EXACT: Final = FAMILIES[-1]


@cache
def _by_name() -> dict[str, Family]:
    return {op: family for family in FAMILIES for op in family.ops}


def family_of(view: OpView) -> Family:
    """The row that an op's call belongs to; arguments can make it another one than its name."""
    name = view.base_name
    found = _by_name().get(name)
    if found is None:
        if view.pointwise:
            return UNKNOWN_POINTWISE
        return UNKNOWN_REDUCTION if view.reduction else UNKNOWN
    if found.name == "addition":
        # alpha = 1 and -1 multiply without rounding
        return found if abs(view.number("alpha", 1.0)) != 1.0 else _exact_addition()
    if name == "pow":
        return _power(view, found)
    if name in ("index_put", "_index_put_impl"):
        accumulates = view.arguments.get("accumulate")
        return _by_name()["index_add"] if accumulates else found
    if name == "scatter_reduce" and view.arguments.get("reduce") in ("amax", "amin"):
        return _EXACT
    return found


@cache
def _exact_addition() -> Family:
    return Family("exact", frozenset(), _ZERO, gain=g.addition_gain, exact=True)


def _power(view: OpView, found: Family) -> Family:
    """x**2, x**1 and 1/x are one operation; x**0.5 is a square root."""
    exponent = view.arguments.get("exponent")
    if exponent in (0, 1, 2, -1):
        return _EXACT
    return _by_name()["sqrt"] if exponent == 0.5 else found
