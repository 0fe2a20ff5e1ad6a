"""Which CPU library computes an op, by the rules of torch 2.13's x86 build (notes: kernels, 5.1).

Held against oneDNN's and MKL's verbose output (tests/tracer/test_cpu_routines.py). Where the trace does not
hold a fact that decides, there is no answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

from opdrift.picks.convolution import convolution, convolution_backward
from opdrift.picks.libraries import Get, lowered, onednn_on, onednn_takes, refusal
from opdrift.picks.quantised import (
    bags,
    integers,
    packed_weights,
    quantised,
    quantised_convolution,
    scaled,
)
from opdrift.picks.settings import Settings
from opdrift.picks.values import base_name
from opdrift.records import Argument, Op, Pick, TensorMeta
from opdrift.tracefile.reader import Trace

#: oneDNN takes a product when m n k (times the batch for bmm) exceeds this.
_ONEDNN_ABOVE: Final = 16 * 16 * 16
#: bmm: products smaller than this are torch's own loop.
_OWN_LOOP_BELOW: Final = 400
_PRODUCTS: Final = ("mm", "addmm", "bmm", "baddbmm")
_PREFIX: Final = {"float32": "S", "float64": "D", "complex64": "C", "complex128": "Z"}
#: BLAS has two dot products of complex numbers; one conjugates.
_DOT: Final = {"float32": "SDOT", "float64": "DDOT", "complex64": "CDOTU", "complex128": "ZDOTU"}
_VDOT: Final = {**_DOT, "complex64": "CDOTC", "complex128": "ZDOTC"}

_QUANTISED_LINEAR: Final = ("linear", "linear_relu", "linear_dynamic", "linear_relu_dynamic")
_QUANTISED_CONVOLUTIONS: Final = tuple(
    f"{kind}{dims}d{end}"
    for kind in ("conv", "conv_transpose")
    for dims in (1, 2, 3)
    for end in ("", "_relu", "_dynamic")
)

#: (name of the op, layouts of its tensors, arguments, flags) -> the pick.
_Rule = Callable[[Op, list[TensorMeta], Mapping[str, Argument], Get], Pick | None]


def routine(trace: Trace, op_index: int, settings: Settings) -> Pick | None:
    """The library and routine of an op on a CPU; None for ops without a choice, or if it is not known."""
    name = trace.op_info(int(trace.ops.signature[op_index])).name
    rule = _RULES.get(name.partition(".")[0], {}).get(base_name(name))
    if rule is None or "mkl" not in trace.header.versions:
        return None
    op = trace.op(op_index)
    metas = _operands(trace, op)
    if not metas or any(m.device != "cpu" for m in metas):
        return None
    arguments = {**op.signature.op.defaults, **dict(op.signature.arguments)}
    return rule(op, metas, arguments, settings.before(op.seq))


def _operands(trace: Trace, op: Op) -> list[TensorMeta]:
    """What an op is given, without the `out=` that it writes: compiled code calls `addmm.out`."""
    metas = [trace.meta(v) for v in op.inputs]
    info = op.signature.op
    return metas[:-1] if info.arguments[-1:] == ("out",) and "out" in info.mutates else metas


def product_sizes(trace: Trace, op_index: int) -> tuple[int, ...] | None:
    """(m, n, k) of a product of matrices, (batch, m, n, k) of several; None for other ops."""
    name = base_name(trace.op_info(int(trace.ops.signature[op_index])).name)
    if name not in _PRODUCTS:
        return None
    metas = _operands(trace, trace.op(op_index))
    left, right = (m.shape for m in metas[-2:]) if len(metas) > 1 else ((), ())
    if not 2 <= len(left) == len(right) <= 3:
        return None
    return (*left[:-1], right[-1], left[-1])


# ---- products --------------------------------------------------------------------------------------------


def _matrices(
    op: Op, metas: list[TensorMeta], arguments: Mapping[str, Argument], flag: Get
) -> Pick | None:
    """mm, addmm, bmm, baddbmm: the last two operands are multiplied."""
    if len(metas) < 2:
        return None
    left, right = metas[-2], metas[-1]
    if not (2 <= len(left.shape) == len(right.shape) <= 3):
        return None
    m, k, n = left.shape[-2], left.shape[-1], right.shape[-1]
    batch = left.shape[0] if len(left.shape) == 3 else None
    if batch is None and m == 1 and right.stride[0] == 1 and arguments.get("alpha", 1) == 1:
        return _row(op.name, left.dtype, n * k, flag)
    return _product(op.name, left.dtype, m * n * k, batch, flag)


def _linear(
    op: Op, metas: list[TensorMeta], arguments: Mapping[str, Argument], flag: Get
) -> Pick | None:
    """`linear` seen whole, as under inference_mode: one product over all rows if they lie in order."""
    rows, weight = metas[0], metas[1]
    if len(weight.shape) != 2 or not (len(rows.shape) == 2 or _contiguous(rows)):
        return None
    size = math.prod(rows.shape) * weight.shape[0]
    if math.prod(rows.shape[:-1]) == 1 and weight.stride[1] == 1:
        return _row(op.name, rows.dtype, size, flag)
    return _product(op.name, rows.dtype, size, None, flag)


def _matmul(
    op: Op, metas: list[TensorMeta], arguments: Mapping[str, Argument], flag: Get
) -> Pick | None:
    """`matmul` seen whole: by its ranks it is a dot, mv, mm or bmm."""
    if len(metas) != 2:
        return None
    left, right = metas
    ranks = len(left.shape), len(right.shape)
    if ranks == (1, 1):
        return _dot(op, metas, arguments, flag)
    if ranks == (2, 1):
        return _vector(op, metas, arguments, flag)
    if ranks == (2, 2):
        return _matrices(op, metas, arguments, flag)
    if min(ranks) >= 3 and left.shape[:-2] == right.shape[:-2]:
        m, k, n = left.shape[-2], left.shape[-1], right.shape[-1]
        return _product(op.name, left.dtype, m * n * k, math.prod(left.shape[:-2]), flag)
    if ranks[0] >= 3 and ranks[1] == 2 and _contiguous(left):  # folded into rows
        size = math.prod(left.shape) * right.shape[-1]
        if math.prod(left.shape[:-1]) == 1 and right.stride[0] == 1:
            return _row(op.name, left.dtype, size, flag)
        return _product(op.name, left.dtype, size, None, flag)
    return None


def _row(name: str, dtype: str, size: int, flag: Get) -> Pick | None:
    """One row times a matrix whose columns are contiguous, as in `linear` for a single token.

    16-bit types have dot products of torch's own for it, which bfloat16 leaves to oneDNN on CPUs with AVX512_BF16.
    """
    own = dtype == "float16"
    if dtype == "bfloat16" and size > _ONEDNN_ABOVE and onednn_takes(dtype, flag, "matmul"):
        units = flag("cpu.units", None)
        if not isinstance(units, str):
            return None
        own = "avx512_bf16" not in units.split()
    if own and size:
        return Pick(f"{name}: own dot products", "ATen", None, f"one row of {dtype}")
    return _product(name, dtype, size, None, flag)


def _product(name: str, dtype: str, size: int, batch: int | None, flag: Get) -> Pick | None:
    total = size * (1 if batch is None else batch)
    if total == 0:
        return None
    sizes = "m n k" if batch is None else "batch m n k"
    takes = onednn_takes(dtype, flag, "matmul")
    if takes is None:
        return None
    if takes and total > _ONEDNN_ABOVE:
        return Pick(
            f"{name}: matmul",
            "oneDNN",
            None,
            f"{dtype}{lowered(dtype, flag)}, {sizes} = {total} > {_ONEDNN_ABOVE}",
        )
    if batch is not None and size < _OWN_LOOP_BELOW:
        return Pick(f"{name}: own loop", "ATen", None, f"m n k = {size} < {_OWN_LOOP_BELOW}")
    if dtype in _PREFIX:
        batched = "_BATCH" if batch is not None and batch > 1 else ""
        of = "" if batch is None else f", {'batch 1' if batch == 1 else f'batch {batch} > 1'}"
        return Pick(
            f"{name}: {_PREFIX[dtype]}GEMM{batched}", "MKL", None, f"{dtype} goes to BLAS{of}"
        )
    why = f"{sizes} = {total} <= {_ONEDNN_ABOVE}" if takes else refusal(dtype, flag)
    return Pick(f"{name}: own loop", "ATen", None, why)


def _vector(
    op: Op, metas: list[TensorMeta], arguments: Mapping[str, Argument], flag: Get
) -> Pick | None:
    """mv, addmv; torch hands BLAS no complex ones, and no vector that is expanded (`gemv_use_fast_path`)."""
    matrix, vector = metas[-2:]
    blas = {"float32": "SGEMV", "float64": "DGEMV"}.get(matrix.dtype)
    found = _level2(op.name, "GEMV", matrix, blas, flag)
    if found is not None and found.library == "MKL" and vector.stride == (0,):
        return Pick(f"{op.name}: own GEMV", "ATen", None, "the vector is one number, expanded")
    return found


def _dot(
    op: Op, metas: list[TensorMeta], arguments: Mapping[str, Argument], flag: Get
) -> Pick | None:
    blas = _VDOT if base_name(op.name) == "vdot" else _DOT
    return _level2(op.name, "dot product", metas[0], blas.get(metas[0].dtype), flag)


def _level2(name: str, kind: str, larger: TensorMeta, blas: str | None, flag: Get) -> Pick | None:
    """A product with a vector: BLAS, or oneDNN for 16-bit types from a size on."""
    size = math.prod(larger.shape)
    takes = onednn_takes(larger.dtype, flag, "matmul")
    if size == 0 or takes is None:
        return None
    if takes and size > _ONEDNN_ABOVE:
        why = f"{larger.dtype}{lowered(larger.dtype, flag)}, {size} elements > {_ONEDNN_ABOVE}"
        return Pick(f"{name}: matmul", "oneDNN", None, why)
    if blas is not None:
        return Pick(f"{name}: {blas}", "MKL", None, f"{larger.dtype} goes to BLAS")
    why = f"{size} elements <= {_ONEDNN_ABOVE}" if takes else refusal(larger.dtype, flag)
    return Pick(f"{name}: own {kind}", "ATen", None, why)


# ---- recurrent layers ------------------------------------------------------------------------------------


def _lstm(
    op: Op, metas: list[TensorMeta], arguments: Mapping[str, Argument], flag: Get
) -> Pick | None:
    """`lstm` seen whole: `use_mkldnn` in aten/src/ATen/native/RNN.cpp."""
    dtype = metas[0].dtype
    if 0 in metas[0].shape:
        return None
    takes = onednn_on(flag) if dtype == "float32" else onednn_takes(dtype, flag, "rnn")
    if takes is None:
        return None
    if takes:
        return Pick(f"{op.name}: rnn", "oneDNN", None, f"LSTM of {dtype}")
    return Pick(f"{op.name}: products and own cells", "ATen", None, refusal(dtype, flag))


def _own_cells(
    op: Op, metas: list[TensorMeta], arguments: Mapping[str, Argument], flag: Get
) -> Pick | None:
    kind = base_name(op.name)
    return Pick(
        f"{op.name}: products and own cells", "ATen", None, f"oneDNN is used for LSTM, not {kind}"
    )


def _onednn_rnn(
    op: Op, metas: list[TensorMeta], arguments: Mapping[str, Argument], flag: Get
) -> Pick | None:
    return Pick(f"{op.name}: rnn", "oneDNN", None, "this op is the library's own")


# ---- others --------------------------------------------------------------------------------------------------


def _gelu(
    op: Op, metas: list[TensorMeta], arguments: Mapping[str, Argument], flag: Get
) -> Pick | None:
    """`use_mkldnn` in aten/src/ATen/native/Activation.cpp."""
    image, enabled = metas[0], onednn_on(flag)
    takes = enabled if image.dtype == "float32" else onednn_takes(image.dtype, flag, "matmul")
    if takes is None or enabled is None:
        return None
    why = None
    if not enabled:
        why = "oneDNN is switched off"
    elif not takes:
        why = f"oneDNN does not take {image.dtype}"
    elif arguments.get("approximate", "none") != "none":
        why = "the tanh form is torch's own"
    elif math.prod(image.shape) <= 1:
        why = "a single element"
    elif not _contiguous(image):
        why = "the input is not contiguous"
    if why is None:
        return Pick(f"{op.name}: eltwise_gelu_erf", "oneDNN", None, f"contiguous {image.dtype}")
    return Pick(f"{op.name}: vectorised", "ATen", None, why)


def _contiguous(meta: TensorMeta) -> bool:
    expected = 1
    for size, stride in zip(reversed(meta.shape), reversed(meta.stride), strict=True):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


#: Operator's name without its overload, by namespace.
_RULES: Final[dict[str, dict[str, _Rule]]] = {
    "aten": {
        **dict.fromkeys(_PRODUCTS, _matrices),
        **dict.fromkeys(("mv", "addmv"), _vector),
        **dict.fromkeys(("dot", "vdot"), _dot),
        **dict.fromkeys(("convolution", "conv1d", "conv2d", "conv3d"), convolution),
        **dict.fromkeys(("gru", "rnn_tanh", "rnn_relu"), _own_cells),
        "linear": _linear,
        "matmul": _matmul,
        "_int_mm": integers,
        "_scaled_mm": scaled,
        **dict.fromkeys(("_embedding_bag", "_embedding_bag_forward_only"), bags),
        **dict.fromkeys(("_weight_int8pack_mm", "_weight_int4pack_mm_for_cpu"), packed_weights),
        "convolution_backward": convolution_backward,
        "lstm": _lstm,
        "mkldnn_rnn_layer": _onednn_rnn,
        "gelu": _gelu,
    },
    "quantized": {
        **dict.fromkeys(_QUANTISED_LINEAR, quantised),
        **dict.fromkeys(_QUANTISED_CONVOLUTIONS, quantised_convolution),
    },
}
