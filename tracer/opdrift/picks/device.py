"""Which kernels an op launched on a GPU, as the profiler named them (`kernels="full"`).

A kernel's name tells its library by habit, not by contract: what is not known here keeps its name and has no library.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from opdrift.picks.observed import Seen, counted
from opdrift.records import Pick

#: How kernels are named, by library; the first that is found counts. AMD's are those of Tensile, Composable Kernel and
#: MIOpen. Other people's kernels are called gemm, too, so of cuBLAS's only whole forms count.
_LIBRARIES: Final = tuple(
    (re.compile(pattern), library)
    for pattern, library in (
        (r"^(nccl|rccl)", "NCCL"),
        (r"^triton_", "Triton"),
        (r"\bflash_(fwd|bwd)|flash::", "FlashAttention"),
        (r"^fmha_cutlass|MemEffAttention", "CUTLASS"),
        (r"cudnn|^implicit_convolve_|convolve_common_engine|^sm\d+_xmma_(fprop|dgrad|wgrad)", "cuDNN"),
        (r"^(regular|vector|multi_bluestein)_fft|cufft", "cuFFT"),
        (r"cusparse", "cuSPARSE"),
        (r"\bat::|at_cuda_detail", "ATen"),
        (r"\bck::|\bck_tile::", "Composable Kernel"),
        (r"(?i)^miopen|^naive_conv_", "MIOpen"),
        (r"^Cijk_", "hipBLAS"),
        (r"cublas|^nvjet_|^sm\d+_xmma_gemm|^splitKreduce_kernel", "cuBLAS"),
        (r"^(maxwell|pascal|volta|turing|ampere|ada|hopper)_\w*gemm", "cuBLAS"),
        (r"^gemv2[TN]_|^gemvNSP_|\bgemvx::|^gemm(SN|k1)_|cutlass_\d+_(tensorop|wmma|simt)", "cuBLAS"),
        (r"\bcutlass::", "CUTLASS"),
    )
)  # fmt: skip
#: These move or fill memory around what computes.
_MOVES: Final = re.compile(r"Memcpy|Memset|splitKreduce|nchwToNhwc|nhwcToNchw")
_CUTLASS_INSIDE: Final = re.compile(r"cutlass::Kernel2?<(\w+)>")


def kernel_text(name: str) -> str:
    """A kernel's name without its return type and the types of its parameters; template arguments stay."""
    text = name.strip().removeprefix("void ")
    if not text.endswith(")"):
        return text
    depth = 0
    for at in range(len(text) - 1, -1, -1):
        depth += {")": 1, "(": -1}.get(text[at], 0)
        if depth == 0:
            # `Memcpy DtoH (Device -> Pinned)` has no parameters
            return text if not at or text[at - 1] == " " else text[:at]
    return text


def kernel_library(name: str) -> str | None:
    """The library that a kernel comes from; None for a copy, and where its name does not tell."""
    if name.startswith(("Memcpy", "Memset")):
        return None
    text = kernel_text(name)
    return next((library for pattern, library in _LIBRARIES if pattern.search(text)), None)


def with_kernels(chosen: Pick | None, op: str, seen: Seen) -> Pick | None:
    """What an op ran, by rule or by its name, and the kernels that it launched.

    Args:
        chosen: What is known without them; None for an op without a rule.
        op: Its name.
        seen: What the profiler saw of it.

    Returns:
        The pick with the kernels; as it was where none are known.
    """
    if seen.ambiguous or not seen.names:
        return chosen
    observed = counted_kernels(seen.names)
    if chosen is not None:
        return replace(chosen, observed=chosen.observed + observed)
    texts = [kernel_text(name) for name in seen.names]
    main = next((text for text in texts if not _MOVES.search(text)), texts[0])
    return Pick(f"{op}: {_short(main)}", kernel_library(main), source="profiler", observed=observed)


def counted_kernels(names: Sequence[str]) -> tuple[str, ...]:
    """Kernels for people, each once: `2 x at::native::reduce_kernel<...>`."""
    return counted(map(kernel_text, names))


def _short(text: str) -> str:
    """`cutlass_80_tensorop_s1688gemm_128x128_32x3_nn_align4`; of others what stands before the template arguments."""
    found = _CUTLASS_INSIDE.match(text)
    return found[1] if found else text.partition("<")[0] or text
