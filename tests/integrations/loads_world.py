"""One of two processes that record one model as it is, under DDP and under FSDP, loaded at several moments. Run by test_loads_compared.py."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.functional import cross_entropy

import opdrift

warnings.filterwarnings("ignore")
torch.set_num_threads(1)
TOKENS = torch.arange(20).reshape(4, 5)


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 20))


def checkpoint() -> dict[str, Tensor]:
    """Other weights, drawn before anything is recorded."""
    drawn = torch.Generator().manual_seed(7)
    return {name: torch.randn(t.shape, generator=drawn) for name, t in build().state_dict().items()}


CHECKPOINT = checkpoint()


def fsdp1(model: nn.Module, *, use_orig_params: bool = True) -> nn.Module:
    return FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
    )


def flat(model: nn.Module) -> nn.Module:
    return fsdp1(model, use_orig_params=False)


def fsdp2(model: nn.Module, precision: MixedPrecisionPolicy | None = None) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (*(m for m in model if isinstance(m, nn.Linear)), model):
        fully_shard(part, mesh=mesh, mp_policy=precision or MixedPrecisionPolicy())
    return model


def unsynchronised(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)


def bfloat16(model: nn.Module) -> nn.Module:
    return fsdp2(model, MixedPrecisionPolicy(param_dtype=torch.bfloat16))


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda model: model,
    "ddp": nn.parallel.DistributedDataParallel,
    "fsdp1": fsdp1,
    "fsdp2": fsdp2,
    "bfloat16": bfloat16,
}
#: When it is loaded: before the recording, in it, where the model is built in it, too, or never; of "part" one layer is not.
LOADS = ("before", "inside", "built", "never", "never-built", "part")


def load(model: nn.Module, when: str) -> None:
    if not when.startswith("never"):
        state = dict(CHECKPOINT)
        if when == "part":
            del state["3.weight"], state["3.bias"]
        model.load_state_dict(state, strict=False)


def train(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        cross_entropy(model(TOKENS).float().flatten(0, 1), TOKENS.flatten()).backward()
        optimizer.step()
    with torch.no_grad():
        model(TOKENS)


def run(wrap: Callable[[nn.Module], nn.Module], when: str, trace: Path) -> None:
    """Two steps of training and an inference."""
    if when.endswith("built"):
        with opdrift.record(trace):
            model = build()
            load(model, when)
            train(wrap(model))
        return
    model = build()
    if when == "before":
        load(model, when)
    with opdrift.record(trace, model=model):
        if when != "before":
            load(model, when)
        train(wrap(model))


def run_apart(
    wrap: Callable[[nn.Module], nn.Module], trace: Path, state: dict[str, Tensor]
) -> None:
    """Each rank loads what it is given while it is recorded; with an empty state nothing."""
    model = build()
    with opdrift.record(trace, model=model):
        model.load_state_dict(state, strict=False)
        train(wrap(model))


def run_statistics(wrap: Callable[[nn.Module], nn.Module], trace: Path, *, own: bool) -> None:
    """A model with running statistics, built while it is recorded; `own`: with a content of this rank's own."""
    torch.manual_seed(0)
    with opdrift.record(trace):
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
        if own:
            model[1].running_mean.add_(0.25)
        wrapped = wrap(model)
        for _ in range(2):
            samples = torch.randn(5, 4)  # each rank goes on with the same generator
            wrapped(samples * (1 + dist.get_rank())).square().mean().backward()


def main(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for name, wrap in WRAPS.items():
        for when in LOADS:
            run(wrap, when, folder / f"{name}-{when}")
    run(flat, "inside", folder / "flat-inside")
    older = {name: tensor * 1.25 for name, tensor in CHECKPOINT.items()}
    for name in ("ddp", "fsdp1", "fsdp2"):
        run_apart(WRAPS[name], folder / f"{name}-one", {} if rank else CHECKPOINT)
        run_apart(WRAPS[name], folder / f"{name}-older", older if rank else CHECKPOINT)
    for name, wrap in (("ddp", unsynchronised), ("fsdp1", fsdp1), ("fsdp2", fsdp2)):
        run_statistics(wrap, folder / f"{name}-statistics", own=False)
        run_statistics(wrap, folder / f"{name}-own-statistics", own=rank == 1)
    with opdrift.record(folder / "ddp-broadcast"):
        model = build()
        if not rank:
            model.load_state_dict(CHECKPOINT)
        train(WRAPS["ddp"](model))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
