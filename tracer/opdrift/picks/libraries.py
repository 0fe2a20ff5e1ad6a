"""What a CPU library takes, by dtype and flags."""

from __future__ import annotations

from typing import Literal

from opdrift.picks.settings import Get

__all__ = ["Get", "onednn_takes"]


def onednn_takes(
    dtype: str, flag: Get, kind: Literal["matmul", "conv", "rnn", "all"]
) -> bool | None:
    """Whether torch hands products of this dtype to oneDNN; None if that depends on the CPU's units.

    bfloat16 needs AVX-512 BW, VL and DQ (`mkldnn_bf16_device_check`), which every CPU has that torch calls
    AVX512; float16 needs units that the trace does not name, and so does float32 at a lower precision.
    """
    if not flag("mkldnn.enabled", True):
        return False
    if dtype == "float32":
        precision = flag(f"fp32_precision.mkldnn.{kind}", "none")
        return False if precision in ("none", "ieee", None) else None
    if dtype == "bfloat16":
        return True if flag("cpu_capability", None) == "AVX512" else None
    return None if dtype == "float16" else False
