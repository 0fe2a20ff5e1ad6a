"""FSDP2 with CPU offload trains another model than one process does: is it the offload?

A critic clips its weights at the start of each forward, as Wasserstein GANs do. In one process that works. Sharded over
two ranks, with the shards in host memory, the loss differs from the second step on. Offload, gathers and mixed
precision are the suspects. Two comparisons with a run in one process clear them, and the findings of the sharded run
name the line: what is written into gathered parameters is thrown away with them.

    python examples/fsdp2_offload.py                                # the whole story
    python examples/fsdp2_offload.py --flow clipped -o mine.trace    # one run of your own, on two ranks
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from pathlib import Path
from typing import Any

import _story
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import opdrift

RANKS = 2
STEPS = 2
LIMIT = 0.05
#: What each flow does beside training: (is sharded and offloaded, clips its weights, computes in bfloat16).
FLOWS = {
    "plain": (False, False, False),
    "offload": (True, False, False),
    "bfloat16": (True, False, True),
    "plain-clipped": (False, True, False),
    "clipped": (True, True, False),
}


class Block(nn.Module):
    """A residual block; sizes that two ranks do not share evenly."""

    def __init__(self, clips: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(15)
        self.fc1 = nn.Linear(15, 33)
        self.fc2 = nn.Linear(33, 15)
        self.clips = clips

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Clip, if it is asked for, and add to `x`."""
        if self.clips:
            for weight in (self.fc1.weight, self.fc2.weight):
                weight.data.clamp_(-LIMIT, LIMIT)
        added: torch.Tensor = self.fc2(torch.relu(self.fc1(self.norm(x))))
        return x + added


class Critic(nn.Module):
    """A number for each sample."""

    def __init__(self, clips: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(clips) for _ in range(3))
        self.head = nn.Linear(15, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The blocks, one after the other."""
        for layer in self.layers:
            x = layer(x)
        score: torch.Tensor = self.head(x)
        return score


def shard(model: Critic, *, bfloat16: bool) -> None:
    """Shard each block and the rest over the ranks, and keep the shards in host memory."""
    options: dict[str, Any] = {
        "mesh": init_device_mesh("cpu", (RANKS,)),
        "offload_policy": CPUOffloadPolicy(pin_memory=False),  # pinning needs a GPU
    }
    if bfloat16:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)


def train(flow: str, trace: Path) -> list[float]:
    """Train on one batch, look at the result, and record both; the loss of each step, and the last one."""
    sharded, clips, bfloat16 = FLOWS[flow]
    torch.manual_seed(0)
    model = Critic(clips)
    x = torch.randn(8, 15)
    if sharded:
        shard(model, bfloat16=bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with opdrift.record(trace, model=model, label=f"critic {flow}") as recorder:
        for step in range(STEPS):
            recorder.mark("step", step=step)
            optimizer.zero_grad()
            loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        with torch.no_grad():
            losses.append(model(x).float().square().mean().item())
    return losses


def run(flows: list[str], folder: Path, rank: int | None, store: Path | None) -> None:
    """Train in each of the ways, in this process; `rank` is its number where it is one of several."""
    torch.set_num_threads(1)
    if rank is not None:
        warnings.filterwarnings("ignore", message=".*barrier.*")
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    for flow in flows:
        losses = train(flow, folder if folder.suffix else folder / f"{flow}.trace")
        if not rank:
            print(f"{flow:14} loss {'  '.join(f'{loss:.6f}' for loss in losses)}", flush=True)
    if rank is not None:
        dist.destroy_process_group()


def start(flows: list[str], output: Path) -> None:
    """Run flows in fresh processes, one for each rank."""
    arguments: list[str | Path] = ["-o", output]
    for flow in flows:
        arguments += ["--flow", flow]
    if not FLOWS[flows[0]][0]:
        _story.together([(__file__, arguments)])
        return
    with tempfile.TemporaryDirectory(prefix="opdrift-store-") as folder:
        arguments += ["--store", Path(folder) / "store", "--rank"]
        _story.together([(__file__, [*arguments, str(rank)]) for rank in range(RANKS)])


def story(keep: Path | None) -> None:
    """Without clipping, in lower precision, and with clipping; each compared with the run in one process."""
    with _story.workspace(keep) as folder:
        _story.heading("The losses of two steps, and after them")
        start(["plain", "plain-clipped"], folder)
        start(["offload", "bfloat16", "clipped"], folder)

        _story.heading("Sharded and offloaded, without clipping: is it the offload?")
        _story.diff_trace(folder, "plain.trace", "offload.trace")

        _story.heading("In bfloat16: is it the precision?")
        _story.diff_trace(folder, "plain.trace", "bfloat16.trace")

        _story.heading("With clipping: what the sharded run alone shows")
        _story.command(folder, "opdrift", "show", "clipped.trace", "--findings")


def main() -> None:
    """Read the options, and run some flows or the whole story."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--flow", choices=FLOWS, action="append", help="run only this one; needs -o"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="TRACE", help="where to record it")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave the story's traces here")
    parser.add_argument("--store", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()

    if options.flow is None:
        story(options.keep)
    elif options.output is None:
        parser.error("--flow needs -o TRACE")
    elif options.rank is None and FLOWS[options.flow[0]][0]:
        start(options.flow, options.output.resolve())
    else:
        run(options.flow, options.output, options.rank, options.store)


if __name__ == "__main__":
    main()
