"""What following a library costs: a small step plain, recorded without the integration, and with it.

Usage: python benchmarks/integrations.py [--rounds N] [--tokens N] [ROW ...]

A step is a forward of the encoder that benchmarks/overhead.py has, 12 layers of 256, over a batch of 8 x 128, written
in modules that can be offloaded. Every round runs it plain and once under each variant, in one process on one thread;
a figure is the median over rounds of variant / plain of the same round, in CPU time of the process (disk reads of offloaded
weights come from the page cache). "added" is what the integration adds to a recording without it, in parts of the plain step; "inside" is
what is spent inside the integration's own functions, which a busy machine disturbs least, since it needs no difference of two
steps; "least" is inside of the fastest round over the fastest plain step.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from accelerate import cpu_offload, disk_offload
from blocks import Block
from inside import watched, written
from torch import nn

import opdrift
from opdrift.fingerprint.engine import load_engine

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Row:
    """A library at work: the model that it has changed, and what that is called."""

    integration: str
    build: Callable[[Path], nn.Module]
    what: str


def encoder() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(256, 8) for _ in range(12))).eval()


ROWS = {
    "accelerate-cpu": Row(
        "accelerate",
        lambda _: cpu_offload(encoder(), execution_device=CPU),
        "cpu_offload: weights stay in host memory, nothing is copied",
    ),
    "accelerate-disk": Row(
        "accelerate",
        lambda folder: disk_offload(encoder(), folder, execution_device=CPU),
        "disk_offload: every weight is read from its file at every step",
    ),
}


@dataclass
class Samples:
    """CPU nanoseconds of a step, a value a round."""

    plain: list[int] = field(default_factory=list)
    without: list[int] = field(default_factory=list)
    followed: list[int] = field(default_factory=list)
    inside: list[int] = field(default_factory=list)


def measure(row: Row, rounds: int, tokens: int, scratch: Path) -> Samples:
    """Interleaved steps; the first one of each is not counted."""
    model = row.build(scratch / "weights")
    inputs = torch.randn(tokens // 128, 128, 256)
    found = Samples()

    def step() -> int:
        start = time.process_time_ns()
        model(inputs)
        return time.process_time_ns() - start

    def recorded(*integrations: str) -> int:
        path = scratch / "run.trace"
        with (
            watched() as (inside, _),
            opdrift.record(path, model=model, integrations=integrations) as recorder,
        ):
            step()  # the first step names what it meets
            written(recorder)
            inside.spent = 0
            spent = step()
            written(recorder)
            if integrations:
                found.inside.append(inside.spent)
        _check(path, followed=bool(integrations))
        shutil.rmtree(path)
        return spent

    step()
    for _ in range(rounds):
        found.plain.append(step())
        found.without.append(recorded())
        found.followed.append(recorded(row.integration))
    return found


def _check(path: Path, *, followed: bool) -> None:
    """A recording that saw nothing, or failed, would be fast for the wrong reason."""
    trace = opdrift.load(path)
    if trace.incomplete is not None or trace.footer is None or trace.footer.failures:
        raise SystemExit(f"the recording is not whole: {trace.incomplete or trace.footer}")
    moves = [mark for mark in trace.marks if mark.kind == "move"]
    if followed != bool(moves):
        raise SystemExit(f"{len(moves)} moves were recorded")


def line(name: str, row: Row, found: Samples) -> str:
    """One row of the table."""

    def ratio(samples: list[int]) -> float:
        return statistics.median(x / p for x, p in zip(samples, found.plain, strict=True))

    added = [f - w for f, w in zip(found.followed, found.without, strict=True)]
    least = min(found.inside) / min(found.plain)
    plain = statistics.median(found.plain) / 1e6
    return (
        f"{name:18}{plain:>10.1f}{ratio(found.without):>10.2f}{ratio(found.followed):>10.2f}"
        f"{ratio(added):>8.1%}{ratio(found.inside):>8.1%}{least:>8.1%}  {row.what}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rows", nargs="*", help=f"{', '.join(ROWS)}; all if none is named")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=1024, help="of a step, a multiple of 128")
    options = parser.parse_args()
    if unknown := set(options.rows) - set(ROWS):
        parser.error(f"no row {', '.join(sorted(unknown))}; there are {', '.join(ROWS)}")
    logging.getLogger("accelerate").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    print(
        f"torch {torch.__version__}, Python {platform.python_version()}, engine {load_engine().name}"
    )
    print(
        f"{'':18}{'plain ms':>10}{'recorded':>10}{'followed':>10}{'added':>8}{'inside':>8}{'least':>8}"
    )
    with torch.no_grad():
        for name in options.rows or ROWS:
            with tempfile.TemporaryDirectory() as scratch:
                row = ROWS[name]
                found = measure(row, options.rounds, options.tokens, Path(scratch))
                print(line(name, row, found), flush=True)
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
