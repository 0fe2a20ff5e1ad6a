"""One of four processes that record models spread in two dimensions, one trace a case. Run by test_topologies.py."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fsdp_world import TOKENS, Net, fsdp1, local, poke, step
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import ShardingStrategy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import opdrift
from opdrift_integrations.torch_pipelining import TorchPipeliningIntegration

WORLD = 4


def grid(*names: str) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def hybrid1(model: nn.Module) -> nn.Module:
    mesh, strategy = grid("replicate", "shard"), ShardingStrategy.HYBRID_SHARD
    return fsdp1(model, device_mesh=mesh, sharding_strategy=strategy)


def hybrid2(model: nn.Module) -> nn.Module:
    return shard(model, grid("replicate", "shard"))


def compressed(model: nn.Module) -> nn.Module:
    """Gradients are reduced in half precision, and written back on a thread of gloo."""
    found = DistributedDataParallel(model)
    found.register_comm_hook(None, fp16_compress_hook)
    return found


class Split(nn.Module):
    """Its products are split over two ranks without a remainder."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.fc1 = nn.Linear(8, 12)
        self.fc2 = nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fc2(torch.tanh(self.fc1(self.norm(x))))


class SplitNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.layers = nn.ModuleList(Split() for _ in range(2))
        self.head = nn.Linear(8, 7)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def tensor_parallel(model: nn.Module) -> nn.Module:
    mesh = grid("data", "tensor")
    plan = {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()}
    for layer in model.layers:
        parallelize_module(layer, mesh["tensor"], plan)
    return shard(model, mesh["data"])


# ---- trainings ----------------------------------------------------------------------------------------


def train(
    model: nn.Module, trace: str | None, between: Callable[[nn.Module], object] = lambda _: None
) -> list[Any]:
    """Two steps and an inference, recorded if a trace is named; what came of it."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    said: list[Any] = []
    recorded = contextlib.nullcontext() if trace is None else opdrift.record(trace, model=model)
    with recorded as recorder:
        for number in range(2):
            if recorder is not None:
                recorder.mark("step", step=number)
            said.append(step(model, optimizer))
            between(model)
        with torch.no_grad():
            said.append(model(TOKENS).tolist())
    return said


def made(kind: Callable[[], nn.Module], wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return wrap(kind())


#: name -> the model, how it is spread.
RIGHT: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], nn.Module]]] = {
    "plain": (Net, lambda model: model),
    "hybrid1": (Net, hybrid1),
    "hybrid2": (Net, hybrid2),
    "compressed": (Net, compressed),
    "split-plain": (SplitNet, lambda model: model),
    "tensor": (SplitNet, tensor_parallel),
}


def on(rank: int, act: Callable[[torch.Tensor], object]) -> Callable[[nn.Module], object]:
    """Do something to one rank's part of a parameter."""

    def between(model: nn.Module) -> None:
        if dist.get_rank() == rank:
            with torch.no_grad():
                act(local(model.layers[1].fc2.weight))

    return between


FAULTS = {
    "poked": (hybrid2, on(3, lambda part: poke(part, 4))),
    "added": (hybrid2, on(3, lambda part: part.add_(0.5))),
    "added-flat": (hybrid1, on(3, lambda part: part.add_(0.5))),
}


class Stage(nn.Module):
    """A block of two, with statistics of what runs through it."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6) if number else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(torch.tanh(self.fc(x)))


def pipeline(trace: str | None) -> list[Any]:
    """Two steps of two stages, each of them sharded over two ranks."""
    mesh = grid("stage", "data")
    torch.manual_seed(3)
    number = mesh["stage"].get_local_rank()
    module = fully_shard(Stage(number), mesh=mesh["data"])
    group = mesh["stage"].get_group()
    stage = PipelineStage(module, number, 2, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    rows, said = torch.linspace(-1, 1, 48).view(8, 6), []
    integrations = ["torch_fsdp", TorchPipeliningIntegration()]
    recorded = (
        contextlib.nullcontext()
        if trace is None
        else opdrift.record(trace, model=module, integrations=integrations)
    )
    with recorded:
        # the trial run's memory holds NaN, not what chance left there
        torch.use_deterministic_algorithms(True)
        for _ in range(2):
            optimizer.zero_grad()
            if number == 0:
                schedule.step(rows)
            else:
                said.append(schedule.step(target=rows.flip(0)).tolist())
            optimizer.step()
        torch.use_deterministic_algorithms(False)
    return said


def uneven(trace: str) -> None:
    """Ranks with one to four batches."""
    torch.manual_seed(3)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with opdrift.record(trace, model=model), Join([model]):
        for _ in range(1 + dist.get_rank()):
            step(model, optimizer)


def from_nothing(trace: str) -> None:
    """A model that is built on "meta", sharded, given memory, and loaded from rank 0's state dict."""
    torch.manual_seed(3)
    whole = Net().state_dict() if dist.get_rank() == 0 else {}
    with torch.device("meta"):
        model = Net()
    model = shard(model, init_device_mesh("cpu", (WORLD,)))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    with opdrift.record(trace, model=model):
        model.to_empty(device="cpu")
        set_model_state_dict(model, whole, options=options)
        with torch.no_grad():
            model(TOKENS)
        get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def main(rank: int, folder: Path) -> None:
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD)
    torch.set_num_threads(1)
    said = {}
    for name, (kind, wrap) in RIGHT.items():
        runs = [train(made(kind, wrap), trace) for trace in (None, str(folder / name))]
        said[name] = runs[0] == runs[1]
    said["pipeline"] = pipeline(None) == pipeline(str(folder / "pipeline"))
    for name, (wrap, between) in FAULTS.items():
        train(made(Net, wrap), str(folder / name), between)
    uneven(str(folder / "uneven"))
    from_nothing(str(folder / "nothing"))
    (folder / f"said-{rank}.json").write_text(json.dumps(said))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
