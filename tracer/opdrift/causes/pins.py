"""How to make both runs take the same kernel, in words that can be typed."""

from __future__ import annotations

import re
from typing import Final

from opdrift.records import Pick

_ATTENTION: Final = (
    "Pin the backend on both sides, to one that every call can run: with"
    " torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH): ..."
)
_PROGRAM: Final = (
    "Let both sides compute attention in one way: call scaled_dot_product_attention in both, or neither (in"
    " transformers attn_implementation='sdpa' or 'eager')"
)
FAST_PATH: Final = "Pin the path on both sides: torch.backends.mha.set_fastpath_enabled(False)"
PADDED: Final = " Padded rows are zeros on the fast path of nn.TransformerEncoder: compare valid positions only."
_DEVICE: Final = (
    "Run both sides with the same batch size, dtype and versions, and with torch.backends.cudnn.benchmark = False:"
    " which kernel a GPU's libraries run follows from the sizes, or from what was fastest when it was tried"
)
_SWITCH: Final = "Switch oneDNN on or off in both runs: torch.backends.mkldnn.enabled = False"
_PRECISION: Final = (
    'Let both runs compute float32 in full: torch.set_float32_matmul_precision("highest")'
)
_ENGINE: Final = (
    "Set torch.backends.quantized.engine alike in both runs, before the weights are packed: what they"
    " were packed for computes"
)
_NNPACK: Final = "Leave NNPACK out in both runs: torch.backends.nnpack.set_flags(False)"
_ONE_ROW: Final = "Give both sides two rows or more, or the same batch size: a single row of 16 bits has a kernel of its own"
_THREADS: Final = (
    "Give both runs as many threads, as torch.set_num_threads(1): by them torch chooses who computes a 1x1 convolution"
    " of a small batch"
)
#: How the rule of convolutions ends where threads decide.
_ON_THREADS: Final = re.compile(r"on (?:one thread|\d+ threads)$")
_SIZE: Final = (
    "Give both sides the same batch size, or leave oneDNN out in both: torch.backends.mkldnn.enabled = False; which"
    " library computes follows from the sizes"
)
_INSIDE_ONEDNN: Final = (
    "oneDNN chooses by sizes, dtype and instruction set: run both sides with the same batch size, and with"
    " ONEDNN_MAX_CPU_ISA=AVX2 in the environment of both"
)
_ROUTINE: Final = (
    "Run both sides with the same batch size: which routine multiplies follows from the sizes"
)
_SAME_BATCH: Final = (
    "For equal bits give both runs the same batch size (pad it, and drop what was added)"
)
#: Measured in torch 2.13 with MKL 2024.2 (docs/kernels.md): products of 1 to 40 rows alone and among 15 times as
#: many, on 1 and 2 threads.
_STRICT: Final = "set MKL_CBWR={isa},STRICT in the environment of both: MKL then adds alike for any number of rows and threads"


def of_other_picks(left: Pick, right: Pick) -> str:
    """How to make both sides run the same, where they did not; a sentence without its end."""
    both = (left, right)
    if any(
        p.backend is None and not is_routine(p) and "fast path" in (p.reason or "") for p in both
    ):
        return FAST_PATH
    if any(written_out(p) for p in both):
        return _PROGRAM
    if any(p.backend is not None for p in both):
        return _ATTENTION
    if any(p.source == "profiler" for p in both):
        return _DEVICE
    return _of_routines(left, right)


def _of_routines(left: Pick, right: Pick) -> str:
    reasons = f"{left.reason} {right.reason}"
    libraries = {left.library, right.library}
    for words, pin in (
        ("switched off", _SWITCH),
        ("rounded to", _PRECISION),
        ("quantized engine", _ENGINE),
        ("one row", _ONE_ROW),
    ):
        if words in reasons:
            return pin
    if all(p.reason and _ON_THREADS.search(p.reason) for p in (left, right)):
        return _THREADS
    if "NNPACK" in libraries:
        return _NNPACK
    if libraries == {"oneDNN"}:
        return _INSIDE_ONEDNN
    return _SIZE if "oneDNN" in libraries else _ROUTINE


def of_other_sizes(pick: Pick, capability: object) -> str:
    """How to get equal bits of a product whose sizes differ; a sentence without its end.

    Args:
        pick: What both sides ran.
        capability: `cpu_capability` of the header: the vector units that torch uses.
    """
    if pick.library != "MKL":
        return _SAME_BATCH
    strict = _STRICT.format(isa="AVX512" if capability == "AVX512" else "AVX2")
    return f"{_SAME_BATCH}, or {strict}"


def of_other_threads(count: object) -> str:
    """How to get equal bits where the runs had other numbers of threads; a sentence without its end."""
    return f"For equal bits give both runs as many threads: torch.set_num_threads({count})"


def written_out(pick: Pick) -> bool:
    """Whether the program computes attention in ops of its own, which no switch of torch's changes."""
    return pick.name == "eager attention"


def is_routine(pick: Pick) -> bool:
    """Whether it is a routine of a library, named after its op."""
    return ": " in pick.name
