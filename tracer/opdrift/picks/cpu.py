"""Which CPU library computes an op, by the rules of torch 2.13's x86 build (notes: kernels, 1.2 and 5.1).

2,829 of 2,829 random products and convolutions agreed with the libraries' verbose output. Where the trace
does not hold a fact that decides, there is no answer.
"""

from __future__ import annotations

import math
from typing import Final

from opdrift.picks.attention import AttentionRegion
from opdrift.picks.settings import Get, Settings
from opdrift.picks.values import Flow, base_name
from opdrift.records import Argument, Op, Pick, TensorMeta
from opdrift.tracefile.reader import Trace

#: oneDNN takes a product when m n k (times the batch for bmm) exceeds this.
_ONEDNN_ABOVE: Final = 16 * 16 * 16
#: bmm: products smaller than this are torch's own loop.
_OWN_LOOP_BELOW: Final = 400
_PREFIX: Final = {"float32": "S", "float64": "D", "complex64": "C", "complex128": "Z"}
_REDUCED: Final = ("bfloat16", "float16")
_FLASH_DTYPES: Final = ("float32", "float64", "bfloat16", "float16")


def routine(trace: Trace, op_index: int, settings: Settings | None = None) -> Pick | None:
    """The library and routine of a matmul or convolution on a CPU; None for others, or if not known.

    `settings` are those of the trace; who asks for many ops makes them once.
    """
    name = base_name(trace.op_info(int(trace.ops.signature[op_index])).name)
    if name not in ("mm", "addmm", "bmm", "baddbmm", "convolution"):
        return None
    op = trace.op(op_index)
    metas = [trace.meta(v) for v in op.inputs]
    if not metas or any(m.device != "cpu" for m in metas) or "mkl" not in trace.header.versions:
        return None
    flag = (settings or Settings(trace)).before(op.seq)
    if name == "convolution":
        return _convolution(op, metas, flag)
    left, right = metas[-2], metas[-1]
    if not (2 <= len(left.shape) == len(right.shape)):
        return None
    m, k, n = left.shape[-2], left.shape[-1], right.shape[-1]
    batch = left.shape[0] if len(left.shape) == 3 else None
    return _product(op.name, left.dtype, m * n * k, batch, flag)


def _product(name: str, dtype: str, size: int, batch: int | None, flag: Get) -> Pick | None:
    total = size * (1 if batch is None else batch)
    if total == 0:
        return None
    sizes = "m n k" if batch is None else "batch m n k"
    takes = _onednn_takes(dtype, flag)
    if takes is None:
        return None
    if takes and total > _ONEDNN_ABOVE:
        return Pick(
            f"{name}: matmul", "oneDNN", None, f"{dtype}, {sizes} = {total} > {_ONEDNN_ABOVE}"
        )
    if batch is not None and size < _OWN_LOOP_BELOW:
        return Pick(f"{name}: own loop", "ATen", None, f"m n k = {size} < {_OWN_LOOP_BELOW}")
    if dtype in _PREFIX:
        batched = "_BATCH" if batch is not None and batch > 1 else ""
        return Pick(f"{name}: {_PREFIX[dtype]}GEMM{batched}", "MKL", None, f"{dtype} goes to BLAS")
    why = f"{sizes} = {total} <= {_ONEDNN_ABOVE}" if takes else f"no library takes {dtype} here"
    return Pick(f"{name}: own loop", "ATen", None, why)


def _onednn_takes(dtype: str, flag: Get) -> bool | None:
    """Whether torch hands products of this dtype to oneDNN; None if that depends on the CPU."""
    if not flag("mkldnn.enabled", True):
        return False
    if dtype == "float32":
        precision = flag("fp32_precision.mkldnn.matmul", "none")
        return False if precision in ("none", "ieee", None) else None
    if dtype == "bfloat16":
        return True if flag("cpu_capability", None) == "AVX512" else None
    return None if dtype == "float16" else False


def _convolution(op: Op, metas: list[TensorMeta], flag: Get) -> Pick | None:
    """As `use_mkldnn` in aten/src/ATen/native/Convolution.cpp: else im2col and a product."""
    arguments = dict(op.signature.arguments)
    image, weight = metas[0], metas[1]
    if 0 in image.shape or arguments.get("transposed"):
        return None
    if not flag("mkldnn.enabled", True):
        return None
    if image.dtype in _REDUCED:
        takes = _onednn_takes(image.dtype, flag)
        return (
            Pick(f"{op.name}: convolution", "oneDNN", None, f"always for {image.dtype}")
            if takes
            else None
        )
    if image.dtype != "float32":
        return Pick(
            f"{op.name}: im2col and GEMM", "ATen", None, f"oneDNN does not take {image.dtype}"
        )
    why = _onednn_convolution(image, weight, arguments, int(flag("num_threads", 1)))
    if why is not None:
        return Pick(f"{op.name}: convolution", "oneDNN", None, why)
    return Pick(f"{op.name}: im2col and SGEMM", "ATen", None, "one small image")


def _onednn_convolution(
    image: TensorMeta, weight: TensorMeta, arguments: dict[str, Argument], threads: int
) -> str | None:
    """Why oneDNN takes a float32 convolution; None if it does not."""
    shape, kernel = image.shape, weight.shape[2:]
    if len(kernel) == 1:  # torch treats it as an image of height 1
        shape, kernel = (*shape[:2], 1, shape[2]), (1, kernel[0])
    groups = arguments.get("groups", 1)
    plain = all(v == 1 for name in ("stride", "dilation") for v in _numbers(arguments.get(name)))
    if plain and shape[0] < 16 and kernel[-1] == kernel[-2] == 1 and threads <= 1:
        return None
    if isinstance(groups, int) and groups > 1:
        return f"{groups} groups"
    if kernel[-1] > 3 and kernel[-2] > 3:
        return "kernel larger than 3x3"
    if shape[0] > 1:
        return f"batch {shape[0]} > 1"
    elements = math.prod(shape[:4])
    return f"{elements} elements > 20480" if elements > 20480 else None


def _numbers(argument: Argument) -> tuple[int, ...]:
    if isinstance(argument, int):
        return (argument,)
    return tuple(v for v in argument if isinstance(v, int)) if isinstance(argument, tuple) else ()


# ---- why CPU flash attention did not run --------------------------------------------------------------------


def flash_refusal(trace: Trace, region: AttentionRegion) -> str | None:
    """Why torch's chooser refused flash for an attention that ran as ops on a CPU; None if not known."""
    flow = Flow(trace)
    query, key, value = (flow.meta(v) for v in (region.query, region.key, region.value))
    if query.device != "cpu":
        return None
    flag = Settings(trace).before(int(trace.ops.seq[region.ops[0]]))
    if flag("sdp.flash", True) is False:
        return "flash attention was switched off"
    mask = None if region.mask is None else flow.meta(region.mask)
    return (
        _by_settings(region)
        or _by_shapes(query, key, value, region.grouped)
        or (None if mask is None else _by_mask(query, key, mask))
        or _by_layout(query, key, value)
    )


def _by_settings(region: AttentionRegion) -> str | None:
    return f"dropout_p = {region.dropout:g} > 0" if region.dropout > 0 else None


def _by_shapes(query: TensorMeta, key: TensorMeta, value: TensorMeta, grouped: bool) -> str | None:
    shapes = query.shape, key.shape, value.shape
    if any(len(s) != 4 for s in shapes):
        return (
            f"query, key and value must have 4 dims, not {', '.join(str(len(s)) for s in shapes)}"
        )
    if len({s[0] for s in shapes}) > 1:
        return f"batch sizes differ: {', '.join(str(s[0]) for s in shapes)}"
    heads = tuple(s[1] for s in shapes)
    if not grouped and len(set(heads)) > 1:
        return f"numbers of heads differ without enable_gqa: {', '.join(map(str, heads))}"
    if grouped and (heads[1] != heads[2] or heads[1] == 0 or heads[0] % heads[1]):
        return (
            f"{heads[0]} query heads are no multiple of {heads[1]} key and {heads[2]} value heads"
        )
    if len({s[-1] for s in shapes}) > 1:
        return f"head dims differ: {', '.join(str(s[-1]) for s in shapes)}"
    return "a length is 0" if 0 in (query.shape[2], key.shape[2]) else None


def _by_mask(query: TensorMeta, key: TensorMeta, mask: TensorMeta) -> str | None:
    shape = mask.shape
    batch, heads, length, width = (*query.shape[:3], key.shape[2])
    fits = len(shape) in (2, 4) and shape[-2] in (1, length) and shape[-1] in (1, width)
    if fits and len(shape) == 4:
        fits = shape[0] in (1, batch) and shape[1] in (1, heads)
    return (
        None if fits else f"a mask of shape {list(shape)} fits neither 2 nor 4 dims of the scores"
    )


def _by_layout(query: TensorMeta, key: TensorMeta, value: TensorMeta) -> str | None:
    for name, meta in (("query", query), ("key", key), ("value", value)):
        if meta.stride[-1] != 1:
            return f"the last stride of the {name} is {meta.stride[-1]}, not 1"
    if query.dtype not in _FLASH_DTYPES:
        return f"{query.dtype} is not supported"
    return None
