"""Sections: what a fingerprint costs on the device, and its launch on the host."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from gpu_sections.check import KINDS, Check, device_seconds, host_seconds
from opdrift.fingerprint import devices
from opdrift.fingerprint.partials import WORDS


def speed(check: Check, call: Callable[[], object], size: int, repeats: int) -> float:
    """GB/s; NaN where torch has no such op for the dtype."""
    try:
        return size / device_seconds(check, call, repeats) / 1e9
    except (RuntimeError, NotImplementedError):
        return math.nan


def kernel_of(check: Check) -> devices.Kernel:
    """What this device is fingerprinted by."""
    for maker in devices.kernels_for(check.device):
        try:
            return maker(check.device)
        except Exception as error:  # it was said in the first section
            print(f"  {maker.__name__}: {error!r}")
    raise SystemExit("no kernel can be made")


def measure_throughput(check: Check) -> None:
    """GB/s of the kernel beside a plain read (x.sum()), a copy and torch.hash_tensor on the same memory."""
    kernel = kernel_of(check)
    rows = torch.zeros(8192, WORDS, dtype=torch.int64, device=check.device)
    sizes = (1 << 20, 1 << 24, 1 << 27, 1 << 30) if check.is_gpu else (1 << 16,)
    print(
        f"  {'':24}{'MB':>6}{kernel.name:>20}{'x.sum()':>10}{'copy_':>10}{'hash_tensor':>13}  of the read"
    )
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64):
        for size in sizes:
            n = size // dtype.itemsize
            data = torch.randint(0, 100, (size,), dtype=torch.uint8, device=check.device).view(
                dtype
            )
            other, readable = torch.empty_like(data), data.view(torch.uint8)
            if dtype.itemsize > 1:
                readable = data
            begun = time.perf_counter()
            kernel.write(data, KINDS[dtype], (1, 1, n), rows, 0)
            check.synchronize()
            first = time.perf_counter() - begun
            repeats = max(3, min(200, (1 << 31) // size))
            calls: list[Callable[[], object]] = [
                lambda data=data, n=n, dtype=dtype: kernel.write(
                    data, KINDS[dtype], (1, 1, n), rows, 0
                ),
                lambda readable=readable: readable.sum(),
                lambda data=data, other=other: other.copy_(data),
                lambda readable=readable: torch.hash_tensor(readable),
            ]
            speeds = [speed(check, call, size, repeats) for call in calls]
            print(
                f"  {str(dtype).removeprefix('torch.'):24}{size >> 20:>6}{speeds[0]:>20.0f}{speeds[1]:>10.0f}"
                f"{speeds[2]:>10.0f}{speeds[3]:>13.0f}  {speeds[0] / speeds[1]:.2f}   (first call {first:.2f} s)"
            )
    variants = getattr(kernel, "_compiled", {})
    for variant, compiled in sorted(variants.items(), key=str):
        if compiled is not None:
            print(
                f"  code {variant[0]:2} {'small' if variant[2] else 'large'}:"
                f" {compiled.n_regs} registers, {compiled.n_spills} spilled"
            )


def measure_launches(check: Check) -> None:
    """Host time for a tiny tensor: a whole put, the kernel alone, and an op of torch's for comparison."""
    kernel, here = kernel_of(check), check.make_devices()
    tiny, into = torch.ones(64, device=check.device), torch.ones(64, device=check.device)
    strided = torch.ones(8, 8, device=check.device).t()
    rows = torch.zeros(8, WORDS, dtype=torch.int64, device=check.device)
    repeats = 500 if check.is_gpu else 3
    here.put(tiny, 0)
    here.put(strided, 0)
    kernel.write(tiny, 0, (1, 1, 64), rows, 0)
    calls: dict[str, Callable[[], object]] = {
        "torch.mul(out=)": lambda: torch.mul(tiny, tiny, out=into),
        "kernel, host": lambda: kernel.write(tiny, 0, (1, 1, 64), rows, 0),
        "put, contiguous": lambda: here.put(tiny, 0),
        "put, transposed": lambda: here.put(strided, 0),
    }
    for name, call in calls.items():
        print(f"  {name:24}{host_seconds(check, call, repeats) * 1e6:>8.1f} us on the host")
    took = device_seconds(check, calls["kernel, host"], repeats)
    print(f"  {'kernel, device':24}{took * 1e6:>8.1f} us at most, a launch after the other")
    here.finish()
    for value in range(4000 if check.is_gpu else 40):
        here.put(tiny, value)
    begun = time.perf_counter()
    count = sum(len(rows) for rows in here.finish())
    print(
        f"  {'drain':24}{(time.perf_counter() - begun) / count * 1e6:>8.2f} us a row, waiting included"
    )
