"""One of two processes that record trainings in which rank 1 goes wrong in the middle. Run by test_fsdp_compared.py."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fsdp_world import TOKENS, Net, fsdp1, fsdp2, local, poke
from torch import nn
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy

import opdrift

LATER = "layers.1.fc2.weight"


@dataclass(frozen=True)
class Run:
    """Three steps and an inference; the faults are rank 1's, after the first step or in the second.

    Attributes:
        wrap: How the model is sharded; None for a plain one.
        forward: What it does to the input of the second block's fc2 in the second step.
        gathered: What it does to that fc2 itself, whose parameters are gathered then.
        between: What it does to the model after the first step.
        gradients: What it does to the gradients of the second step.
        keeps: The gradients are never zeroed, on both ranks.
        skips: Rank 1 leaves out the second step of the optimizer.
        optimizer: "SGD" or "AdamW".
        settings: Of the optimizer; both ranks have them.
        options: Of the wrapper.
        record: Of the recorder.
    """

    wrap: Callable[..., nn.Module] | None = None
    forward: Callable[[torch.Tensor], torch.Tensor] | None = None
    gathered: Callable[[nn.Module], None] | None = None
    between: Callable[[nn.Module], None] | None = None
    gradients: Callable[[nn.Module], None] | None = None
    keeps: bool = False
    skips: bool = False
    optimizer: str = "SGD"
    settings: dict[str, float] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)


def double(gradients_of: nn.Module) -> None:
    dict(gradients_of.named_parameters())[LATER].grad.mul_(2)


def add(model: nn.Module) -> None:
    with torch.no_grad():
        local(dict(model.named_parameters())[LATER]).add_(0.5)


def shift(model: nn.Module) -> None:
    """Change a weight by what the mean of its input goes with, which is zero behind a norm."""
    with torch.no_grad():
        local(model.layers[1].fc1.weight).add_(0.01)


def exchange(model: nn.Module) -> None:
    """Put another tensor in the place of a shard: FSDP2 goes on to gather the one that it made."""
    shard = dict(model.named_parameters())[LATER]._local_tensor
    shard.data = shard.data * 0.5


def replace(linear: nn.Module) -> None:
    """Put another tensor in the place of what was gathered."""
    linear.weight.data = linear.weight.data * 1.5


def poke_gathered(linear: nn.Module) -> None:
    poke(linear.weight, 45)


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
RUNS = {
    "plain": Run(),
    "plain-adam": Run(optimizer="AdamW"),
    "fsdp1-adam": Run(fsdp1, optimizer="AdamW"),
    "fsdp2-adam": Run(fsdp2, optimizer="AdamW"),
    "fsdp1": Run(fsdp1),
    "fsdp1-forward": Run(fsdp1, forward=lambda x: x * 1.5),
    "fsdp2": Run(fsdp2),
    "fsdp2-forward": Run(fsdp2, forward=lambda x: x * 1.5),
    "fsdp1-replaced": Run(fsdp1, gathered=replace),
    "fsdp2-replaced": Run(fsdp2, gathered=replace),
    "fsdp1-torn": Run(fsdp1, gathered=poke_gathered),
    "fsdp2-torn": Run(fsdp2, gathered=poke_gathered),
    "fsdp2-poked": Run(fsdp2, between=lambda model: poke(local(model.layers[1].fc2.weight), 3)),
    "fsdp2-added": Run(fsdp2, between=add),
    "fsdp2-exchanged": Run(fsdp2, between=exchange),
    "fsdp1-alone": Run(fsdp1, record={"integrations": ()}),
    "fsdp2-alone": Run(fsdp2, record={"integrations": ()}),
    "fsdp1-flat-alone": Run(fsdp1, options={"use_orig_params": False}, record={"integrations": ()}),
    "fsdp2-bf16": Run(fsdp2, options={"mp_policy": BF16}),
    "fsdp1-bf16": Run(
        fsdp1, options={"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)}
    ),
    "fsdp2-reduced": Run(
        fsdp2, options={"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)}
    ),
    "fsdp2-shifted": Run(fsdp2, between=shift),
    "fsdp2-rate": Run(fsdp2, settings={"lr": 0.012}),
    "fsdp1-rate": Run(fsdp1, settings={"lr": 0.012}),
    "fsdp2-bf16-rate": Run(fsdp2, options={"mp_policy": BF16}, settings={"lr": 0.012}),
    "fsdp2-bf16-decay": Run(fsdp2, options={"mp_policy": BF16}, settings={"weight_decay": 0.1}),
    "fsdp2-slow": Run(fsdp2, settings={"lr": 1.2e-6}),
    "plain-slow": Run(settings={"lr": 1e-6}),
    "fsdp2-adam-decay": Run(fsdp2, optimizer="AdamW", settings={"weight_decay": 0.1}),
    "fsdp2-gradients": Run(fsdp2, gradients=double),
    "fsdp1-kept": Run(fsdp1, keeps=True, optimizer="AdamW"),
    "fsdp2-kept": Run(fsdp2, keeps=True, optimizer="AdamW"),
    "fsdp1-skipped": Run(fsdp1, skips=True, optimizer="AdamW"),
    "fsdp2-skipped": Run(fsdp2, skips=True, optimizer="AdamW"),
}


def run(case: Run, rank: int, trace: str) -> None:
    torch.manual_seed(3)
    model: nn.Module = Net()
    steps = 0

    def act(linear: nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor] | None:
        if rank != 1 or steps != 1:
            return None
        if case.gathered is not None:
            case.gathered(linear)
        return None if case.forward is None else (case.forward(inputs[0]),)

    model.layers[1].fc2.register_forward_pre_hook(act)
    if case.wrap is not None:
        model = case.wrap(model, **case.options)
    optimizer = getattr(torch.optim, case.optimizer)(
        model.parameters(), **{"lr": 0.01, **case.settings}
    )
    with opdrift.record(trace, model=model, **case.record) as recorder:
        for steps in range(3):  # `act` reads it
            recorder.mark("step", step=steps)
            if not case.keeps:
                optimizer.zero_grad()
            model(TOKENS).float().square().mean().backward()
            if case.gradients is not None and rank == 1 and steps == 1:
                case.gradients(model)
            if not (case.skips and rank == 1 and steps == 1):
                optimizer.step()
            if case.between is not None and rank == 1 and steps == 0:
                case.between(model)
        with torch.no_grad():
            model(TOKENS)


def main(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for name, case in RUNS.items():
        run(case, rank, str(folder / name))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
