"""Watch FSDP1, which puts the parameters of a unit end to end into one flat parameter.

Hook points (torch 2.13): `torch/distributed/fsdp/_flat_param.py`, class `FlatParamHandle`, and of `_runtime_utils.py`
`_lazy_init`, which casts buffers, and `_unshard`, which knows the ranks that hold the same shard.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from opdrift_integrations.digests import as_field, same
from opdrift_integrations.layouts import Buffer, Part
from opdrift_integrations.paths import join
from opdrift_integrations.tensors import between, storage_id
from opdrift_integrations.torch_fsdp.gathers import LIBRARY, Follower, Unit, phase_of
from opdrift_integrations.torch_fsdp.memory import FlatMemory, Memory

Observation = Generator[None, Any, None]

#: (module, class or "", name) of what is watched.
HOOKS: Final = {
    "replicas": ("torch.distributed.fsdp._runtime_utils", "", "_unshard"),
    "unshard": ("torch.distributed.fsdp._flat_param", "FlatParamHandle", "unshard"),
    "reshard": ("torch.distributed.fsdp._flat_param", "FlatParamHandle", "reshard"),
    "free": ("torch.distributed.fsdp._flat_param", "FlatParamHandle", "_free_unsharded_flat_param"),
    "free_shard": (
        "torch.distributed.fsdp._flat_param",
        "FlatParamHandle",
        "_free_low_precision_sharded_param",
    ),
    "views": ("torch.distributed.fsdp._flat_param", "FlatParamHandle", "_use_unsharded_views"),
    "shard_views": ("torch.distributed.fsdp._flat_param", "FlatParamHandle", "_use_sharded_views"),
    "cast_buffers": ("torch.distributed.fsdp._runtime_utils", "", "_lazy_init"),
}


class FlatWatcher:
    """The observers of FSDP1."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self._recorder = follower.recorder
        self._units: WeakKeyDictionary[Any, Unit] = WeakKeyDictionary()
        #: The ranks that hold the same shard, under hybrid sharding.
        self._replicas: WeakKeyDictionary[Any, list[int]] = WeakKeyDictionary()

    def shards(self) -> Iterator[tuple[Unit, Memory]]:
        """The units that were met, and where their shards are; not to be held."""
        for handle, unit in list(self._units.items()):
            yield unit, _over(unit, handle, handle.flat_param.data)

    # ---- observers ----------------------------------------------------------------------------------

    def replicas(
        self, state: Any, handle: Any, unshard_stream: Any, pre_unshard_stream: Any
    ) -> Observation:
        """`_unshard`: only the wrapper's state has the group over which hybrid sharding reduces gradients of one shard."""
        group = getattr(state, "_inter_node_pg", None)
        if group is not None and handle is not None and handle not in self._replicas:
            self._replicas[handle] = list(dist.get_process_group_ranks(group))
        yield

    def unshard(self, handle: Any) -> Observation:
        """`unshard`: the gather; nothing is gathered where the full parameters are still there."""
        unit = self._unit(handle)
        if unit is None:
            return
        with self._recorder.quiet():
            memory, fresh = _memory(unit, handle), bool(handle.needs_unshard())
        if memory is None:
            # one rank in full precision: the flat parameter is the parameters themselves
            yield
            if unit.path is not None:
                with self._recorder.quiet():
                    own = _over(unit, handle, handle.flat_param.data)
                    self._follower.name_parameters(unit, own)
            return
        fresh = fresh or not handle.uses_sharded_strategy
        dtype, phase = memory.everything.dtype, phase_of(handle)
        self._follower.read_shard(unit, memory, dtype, phase, sent=fresh)
        yield
        if fresh:
            self._follower.gathered(unit, memory, phase_of(handle), _ranks(handle))
        else:
            self._follower.used(unit, memory, phase_of(handle), _ranks(handle))

    def reshard(self, handle: Any, free_unsharded_flat_param: bool) -> Observation:
        """`reshard`: the shard takes the place of what was gathered."""
        unit = self._units.get(handle)
        if unit is not None and free_unsharded_flat_param:
            with self._recorder.quiet():
                memory = _memory(unit, handle)
            if memory is not None:
                rebound = _rebound(unit, handle, memory)
                self._follower.released(unit, memory, phase_of(handle), rebound)
        yield

    def free(self, handle: Any) -> Observation:
        """`_free_unsharded_flat_param`: the gathered storage is resized to nothing."""
        full = handle._get_padded_unsharded_flat_param()
        yield from self._freeing(handle, full, "gathered")

    def free_shard(self, handle: Any) -> Observation:
        """`_free_low_precision_sharded_param`: the cast shard is resized to nothing."""
        yield from self._freeing(handle, handle.flat_param._mp_shard, "cast shard")

    def views(self, handle: Any, as_params: bool) -> Observation:
        """`_use_unsharded_views`: the module's parameters become views of what was gathered."""
        yield from self._viewing(handle, "unsharded")

    def shard_views(self, handle: Any) -> Observation:
        """`_use_sharded_views`: the module's parameters become views of the shard."""
        yield from self._viewing(handle, "sharded")

    def cast_buffers(self, state: Any, root_module: Any) -> Observation:
        """`_lazy_init`: the root casts the buffers of the whole model, and keeps no original."""
        if state._is_root is not None or not self._follower.is_mine(known=False):
            return
        before = [
            (module, name, buffer, buffer.data)
            for module in root_module.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]
        yield
        for module, name, buffer, old in before:
            if buffer.dtype != old.dtype:
                self._cast_buffer(module, name, old, buffer)

    # ---- what they share ----------------------------------------------------------------------------

    def _unit(self, handle: Any) -> Unit | None:
        """What is known of a handle's unit; None for one of another thread's recorder."""
        found = self._units.get(handle)
        if not self._follower.is_mine(known=found is not None):
            return None
        path = self._recorder.clean_path(handle._fully_sharded_module)
        if found is None or found.path != path:
            with self._recorder.quiet():
                buffer = buffer_of(handle, path or "")
            found = Unit(path, buffer, bool(handle._offload_params), blocking=False)
            if handle in self._replicas:
                found.fields["replicas"] = self._replicas[handle]
            self._units[handle] = found
        return found

    def _freeing(self, handle: Any, tensor: Any, what: str) -> Observation:
        unit = self._units.get(handle)
        if unit is None:
            return
        before, device = tensor.untyped_storage().nbytes(), str(tensor.device)
        yield
        bytes_ = before - tensor.untyped_storage().nbytes()
        self._follower.freed(unit, phase_of(handle), bytes_, device, what)

    def _viewing(self, handle: Any, what: str) -> Observation:
        unit = self._units.get(handle)
        if unit is None:
            return
        yield
        self._recorder.mark(
            "views",
            library=LIBRARY,
            unit=unit.path,
            phase=phase_of(handle),
            step=self._follower.step,
            buffer=unit.buffer.name,
            what=what,
        )

    def _cast_buffer(self, module: Any, name: str, old: Any, new: Any) -> None:
        path = self._recorder.clean_path(module)
        with self._recorder.quiet():
            source, destination = self._recorder.digest(old), self._recorder.digest(new.data)
            back = new.data.to(device=old.device, dtype=old.dtype)
            lossless = same(source, self._recorder.digest(back))
            largest = float((back - old).abs().max()) if lossless is False else None
            if path is not None:
                self._recorder.name_tensor(new, join(path, name), kind="buffer")
        self._recorder.mark(
            "buffer-cast",
            library=LIBRARY,
            unit=None,
            phase=None,
            step=self._follower.step,
            name=None if path is None else join(path, name),
            source=as_field(source),
            destination=as_field(destination),
            lossless=lossless,
            largest_change=largest,
            **between(old, new),
        )


def buffer_of(handle: Any, path: str) -> Buffer:
    """The layout of a handle's flat parameter; `path` is where its module is in the model."""
    flat = handle.flat_param
    sizes, parts, offset = iter(zip(flat._fqns, flat._shapes, strict=True)), [], 0
    for size, is_padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
        if not is_padding:
            name, shape = next(sizes)
            parts.append(Part(join(path, name), offset, size, tuple(shape)))
        offset += size
    tied = tuple(
        (join(path, info.module_name, info.param_name), join(path, info.prim_module_name, info.prim_param_name))
        for info in flat._shared_param_infos
    )  # fmt: skip
    sharded = bool(handle.uses_sharded_strategy)
    return Buffer(
        name=join(path, "_flat_param"),
        parts=tuple(parts),
        tied=tied,
        shard=_shard_of(handle).numel(),
        ranks=handle.world_size if sharded else 1,
        rank=handle.rank if sharded else 0,
    )


def _shard_of(handle: Any) -> Any:
    """This rank's shard: before the first forward FSDP has no name of its own for it."""
    flat = handle.flat_param
    return getattr(flat, "_local_shard", flat.data).detach().reshape(-1)


def _memory(unit: Unit, handle: Any) -> FlatMemory | None:
    """What is gathered into; None where the shard itself is computed with."""
    flat = handle.flat_param
    if handle.uses_sharded_strategy:
        whole = handle._get_padded_unsharded_flat_param()
    else:
        whole = flat.data
        if storage_id(whole) == storage_id(_shard_of(handle)):
            return None
    return _over(unit, handle, whole)


def _over(unit: Unit, handle: Any, whole: Any) -> FlatMemory:
    flat = handle.flat_param
    strides = tuple(
        None if contiguous else tuple(stride)
        for stride, contiguous in zip(flat._strides, flat._contiguities, strict=True)
    )
    return FlatMemory(unit.cut, _shard_of(handle), whole.detach().reshape(-1), strides)


def _rebound(unit: Unit, handle: Any, memory: FlatMemory) -> list[str]:
    """Parameters of the module that are no part of what was gathered any more."""
    found = []
    for part, info in zip(unit.buffer.parts, handle.flat_param._param_infos, strict=True):
        present = getattr(info.module, info.param_name, None)
        if not isinstance(present, torch.Tensor) or not present.numel():
            continue
        if storage_id(present) not in (storage_id(memory.everything), storage_id(memory.master)):
            found.append(part.name)
    return found


def _ranks(handle: Any) -> list[int] | None:
    """Global ranks that share the flat parameter; None for a group that torch has forgotten."""
    try:
        return dist.get_process_group_ranks(handle.process_group)
    except (KeyError, TypeError):
        return None
