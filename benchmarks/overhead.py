"""What recording costs, beside torch's own DebugMode, as ratios to the plain run.

Usage: python benchmarks/overhead.py [--rounds N] [--levels] [encoder] [tiny] [decode]

Every round runs the workload plain and then once under each variant, in one process; a figure is the
median over rounds of variant / plain of the same round, in CPU time of the process on one thread. So a
busy machine moves both sides of a ratio. "inside" is the workload alone, "whole" the `with` statement too:
opening the trace, reading the model's parameters, closing. Higher is worse; plain is 1. "least" is the
fastest run of a variant over the fastest plain one, per op: what a quiet machine would come to.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional
from torch.utils._debug_mode import DebugMode
from torch.utils._python_dispatch import TorchDispatchMode

import opdrift
from opdrift.fingerprint.engine import load_engine
from opdrift.picks.observed import Observed


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


# ---- workloads -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Workload:
    """Something to run, the model in it, and how many ops it dispatches."""

    name: str
    run: Callable[[], object]
    model: nn.Module | None
    ops: int
    rounds: int
    what: str
    batch: int | None = None


def encoder() -> Workload:
    """Few ops, large ones: memory traffic counts."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(256, 8, 1024, batch_first=True)
    model = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False).eval()
    inputs = torch.randn(8, 64, 256)
    what = "12 layers, d 256, batch 8 x 64, fast path off"
    found = _counted("encoder", lambda: model(inputs), model, 15, what)
    return dataclasses.replace(found, batch=len(inputs))


def tiny() -> Workload:
    """Nothing but dispatch: Python counts."""
    left, right = torch.randn(4), torch.randn(4)

    def run() -> None:
        for _ in range(20_000):
            torch.add(left, right)

    return _counted("tiny", run, None, 9, "20,000 additions of 4 elements")


def decode() -> Workload:
    """Small ops between module calls, growing positions and a cache."""
    torch.manual_seed(0)
    model = Decoder().eval()
    return _counted(
        "decode",
        lambda: model.generate(32),
        model,
        9,
        "LLaMA-style, 2 layers, d 256, 33 forwards, batch 1",
    )


WORKLOADS = {"encoder": encoder, "tiny": tiny, "decode": decode}


def _counted(
    name: str, run: Callable[[], object], model: nn.Module | None, rounds: int, what: str
) -> Workload:
    run()
    with DebugMode() as seen:
        run()
    return Workload(name, run, model, len(seen.operators), rounds, what)


class RMSNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(
        self, x: torch.Tensor, angles: torch.Tensor, cache: torch.Tensor, at: int
    ) -> torch.Tensor:
        batch, length, dim = x.shape
        q, k, v = (
            layer(x).view(batch, length, self.heads, -1).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        cache[0, :, :, at : at + length] = rotated(k, angles)
        cache[1, :, :, at : at + length] = v
        keys, values = cache[:, :, :, : at + length]
        mixed = functional.scaled_dot_product_attention(
            rotated(q, angles), keys, values, is_causal=length > 1
        )
        return self.out(mixed.transpose(1, 2).reshape(batch, length, dim))


def rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of half-split pairs."""
    first, second = x.chunk(2, -1)
    cos, sin = angles
    return torch.cat((first * cos - second * sin, first * sin + second * cos), -1)


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.before, self.attention, self.after = RMSNorm(dim), Attention(dim, heads), RMSNorm(dim)
        self.gate, self.up, self.down = (
            nn.Linear(dim, 4 * dim, bias=False),
            nn.Linear(dim, 4 * dim, bias=False),
            nn.Linear(4 * dim, dim, bias=False),
        )

    def forward(
        self, x: torch.Tensor, angles: torch.Tensor, cache: torch.Tensor, at: int
    ) -> torch.Tensor:
        x = x + self.attention(self.before(x), angles, cache, at)
        hidden = self.after(x)
        return x + self.down(functional.silu(self.gate(hidden)) * self.up(hidden))


class Decoder(nn.Module):
    def __init__(self, dim: int = 256, heads: int = 8, layers: int = 2, words: int = 1000) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, dim)
        self.layers = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm, self.head = RMSNorm(dim), nn.Linear(dim, words, bias=False)
        self.cache_shape = (layers, 2, 1, heads, 256, dim // heads)
        turns = torch.outer(torch.arange(512.0), 1e4 ** -torch.arange(0, 1, 2 * heads / dim))
        self.register_buffer("angles", torch.stack((turns.cos(), turns.sin())))

    def forward(self, tokens: torch.Tensor, cache: torch.Tensor, at: int) -> torch.Tensor:
        x = self.embed(tokens)
        angles = self.get_buffer("angles")[:, at : at + tokens.shape[1]]
        for layer, own in zip(self.layers, cache, strict=True):
            x = layer(x, angles, own, at)
        return self.head(self.norm(x))

    def generate(self, count: int) -> torch.Tensor:
        """Greedily, `count` tokens after a prompt of four."""
        tokens = torch.tensor([[1, 2, 3, 4]])
        cache = torch.zeros(self.cache_shape)
        logits, at, found = self(tokens, cache, 0), 4, []
        for _ in range(count):
            tokens = logits[:, -1:].argmax(-1)
            logits, at = self(tokens, cache, at), at + 1
            found.append(tokens)
        return torch.cat(found, 1)


# ---- variants ------------------------------------------------------------------------------------------

Variant = Callable[[Path, Workload], AbstractContextManager[object]]


def _ours(**options: Any) -> Variant:
    return lambda path, workload: opdrift.record(path, model=workload.model, **options)


def _by_sample(path: Path, workload: Workload) -> AbstractContextManager[object]:
    batch = None if workload.batch is None else opdrift.Batch(workload.batch)
    return opdrift.record(path, model=workload.model, batch=batch)


@contextlib.contextmanager
def _without_contents(path: Path, workload: Workload) -> Iterator[None]:
    """Everything but reading tensors: a fingerprint is a row of zeros."""
    blind = dataclasses.replace(load_engine(), put=_nothing, put_large=_nothing)
    options: dict[str, Any] = {"integrity": "off", "kernels": "off"}
    with (
        mock.patch("opdrift.recorder.load_engine", return_value=blind),
        opdrift.record(path, model=workload.model, **options),
    ):
        yield


def _nothing(*_: int) -> None:
    pass


def _hashing(hash_fn: str, *, inputs: bool, **options: Any) -> Variant:
    @contextlib.contextmanager
    def start(_: Path, __: Workload) -> Iterator[None]:
        with DebugMode(**options), DebugMode.log_tensor_hashes(hash_fn, hash_inputs=inputs):
            yield

    return start


_DEBUG_MODES = ("DebugMode, hashes (norm, outputs)", "DebugMode, everything")
VARIANTS: dict[str, Variant] = {
    "empty dispatch mode": lambda _, __: EmptyMode(),
    "opdrift, metadata only": _without_contents,
    "opdrift": _ours(),
    "DebugMode": lambda _, __: DebugMode(),
    "DebugMode, hashes (norm, outputs)": _hashing("norm", inputs=False),
    "DebugMode, everything": _hashing(
        "hash_tensor", inputs=True, record_nn_module=True, record_stack_trace=True, record_ids=True
    ),
}
#: Levels of our own options, each beside the default (both "auto"), and DebugMode with hashes beside them.
LEVELS: dict[str, Variant] = {
    "opdrift": _ours(),
    "opdrift, integrity off": _ours(integrity="off"),
    "opdrift, integrity full": _ours(integrity="full"),
    "opdrift, kernels off": _ours(kernels="off"),
    "opdrift, kernels full": _ours(kernels="full"),
    "opdrift, both off": _ours(integrity="off", kernels="off"),
    "opdrift, both full": _ours(integrity="full", kernels="full"),
    "opdrift, batch of the encoder's 8": _by_sample,
    **{name: VARIANTS[name] for name in _DEBUG_MODES},
}


# ---- measuring -----------------------------------------------------------------------------------------


@dataclass
class Samples:
    """Of one variant, a value a round: CPU nanoseconds, and bytes on disk."""

    inside: list[int] = field(default_factory=list)
    whole: list[int] = field(default_factory=list)
    size: list[int] = field(default_factory=list)


def measure(
    workload: Workload, variants: dict[str, Variant], rounds: int, scratch: Path
) -> tuple[list[int], dict[str, Samples]]:
    """CPU time of the plain runs, and samples of each variant, interleaved."""
    plain: list[int] = []
    samples = {name: Samples() for name in variants}
    for _ in range(rounds):
        start = time.process_time_ns()
        workload.run()
        plain.append(time.process_time_ns() - start)
        for name, variant in variants.items():
            path = scratch / "run.trace"
            opened = time.process_time_ns()
            with variant(path, workload):
                start = time.process_time_ns()
                workload.run()
                samples[name].inside.append(time.process_time_ns() - start)
            samples[name].whole.append(time.process_time_ns() - opened)
            if path.exists():
                _check(path)
                samples[name].size.append(sum(file.stat().st_size for file in path.iterdir()))
                shutil.rmtree(path)
    return plain, samples


def _check(path: Path) -> None:
    """A recording that failed somewhere would be fast for the wrong reason."""
    trace = opdrift.load(path)
    if trace.incomplete is not None or trace.footer is None or trace.footer.failures:
        raise SystemExit(f"the recording is not whole: {trace.incomplete or trace.footer}")
    if refused := Observed(trace).refused:
        raise SystemExit(f"kernels were not observed: {'; '.join(refused)}")


def table(workload: Workload, plain: list[int], samples: dict[str, Samples]) -> str:
    """One line a variant."""
    lines = [
        f"{workload.name}: {workload.what}; {workload.ops} ops, plain {statistics.median(plain) / 1e6:.1f} ms"
        f" ({statistics.median(plain) / 1e3 / workload.ops:.2f} us per op), {len(plain)} rounds",
        f"  {'':36}{'inside':>8}{'whole':>8}{'us/op over plain':>18}{'least':>8}{'bytes/op':>10}",
    ]
    for name, found in samples.items():
        inside, whole = (
            statistics.median(x / p for x, p in zip(xs, plain, strict=True))
            for xs in (found.inside, found.whole)
        )
        over = (
            statistics.median(x - p for x, p in zip(found.inside, plain, strict=True))
            / 1e3
            / workload.ops
        )
        least = (min(found.inside) - min(plain)) / 1e3 / workload.ops
        size = f"{statistics.median(found.size) / workload.ops:.0f}" if found.size else "-"
        lines.append(f"  {name:36}{inside:>8.2f}{whole:>8.2f}{over:>18.1f}{least:>8.1f}{size:>10}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "workloads", nargs="*", help=f"{', '.join(WORKLOADS)}; all if none is named"
    )
    parser.add_argument("--rounds", type=int, help="of each workload; 9 to 15 without")
    parser.add_argument("--levels", action="store_true", help="levels of opdrift's own options")
    options = parser.parse_args()
    if unknown := set(options.workloads) - set(WORKLOADS):
        parser.error(f"no workload {', '.join(sorted(unknown))}; there are {', '.join(WORKLOADS)}")
    torch.set_num_threads(1)
    torch.backends.mha.set_fastpath_enabled(False)
    variants = LEVELS if options.levels else VARIANTS
    print(
        f"torch {torch.__version__}, Python {platform.python_version()}, {torch.backends.cpu.get_cpu_capability()}, engine {load_engine().name}"
    )
    with tempfile.TemporaryDirectory() as scratch, torch.no_grad():
        for name in options.workloads or WORKLOADS:
            workload = WORKLOADS[name]()
            rounds = options.rounds or workload.rounds
            plain, samples = measure(workload, variants, rounds, Path(scratch))
            print(table(workload, plain, samples), flush=True)
            print(f"  load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)


if __name__ == "__main__":
    main()
