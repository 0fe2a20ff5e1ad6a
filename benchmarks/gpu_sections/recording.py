"""Sections: recording changes no bit, its traces compare, and what it costs."""

from __future__ import annotations

import contextlib
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._debug_mode import DebugMode
from torch.utils._python_dispatch import TorchDispatchMode

import opdrift
from gpu_sections.check import Check


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
