"""Attention ops that are told by their name: torch's backends, and those of other libraries."""

from __future__ import annotations

from typing import Final

from opdrift.picks.values import base_name
from opdrift.records import Pick

#: Op -> torch's name of the attention backend, and the library that the kernel comes from. Their backward
#: ops carry the same names with `_backward`.
_TORCH: Final[dict[str, tuple[str, str]]] = {
    "_scaled_dot_product_flash_attention_for_cpu": ("FLASH_ATTENTION", "ATen"),
    "_scaled_dot_product_flash_attention": ("FLASH_ATTENTION", "FlashAttention"),
    "_scaled_dot_product_flash_attention_quantized": ("FLASH_ATTENTION", "FlashAttention"),
    "_flash_attention_forward": ("FLASH_ATTENTION", "FlashAttention"),
    "_flash_attention_forward_no_dropout_inplace": ("FLASH_ATTENTION", "FlashAttention"),
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

#: Namespace of a library's ops -> the library. Their attention ops have "attention", "flash" or "fwd" and
#: "bwd" in their names (flash-attn 2.7 and 3, xFormers 0.0.30).
_LIBRARIES: Final = {
    "flash_attn": "flash-attn",
    "flash_attn_2": "flash-attn",
    "flash_attn_3": "flash-attn 3",
    "_flash_attn_forward": "flash-attn",
    "vllm_flash_attn": "vLLM's flash-attn",
    "_vllm_fa2_C": "vLLM's flash-attn",
    "_vllm_fa3_C": "vLLM's flash-attn 3",
    "xformers": "xFormers",
    "xformers_flash": "xFormers' flash-attn",
    "xformers_flash3": "xFormers' flash-attn 3",
    "sageattention": "SageAttention",
}
_WORDS: Final = ("attention", "attn", "flash", "fwd", "bwd")


#: What AMD's builds run under the names of flash and memory-efficient attention.
_ON_AMD: Final = "AOTriton or Composable Kernel"


def named(name: str, *, amd: bool = False) -> Pick | None:
    """The attention that an op of this name is by itself; None for other ops.

    Args:
        name: Of the op, `aten._scaled_dot_product_flash_attention.default`.
        amd: Whether the run's torch was built for AMD's devices.
    """
    space, op = name.partition(".")[0], base_name(name)
    if op.startswith("flex_attention"):
        reason = "the program called flex_attention, which is none of SDPA's backends"
        return Pick(name, "FlexAttention", None, reason, source="dispatcher")
    if (library := _LIBRARIES.get(space)) is not None:
        if not any(word in op for word in _WORDS):
            return None
        reason = "the program called this library, not SDPA"
        return Pick(name, library, None, reason, source="dispatcher")
    if space != "aten":
        return None
    known = _TORCH.get(op) or _TORCH.get(op.removesuffix("_backward"))
    if known is not None:
        backend, library = known
        if amd and library in ("FlashAttention", "CUTLASS"):
            library = _ON_AMD
        reason = "this op is the backend's own"
        if op.endswith("_backward"):
            reason = "backward of the backend that ran forward"
        return Pick(name, library, backend, reason, source="dispatcher")
    if op.startswith(("_triton_scaled_dot_attention", "_triton_multi_head_attention")):
        reason = "the program called torch's attention in Triton, which is none of SDPA's backends"
        return Pick(name, "Triton", None, reason, source="dispatcher")
    if op.startswith("_scaled_dot_product_"):
        reason = "an attention backend of torch that this opdrift does not know"
        return Pick(name, None, None, reason, source="dispatcher")
    return None
