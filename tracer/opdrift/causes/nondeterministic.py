"""Ops that may give another result at every run: torch's own list."""

from __future__ import annotations

from typing import Final

#: Only with a sparse operand, which takes two inputs or more in a trace.
SPARSE: Final = "sparse times dense"
#: Aten op -> devices, and when. From the documentation of `torch.use_deterministic_algorithms` in torch
#: 2.13 (torch/__init__.py), checked against its op list (notes: kernels, flags.py).
NONDETERMINISTIC: Final[dict[str, tuple[str, str]]] = {
    "convolution": ("cuda", "cuDNN chooses"),
    "convolution_backward": ("cuda", ""),
    "cudnn_convolution": ("cuda", ""),
    "cudnn_convolution_transpose": ("cuda", ""),
    "replication_pad1d_backward": ("cuda", ""),
    "replication_pad2d_backward": ("cuda", ""),
    "replication_pad3d_backward": ("cuda", ""),
    "index_put": ("cpu cuda", "with repeated indices, or accumulate=True on cpu"),
    "index_put_": ("cpu cuda", "with repeated indices, or accumulate=True on cpu"),
    "_index_put_impl_": ("cpu cuda", "also the backward of indexing by tensors"),
    "put_": ("cpu cuda", "with repeated indices"),
    "scatter_add": ("cuda", ""),
    "scatter_add_": ("cuda", "also the backward of gather"),
    "index_add": ("cuda", ""),
    "index_add_": ("cuda", "also the backward of index_select and repeat_interleave"),
    "index_copy": ("cpu cuda", ""),
    "index_copy_": ("cpu cuda", ""),
    "scatter": ("cuda", "from a tensor"),
    "scatter_": ("cuda", "from a tensor"),
    "scatter_reduce": ("cuda", "sum, mean or prod"),
    "scatter_reduce_": ("cuda", "sum, mean or prod"),
    "max_pool3d_with_indices_backward": ("cuda", ""),
    "avg_pool3d_backward": ("cuda", ""),
    "_adaptive_avg_pool2d_backward": ("cuda", ""),
    "_adaptive_avg_pool3d_backward": ("cuda", ""),
    "adaptive_max_pool2d_backward": ("cuda", ""),
    "fractional_max_pool2d_backward": ("cuda", ""),
    "fractional_max_pool3d_backward": ("cuda", ""),
    "max_unpool2d": ("cpu cuda", ""),
    "max_unpool3d": ("cpu cuda", ""),
    "upsample_linear1d_backward": ("cuda", ""),
    "upsample_bilinear2d_backward": ("cuda", ""),
    "_upsample_bilinear2d_aa_backward": ("cuda", ""),
    "upsample_bicubic2d_backward": ("cuda", ""),
    "_upsample_bicubic2d_aa_backward": ("cuda", ""),
    "upsample_trilinear3d_backward": ("cuda", ""),
    "reflection_pad1d_backward": ("cuda", ""),
    "reflection_pad2d_backward": ("cuda", ""),
    "reflection_pad3d_backward": ("cuda", ""),
    "nll_loss2d_forward": ("cuda", ""),
    "nll_loss2d_backward": ("cuda", ""),
    "_ctc_loss_backward": ("cuda", ""),
    "_cudnn_ctc_loss": ("cuda", ""),
    "_embedding_bag_dense_backward": ("cuda", "mode='max'"),
    "put": ("cpu cuda", "with repeated indices"),
    "histc": ("cuda", ""),
    "bincount": ("cuda", "with weights"),
    "median": ("cuda", "with indices"),
    "nanmedian": ("cuda", "with indices"),
    "kthvalue": ("cuda", ""),
    "grid_sampler_2d_backward": ("cuda", ""),
    "grid_sampler_3d_backward": ("cuda", ""),
    "cumsum": ("cuda", "floating point"),
    "cumsum_": ("cuda", "floating point"),
    "bmm": ("cuda", SPARSE),
    # not on torch's list, and atomic in the same way
    "embedding_dense_backward": (
        "cuda",
        "sums the gradients of equal indices with atomic additions",
    ),
}
