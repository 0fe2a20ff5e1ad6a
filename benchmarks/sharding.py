"""What following sharded training costs: a step plain, recorded without the integration, and with it.

Usage: python benchmarks/sharding.py [--rounds N] [--tokens N] [--width N] [ROW ...]

Two processes on gloo train an encoder of 12 layers (d 256, 9.5 million parameters); every round each of them makes a
step plain and then one under each variant. Figures are of rank 0, in CPU time on one thread: waiting for the other rank counts on
neither side. "recorded" is a recording without the integration in parts of the plain step, "followed" one with it; medians over
rounds of the ratio within a round. All that follows is in parts of the plain step: "added" is followed less recorded; "inside" is
what is spent inside the integration's own functions (digests, names, marks), which a busy machine disturbs least, since it
needs no difference of two steps; "announced" is what it takes to have each collective on disk before it is issued, which a
recording without the integration does, too; "everything" is added and announced together. "inside" and "announced" are
medians over rounds as well, and "least" is inside of the fastest round over the fastest plain step.

The work for a step grows with tokens, that of the checks with parameters: `--width 432 --tokens 128` (27 million parameters) is a
hard case.
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
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from blocks import Block
from fairscale.nn.data_parallel import FullyShardedDataParallel as Fairscale
from inside import watched, written
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard

import opdrift
from opdrift.fingerprint.engine import load_engine
from opdrift_integrations.fairscale import watcher as fairscale_watcher
from opdrift_integrations.torch_fsdp import watching as torch_watching

#: What was measured -> nanoseconds of CPU time, one for each round.
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


def encoder(width: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width, 8) for _ in range(12)))


def fairscale(width: int) -> nn.Module:
    # buckets of gradients do not have the shape that gloo asks for
    options = {"compute_device": torch.device("cpu"), "bucket_cap_mb": 0}
    blocks = (Fairscale(block, **options) for block in encoder(width))
    return Fairscale(nn.Sequential(*blocks), **options)


def fsdp1(width: int) -> nn.Module:
    options = {"device_id": torch.device("cpu"), "use_orig_params": True}
    blocks = (FullyShardedDataParallel(block, **options) for block in encoder(width))
    return FullyShardedDataParallel(nn.Sequential(*blocks), **options)


def fsdp2(width: int, **options: object) -> nn.Module:
    model, mesh = encoder(width), init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def fsdp2_bf16(width: int) -> nn.Module:
    return fsdp2(width, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))


#: Row -> how the model is wrapped, the integration that follows it.
ROWS: dict[str, tuple[Callable[[int], nn.Module], str]] = {
    "fairscale": (fairscale, "fairscale"),
    "fsdp1": (fsdp1, "torch_fsdp"),
    "fsdp2": (fsdp2, "torch_fsdp"),
    "fsdp2-bf16": (fsdp2_bf16, "torch_fsdp"),
}


def measure(row: str, options: argparse.Namespace) -> Samples:
    """Interleaved steps of one rank; the first one of each is not counted."""
    build, integration = ROWS[row]
    model, scratch = build(options.width), Path(options.scratch)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    inputs = torch.randn(options.tokens // 64, 64, options.width)
    found: Samples = {name: [] for name in ("plain", "recorded", "followed", "inside", "announced")}

    def step() -> int:
        dist.barrier()
        start = time.process_time_ns()
        model(inputs).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.process_time_ns() - start

    def recorded(*integrations: str) -> int:
        path = scratch / f"{row}-{len(integrations)}.trace"
        with (
            watched(torch_watching, fairscale_watcher) as (inside, announced),
            opdrift.record(path, model=model, integrations=integrations) as recorder,
        ):
            step()  # the first step names what it meets
            written(recorder)
            inside.spent = announced.spent = 0
            spent = step()
            written(recorder)
            if integrations:
                found["inside"].append(inside.spent)
                found["announced"].append(announced.spent)
        check(path, followed=bool(integrations))
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(path)
        dist.barrier()
        return spent

    step()
    for _ in range(options.rounds):
        found["plain"].append(step())
        found["recorded"].append(recorded())
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

    def ratio(samples: Iterable[int]) -> float:
        return statistics.median(x / p for x, p in zip(samples, found["plain"], strict=True))

    added = [f - r for f, r in zip(found["followed"], found["recorded"], strict=True)]
    everything = [a + c for a, c in zip(added, found["announced"], strict=True)]
    parts = [
        ratio(added),
        ratio(found["inside"]),
        min(found["inside"]) / min(found["plain"]),
        ratio(found["announced"]),
        ratio(everything),
    ]
    return (
        f"{name:12}{statistics.median(found['plain']) / 1e6:>8.0f}"
        f"{ratio(found['recorded']):>10.2f}{ratio(found['followed']):>10.2f}"
        + "".join(
            f"{part:>{width}.1%}" for part, width in zip(parts, (8, 8, 8, 11, 12), strict=True)
        )
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
            found = measure(name, options)
            if options.rank == 0:
                print(line(name, found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rows", nargs="*", help=f"{', '.join(ROWS)}; all if none is named")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=512, help="of a step, a multiple of 64")
    parser.add_argument("--width", type=int, default=256, help="of the encoder, a multiple of 8")
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
    print(
        f"{'':12}{'plain ms':>8}{'recorded':>10}{'followed':>10}{'added':>8}{'inside':>8}{'least':>8}"
        f"{'announced':>11}{'everything':>12}"
    )
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
