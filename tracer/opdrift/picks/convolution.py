"""Which library computes a convolution on a CPU: `select_conv_backend` in aten/src/ATen/native/Convolution.cpp."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from opdrift.picks.libraries import Get, onednn_on, onednn_takes
from opdrift.records import Argument, Op, Pick, TensorMeta

#: oneDNN takes a single image from more elements than this on.
_LARGE: Final = 20480
#: NNPACK takes batches from this size on; so does oneDNN for 1x1 kernels on one thread.
_LARGE_BATCH: Final = 16


def convolution(
    op: Op, metas: list[TensorMeta], arguments: Mapping[str, Argument], flag: Get
) -> Pick | None:
    """The library of a convolution, and why that one."""
    return _chosen(op, metas[0], metas[1], arguments, flag)


def convolution_backward(
    op: Op, metas: list[TensorMeta], arguments: Mapping[str, Argument], flag: Get
) -> Pick | None:
    """The gradient's library: torch chooses by the same image and weight as forward; the result's gradient is first."""
    return _chosen(op, metas[1], metas[2], arguments, flag) if len(metas) > 2 else None


def _chosen(
    op: Op, image: TensorMeta, weight: TensorMeta, arguments: Mapping[str, Argument], flag: Get
) -> Pick | None:
    dims = len(weight.shape) - 2
    if (
        0 in image.shape
        or len(image.shape) != dims + 2
        or isinstance(arguments.get("padding"), str)
    ):
        return None
    onednn = _onednn(image, weight, arguments, flag)
    if onednn is None:
        return None
    takes, why = onednn
    if takes:
        return Pick(f"{op.name}: convolution", "oneDNN", None, why)
    turned = arguments.get("transposed") is True
    dilated = any(v != 1 for v in numbers(arguments.get("dilation")))
    if _nnpack_takes(image, weight, flag) and not turned and not dilated:
        return Pick(f"{op.name}: convolution", "NNPACK", None, f"{why}; batch {image.shape[0]}")
    if image.dtype == "float32" and onednn_takes("float32", flag, "matmul") is not False:
        name = f"{op.name}: unfolding and products of lower precision"
        return Pick(name, "ATen", None, f"{why}; float32 may be rounded before it is multiplied")
    if dims == 3:  # unfolded by MKL's transposes, in batches
        return Pick(f"{op.name}: unfolding and products", "ATen", None, why)
    product = {"float32": "SGEMM", "float64": "DGEMM"}.get(image.dtype, "own product")
    step = "GEMM and col2im" if turned else "im2col and GEMM"
    return Pick(f"{op.name}: {step.replace('GEMM', product)}", "ATen", None, why)


def _onednn(
    image: TensorMeta, weight: TensorMeta, arguments: Mapping[str, Argument], flag: Get
) -> tuple[bool, str] | None:
    """Whether oneDNN takes it, and why; None if that is not known."""
    enabled = onednn_on(flag)
    if not enabled:
        return None if enabled is None else (False, "oneDNN is switched off")
    stride = numbers(arguments.get("stride")) or (1,)
    output_padding = numbers(arguments.get("output_padding"))
    if arguments.get("transposed") is True and any(
        padding >= step for padding, step in zip(output_padding, stride, strict=False)
    ):
        return False, "output_padding is not smaller than stride"
    if image.dtype in ("bfloat16", "float16"):
        takes = onednn_takes(image.dtype, flag, "conv")
        if takes is None:
            return None
        return takes, f"always for {image.dtype}" if takes else f"oneDNN has no {image.dtype} here"
    if image.dtype != "float32":
        return False, f"oneDNN does not take {image.dtype}"
    threads = flag("num_threads", 1)
    if not isinstance(threads, int):
        return None
    return _float32(image, weight, arguments, threads)


def _float32(
    image: TensorMeta, weight: TensorMeta, arguments: Mapping[str, Argument], threads: int
) -> tuple[bool, str]:
    """Whether oneDNN takes a float32 convolution, and why."""
    shape, kernel = image.shape, weight.shape[2:]
    if len(kernel) == 1:  # torch treats it as an image of height 1
        shape, kernel = (*shape[:2], 1, shape[2]), (1, kernel[0])
    groups = arguments.get("groups", 1)
    plain = all(v == 1 for name in ("stride", "dilation") for v in numbers(arguments.get(name)))
    small = kernel[-1] == kernel[-2] == 1
    by_threads = plain and small and shape[0] < _LARGE_BATCH
    if by_threads and threads <= 1:
        return False, f"1x1 kernel and batch {shape[0]} < {_LARGE_BATCH} on one thread"
    more = f", on {threads} threads" if by_threads else ""
    if isinstance(groups, int) and groups > 1:
        return True, f"{groups} groups{more}"
    if kernel[-1] > 3 and kernel[-2] > 3:
        return True, "kernel larger than 3x3"
    if shape[0] > 1:
        return True, f"batch {shape[0]} > 1{more}"
    elements = math.prod(shape[:4])
    if elements > _LARGE:
        return True, f"{elements} elements > {_LARGE}{more}"
    return False, "one small image"


def _nnpack_takes(image: TensorMeta, weight: TensorMeta, flag: Get) -> bool:
    return (
        flag("nnpack.enabled", False) is True
        and image.dtype == "float32"
        and len(weight.shape) < 5
        and image.shape[0] >= _LARGE_BATCH
        and all(size < 17 for size in weight.shape[2:])
    )


def numbers(argument: Argument) -> tuple[int, ...]:
    """The numbers of an argument that is one or a list of them."""
    if isinstance(argument, int):
        return (argument,)
    return tuple(v for v in argument if isinstance(v, int)) if isinstance(argument, tuple) else ()
