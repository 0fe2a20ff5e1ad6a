"""Watch FSDP2 (`fully_shard`), which shards each parameter by itself and gathers those of a group together.

Hook points (torch 2.13): `torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py`, class `FSDPParamGroup`.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from opdrift_integrations.layouts import Buffer, Part
from opdrift_integrations.paths import join
from opdrift_integrations.tensors import dtype_name, shares_storage
from opdrift_integrations.torch_fsdp.gathers import Follower, Unit, phase_of
from opdrift_integrations.torch_fsdp.memory import EachMemory, Memory, shard_of

Observation = Generator[None, Any, None]

_MODULE: Final = "torch.distributed.fsdp._fully_shard._fsdp_param_group"
#: (module, class or "", name) of what is watched.
HOOKS: Final = {
    "unshard": (_MODULE, "FSDPParamGroup", "unshard"),
    "wait": (_MODULE, "FSDPParamGroup", "wait_for_unshard"),
    "pre_forward": (_MODULE, "FSDPParamGroup", "pre_forward"),
    "pre_backward": (_MODULE, "FSDPParamGroup", "pre_backward"),
    "reshard": (_MODULE, "FSDPParamGroup", "_to_sharded"),
    "reshard_partly": (_MODULE, "FSDPParamGroup", "_to_sharded_post_forward"),
}


@dataclass(frozen=True, slots=True)
class _Buffer:
    """Parameters that are gathered in one dtype.

    Attributes:
        unit: What is known of them.
        numbers: Theirs in the group.
        outer: As of `EachMemory`.
    """

    unit: Unit
    numbers: tuple[int, ...]
    outer: tuple[int, ...]

    def memory(self, group: Any) -> EachMemory:
        """Where they are now; not to be held."""
        params = group.fsdp_params
        return EachMemory(self.unit.cut, [params[number] for number in self.numbers], self.outer)


@dataclass(slots=True, eq=False)
class _Group:
    """The buffers of one group: the parameters that are gathered in one dtype.

    Attributes:
        path: Where its module is in the model.
        process_group: In which it gathers; not held, since a program may destroy it.
        ranks: The ranks that gather together; `rank` is this one's number among them.
        partly: It gathers what was kept after a forward, not the shards that the optimizer writes.
        buffers: What is known of each, and of which parameters it is.
        gathering: The shards were read, and what was gathered from them has not been waited for.
        fresh: It was gathered in the call that is running.
    """

    path: str | None
    process_group: Callable[[], Any]
    ranks: tuple[int, ...] | None
    rank: int
    partly: bool
    buffers: list[_Buffer] = field(default_factory=list)
    gathering: bool = False
    fresh: bool = False

    def of(self, group: Any) -> list[tuple[Unit, EachMemory]]:
        """Its buffers, and where they are: the group is passed, since to hold it would keep a model alive."""
        return [(each.unit, each.memory(group)) for each in self.buffers]


class GroupWatcher:
    """The observers of FSDP2."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self._recorder = follower.recorder
        self._groups: WeakKeyDictionary[Any, _Group] = WeakKeyDictionary()
        #: The same and those for other ranks: after a forward, shards may be kept on fewer of them.
        self._known: WeakKeyDictionary[Any, dict[Any, _Group]] = WeakKeyDictionary()

    def shards(self) -> Iterator[tuple[Unit, Memory]]:
        """The units that were met, and where their shards are; not to be held."""
        for group, known in list(self._known.items()):
            for state in known.values():
                if not state.partly:
                    yield from state.of(group)

    # ---- observers ----------------------------------------------------------------------------------

    def unshard(self, group: Any, async_op: bool = False) -> Observation:
        """`unshard`: the shards are copied, cast and sent."""
        if group._all_gather_result is not None or group.is_unsharded:
            return
        state = self._state(group)
        if state is None:
            return
        phase = phase_of(group)
        for unit, memory in state.of(group):
            self._follower.exchanged(unit, phase, _exchanged(memory))
            if state.partly:
                unit.seen = None  # what was kept after a forward is another tensor each time
            first = memory.params[0]
            dtype = first.param_dtype or first._sharded_param_data.dtype
            self._follower.read_shard(unit, memory, dtype, phase, sent=True)
        yield
        state.gathering = group._all_gather_result is not None

    def wait(self, group: Any) -> Observation:
        """`wait_for_unshard`: what was gathered is copied to where the parameters are."""
        state = self._groups.get(group)
        if state is None or not state.gathering:
            return
        yield
        state.gathering, state.fresh = False, True
        for unit, memory in state.of(group):
            self._follower.gathered(unit, memory, phase_of(group), state.ranks)

    def pre_forward(self, group: Any, *args: Any, **kwargs: Any) -> Observation:
        """`pre_forward`: the parameters are about to be used, gathered just now or still there."""
        yield from self._using(group)

    def pre_backward(self, group: Any, *args: Any, **kwargs: Any) -> Observation:
        """`pre_backward`: as `pre_forward`."""
        yield from self._using(group)

    def reshard(self, group: Any) -> Observation:
        """`_to_sharded`: the shards take the place of what was gathered."""
        yield from self._releasing(group)

    def reshard_partly(self, group: Any) -> Observation:
        """`_to_sharded_post_forward`: shards over fewer ranks are kept for backward."""
        yield from self._releasing(group)

    # ---- what they share ----------------------------------------------------------------------------

    def _state(self, group: Any) -> _Group | None:
        """What is known of a group as it is sharded now; None for one of another thread's recorder."""
        state = self._groups.get(group)
        if not self._follower.is_mine(known=state is not None):
            return None
        path, process_group = self._recorder.clean_path(group.modules[0]), _process_group(group)
        if state is not None and state.path == path and state.process_group() is process_group:
            return state
        ranks, rank = _ranks(process_group)
        known = self._known.setdefault(group, {})
        state = known.get((path, ranks, rank))
        if state is None:
            partly = bool(group.is_sharded_post_forward)
            state = _Group(path, _reference(process_group), ranks, rank, partly)
            known[path, ranks, rank] = state
            with self._recorder.quiet():
                state.buffers = self._cut(group, state)
        state.process_group = _reference(process_group)
        self._groups[group] = state
        return state

    def _cut(self, group: Any, state: _Group) -> list[_Buffer]:
        by_dtype: dict[tuple[torch.dtype, torch.dtype], list[int]] = {}
        for number, param in enumerate(group.fsdp_params):
            if hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather"):
                continue  # an extension sends something else than the shard: nothing can be held against it
            kept = shard_of(param).dtype
            by_dtype.setdefault((kept, param.param_dtype or kept), []).append(number)
        found = []
        for (_, dtype), numbers in by_dtype.items():
            params = [group.fsdp_params[number] for number in numbers]
            suffix = f"[{dtype_name(dtype)}]" if len(by_dtype) > 1 else ""
            buffer = self._buffer(params, f"{state.path or 'parameters'}{suffix}", state)
            offloaded = bool(params[0].offload_to_cpu)
            unit = Unit(state.path, buffer, offloaded, blocking=False)
            pairs = zip(buffer.parts, params, strict=True)
            split = [part.name for part, param in pairs if _is_split(param)]
            if split:
                unit.fields["split"] = split
            replicas = _replicas(group)
            if replicas:
                unit.fields["replicas"] = replicas
            outer = (math.prod(param._orig_size[: param.fsdp_placement.dim]) for param in params)
            found.append(_Buffer(unit, tuple(numbers), tuple(outer)))
        return found

    def _buffer(self, params: Sequence[Any], name: str, state: _Group) -> Buffer:
        parts, tied, offset = [], [], 0
        for param in params:
            info = param._module_info
            own = self._name(info.module, info.param_name)
            shape = tuple(param._orig_size)
            parts.append(Part(own, offset, math.prod(shape), shape))
            others = zip(info.shared_modules, info.shared_param_names, strict=True)
            tied += [(self._name(module, name), own) for module, name in others]
            offset += shard_of(param).numel()
        ranks = 1 if state.ranks is None else len(state.ranks)
        return Buffer(name, tuple(parts), tuple(tied), offset, ranks, state.rank, "each")

    def _name(self, module: Any, name: str) -> str:
        return join(self._recorder.clean_path(module) or "", name)

    def _using(self, group: Any) -> Observation:
        state = self._groups.get(group)
        if state is not None:
            state.fresh = False
        yield
        state = self._groups.get(group) or self._state(group)
        if state is None or state.fresh or state.partly or not group.is_unsharded:
            return
        phase = phase_of(group)
        for unit, memory in state.of(group):
            self._follower.exchanged(unit, phase, _exchanged(memory))
            # the shards may have been written since; what they were sent as does not tell
            dtype = memory.gathered[0].dtype
            self._follower.read_shard(unit, memory, dtype, phase, sent=False)
            self._follower.used(unit, memory, phase, state.ranks)

    def _releasing(self, group: Any) -> Observation:
        state = self._groups.get(group)
        if state is None or not group.is_unsharded:
            return
        phase, released = phase_of(group), state.of(group)
        before = []
        for unit, memory in released:
            self._follower.released(unit, memory, phase, _rebound(memory))
            before.append(_held(memory))
        yield
        phase = phase_of(group)
        for (unit, memory), held in zip(released, before, strict=True):
            device = str(memory.gathered[0].device)
            self._follower.freed(unit, phase, held - _held(memory), device, "gathered")


def _held(memory: EachMemory) -> int:
    return sum(each.untyped_storage().nbytes() for each in memory.gathered)


def _is_split(param: Any) -> bool:
    """Whether a parameter was split over other ranks before FSDP sharded what is here: tensor parallelism."""
    if not param.is_dtensor:
        return False
    spec = param._unsharded_dtensor_spec
    return not all(placement.is_replicate() for placement in spec.placements)


def _replicas(group: Any) -> list[int]:
    """The ranks that hold the same parts as this one, whose gradients are reduced among them; none but under HSDP."""
    mesh = group.mesh_info
    if not hasattr(mesh, "shard_process_group") or not hasattr(mesh, "replicate_process_group"):
        return []
    return list(dist.get_process_group_ranks(mesh.replicate_process_group))


def _rebound(memory: EachMemory) -> list[str]:
    """Parameters of the module that are no part of what was gathered any more."""
    found = []
    for part, param in zip(memory.cut.buffer.parts, memory.params, strict=True):
        info = param._module_info
        present = info.module._parameters.get(info.param_name)
        if present is None:
            continue
        local = getattr(present, "_local_tensor", present)
        if not shares_storage(local, param.all_gather_outputs[0]):
            found.append(part.name)
    return found


def _exchanged(memory: EachMemory) -> list[str]:
    """Parameters whose tensor between gathers is no longer the one that FSDP sends."""
    found = []
    for part, param in zip(memory.cut.buffer.parts, memory.params, strict=True):
        kept, state = param.sharded_param, param.sharded_state
        if state is type(state).SHARDED:
            info = param._module_info
            kept = info.module._parameters.get(info.param_name)
        local = getattr(kept, "_local_tensor", None)
        if local is not None and not shares_storage(local, param._sharded_param_data):
            found.append(part.name)
    return found


def _process_group(group: Any) -> Any:
    """The process group in which a group gathers now; None where it is replicated, and nothing is sharded."""
    if not hasattr(group.mesh_info, "shard_process_group"):
        return None
    return group._all_gather_process_group


def _reference(process_group: Any) -> Callable[[], Any]:
    return weakref.ref(process_group) if process_group is not None else lambda: None


def _ranks(process_group: Any) -> tuple[tuple[int, ...] | None, int]:
    """Global ranks that gather together, and this one's number among them."""
    if process_group is None:
        return None, 0
    return tuple(dist.get_process_group_ranks(process_group)), process_group.rank()
