"""Which implementation an op ran, from what the trace holds.

A fused attention op *is* the pick; the math path and attention written by hand are recognised by data
flow (`attention_regions`); for matmul and convolution on CPUs the library follows from torch's own rules.
"""

from __future__ import annotations

from typing import Final

from opdrift.picks.attention import AttentionRegion, attention_regions
from opdrift.picks.cpu import flash_refusal, routine
from opdrift.picks.settings import Settings
from opdrift.picks.values import base_name
from opdrift.records import Pick
from opdrift.tracefile.reader import Trace

__all__ = ["AttentionRegion", "Settings", "attention_regions", "pick", "region_pick"]

#: Op -> torch's name of the attention backend, and the library that the kernel comes from. Their backward
#: ops carry the same names with `_backward`.
_ATTENTION: Final[dict[str, tuple[str, str]]] = {
    "_scaled_dot_product_flash_attention_for_cpu": ("FLASH_ATTENTION", "ATen"),
    "_scaled_dot_product_flash_attention": ("FLASH_ATTENTION", "FlashAttention"),
    "_flash_attention_forward": ("FLASH_ATTENTION", "FlashAttention"),
    "_flash_attention": ("FLASH_ATTENTION", "FlashAttention"),
    "_scaled_dot_product_efficient_attention": ("EFFICIENT_ATTENTION", "CUTLASS"),
    "_efficient_attention_forward": ("EFFICIENT_ATTENTION", "CUTLASS"),
    "_efficient_attention": ("EFFICIENT_ATTENTION", "CUTLASS"),
    "_scaled_dot_product_cudnn_attention": ("CUDNN_ATTENTION", "cuDNN"),
    "_cudnn_attention_forward": ("CUDNN_ATTENTION", "cuDNN"),
    "_scaled_dot_product_fused_attention_overrideable": ("OVERRIDEABLE", "backend"),
    "_scaled_dot_product_attention_math": ("MATH", "ATen"),
    "_scaled_dot_product_attention_math_for_mps": ("MATH", "MPS"),
}

#: Fused paths of modules; attention inside them is none of SDPA's backends.
_FUSED: Final = {
    "_transformer_encoder_layer_fwd": "the fast path of nn.TransformerEncoderLayer",
    "_native_multi_head_attention": "the fast path of nn.MultiheadAttention",
}


def pick(trace: Trace, op_index: int, settings: Settings | None = None) -> Pick | None:
    """Which implementation the op at an index ran; None where there is no choice or it is not known.

    `settings` are those of the trace; who asks for many ops makes them once.
    """
    name = trace.op_info(int(trace.ops.signature[op_index])).name
    op = base_name(name)
    if op in _FUSED:
        return Pick(name, "ATen", None, _FUSED[op], source="dispatcher")
    known = _ATTENTION.get(op) or _ATTENTION.get(op.removesuffix("_backward"))
    if known is not None:
        backend, library = known
        return Pick(name, library, backend, "this op is the backend's own", source="dispatcher")
    if op == "_safe_softmax":
        reason = "nothing but the math path of SDPA calls it"
        return Pick(name, "ATen", "MATH", reason, source="dispatcher")
    return routine(trace, op_index, settings)


def region_pick(trace: Trace, region: AttentionRegion) -> Pick:
    """The pick that a region of several ops stands for."""
    if region.backend is None:
        return Pick(region.name, "ATen", None, "attention written out in ops", source="inferred")
    why = flash_refusal(trace, region)
    refused = {} if why is None else {"FLASH_ATTENTION": why}
    return Pick(region.name, "ATen", region.backend, why, refused, "dispatcher")
