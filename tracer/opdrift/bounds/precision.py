"""In which precision products of float32 may be computed: TF32 and bfloat16 round their factors first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal

from opdrift.bounds.table import Family

Precision = Literal["ieee", "tf32", "bf16"]

#: Unit roundoff of the factors: TF32 keeps 10 bits of the mantissa, bfloat16 7 (PyTorch's notes on CUDA and oneDNN).
ROUNDOFF: Final = {"ieee": 2.0**-24, "tf32": 2.0**-11, "bf16": 2.0**-8}
#: Family -> the name of its setting below `fp32_precision.<backend>`.
_SETTING: Final = {
    "matmul": "matmul",
    "attention": "matmul",
    "fused layer": "matmul",
    "rnn": "rnn",
}
_CONVOLUTION: Final = "conv"


def setting_of(family: Family, op: str) -> str | None:
    """The setting that an op obeys: "matmul", "conv" or "rnn"; None for an op without products."""
    found = _SETTING.get(family.name)
    return "conv" if found == "matmul" and _CONVOLUTION in op else found


def product_precision(device: str, setting: str, flag: Callable[[str, Any], Any]) -> Precision:
    """In which precision float32 products may be computed on a device.

    "May": the library decides call by call (cuBLAS and cuDNN by shape and alignment).

    Args:
        device: As in a layout, `cuda:0`.
        setting: "matmul", "conv" or "rnn".
        flag: Asks for a flag of the trace's header, with a default.
    """
    backend = {"cpu": "mkldnn", "cuda": "cuda"}.get(device.partition(":")[0])
    if backend is None:
        return "ieee"
    for name in (f"{backend}.{setting}", f"{backend}.all", "generic.all"):
        value = flag(f"fp32_precision.{name}", "none")
        if value in ("tf32", "bf16"):
            return "tf32" if value == "tf32" else "bf16"
        if value == "ieee":
            return "ieee"
    # what a torch without fp32_precision says
    older = "cuda.matmul.allow_tf32" if setting == "matmul" else "cudnn.allow_tf32"
    return "tf32" if backend == "cuda" and flag(older, False) is True else "ieee"
