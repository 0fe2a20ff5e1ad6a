"""Sections: fingerprints on the device are those of the CPU, at any place of a stream."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_sections.check import ENGINE, KINDS, Check
from opdrift import tfp1
from opdrift.fingerprint import ROW, devices
from opdrift.tfp1 import Code

EXACT = (
    *("raw", "n", "min", "max", "absmax", "nan", "pinf", "ninf", "zero", "sub"),
    *("version", "code", "flags", "item", "value"),
)
COMPLEX = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}
DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(getattr(torch, name) for name in tfp1.FP8_FORMATS),
    *(torch.int8, torch.uint8, torch.bool, torch.int16, torch.uint16, torch.int32, torch.uint32),
    *(torch.int64, torch.uint64, *COMPLEX),
)
SIZES = (0, 1, 31, 32, 33, 64, 65, 4095, 4096, 4097, 65_536, 65_537, 1_000_003)


def tensor_of(dtype: torch.dtype, n: int) -> Tensor:
    """Values of all sizes on the host; for floats also NaN, infinities, both zeros and a subnormal."""
    make = torch.Generator().manual_seed(n)
    if dtype in COMPLEX:
        return torch.view_as_complex(tensor_of(COMPLEX[dtype], 2 * n).view(n, 2))
    if dtype is torch.bool:
        return torch.randint(0, 2, (n,), generator=make).bool()
    if not dtype.is_floating_point or dtype.itemsize == 1:
        return (
            torch.randint(0, 256, (n * dtype.itemsize,), generator=make).to(torch.uint8).view(dtype)
        )
    x = torch.exp(3 * torch.randn(n, dtype=torch.float64, generator=make))
    x = (x * torch.randn(n, dtype=torch.float64, generator=make)).to(dtype)
    if n > 20:
        special = [math.nan, math.inf, -math.inf, 0.0, -0.0, torch.finfo(dtype).tiny / 4]
        x[torch.randperm(n, generator=make)[:6]] = torch.tensor(special, dtype=torch.float64).to(
            dtype
        )
    return x


def sketch_of(row: np.void) -> Any:
    wide = Code(int(row["code"])).bytes >= 4
    return row["sketch"].view(np.float64 if wide else np.float32).astype(np.float64)


def difference(found: np.void, wanted: np.void) -> str | None:
    """In what two rows differ that must not, or None."""
    for name in EXACT:
        if found[name] != wanted[name]:
            return f"{name} {found[name]} instead of {wanted[name]}"
    if found["sample"].tolist() != wanted["sample"].tolist():
        return "the sample"
    with np.errstate(all="ignore"):
        norm = math.sqrt(wanted["ssq"]) if wanted["ssq"] < math.inf else math.inf
        for name, scale in (("sum", norm * math.sqrt(max(int(wanted["n"]), 1))), ("ssq", 0.0)):
            if not np.isclose(found[name], wanted[name], rtol=1e-9, atol=1e-9 * scale):
                return f"{name} {found[name]} instead of {wanted[name]}"
        if not np.allclose(sketch_of(found), sketch_of(wanted), rtol=2e-7, atol=2e-7 * norm):
            return "the sketch"
    return None


def layouts() -> Iterator[tuple[str, Tensor]]:
    """Tensors on the host that are not just contiguous memory; `to` keeps their strides where it can."""
    x = tensor_of(torch.bfloat16, 6000)
    yield "not aligned to 16 bytes", x[1:]
    yield "transposed", x.view(60, 100).t()
    yield "expanded", x[:50].expand(70, 50)
    yield "heads", x.view(10, 20, 30).transpose(1, 2)
    yield "channels last", x.view(2, 30, 10, 10).to(memory_format=torch.channels_last)
    yield "0-dimensional", torch.tensor(3.0)
    yield "conjugate", tensor_of(torch.complex64, 500).conj()
    yield "negative", tensor_of(torch.complex64, 500).conj().imag
    yield "sub-byte", torch.arange(64, dtype=torch.uint8).view(torch.uint4)
    yield "bits", torch.arange(64, dtype=torch.uint8).view(torch.bits16)
    yield "all NaN", torch.full((5000,), math.nan)
    # bytes of 0 are no zeros in this format, and beyond the end of a tensor there are such bytes
    yield "smallest scales", torch.zeros(33, dtype=torch.uint8).view(torch.float8_e8m0fnu)


def moved(check: Check, name: str, tensor: Tensor) -> Tensor:
    """The tensor on the device, in the same layout."""
    if name == "not aligned to 16 bytes":
        return torch.cat([tensor[:1], tensor]).to(check.device)[1:]
    if name in ("transposed", "heads"):
        return tensor.transpose(-1, -2).to(check.device).transpose(-1, -2)
    if name == "expanded":
        return tensor[0].to(check.device).expand(tensor.shape)
    if name == "conjugate":
        return tensor.conj().to(check.device).conj()
    if name == "negative":
        return (
            torch.view_as_complex(
                torch.stack([torch.zeros_like(tensor), -tensor.resolve_neg()], -1)
            )
            .to(check.device)
            .conj()
            .imag
        )
    if tensor.dtype in (torch.uint4, torch.bits16):
        return tensor.view(torch.uint8).to(check.device).view(tensor.dtype)
    return tensor.to(check.device)


def check_equality(check: Check) -> None:
    """Digest, counts, extremes and sample bit by bit, sums and sketch within 1e-9, against the C core."""
    sizes = SIZES[:-3] if check.quick else SIZES
    cases: list[tuple[str, Tensor, Tensor]] = [
        (f"{dtype} {n}", tensor := tensor_of(dtype, n), tensor.to(check.device))
        for dtype in DTYPES
        for n in sizes
    ]
    cases += [(name, tensor, moved(check, name, tensor)) for name, tensor in layouts()]
    if check.is_gpu:
        large = tensor_of(torch.bfloat16, (1 << 26) + 12_345)  # several tiles a program
        cases.append(("bfloat16, 128 MB", large, large.to(check.device)))
    found, wanted = [], []
    here = check.make_devices()
    for value, (_, host, tensor) in enumerate(cases):
        reason = here.put(tensor, value)
        check.expect(reason is None, f"put: {reason}")
        wanted.append(ENGINE.fingerprint(host, value))
    found = np.concatenate(here.finish())
    check.expect(len(found) == len(cases), f"{len(found)} rows of {len(cases)}")
    bad = 0
    for (name, _, _), row in zip(
        cases, found[np.argsort(found["value"], kind="stable")], strict=True
    ):
        problem = difference(row, wanted[int(row["value"])])
        bad += problem is not None
        check.expect(problem is None, f"{name}: {problem}")
    print(f"  {len(cases)} tensors, {len(DTYPES)} dtypes: {len(cases) - bad} equal")


def check_items(check: Check) -> None:
    """Rows of the items of a batch, at any place of the batch dim."""
    here, count = check.make_devices(), 0
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for shape in ((1, 6, 2310), (6, 5, 2310), (330, 21, 3), (20_000, 3, 2)):
            tensor = tensor_of(dtype, math.prod(shape))
            wanted = np.zeros(shape[1], ROW)
            ENGINE.put_batch(wanted.ctypes.data, tensor.data_ptr(), *shape, KINDS[dtype], 7)
            here.put(tensor.view(shape).to(check.device), 7, batch=shape)
            rows = np.concatenate(here.finish())
            for row, one in zip(rows, wanted, strict=True):
                problem = difference(row, one)
                check.expect(problem is None, f"{dtype} {shape}, item {one['item']}: {problem}")
                count += 1
    print(f"  {count} items of batches")


def check_order(check: Check) -> None:
    """A fingerprint is of the content at its place in the stream: later writes and reuse come too late."""
    here = check.make_devices()
    count = 200 if check.is_gpu else 20
    for value in range(count):
        tensor = torch.full((50_000,), float(value), device=check.device)
        here.put(tensor, value)
        tensor.mul_(-1)  # and then the memory is given to the next one
        del tensor
    rows = np.concatenate(here.finish())
    right = [row["sum"] == 50_000.0 * float(row["value"]) for row in rows]
    check.expect(
        len(rows) == count and all(right), f"{right.count(False)} rows show a later content"
    )
    tensor = tensor_of(torch.float32, 3_000_000).to(check.device)
    for value in range(4):
        here.put(tensor, value)
    again = np.concatenate(here.finish())
    again["value"] = 0
    check.expect(len({row.tobytes() for row in again}) == 1, "sums differ from launch to launch")
    print("  writes after it, memory used again, sums repeated bit by bit")


def check_streams(check: Check) -> None:
    """Two streams at once, a captured graph, and the other device if there is one."""
    if not check.is_gpu:
        print("  no streams on the host")
        return
    here, side = check.make_devices(), torch.cuda.Stream()
    for value in range(2000):
        with torch.cuda.stream(side) if value % 2 else contextlib.nullcontext():
            here.put(torch.full((100,), float(value), device=check.device), value)
    rows = np.concatenate(here.finish())
    check.expect(
        sorted(rows["value"].tolist()) == list(range(2000))
        and bool((rows["sum"] == 100.0 * rows["value"]).all()),
        "rows of two streams are mixed",
    )
    x, graph = torch.ones(1000, device=check.device), torch.cuda.CUDAGraph()
    y = x * 2
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        y = x * 2
        reason = here.put(y, 1)
        taken = here.take()
    check.expect(reason == devices.CAPTURED and taken == [], "a capture was not left alone")
    x.fill_(3.0)
    graph.replay()
    check.expect(bool((y == 6.0).all()), "the captured graph computes something else")
    check.expect(here.put(y, 2) is None, "no fingerprint after a capture")
    print(f"  2000 tensors on two streams, a captured graph, {torch.cuda.device_count()} devices")
    if torch.cuda.device_count() > 1:
        other = torch.arange(5000.0, device="cuda:1")
        here.put(other, 3)
        row = np.concatenate(here.finish())[-1]
        check.expect(difference(row, ENGINE.fingerprint(other.cpu(), 3)) is None, "another device")
