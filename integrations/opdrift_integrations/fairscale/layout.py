"""Where the original parameters lie in what a fairscale FSDP unit gathers."""

from __future__ import annotations

from typing import Any

import torch
from fairscale.nn.misc.flatten_params_wrapper import FlatParameter

from opdrift_integrations.layouts import Buffer, Part
from opdrift_integrations.paths import join
from opdrift_integrations.tensors import storage_id


def buffers(unit: Any, path: str) -> tuple[Buffer, ...]:
    """The layout of each of `unit.params`; `path` is where the unit is in the model.

    `unit` is a `FullyShardedDataParallel` after its lazy initialisation.
    """
    return tuple(_buffer(unit, path, index) for index in range(len(unit.params)))


def _buffer(unit: Any, path: str, index: int) -> Buffer:
    parameter = unit.params[index]
    if isinstance(parameter, FlatParameter):
        name = join(path, f"flat_param_{index}")
        names, shapes, sizes = parameter.metadata()
        tied = tuple(
            (join(path, module, leaf), join(path, shared_module, shared_leaf))
            for module, shared_module, _, leaf, _, shared_leaf in parameter._shared_param_infos
        )
    else:
        own, *others = _names_of(unit, parameter, unit._param_name_groups[index][0])
        name = join(path, own)
        names, shapes, sizes = [own], [parameter._orig_size], [parameter._orig_size.numel()]
        tied = tuple((join(path, other), name) for other in others)
    parts, offset = [], 0
    for part, shape, size in zip(names, shapes, sizes, strict=True):
        parts.append(Part(join(path, part), offset, size, tuple(shape)))
        offset += size
    sharded = bool(parameter._is_sharded)
    return Buffer(
        name=name,
        parts=tuple(parts),
        tied=tied,
        shard=parameter._fp32_shard.numel(),
        ranks=unit.world_size if sharded else 1,
        rank=unit.rank if sharded else 0,
    )


def rebound(buffer: Buffer, parameter: Any, whole: Any) -> list[str]:
    """Parameters of the module that are no part of what was gathered any more."""
    own = {storage_id(whole), storage_id(parameter._fp32_shard)}
    if parameter._fp16_shard is not None:
        own.add(storage_id(parameter._fp16_shard))
    if not isinstance(parameter, FlatParameter):
        return [] if storage_id(parameter) in own else [buffer.parts[0].name]
    found = []
    for part, (_, module, name) in zip(buffer.parts, parameter._param_infos, strict=True):
        present = getattr(module, name, None)
        if isinstance(present, torch.Tensor) and present.numel() and storage_id(present) not in own:
            found.append(part.name)
    return found


def _names_of(unit: Any, parameter: Any, first: str) -> list[str]:
    """All names of a parameter that stayed one; `first` is the one that fairscale knows it by."""
    found = [
        join(name)
        for name, other in unit.named_parameters(remove_duplicate=False)
        if other is parameter
    ]
    first = join(first)
    return [first, *(name for name in found if name != first)]
