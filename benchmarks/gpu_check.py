"""Check the fingerprints and the recorder on a real GPU, and measure what they cost there.

Usage: python benchmarks/gpu_check.py [--device cuda|cpu] [--quick] [SECTION ...]

Needs a checkout with opdrift installed (`pip install -e .`), torch for CUDA or ROCm, and some minutes. Prints
one table a section. Exits with 1 if anything differs from what the CPU says or if recording changed a bit of
the run, and with 2 if there is no GPU. `--device cpu` is a rehearsal of the script itself: the host stands
for a device without a kernel, and figures mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._debug_mode import DebugMode
from torch.utils._python_dispatch import TorchDispatchMode

import opdrift
from opdrift import recorder, tfp1, values
from opdrift.fingerprint import ROW, Engine, devices, load_engine
from opdrift.fingerprint.partials import WORDS
from opdrift.fingerprint.tensors import kinds_by_dtype
from opdrift.fingerprint.torch_ops import TorchOps
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
ENGINE: Engine = load_engine()
KINDS = kinds_by_dtype()


# ---- the device ------------------------------------------------------------------------------------------


class Immediate:
    """A copy that is done."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Nothing is under way."""


class Host:
    """The CPU as a device, for rehearsals: `devices.Accelerator` and `device_ring.Memory` at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def current(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def is_capturing(self) -> bool:
        return False

    def stream(self) -> int:
        return 0

    def memory(self) -> Host:
        return self

    def make_rows(self, count: int) -> tuple[Tensor, Tensor]:
        with torch.inference_mode(mode=False), torch._C._DisableTorchDispatch():
            return (
                torch.zeros(count, WORDS, dtype=torch.int64),
                torch.zeros(count, WORDS, dtype=torch.int64),
            )

    def copy(self, source: Tensor, target: Tensor, count: int) -> Immediate:
        with torch._C._DisableTorchDispatch(), torch.no_grad():
            target[:count].copy_(source[:count])
        return Immediate()


def rehearse() -> None:
    """Let the host stand for a device, in this process."""
    devices.Accelerator = Host  # type: ignore[assignment,misc]
    devices.kernels_for = lambda device: (TorchOps,)  # type: ignore[assignment]
    values.Values.is_elsewhere = staticmethod(lambda tensor: True)  # type: ignore[method-assign]
    recorder.load_engine = lambda: dataclasses.replace(ENGINE, kinds={})  # type: ignore[attr-defined]


@dataclasses.dataclass
class Check:
    """What the sections share: the device, what was said, what was wrong."""

    device: torch.device
    quick: bool
    wrong: list[str] = dataclasses.field(default_factory=list)
    said: list[str] = dataclasses.field(default_factory=list)

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    def expect(self, holds: bool, what: str) -> bool:
        if not holds:
            self.wrong.append(what)
            print(f"  WRONG: {what}")
        return holds

    def make_devices(self) -> devices.Devices:
        return devices.Devices(
            ENGINE,
            say=lambda device, by, why: self.said.append(
                f"{device}: {by}" + (f" because {'; '.join(why)}" if why else "")
            ),
            failed=lambda where, error: self.wrong.append(f"{where}: {error!r}"),
        )

    def synchronize(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize(self.device)


# ---- equality --------------------------------------------------------------------------------------------


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


# ---- speed -----------------------------------------------------------------------------------------------


def device_seconds(check: Check, call: Callable[[], object], repeats: int) -> float:
    """Seconds a call takes on the device; the best of five series."""
    best = math.inf
    for _ in range(5 if check.is_gpu else 1):
        if check.is_gpu:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(repeats):
                call()
            end.record()
            end.synchronize()
            best = min(best, start.elapsed_time(end) / 1e3 / repeats)
        else:
            begun = time.perf_counter()
            call()
            best = min(best, time.perf_counter() - begun)
    return best


def host_seconds(check: Check, call: Callable[[], object], repeats: int) -> float:
    """Seconds a call keeps the host busy; the median of series that the device keeps up with."""
    series = []
    for _ in range(9):
        check.synchronize()
        begun = time.perf_counter()
        for _ in range(repeats):
            call()
        series.append((time.perf_counter() - begun) / repeats)
    check.synchronize()
    return statistics.median(series)


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


# ---- recording -------------------------------------------------------------------------------------------


class EmptyMode(TorchDispatchMode):
    """The least that anything which sees every op costs."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func._op(*args, **kwargs) if kwargs else func._op(*args)


@contextlib.contextmanager
def hashing() -> Iterator[None]:
    with DebugMode(), DebugMode.log_tensor_hashes(hash_fn="hash_tensor", hash_inputs=False):
        yield


def transformer(check: Check) -> tuple[nn.Module, Tensor]:
    """Twelve layers; on a GPU of a size that keeps it busy."""
    torch.manual_seed(0)
    dim, batch, length = (1024, 8, 512) if check.is_gpu and not check.quick else (64, 2, 16)
    layer = nn.TransformerEncoderLayer(dim, 16, 4 * dim, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
    dtype = torch.bfloat16 if check.is_gpu else torch.float32
    return model.to(check.device, dtype), torch.randn(batch, length, dim).to(check.device, dtype)


def bits(tensors: list[Tensor]) -> list[bytes]:
    flat = [t.detach().reshape(-1).view(torch.uint8).cpu() for t in tensors]
    return [t.numpy().tobytes() for t in flat]


def forward(model: nn.Module, x: Tensor) -> list[Tensor]:
    with torch.no_grad():
        return [model(x)]


def training_step(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Dropout on, backward, and an optimizer that works on lists of tensors."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss = model(x).float().square().mean()
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    optimizer.step()
    optimizer.zero_grad()
    state = [torch.cuda.get_rng_state()] if x.is_cuda else [torch.get_rng_state()]
    return [loss, *gradients, *(p.detach().clone() for p in model.parameters()), *state]


def is_view(name: str) -> bool:
    """Whether the overload called `aten.view.default` hands out memory of its argument."""
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part)
    return bool(found.is_view)


def trace_problems(check: Check, path: Path) -> tuple[list[str], int, int]:
    """What a trace lacks that it should hold; its ops, and how many values have a fingerprint."""
    trace = opdrift.load(path)
    problems = [] if trace.incomplete is None else [trace.incomplete]
    if trace.footer is not None:
        problems += [str(failure) for failure in trace.footer.failures]
        problems += list(trace.footer.notes)
    for mark in trace.marks:
        if mark.kind == "fingerprints":
            check.said.append(f"{mark.fields['device']}: {mark.fields['by']}")
    ops = [trace.op(index) for index in range(len(trace.ops))]
    bare = {
        op.name
        for op in ops
        if op.outputs and all(trace.fingerprint(value) is None for value in op.outputs)
    }
    bare = {name for name in bare if "empty" not in name and not is_view(name)}
    if bare:
        problems.append(f"ops without fingerprints: {', '.join(sorted(bare))}")
    fingerprints = int((trace.values.fingerprint >= 0).sum())
    return problems, len(trace.ops), fingerprints


def check_neutrality(check: Check, scratch: Path) -> None:
    """Outputs, gradients, parameters and generator state: plain, recorded, plain again, bit by bit."""
    for name, step, training in (
        ("forward", forward, False),
        ("training step", training_step, True),
    ):
        results = []
        for recorded in (False, True, False):
            model, x = transformer(check)
            model.train(training)
            path = scratch / f"{step.__name__}.trace"
            start = (
                opdrift.record(path, model=model, overwrite=True)
                if recorded
                else contextlib.nullcontext()
            )
            with start:
                kept = step(model, x)
            results.append(bits(kept))
        if results[0] != results[2]:
            print(f"  {name}: the plain run does not repeat itself, so nothing can be said")
            continue
        check.expect(results[0] == results[1], f"{name}: recording changed the run")
        problems, ops, fingerprints = trace_problems(check, path)
        for problem in problems:
            check.expect(False, f"{name}: {problem}")
        print(
            f"  {name}: {len(results[0])} tensors bit for bit, {ops} ops, {fingerprints} fingerprints"
        )


def check_diff(check: Check, scratch: Path) -> None:
    """Two recordings of one run are identical; one changed weight is found."""
    model, x = transformer(check)
    model.eval()
    for name in ("left", "right", "changed"):
        if name == "changed":
            with torch.no_grad():
                next(model.layers[7].parameters()).view(-1)[5] *= 1.5
        with opdrift.record(scratch / f"{name}.trace", model=model, overwrite=True):
            forward(model, x)
    same = opdrift.diff(scratch / "left.trace", scratch / "right.trace")
    check.expect(same.verdict == "identical", f"two recordings of one run: {same.verdict}")
    other = opdrift.diff(scratch / "left.trace", scratch / "changed.trace")
    where = None if other.first is None else other.first.name
    check.expect(
        bool(where) and where.startswith("layers.7"), f"a changed weight is found at {where}"
    )
    print(f"  two runs: {same.verdict}; a changed weight: {other.verdict}, first at {where}")


def measure_recording(check: Check, scratch: Path) -> None:
    """A forward pass under each way to look at it, in turns, as ratios to the plain one."""
    model, x = transformer(check)
    model.eval()
    path = scratch / "speed.trace"
    variants: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
        "plain": contextlib.nullcontext,
        "empty dispatch mode": EmptyMode,
        "opdrift": lambda: opdrift.record(path, model=model, overwrite=True),
        "opdrift, integrity off": lambda: opdrift.record(
            path, model=model, overwrite=True, integrity="off"
        ),
        "DebugMode": DebugMode,
        "DebugMode, hash_tensor": hashing,
    }
    inside: dict[str, list[float]] = {name: [] for name in variants}
    whole: dict[str, list[float]] = {name: [] for name in variants}
    forward(model, x)
    for number in range(9 if check.is_gpu else 2):
        for name, variant in variants.items():
            check.synchronize()
            begun = time.perf_counter()
            with variant():
                opened = time.perf_counter()
                for _ in range(5):
                    forward(model, x)
                check.synchronize()
                closed = time.perf_counter()
            if number:  # the first round compiles and imports
                inside[name].append(closed - opened)
                whole[name].append(time.perf_counter() - begun)
            shutil.rmtree(path, ignore_errors=True)
    plain = inside["plain"]
    print(
        f"  plain: {statistics.median(plain) / 5 * 1e3:.2f} ms a forward, five a round, {len(plain)} rounds"
    )
    print(f"  {'':28}{'inside':>8}{'whole':>8}")
    for name in variants:
        ratios = [
            statistics.median(a / b for a, b in zip(times[name], plain, strict=True))
            for times in (inside, whole)
        ]
        print(f"  {name:28}{ratios[0]:>8.2f}{ratios[1]:>8.2f}")
    if check.is_gpu:
        print(f"  peak memory of all this: {torch.cuda.max_memory_allocated() / 1e9:.2f} GB")


# ---- main ------------------------------------------------------------------------------------------------

SECTIONS: dict[str, tuple[str, Callable[[Check, Path], None]]] = {
    "equality": ("equality with the CPU", lambda check, _: check_equality(check)),
    "items": ("items of a batch", lambda check, _: check_items(check)),
    "order": ("order within a stream", lambda check, _: check_order(check)),
    "streams": ("streams and graphs", lambda check, _: check_streams(check)),
    "throughput": ("throughput, GB/s", lambda check, _: measure_throughput(check)),
    "launches": ("launches", lambda check, _: measure_launches(check)),
    "neutrality": ("neutrality", check_neutrality),
    "diff": ("diff", check_diff),
    "recording": ("12-layer transformer", measure_recording),
}


def describe(check: Check) -> str:
    if not check.is_gpu:
        return "a rehearsal on the host"
    properties = torch.cuda.get_device_properties(check.device)
    return f"{properties.name}, {properties.total_memory >> 30} GiB, CUDA {torch.version.cuda}, HIP {torch.version.hip}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "sections",
        nargs="*",
        metavar="SECTION",
        help=f"{', '.join(SECTIONS)}; all if none is named",
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--quick", action="store_true", help="smaller tensors, a smaller model")
    options = parser.parse_args()
    if unknown := set(options.sections) - set(SECTIONS):
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        print("torch sees no CUDA or ROCm device here, so nothing was checked.")
        return 2
    check = Check(
        torch.device("cuda", torch.cuda.current_device())
        if options.device == "cuda"
        else torch.device("cpu"),
        options.quick,
    )
    if check.is_gpu:  # so that a training step repeats itself
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.mha.set_fastpath_enabled(False)  # one op a layer would be no measure
    if not check.is_gpu:
        torch.set_num_threads(1)
        rehearse()
    print(f"torch {torch.__version__}, {describe(check)}, host engine {ENGINE.name}")
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for name in options.sections or SECTIONS:
            title, section = SECTIONS[name]
            print(f"\n{title} ({time.perf_counter() - begun:.0f} s)", flush=True)
            try:
                section(check, Path(folder))
            except Exception as error:  # the other sections are of interest, too
                check.expect(False, f"{title}: {type(error).__name__}: {error}")
    by = sorted(set(check.said))
    print(f"\nfingerprints were computed by: {', '.join(by)}")
    if check.is_gpu:
        check.expect(all(": triton" in line for line in by), "a GPU's tensors went past the kernel")
    print(f"{len(check.wrong)} wrong, {time.perf_counter() - begun:.0f} s")
    for what in check.wrong:
        print(f"  {what}")
    return 1 if check.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
