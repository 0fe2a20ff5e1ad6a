"""Run the Triton kernel in Triton's interpreter and hold every row against the core's.

    TRITON_INTERPRET=1 python interpret_kernel.py

Prints one line for each row that differs, and at last how many were compared. In a process of its own,
because the variable has to be set before Triton is imported. A launch of one tile takes a second.
"""

import math
import sys

import numpy as np
import torch
from fingerprint_checks import COMPONENT_DTYPE, DTYPES, assert_same, tensor_of

from opdrift import tfp1
from opdrift.fingerprint import ROW, load_engine, triton_launch
from opdrift.fingerprint.partials import PARTIAL, WORDS, Ticket, finish
from opdrift.fingerprint.tensors import kinds_by_dtype, plain_on_device
from opdrift.fingerprint.triton_launch import TritonKernel

KINDS = kinds_by_dtype()
ENGINE = load_engine()
kernel = TritonKernel(torch.device("cpu"))
compared = 0


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def check(what: str, tensor: torch.Tensor, batch: tuple[int, int, int] | None = None) -> None:
    """Compare the rows of a tensor's items."""
    global compared
    data = plain_on_device(tensor)
    kind = KINDS[data.dtype]
    outer, items, inner = batch or (1, 1, data.numel())
    parts, span = kernel.split(outer * inner)
    words = torch.full((1 + parts * items, WORDS), -1, dtype=torch.int64)
    kernel.write(data, kind, (outer, items, inner), words, 1)
    rows = finish(
        words.numpy().view(PARTIAL)[1:, 0],
        [Ticket(3, kind, outer * inner, items, parts, span)],
    )
    wanted = np.zeros(items, ROW)
    ENGINE.put_batch(wanted.ctypes.data, data.data_ptr(), outer, items, inner, kind, 3)
    for item in range(items):
        compared += 1
        try:
            assert_same(rows[item], wanted[item])
        except AssertionError as error:
            say(f"{what}, item {item}: {error}")
    if words[0].ne(-1).any():
        say(f"{what}: wrote into the row before")


def main() -> None:
    for dtype in (*DTYPES, torch.uint4):
        for n in (0, 33, 65, 1000):  # one program, few steps
            raw = torch.arange(n, dtype=torch.int64).to(torch.uint8)
            check(f"{dtype} {n}", raw.view(dtype) if dtype is torch.uint4 else tensor_of(dtype, n))
    for dtype in DTYPES:  # more than one chunk; the second is not full
        same = dtype in COMPONENT_DTYPE or dtype is torch.bool or "float8" in str(dtype)
        if not same or dtype is torch.float8_e4m3fn:  # the others are compiled to the same
            check(f"{dtype} 4097", tensor_of(dtype, 4097))
    check("edge of a chunk", tensor_of(torch.float32, 4096))
    check("not aligned to 16 bytes", tensor_of(torch.bfloat16, 4300)[1:])
    check("two programs", tensor_of(torch.float32, triton_launch.TILE + 77))
    check("all NaN", torch.full((70,), math.nan, dtype=torch.float16))
    for byte in (
        0,
        255,
    ):  # the smallest number, and NaN: what lies beyond the end must not be added
        scales = torch.full((33,), byte, dtype=torch.uint8).view(torch.float8_e8m0fnu)
        check(f"float8_e8m0fnu {byte}", scales)
    for name in tfp1.FP8_FORMATS:  # all bytes, in four rows
        check(f"{name}, all", torch.arange(256).to(torch.uint8).view(getattr(torch, name)))
    check("items side by side", tensor_of(torch.bfloat16, 3 * 130), (1, 3, 130))
    check("items in pieces", tensor_of(torch.int64, 5 * 3 * 33), (5, 3, 33))
    check("items of single elements", tensor_of(torch.float32, 4 * 7), (4, 7, 1))
    check("items of two chunks", tensor_of(torch.float64, 9 * 2 * 500), (9, 2, 500))
    triton_launch.PROGRAMS = 1  # as for a tensor of 512 times the size: several tiles a program
    check("three tiles", tensor_of(torch.float32, 2 * triton_launch.TILE + 300))
    check("two tiles, wide", tensor_of(torch.int64, triton_launch.TILE + 5000))
    say(f"compared {compared}")


if __name__ == "__main__":
    sys.exit(main())
