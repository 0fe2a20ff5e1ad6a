"""Which CPU library computes with integers and eight-bit floats, and sums rows of a table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from opdrift.picks.libraries import Get, onednn_on, onednn_takes
from opdrift.records import Argument, Op, Pick, TensorMeta

#: `torch.backends.quantized.engine` -> the library of a product of quantised numbers.
_ENGINES: Final = {
    "x86": "FBGEMM",
    "fbgemm": "FBGEMM",
    "onednn": "oneDNN",
    "qnnpack": "QNNPACK",
}
#: `embedding_bag`: numbers of its modes that add rows, and the types that FBGEMM has a kernel for.
_ADDING: Final = (0, 1)
_IN_BAGS: Final = ("float32", "float16", "bfloat16")


def integers(
    op: Op, metas: list[TensorMeta], arguments: Mapping[str, Argument], flag: Get
) -> Pick | None:
    """`_int_mm`."""
    enabled = onednn_on(flag)
    if enabled is None:
        return None
    if not enabled:
        return Pick(f"{op.name}: own loop", "ATen", None, "oneDNN is switched off")
    return Pick(f"{op.name}: gemm_s8s8s32", "oneDNN", None, "products of int8 with int32 sums")


def scaled(
    op: Op, metas: list[TensorMeta], arguments: Mapping[str, Argument], flag: Get
) -> Pick | None:
    """`_scaled_mm`: operands of float8, each with a scale (`_scaled_mm_cpu` in aten/src/ATen/native/Blas.cpp)."""
    if len(metas) < 4 or any(0 in m.shape for m in metas):
        return None
    dtype, scales, enabled = metas[0].dtype, metas[2:4], onednn_on(flag)
    units = flag("cpu.units", None)
    if enabled is None or (enabled and not isinstance(units, str)):
        return None
    if not enabled:
        return Pick(f"{op.name}: SGEMM", "MKL", None, f"{dtype} as float32: oneDNN is switched off")
    needed = "amx_int8" if metas[1].dtype == dtype else "amx_fp16"
    if needed not in str(units).split():
        if onednn_takes("float32", flag, "matmul") is not False:
            return None
        why = f"{dtype} as float32: this CPU has no {needed}"
        return Pick(f"{op.name}: SGEMM", "MKL", None, why)
    if any(math.prod(m.shape) > 1 for m in scales):
        if onednn_takes("float32", flag, "matmul") is not False:
            return None  # what it becomes is rounded again, or not, by its size
        return Pick(f"{op.name}: SGEMM", "MKL", None, f"{dtype} as float32: more than one scale")
    return Pick(f"{op.name}: matmul", "oneDNN", None, f"{dtype} with one scale an operand")


def quantised(
    op: Op, metas: list[TensorMeta], arguments: Mapping[str, Argument], flag: Get
) -> Pick | None:
    """`quantized::linear` and its like, whose weights were packed for an engine before."""
    engine = flag("quantized.engine", None)
    library = _ENGINES.get(engine) if isinstance(engine, str) else None
    if library is None:
        return None
    return Pick(f"{op.name}: product", library, None, f"the quantized engine is {engine}")


def quantised_convolution(
    op: Op, metas: list[TensorMeta], arguments: Mapping[str, Argument], flag: Get
) -> Pick | None:
    """As `quantised`; "x86" chooses by the weight's zero points, which the trace does not hold."""
    if flag("quantized.engine", None) == "x86":
        return None
    return quantised(op, metas, arguments, flag)


def packed_weights(
    op: Op, metas: list[TensorMeta], arguments: Mapping[str, Argument], flag: Get
) -> Pick | None:
    """Products with weights of 4 or 8 bits that stand packed in a tensor."""
    return Pick(f"{op.name}: own product", "ATen", None, "no library takes packed weights here")


def bags(
    op: Op, metas: list[TensorMeta], arguments: Mapping[str, Argument], flag: Get
) -> Pick | None:
    """`_embedding_bag` (`is_fast_path_index_select` in aten/src/ATen/native/EmbeddingBag.cpp)."""
    table, mode = metas[0], arguments.get("mode", 0)
    padding = arguments.get("padding_idx", -1)
    if len(table.shape) != 2 or not isinstance(padding, int):
        return None
    why = None
    if mode not in _ADDING:
        why = "the largest of a bag is torch's own"
    elif table.dtype not in _IN_BAGS:
        why = f"FBGEMM does not take {table.dtype}"
    elif padding >= 0:
        why = f"padding_idx is {padding}"
    elif table.stride[1] != 1:
        why = "rows of the table are not contiguous"
    if why is not None:
        return Pick(f"{op.name}: own sums", "ATen", None, why)
    return Pick(f"{op.name}: EmbeddingSpMDM", "FBGEMM", None, f"sums of rows of {table.dtype}")
