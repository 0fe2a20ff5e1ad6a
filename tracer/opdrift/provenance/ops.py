"""Which ops draw, fill, or pass a content on; by name without namespace, overload and trailing underscore."""

from __future__ import annotations

from functools import cache
from typing import Final


def _ops(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Contents come from a generator alone.
DRAWS: Final = _ops(
    "uniform normal bernoulli rand randn rand_like randn_like randint randint_like randperm random multinomial"
    " exponential cauchy log_normal geometric poisson binomial normal_functional bernoulli_functional _sample_dirichlet"
    " _standard_gamma"
)

#: Contents are constants of the program.
FILLS: Final = _ops(
    "zero zeros zeros_like new_zeros fill ones ones_like new_ones full full_like new_full eye arange linspace logspace"
    " scalar_tensor tril_indices triu_indices range _efficientzerotensor hann_window hamming_window blackman_window"
    " bartlett_window kaiser_window fill_diagonal constant"
)

#: Contents are elements of one input, moved, repeated or cast.
COPIES: Final = _ops(
    "copy _to_copy to clone contiguous lift lift_fresh lift_fresh_copy detach alias view _unsafe_view reshape _reshape_alias"
    " _reshape_copy view_copy alias_copy detach_copy expand_copy permute_copy transpose_copy t_copy slice_copy select_copy"
    " squeeze_copy unsqueeze_copy as_strided_copy unbind_copy split_copy split_with_sizes_copy narrow_copy _copy_from"
    " _copy_from_and_resize _foreach_copy cat concat concatenate stack hstack vstack index_select gather take embedding index"
    " repeat tile flip roll rot90 constant_pad_nd resolve_conj resolve_neg _conj_physical pixel_shuffle pixel_unshuffle"
    " _allgather_base allgather all_gather_into_tensor allgather_into_tensor_coalesced all_gather_into_tensor_coalesced"
    " all_gather_copy_in broadcast wait_tensor scatter_tensor chunk_cat dequantize"
)

#: Of `all_gather_copy_in`, the buffer that it fills comes behind what it lays into it.
CONCATENATIONS: Final = _ops("cat concat concatenate stack all_gather_copy_in")
#: Collectives that lay the inputs of all ranks end to end.
GATHERS: Final = _ops(
    "_allgather_base allgather all_gather_into_tensor allgather_into_tensor_coalesced"
)
#: Where the copied content is among an op's tensor arguments, if not in front.
SOURCE_POSITION: Final = {
    "copy": 1,
    "_allgather_base": 1,
    "allgather": -1,
    "allgather_into_tensor_coalesced": -1,
}

#: Initialisers compute with these beside elementwise ops; what a network or an optimizer makes is not so.
INITIALISING: Final = _ops(
    "linalg_qr linalg_svd linalg_vector_norm linalg_householder_product qr svd _linalg_svd geqrf orgqr diag diagonal_copy"
    " diag_embed tril triu index_put index_fill index_copy masked_fill masked_scatter scatter where sort"
)

#: Values were rounded to a grid.
QUANTISERS: Final = _ops(
    "round quantize_per_tensor quantize_per_channel quantize_per_tensor_dynamic dequantize fake_quantize_per_tensor_affine"
    " fake_quantize_per_channel_affine fake_quantize_per_tensor_affine_cachemask fake_quantize_per_channel_affine_cachemask"
    " _fake_quantize_learnable_per_tensor_affine _weight_int4pack_mm _weight_int8pack_mm int_repr quantize_affine dequantize_affine"
)

#: These change which memory a tensor stands for; they write no content.
REBINDING: Final = _ops("resize set resize_as _resize_output resize_as_sparse detach")


@cache
def operator(name: str) -> str:
    """`aten.copy_.default` -> `copy`."""
    parts = name.split(".")
    op = parts[1] if len(parts) > 1 else name
    return op[:-1] if op.endswith("_") and not op.endswith("__") else op


@cache
def short_name(name: str) -> str:
    """`aten.uniform_.default` -> `aten.uniform_`."""
    return ".".join(name.split(".")[:2])
