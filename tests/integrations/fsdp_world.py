"""One of two processes that record models under torch's FSDP, one trace a case. Run by test_torch_fsdp.py."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp._flat_param import FlatParamHandle
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import Shard
from torch.optim.optimizer import register_optimizer_step_pre_hook

import opdrift

warnings.filterwarnings("ignore")
torch.set_num_threads(1)

TOKENS = torch.tensor([[0, 3, 6, 2], [1, 5, 5, 4]])


class Block(nn.Module):
    """Sizes that two ranks do not share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(10)
        self.fc1 = nn.Linear(10, 13)
        self.fc2 = nn.Linear(13, 10)
        self.register_buffer("scale", torch.tensor([1 / 3, 0.5]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fc2(torch.tanh(self.fc1(self.norm(x)))) * self.scale[0]


class Net(nn.Module):
    """A tied embedding and two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 10)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(10, 7)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def fsdp1(model: nn.Module, **options: Any) -> nn.Module:
    options = {"device_id": torch.device("cpu"), "use_orig_params": True, **options}
    for number, layer in enumerate(model.layers):
        model.layers[number] = FullyShardedDataParallel(layer, **options)
    return FullyShardedDataParallel(model, **options)


def fsdp2(model: nn.Module, **options: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor = TOKENS
) -> float:
    optimizer.zero_grad()
    loss = model(tokens).float().square().mean()
    loss.backward()
    optimizer.step()
    return float(loss)


# ---- correct runs ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Correct:
    """A run without a fault: how it is wrapped, and what it does between its steps."""

    wrap: Callable[..., nn.Module] | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    between: Callable[[nn.Module], object] = lambda _: None


def summon(model: nn.Module) -> None:
    """Change the whole parameters, and let FSDP1 write the change into the shards."""
    with FullyShardedDataParallel.summon_full_params(model, writeback=True), torch.no_grad():
        model.head.bias.add_(0.5)


def accumulate(model: nn.Module) -> None:
    """A backward whose gradients are kept for the next one."""
    if isinstance(model, FullyShardedDataParallel):
        with model.no_sync():
            model(TOKENS).float().square().mean().backward()
        return
    model.set_requires_gradient_sync(False)
    model(TOKENS).float().square().mean().backward()
    model.set_requires_gradient_sync(True)


def unshard(model: nn.Module) -> None:
    """Ask for the parameters of a unit, look at them, and give them back."""
    layer = model.layers[0]
    layer.unshard()
    layer.fc1.weight.sum()
    layer.reshard()


BF16 = torch.bfloat16
CORRECT = {
    "plain": Correct(),
    "fsdp1": Correct(fsdp1),
    "fsdp1-flat": Correct(fsdp1, {"use_orig_params": False}),
    "fsdp1-kept": Correct(fsdp1, {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}),
    "fsdp1-bf16": Correct(
        fsdp1, {"mixed_precision": MixedPrecision(param_dtype=BF16, buffer_dtype=BF16)}
    ),
    "fsdp1-summon": Correct(fsdp1, between=summon),
    "fsdp1-state": Correct(fsdp1, between=lambda model: model.state_dict()),
    "fsdp1-accumulate": Correct(fsdp1, between=accumulate),
    "fsdp2": Correct(fsdp2),
    "fsdp2-offload": Correct(fsdp2, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "fsdp2-kept": Correct(fsdp2, {"reshard_after_forward": False}),
    "fsdp2-bf16": Correct(fsdp2, {"mp_policy": MixedPrecisionPolicy(param_dtype=BF16)}),
    "fsdp2-columns": Correct(
        fsdp2, {"shard_placement_fn": lambda p: Shard(1) if p.shape[-1] == 10 and p.ndim == 2 else None}
    ),
    "fsdp2-state": Correct(fsdp2, between=lambda model: model.state_dict()),
    "fsdp2-accumulate": Correct(fsdp2, between=accumulate),
    "fsdp2-unshard": Correct(fsdp2, between=unshard),
}  # fmt: skip


def run_correct(case: Correct, trace: str | None) -> dict[str, Any]:
    """An inference, two steps and an inference, recorded if a trace is named; what came of it."""
    torch.manual_seed(3)
    model = Net()
    if case.wrap is not None:
        model = case.wrap(model, **case.options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    recorded = contextlib.nullcontext() if trace is None else opdrift.record(trace, model=model)
    with recorded as recorder:
        with torch.no_grad():
            outputs = [model(TOKENS)]
        for number in range(2):
            if recorder is not None:
                recorder.mark("step", step=number)
            step(model, optimizer)
            case.between(model)
        with torch.no_grad():
            outputs.append(model(TOKENS))
    return {
        "outputs": [output.double().flatten().tolist() for output in outputs],
        "random": torch.get_rng_state().tolist()[:64],
    }


# ---- faults --------------------------------------------------------------------------------------------


def poke(tensor: torch.Tensor, element: int = 0, value: float = 7.0) -> None:
    """Write one element past the dispatcher, as another thread would."""
    if tensor.element_size() == 2:
        ctypes.c_uint16.from_address(tensor.data_ptr() + 2 * element).value = 0x40E0  # 7, or 2.4
        return
    ctypes.c_float.from_address(tensor.data_ptr() + 4 * element).value = value


@contextlib.contextmanager
def replaced(owner: Any, name: str, function: Any) -> Iterator[None]:
    original = vars(owner)[name]
    setattr(owner, name, function(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def local(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter between steps."""
    return getattr(parameter, "_local_tensor", parameter).detach()


def poke_shard(block: nn.Module) -> None:
    """What the block's weight is gathered from, after it was gathered for forward and before it is for backward."""
    params = block._get_fsdp_state()._fsdp_param_group.fsdp_params
    poke(next(p for p in params if p._param_fqn.endswith("fc1.weight"))._sharded_param_data, 5)


class Fault:
    """Planted into a training of two steps.

    Attributes:
        ranks: The ranks that have it.
        patches: Replaces functions of torch before it is recorded.
        forward: Runs at the beginning of the first block's forward in step 1.
        between: Runs between the steps.
    """

    def __init__(
        self,
        wrap: Callable[..., nn.Module],
        *,
        ranks: tuple[int, ...] = (1,),
        options: dict[str, Any] | None = None,
        patches: Callable[[nn.Module], contextlib.AbstractContextManager[None]] | None = None,
        forward: Callable[[nn.Module], None] | None = None,
        between: Callable[[nn.Module], None] | None = None,
    ) -> None:
        self.wrap, self.ranks, self.options = wrap, ranks, options or {}
        self.patches, self.forward, self.between = patches, forward, between


def keep_after_backward(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    model.set_reshard_after_backward(False)
    return contextlib.nullcontext()


@contextlib.contextmanager
def gather_before_the_step(model: nn.Module) -> Iterator[None]:
    """Ask for the next forward's parameters too early: what the optimizer then does is not in them."""
    handle = register_optimizer_step_pre_hook(lambda *_: model.layers[0].unshard())
    try:
        yield
    finally:
        handle.remove()


def never_free(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    return replaced(FlatParamHandle, "_free_unsharded_flat_param", lambda _: lambda handle: None)


def reverse_flat(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """The first block's halves arrive in the wrong order."""
    unit = model.layers[0]._handle

    def wrong(original: Any) -> Any:
        def gather(handle: Any, whole: torch.Tensor) -> torch.Tensor:
            found = original(handle, whole)
            if handle is unit:
                with torch.no_grad():
                    found.copy_(torch.cat(tuple(reversed(found.chunk(2)))))
            return found

        return gather

    return replaced(FlatParamHandle, "_all_gather_flat_param", wrong)


def reverse_each(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    unit = model.layers[0]._get_fsdp_state()._fsdp_param_group

    def wrong(original: Any) -> Any:
        def wait(group: Any) -> None:
            fresh = group._all_gather_result is not None
            original(group)
            if group is unit and fresh:
                for param in group.fsdp_params:
                    whole = param.all_gather_outputs[0]
                    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(whole):
                        whole.copy_(torch.cat(tuple(reversed(whole.chunk(2)))))

        return wait

    return replaced(FSDPParamGroup, "wait_for_unshard", wrong)


def exchange(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """This rank sends its part of norm.weight for that of norm.bias, and the other way round."""
    unit = model.layers[0]._get_fsdp_state()._fsdp_param_group
    first, second = unit.fsdp_params[:2]

    def wrong(original: Any) -> Any:
        def unshard(group: Any, async_op: bool = False) -> None:
            if group is not unit:
                return original(group, async_op)
            kept = first._sharded_param_data, second._sharded_param_data
            second._sharded_param_data, first._sharded_param_data = kept
            original(group, async_op)
            first._sharded_param_data, second._sharded_param_data = kept
            return None

        return unshard

    return replaced(FSDPParamGroup, "unshard", wrong)


def exchange_units(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """This rank sends the second block's shard for the first one's."""
    unit, other = (layer._handle for layer in model.layers)

    def wrong(original: Any) -> Any:
        def gather(handle: Any, whole: torch.Tensor) -> torch.Tensor:
            if handle is unit:
                handle.flat_param.data = other.flat_param._local_shard
            return original(handle, whole)

        return gather

    return replaced(FlatParamHandle, "_all_gather_flat_param", wrong)


def cast_a_part(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """The cast of the first block's shard ends too early."""
    unit = model.layers[0]._handle

    def wrong(original: Any) -> Any:
        def cast(handle: Any) -> None:
            original(handle)
            if handle is unit:
                with torch.no_grad():
                    handle.flat_param._mp_shard[-30:] = 0

        return cast

    return replaced(FlatParamHandle, "_use_low_precision_shard", wrong)


def copy_a_part(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """The copy to the device ends too early for one parameter."""
    wanted = model.layers[0]._get_fsdp_state()._fsdp_param_group.fsdp_params[2]

    def wrong(original: Any) -> Any:
        def inputs(param: Any) -> list[torch.Tensor]:
            (sent,) = original.fget(param)
            if param is not wanted:
                return [sent]
            arrived = torch.zeros_like(sent)
            arrived[:20] = sent[:20]
            return [arrived]

        return property(inputs)

    return replaced(FSDPParam, "all_gather_inputs", wrong)


def other_buffer(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """FSDP does not synchronise buffers."""
    poke(model.layers[1].scale, 0, 0.25)
    return contextlib.nullcontext()


def clamp(block: nn.Module) -> None:
    block.fc1.weight.data.clamp_(-0.01, 0.01)


def swap(block: nn.Module) -> None:
    block.fc1.weight.data = torch.zeros_like(block.fc1.weight)


FAULTS: dict[str, Fault] = {}
for _wrap in (fsdp1, fsdp2):
    _name = _wrap.__name__
    FAULTS |= {
        f"{_name}-stale": Fault(_wrap, ranks=(0, 1), patches=keep_after_backward if _wrap is fsdp2 else never_free),
        f"{_name}-torn": Fault(_wrap, forward=lambda block: poke(block.fc1.weight, 33)),
        f"{_name}-order": Fault(_wrap, patches=reverse_each if _wrap is fsdp2 else reverse_flat),
        f"{_name}-clamped": Fault(_wrap, forward=clamp),
        f"{_name}-swapped": Fault(_wrap, forward=swap),
        f"{_name}-hidden": Fault(_wrap, between=lambda model: poke(local(model.layers[1].fc2.weight), 5)),
    }  # fmt: skip
for _wrap, _options in (
    (fsdp1, {"mixed_precision": MixedPrecision(param_dtype=BF16)}),
    (fsdp2, {"mp_policy": MixedPrecisionPolicy(param_dtype=BF16)}),
):
    _name = f"{_wrap.__name__}-bf16"
    FAULTS |= {
        f"{_name}-stale": Fault(_wrap, options=_options, ranks=(0, 1), patches=keep_after_backward if _wrap is fsdp2 else never_free),
        f"{_name}-torn": Fault(_wrap, options=_options, forward=lambda block: poke(block.fc1.weight, 33)),
        f"{_name}-order": Fault(_wrap, options=_options, patches=reverse_each if _wrap is fsdp2 else reverse_flat),
        f"{_name}-swapped": Fault(_wrap, options=_options, forward=swap),
        f"{_name}-clamped": Fault(_wrap, options=_options, forward=clamp),
        f"{_name}-hidden": Fault(_wrap, options=_options, between=lambda model: poke(local(model.layers[1].fc2.weight), 5)),
    }  # fmt: skip
FAULTS["fsdp2-bf16-meanwhile"] = Fault(
    fsdp2, options={"mp_policy": MixedPrecisionPolicy(param_dtype=BF16)}, forward=poke_shard
)
for _wrap, _options in (
    (fsdp1, {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}),
    (fsdp2, {"reshard_after_forward": False}),
):  # rank 0's segment, so that its backward meets it
    FAULTS[f"{_wrap.__name__}-kept-torn"] = Fault(
        _wrap, options=_options, ranks=(0,), forward=lambda block: poke(block.fc1.weight, 33)
    )
FAULTS["fsdp2-kept-meanwhile"] = Fault(
    fsdp2, options={"reshard_after_forward": False}, forward=poke_shard
)
FAULTS["fsdp1-exchanged"] = Fault(fsdp1, patches=exchange_units)
FAULTS["fsdp1-bf16-moved"] = Fault(
    fsdp1, patches=cast_a_part, options={"mixed_precision": MixedPrecision(param_dtype=BF16)}
)
FAULTS["fsdp1-buffers"] = Fault(fsdp1, patches=other_buffer)
FAULTS["fsdp2-buffers"] = Fault(fsdp2, patches=other_buffer)
FAULTS["fsdp2-exchanged"] = Fault(fsdp2, patches=exchange)
FAULTS["fsdp2-early"] = Fault(fsdp2, ranks=(0, 1), patches=gather_before_the_step)
FAULTS["fsdp2-offload-stale"] = Fault(
    fsdp2,
    ranks=(0, 1),
    patches=keep_after_backward,
    options={"offload_policy": CPUOffloadPolicy(pin_memory=False)},
)
FAULTS["fsdp2-moved"] = Fault(
    fsdp2,
    patches=copy_a_part,
    options={"offload_policy": CPUOffloadPolicy(pin_memory=False)},
)


def run_fault(case: Fault, rank: int, trace: str) -> None:
    torch.manual_seed(3)
    model = case.wrap(Net(), **case.options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mine = rank in case.ranks
    patches = case.patches(model) if mine and case.patches else contextlib.nullcontext()
    steps = 0

    def act(module: nn.Module, _: Any) -> None:
        if mine and steps == 1 and case.forward is not None:
            case.forward(module)

    # a hook on what FSDP wraps runs once the parameters are there
    block = model.layers[0]
    inner = getattr(block, "_fsdp_wrapped_module", block)
    inner = getattr(inner, "_fpw_module", inner)
    handle = inner.register_forward_pre_hook(act)
    with patches, opdrift.record(trace, model=model) as recorder:
        for steps in range(2):  # `act` reads it
            recorder.mark("step", step=steps)
            step(model, optimizer)
            if steps == 0 and mine and case.between is not None:
                case.between(model)
    handle.remove()


def run_never_loaded(wrap: Callable[..., nn.Module], rank: int, trace: str, loading: range) -> None:
    """A model that is built and loaded while it is recorded, on some of the ranks."""
    torch.manual_seed(5)
    checkpoint = Net().state_dict()
    with opdrift.record(trace):
        torch.manual_seed(3 + rank)
        model = Net()
        if rank in loading:
            model.load_state_dict(checkpoint)
        model = wrap(model)
        with torch.no_grad():
            model(TOKENS)


def main(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    said: dict[str, Any] = {}
    for name, correct in CORRECT.items():
        without = run_correct(correct, None)
        with_ = run_correct(correct, str(folder / name))
        said[name] = {"same": without == with_, "outputs": with_["outputs"]}
    for name, fault in FAULTS.items():
        run_fault(fault, rank, str(folder / name))
    for wrap in (fsdp1, fsdp2):
        name = wrap.__name__
        run_never_loaded(wrap, rank, str(folder / f"{name}-unloaded"), range(1))
        run_never_loaded(wrap, rank, str(folder / f"{name}-loaded"), range(2))
    (folder / f"said-{rank}.json").write_text(json.dumps(said))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
