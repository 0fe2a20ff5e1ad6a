"""What a CPU library takes, by dtype and flags."""

from __future__ import annotations

from typing import Final, Literal

from opdrift.picks.settings import Get

__all__ = ["Get", "lowered", "onednn_on", "onednn_takes", "refusal"]

#: Type of 16 bits -> the flag that says whether torch hands it to oneDNN on this CPU.
_SUPPORTED: Final = {"bfloat16": "cpu.onednn_bf16", "float16": "cpu.onednn_fp16"}


def onednn_on(flag: Get) -> bool | None:
    """Whether torch may use oneDNN, which it does unless it is told not to; None if the flag could not be read."""
    enabled = flag("mkldnn.enabled", True)
    return enabled if isinstance(enabled, bool) else None


def onednn_takes(dtype: str, flag: Get, kind: Literal["matmul", "conv", "rnn"]) -> bool | None:
    """Whether torch hands this dtype to oneDNN; None if that depends on units that the trace does not name.

    float32 is the caller's matter but for products, which oneDNN gets where the program lets it round their
    operands: to bfloat16 on CPUs with units for that, to TF32 on those with AMX-FP16
    (`use_mkldnn_bf32_matmul` and `use_mkldnn_tf32_matmul` in aten/src/ATen/native/mkldnn/Matmul.cpp).
    """
    enabled = onednn_on(flag)
    if not enabled:
        return enabled
    if dtype in _SUPPORTED:
        return _supports(dtype, flag)
    if dtype != "float32":
        return False
    precision = flag(f"fp32_precision.mkldnn.{kind}", "none")
    if precision in ("none", "ieee", None):
        return False
    if precision == "bf16":
        return _supports("bfloat16", flag)
    units = flag("cpu.units", None)
    if precision == "tf32" and isinstance(units, str):
        return "amx_fp16" in units.split()
    return None


def lowered(dtype: str, flag: Get) -> str:
    """What is said of float32 operands that are rounded before they are multiplied; empty for none."""
    if dtype != "float32":
        return ""
    return f", rounded to {flag('fp32_precision.mkldnn.matmul', 'none')}"


def refusal(dtype: str, flag: Get) -> str:
    """Why oneDNN does not compute with a dtype, where it does not."""
    if onednn_on(flag) is False and (dtype in _SUPPORTED or dtype == "float32"):
        return "oneDNN is switched off"
    return f"no library takes {dtype} here"


def _supports(dtype: str, flag: Get) -> bool | None:
    """Traces before 2026-12 lack the flag; every CPU that torch calls AVX512 has what bfloat16 needs."""
    supported = flag(_SUPPORTED[dtype], None)
    if isinstance(supported, bool):
        return supported
    old = dtype == "bfloat16" and flag("cpu_capability", None) == "AVX512"
    return True if old else None
