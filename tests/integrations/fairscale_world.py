"""One of two processes that record models under fairscale's FSDP, one trace a case. Run by test_fairscale_world.py."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from conftest import example
from fairscale.nn.data_parallel import FullyShardedDataParallel as FSDP  # noqa: N817
from fsdp_world import (
    Correct,
    Fault,
    clamp,
    other_buffer,
    poke,
    replaced,
    run_correct,
    run_fault,
    run_never_loaded,
    swap,
)
from torch import nn

OFFLOAD = {"mixed_precision": True, "cpu_offload": True}
KEPT = {"reshard_after_forward": False}


def fairscale(model: nn.Module, **options: Any) -> nn.Module:
    # gloo cannot reduce what fairscale puts into buckets
    options = {"compute_device": torch.device("cpu"), "bucket_cap_mb": 0, **options}
    for number, layer in enumerate(model.layers):
        model.layers[number] = FSDP(layer, **options)
    return FSDP(model, **options)


def summon(model: nn.Module) -> None:
    """Change the whole parameters, and let fairscale write the change into the shards."""
    with model.summon_full_params(), torch.no_grad():
        model.module.head.bias.add_(0.5)


def accumulate(model: nn.Module) -> None:
    """A backward whose gradients are kept for the next one."""
    with model.no_sync():
        model(torch.tensor([[0, 1]])).float().square().mean().backward()


CORRECT = {
    "plain": Correct(),
    "flat": Correct(fairscale),
    "buckets": Correct(fairscale, {"bucket_cap_mb": 25}),  # fairscale's own default
    "kept": Correct(fairscale, KEPT),
    "each": Correct(fairscale, {"flatten_parameters": False}),
    "offload": Correct(fairscale, {"cpu_offload": True}),
    "half": Correct(fairscale, OFFLOAD),
    "summon": Correct(fairscale, between=summon),
    "half-summon": Correct(fairscale, OFFLOAD, summon),
    "state": Correct(fairscale, between=lambda model: model.state_dict()),
    "accumulate": Correct(fairscale, between=accumulate),
}


# ---- faults --------------------------------------------------------------------------------------------


def never_free(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    return replaced(FSDP, "_free_full_params", lambda _: lambda unit, params=None: None)


def reverse(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """The first block's halves arrive in the wrong order."""
    wrong_unit = model.layers[0]

    def wrong(original: Any) -> Any:
        def rebuild(unit: Any, force_full_precision: bool = False) -> Any:
            fresh = not unit.has_full_params
            found = original(unit, force_full_precision)
            if unit is wrong_unit and fresh:
                with torch.no_grad():
                    full = unit.params[0]._full_param_padded
                    full.copy_(torch.cat(tuple(reversed(full.chunk(2)))))
            return found

        return rebuild

    return replaced(FSDP, "_rebuild_full_params", wrong)


def exchange(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """This rank sends its part of norm.weight for that of norm.bias, and the other way round."""
    wrong_unit = model.layers[0]

    def wrong(original: Any) -> Any:
        def rebuild(unit: Any, force_full_precision: bool = False) -> Any:
            if unit is wrong_unit and not unit.has_full_params:
                first, second = unit.params[:2]
                first.data, second.data = second.data, first.data
            return original(unit, force_full_precision)

        return rebuild

    return replaced(FSDP, "_rebuild_full_params", wrong)


def exchange_units(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """This rank sends the second block's shard for the first one's."""
    wrong_unit, other = model.layers

    def wrong(original: Any) -> Any:
        def rebuild(unit: Any, force_full_precision: bool = False) -> Any:
            if unit is wrong_unit and not unit.has_full_params:
                theirs = other.params[0]
                unit.params[0].data = getattr(theirs, "_fp32_shard", theirs.data)
            return original(unit, force_full_precision)

        return rebuild

    return replaced(FSDP, "_rebuild_full_params", wrong)


def copy_a_part(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """The copy to the device ends too early."""
    wrong_unit = model.layers[0]

    def wrong(original: Any) -> Any:
        def cast(unit: Any, params: Any = None) -> None:
            original(unit, params)
            if unit is wrong_unit:
                unit.params[0]._fp16_shard[100:] = 0

        return cast

    return replaced(FSDP, "_cast_fp32_param_shards_to_fp16", wrong)


@contextlib.contextmanager
def poke_shard_meanwhile(model: nn.Module) -> Iterator[None]:
    """As `poke_shard`, between the second step's forward and its backward."""
    calls = 0

    def act(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            poke_shard(model)

    handle = model.register_forward_hook(act)
    try:
        yield
    finally:
        handle.remove()


def poke_shard(model: nn.Module) -> None:
    """One element of layers.1.fc2.weight, in the second half of the block's parameters."""
    poke(model.layers[1].params[0]._fp32_shard, 40)


FAULTS = {
    "buffers": Fault(fairscale, patches=other_buffer),
    "exchanged": Fault(fairscale, patches=exchange, options={"flatten_parameters": False}),
    "each-swapped": Fault(fairscale, forward=swap, options={"flatten_parameters": False}),
    "flat-exchanged": Fault(fairscale, patches=exchange_units),
    "kept-torn": Fault(
        fairscale,
        options=KEPT,
        ranks=(0,),  # its segment, so that its backward meets it
        forward=lambda block: poke(block.fc1.weight, 33),
    ),
    "kept-hidden": Fault(fairscale, options=KEPT, patches=poke_shard_meanwhile),
    "half-moved": Fault(fairscale, patches=copy_a_part, options=OFFLOAD),
}
for _name, _options in (("", {}), ("half-", OFFLOAD)):
    FAULTS |= {
        f"{_name}stale": Fault(fairscale, ranks=(0, 1), patches=never_free, options=_options),
        f"{_name}torn": Fault(
            fairscale, forward=lambda block: poke(block.fc1.weight, 33), options=_options
        ),
        f"{_name}order": Fault(fairscale, patches=reverse, options=_options),
        f"{_name}clamped": Fault(fairscale, forward=clamp, options=_options),
        f"{_name}swapped": Fault(fairscale, forward=swap, options=_options),
        f"{_name}hidden": Fault(fairscale, between=poke_shard, options=_options),
    }


def main(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    same: dict[str, bool] = {}
    with example("_fairscale_on_cpu").fairscale_on_cpu():
        for name, correct in CORRECT.items():
            same[name] = run_correct(correct, None) == run_correct(correct, str(folder / name))
        for name, fault in FAULTS.items():
            run_fault(fault, rank, str(folder / name))
        run_never_loaded(fairscale, rank, str(folder / "unloaded"), range(1))
        run_never_loaded(fairscale, rank, str(folder / "loaded"), range(2))
    (folder / f"same-{rank}.json").write_text(json.dumps(same))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
