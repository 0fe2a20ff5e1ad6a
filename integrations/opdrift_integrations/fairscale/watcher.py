"""Write down what fairscale FSDP does to parameters and buffers.

fairscale moves weights in ways that no dispatched op shows: it resizes storages to zero and back,
and points `parameter.data` elsewhere. So its methods are watched (fairscale 0.4.13,
`fully_sharded_data_parallel.py`). The marks, all with `library`, `unit` (path of the FSDP module,
null if the recorder does not know it), and `phase` (forward, backward, summon); those about parameters with
`buffer` (fairscale's name), `parameters` [[name, offset, shape]] and `tied` [[name, owner]]:

`gather`, `use`, `reshard`, `shard-changed`  As of torch's FSDP, with the same fields: `torch_fsdp.gathers`.
`cast`         A shard was cast for computing (`what` "shard"), or the inputs were (`what` "input").
`move`         Offload: `direction` "load" copies the shard to the compute device, "drop" goes back to
               the shard in host memory (no copy: a pointer is switched). Both carry digests of
               source and destination, and `intact`.
`buffer-cast`  A buffer was replaced by a cast one, for good: fairscale keeps no original.
               `lossless` says whether casting back gives the same content.
`free`         The storage of a gathered buffer or of a cast shard was resized to nothing: `bytes`, `buffer`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import fairscale.nn.data_parallel.fully_sharded_data_parallel as fsdp
import torch
import torch.distributed as dist
from fairscale.nn.misc.flatten_params_wrapper import FlattenParamsWrapper
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves

from opdrift.composition import end_to_end
from opdrift.plugins import RecorderLike
from opdrift_integrations.digests import as_field, same
from opdrift_integrations.fairscale.layout import buffers, rebound
from opdrift_integrations.patching import watch_all
from opdrift_integrations.paths import join
from opdrift_integrations.tensors import between, dtype_name, is_readable, storage_id
from opdrift_integrations.torch_fsdp.gathers import Digests, Follower, Unit
from opdrift_integrations.torch_fsdp.memory import FlatMemory, Memory

Observation = Generator[None, Any, None]


LIBRARY = "fairscale"


@dataclass(slots=True)
class _Unit:
    """What is known of one FSDP unit."""

    path: str | None
    #: One for each of its parameters, flat or not.
    buffers: tuple[Unit, ...]
    #: Per buffer: the storage that it was last gathered into.
    into: list[int | None]
    #: The full parameters that are there now have been named.
    named: bool = False


class _Follower(Follower):
    """fairscale casts and moves in calls of their own, which are watched."""

    def copied(self, unit: Unit, found: Digests) -> dict[str, Any]:
        """Whether pieces that were copied, and cast, are those of the shard; the parameters where they are not."""
        return self._checked(unit, found)

    def _sent(self, *_: Any) -> None:
        """They have their marks already."""


class Watcher:
    """The observers of one recorder."""

    def __init__(self, recorder: RecorderLike) -> None:
        self._recorder = recorder
        self._thread = threading.get_ident()
        self._units: WeakKeyDictionary[Any, _Unit] = WeakKeyDictionary()
        self._wrapped_by_unit: WeakSet[Any] = WeakSet()
        #: Storage -> (unit, buffer) of what fairscale will free, until it does.
        self._storages: dict[int, tuple[str | None, str]] = {}
        self._casting_buffers = False
        self._follower = _Follower(recorder, LIBRARY, LIBRARY)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Observe fairscale inside the block."""
        unit = fsdp.FullyShardedDataParallel
        points = (
            (unit, "_rebuild_full_params", self.rebuild),
            (unit, "_use_full_params", self.keep),
            (unit, "_free_full_params", self.release),
            (unit, "_cast_fp32_param_shards_to_fp16", self.load),
            (unit, "_use_fp32_param_shard", self.drop),
            (unit, "_cast_buffers", self.cast_buffers),
            (fsdp, "cast_floats_to_right_precision", self.cast_inputs),
            (fsdp, "free_storage_", self.free),
            (FlattenParamsWrapper, "_unflatten_params_as_views", self.make_views),
        )
        failed = self._follower.failed
        stepping = register_optimizer_step_post_hook(self.stepped)
        try:
            with watch_all(points, failed, failed.missing):
                yield
        finally:
            stepping.remove()

    # ---- observers, in the order in which a forward meets them ------------------------------------

    def cast_inputs(self, to_fp16: bool, no_grad: bool, *args: Any, **kwargs: Any) -> Observation:
        """`cast_floats_to_right_precision`: the inputs of the root unit."""
        if not self._here():
            return
        before = _tensors((args, kwargs))
        result = yield
        changed = [
            (old, new)
            for old, new in zip(before, _tensors(result), strict=True)
            if old.dtype != new.dtype
        ]
        for old, new in changed:
            self._mark(
                "cast",
                None,
                "forward",
                what="input",
                shape=list(old.shape),
                **between(old, new),
            )

    def cast_buffers(self, unit: Any, *args: Any, **kwargs: Any) -> Observation:
        """`_cast_buffers`: replaces each buffer by a cast one, and keeps no original."""
        if self._casting_buffers or not self._here(unit):
            return  # called for the units inside by the root's call, which sees their buffers too
        before = [
            (module, name, buffer)
            for module in unit.modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]
        self._casting_buffers = True
        try:
            yield
        finally:
            self._casting_buffers = False
        for module, name, old in before:
            new = getattr(module, name)
            if new is old:
                continue
            path = self._recorder.clean_path(module)
            with self._recorder.quiet():
                source, destination = self._recorder.digest(old), self._recorder.digest(new)
                back = new.to(device=old.device, dtype=old.dtype)
                lossless = same(source, self._recorder.digest(back))
                largest = float((back - old).abs().max()) if lossless is False else None
                if path is not None:
                    self._recorder.name_tensor(new, join(path, name), kind="buffer")
            self._mark(
                "buffer-cast",
                self._recorder.clean_path(unit),
                None,
                name=None if path is None else join(path, name),
                source=as_field(source),
                destination=as_field(destination),
                lossless=lossless,
                largest_change=largest,
                **between(old, new),
            )

    def rebuild(self, unit: Any, force_full_precision: bool = False) -> Observation:
        """`_rebuild_full_params`: the gather; without one where the full parameters are still there."""
        if not self._here(unit):
            return
        fresh = force_full_precision or not unit.has_full_params
        copied = (unit.mixed_precision or unit.move_params_to_cpu) and not force_full_precision
        yield from self._using(unit, fresh=fresh, copied=copied)

    def keep(self, unit: Any) -> Observation:
        """`_use_full_params`: backward uses what was kept after forward (`reshard_after_forward=False`, every root)."""
        if self._here(unit):
            copied = unit.mixed_precision or unit.move_params_to_cpu
            yield from self._using(unit, fresh=False, copied=copied)

    def _using(self, unit: Any, *, fresh: bool, copied: bool) -> Observation:
        """Hold what the module computes with against the shards: `fresh`, it is gathered now; `copied`, from copies."""
        state = self._unit(unit)
        for buffer, parameter in zip(state.buffers, unit.params, strict=True):
            if copied or parameter._is_sharded:
                master = parameter._fp32_shard
                dtype = unit.compute_dtype if copied and unit.mixed_precision else master.dtype
                with self._recorder.quiet():
                    memory = _memory(buffer, parameter, master)
                sent = (
                    fresh and not copied
                )  # copies have marks of their own, which hold them against the shard
                self._follower.read_shard(buffer, memory, dtype, _phase(unit), sent=sent)
        yield
        for index, parameter in enumerate(unit.params):
            self._gathered(unit, state, index, parameter, fresh=fresh)
        state.named = True

    def release(self, unit: Any, params: Any = None) -> Observation:
        """`_free_full_params`: what was gathered is given back."""
        state = self._units.get(unit)
        if state is not None:
            for index, parameter in _chosen(unit, params):
                whole = getattr(parameter, "_full_param_padded", None)
                whole = parameter._fp16_shard if whole is None else whole
                # parameters that were summoned in full precision lie elsewhere, and are freed by themselves
                if whole is None or storage_id(whole) != state.into[index]:
                    continue
                if not is_readable(whole):
                    continue  # given back already
                buffer = state.buffers[index]
                with self._recorder.quiet():
                    memory = _memory(buffer, parameter, whole)
                exchanged = rebound(buffer.buffer, parameter, whole)
                self._follower.released(buffer, memory, _phase(unit), exchanged)
        yield

    def stepped(self, *_: Any) -> None:
        """An optimizer has made a step."""
        if threading.get_ident() != self._thread:
            return
        self._follower.step += 1
        try:
            with self._recorder.quiet():
                for unit, state in list(self._units.items()):
                    for buffer, parameter in zip(state.buffers, unit.params, strict=True):
                        memory = _memory(buffer, parameter, parameter._fp32_shard)
                        self._follower.stepped(buffer, memory)
        except Exception as error:  # the program's step is done, and goes on
            self._follower.failed(error)

    def load(self, unit: Any, params: Any = None) -> Observation:
        """`_cast_fp32_param_shards_to_fp16`: the shard is cast and, under offload, copied to the device."""
        if not self._here(unit):
            return
        state = self._unit(unit)
        yield
        for index, parameter in _chosen(unit, params):
            buffer = state.buffers[index]
            source, copy = parameter._fp32_shard, parameter._fp16_shard
            self._storages[storage_id(copy)] = (state.path, buffer.buffer.name)
            after = self._pieces(buffer, copy)
            checked = self._follower.copied(buffer, after)
            if checked["intact"] is False:
                # the gather is held against what is sent, and the next cast against the shard again
                buffer.source, buffer.cast_dtype = after, None
            fields = {
                **buffer.buffer.as_fields(),
                "source": as_field(end_to_end(buffer.cast_from)),
                "destination": as_field(end_to_end(after)),
                **checked,
                **between(source, copy),
            }
            if source.dtype != copy.dtype:
                self._mark("cast", state.path, _phase(unit), what="shard", **fields)
            if unit.move_params_to_cpu:
                self._mark("move", state.path, _phase(unit), direction="load", **fields)

    def make_views(self, wrapper: Any) -> Observation:
        """`_unflatten_params_as_views` of a FlattenParamsWrapper that no FSDP unit owns."""
        yield
        if not self._here(wrapper) or wrapper in self._wrapped_by_unit:
            return
        path = self._recorder.clean_path(wrapper)
        if path is None:
            return
        for (module, _, name), view in zip(
            wrapper._param_infos, wrapper._fpw_module._unflattened_param_views, strict=True
        ):
            if is_readable(view):
                self._recorder.name_tensor(view, join(path, module, name), kind="parameter")

    def drop(self, unit: Any, params: Any = None) -> Observation:
        """`_use_fp32_param_shard`: back to the master shard; under offload the one in host memory."""
        if not self._here(unit) or not unit.move_params_to_cpu:
            return
        state = self._unit(unit)
        # A pointer comparison: by now the storage of the full parameter may be gone.
        moved = [
            (index, parameter, parameter.dtype, parameter.device)
            for index, parameter in _chosen(unit, params)
            if parameter.data_ptr() != parameter._fp32_shard.data_ptr()
        ]
        yield
        for index, parameter, dtype, device in moved:
            buffer = state.buffers[index]
            master = end_to_end(self._pieces(buffer, parameter._fp32_shard))
            # Only forward leaves the master alone: an optimizer or a summon may write into it.
            known = end_to_end(buffer.cast_from) if _phase(unit) == "forward" else None
            self._mark(
                "move",
                state.path,
                _phase(unit),
                direction="drop",
                **buffer.buffer.as_fields(),
                source_dtype=dtype_name(dtype),
                source_device=str(device),
                destination_dtype=dtype_name(parameter.dtype),
                destination_device=str(parameter.device),
                bytes=0,
                destination=as_field(master),
                intact=same(known, master),
            )

    def free(self, data: Any) -> Observation:
        """`free_storage_`: the storage is resized to nothing, which no op shows."""
        owner = self._storages.pop(storage_id(data), None)
        if owner is None:
            return  # another recorder's, or a placeholder that was never filled
        before = data.untyped_storage().nbytes()
        yield
        freed = before - data.untyped_storage().nbytes()
        if freed:
            self._mark(
                "free", owner[0], None, buffer=owner[1], bytes=freed, device=str(data.device)
            )

    # ---- what they share ----------------------------------------------------------------------------

    def _here(self, unit: Any = None) -> bool:
        """Whether this recorder is meant: its thread, or a unit of its thread (backward has its own)."""
        return threading.get_ident() == self._thread or unit in self._units

    def _unit(self, unit: Any) -> _Unit:
        path = self._recorder.clean_path(unit)
        state = self._units.get(unit)
        if state is None or state.path != path:
            layout = buffers(unit, path or "")
            # one rank holds no part of a parameter, but all of it
            known = tuple(Unit(path, buffer, named=buffer.ranks == 1) for buffer in layout)
            state = _Unit(path, known, [None] * len(known))
            self._units[unit] = state
            self._wrapped_by_unit.add(unit._fsdp_wrapped_module)
        return state

    def _gathered(
        self, unit: Any, state: _Unit, index: int, parameter: Any, *, fresh: bool
    ) -> None:
        buffer = state.buffers[index]
        content = parameter.data
        if not is_readable(content):
            return
        into = state.into[index] = storage_id(content)
        if into == storage_id(parameter._fp32_shard):
            # one rank, nothing cast or moved: the parameters are the master itself
            if state.path is not None and (fresh or not state.named):
                with self._recorder.quiet():
                    memory = _memory(buffer, parameter, content)
                    self._follower.name_parameters(buffer, memory)
            return
        self._storages[into] = (state.path, buffer.buffer.name)
        with self._recorder.quiet():
            # the padding lies behind the view that fairscale trimmed
            full = content.as_strided((buffer.buffer.size,), (1,), 0)
            memory = _memory(buffer, parameter, full)
        told = self._follower.gathered if fresh else self._follower.used
        told(buffer, memory, _phase(unit), _ranks(unit))

    def _pieces(self, buffer: Unit, shard: Any) -> Digests:
        """The digests of a shard, cut as that of its buffer is."""
        return self._recorder.digests([(shard, buffer.cut.mine_sizes)])

    def _mark(self, kind: str, unit: str | None, phase: str | None, **fields: Any) -> None:
        self._recorder.mark(kind, library=LIBRARY, unit=unit, phase=phase, **fields)


def _memory(buffer: Unit, parameter: Any, whole: Any) -> Memory:
    """A parameter of fairscale as its shard, and what is gathered from it."""
    return FlatMemory(
        buffer.cut,
        _flat(parameter._fp32_shard),
        _flat(whole),
        (None,) * len(buffer.buffer.parts),
    )


def _flat(tensor: Any) -> Any:
    """All elements of a tensor in one dim, without its graph."""
    tensor = tensor.detach()
    return tensor if tensor.dim() == 1 else tensor.reshape(-1)


def _phase(unit: Any) -> str:
    """forward, backward or summon; the backward hook gathers before fairscale says that it began."""
    state = unit.training_state
    if state is fsdp.TrainingState.SUMMON_FULL_PARAMS:
        return "summon"
    return "forward" if state is fsdp.TrainingState.FORWARD else "backward"


def _chosen(unit: Any, params: Any) -> list[tuple[int, Any]]:
    """The (index, parameter) that a method of the unit was called for; all if `params` is None."""
    wanted = None if params is None else {id(parameter) for parameter in params}
    return [
        (index, parameter)
        for index, parameter in enumerate(unit.params)
        if wanted is None or id(parameter) in wanted
    ]


def _ranks(unit: Any) -> list[int] | None:
    """Global ranks of the unit's group; None for a stand-in, or one that was destroyed since."""
    try:
        return dist.get_process_group_ranks(unit.process_group)
    except (KeyError, TypeError):
        return None


def _tensors(tree: Any) -> list[Any]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
