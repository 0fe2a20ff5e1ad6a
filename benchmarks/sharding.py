"""What following sharded training costs: a step plain, recorded without the integration, and with it.

Usage: python benchmarks/sharding.py [--rounds N] [--tokens N] [ROW ...]

Two processes on gloo train an encoder of 12 layers (d 256, 9.5 million parameters); every round each of them makes a
step plain and then one under each variant. A figure is the median over rounds of variant / plain of the same round, in CPU time
of rank 0 on one thread: waiting for the other rank counts on neither side. "checks" is what the integration adds
to a recording without it, in parts of the plain step; "least" is the same of the fastest step of each, what a quiet machine would
come to. The work for a step grows with tokens, that of the checks with parameters.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from blocks import Block
from fairscale.nn.data_parallel import FullyShardedDataParallel as Fairscale
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard

import opdrift
from opdrift.fingerprint.engine import load_engine

Samples = dict[str, list[int]]


def fairscale_on_cpu() -> contextlib.AbstractContextManager[None]:
    """What the examples use: fairscale asks for a GPU that it does not need."""
    path = Path(__file__).parents[1] / "examples" / "_fairscale_on_cpu.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.fairscale_on_cpu()


def encoder() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(256, 8) for _ in range(12)))


def fairscale() -> nn.Module:
    # buckets of gradients do not have the shape that gloo asks for
    options = {"compute_device": torch.device("cpu"), "bucket_cap_mb": 0}
    blocks = (Fairscale(block, **options) for block in encoder())
    return Fairscale(nn.Sequential(*blocks), **options)


def fsdp1() -> nn.Module:
    options = {"device_id": torch.device("cpu"), "use_orig_params": True}
    blocks = (FullyShardedDataParallel(block, **options) for block in encoder())
    return FullyShardedDataParallel(nn.Sequential(*blocks), **options)


def fsdp2(**options: object) -> nn.Module:
    model, mesh = encoder(), init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def fsdp2_bf16() -> nn.Module:
    return fsdp2(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


#: Row -> how the model is wrapped, the integration that follows it.
ROWS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "fairscale": (fairscale, "fairscale"),
    "fsdp1": (fsdp1, "torch_fsdp"),
    "fsdp2": (fsdp2, "torch_fsdp"),
    "fsdp2-bf16": (fsdp2_bf16, "torch_fsdp"),
}


def measure(row: str, rounds: int, tokens: int, scratch: Path) -> Samples:
    """Interleaved steps of one rank; the first one of each is not counted."""
    build, integration = ROWS[row]
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.randn(tokens // 64, 64, 256)

    def step() -> int:
        dist.barrier()
        start = time.process_time_ns()
        model(inputs).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.process_time_ns() - start

    def recorded(*integrations: str) -> int:
        path = scratch / f"{row}-{len(integrations)}.trace"
        with opdrift.record(path, model=model, integrations=integrations):
            step()  # the first step names what it meets
            spent = step()
        check(path, followed=bool(integrations))
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(path)
        dist.barrier()
        return spent

    found: Samples = {"plain": [], "without": [], "followed": []}
    step()
    for _ in range(rounds):
        found["plain"].append(step())
        found["without"].append(recorded())
        found["followed"].append(recorded(integration))
    return found


def check(path: Path, *, followed: bool) -> None:
    """A recording that saw nothing, or failed, would be fast for the wrong reason."""
    trace = opdrift.load(path, rank=dist.get_rank())
    if trace.incomplete is not None or trace.footer is None or trace.footer.failures:
        raise SystemExit(f"the recording is not whole: {trace.incomplete or trace.footer}")
    gathers = [mark.fields["intact"] for mark in trace.marks if mark.kind == "gather"]
    if followed != bool(gathers) or not all(gathers):
        raise SystemExit(f"{len(gathers)} gathers were recorded, {sum(gathers)} of them intact")


def line(name: str, found: Samples) -> str:
    """One row of the table."""

    def ratio(samples: list[int]) -> float:
        return statistics.median(x / p for x, p in zip(samples, found["plain"], strict=True))

    checks = statistics.median(
        (f - w) / p
        for f, w, p in zip(found["followed"], found["without"], found["plain"], strict=True)
    )
    least = (min(found["followed"]) - min(found["without"])) / min(found["plain"])
    plain = statistics.median(found["plain"]) / 1e6
    return (
        f"{name:12}{plain:>10.1f}{ratio(found['without']):>10.2f}{ratio(found['followed']):>10.2f}"
        f"{checks:>9.0%}{least:>8.0%}"
    )


def worker(options: argparse.Namespace) -> None:
    """One of the two processes."""
    scratch = Path(options.scratch)
    dist.init_process_group(
        "gloo", init_method=f"file://{scratch}/store", rank=options.rank, world_size=2
    )
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with fairscale_on_cpu():
        for name in options.rows or ROWS:
            found = measure(name, options.rounds, options.tokens, scratch)
            if options.rank == 0:
                print(line(name, found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rows", nargs="*", help=f"{', '.join(ROWS)}; all if none is named")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=512, help="of a step, a multiple of 64")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--scratch", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.rows) - set(ROWS):
        parser.error(f"no row {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}")
    if options.rank is not None:
        worker(options)
        return
    print(
        f"torch {torch.__version__}, Python {platform.python_version()}, engine {load_engine().name}"
    )
    print(f"{'':12}{'plain ms':>10}{'recorded':>10}{'followed':>10}{'checks':>9}{'least':>8}")
    with tempfile.TemporaryDirectory() as scratch:
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, *sys.argv[1:], "--rank", str(rank), "--scratch", scratch]
            )
            for rank in range(2)
        ]
        ended = [rank.wait() for rank in ranks]
    if any(ended):
        sys.exit("a process failed")
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
