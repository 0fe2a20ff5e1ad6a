"""Attach to what torch's FSDPs are watched by, as far as this torch has it."""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from opdrift.plugins import RecorderLike
from opdrift_integrations.patching import watch
from opdrift_integrations.torch_fsdp import flat, groups
from opdrift_integrations.torch_fsdp.flat import FlatWatcher
from opdrift_integrations.torch_fsdp.gathers import Follower
from opdrift_integrations.torch_fsdp.groups import GroupWatcher

Hooks = Mapping[str, tuple[str, str, str]]


@contextlib.contextmanager
def watching(recorder: RecorderLike) -> Iterator[None]:
    """Observe FSDP1 and FSDP2 inside the block."""
    follower = Follower(recorder)
    watchers = (("FSDP1", FlatWatcher(follower), flat.HOOKS), ("FSDP2", GroupWatcher(follower), groups.HOOKS))  # fmt: skip
    with contextlib.ExitStack() as stack:
        followed: list[FlatWatcher | GroupWatcher] = []
        for what, watcher, hooks in watchers:
            missing = lacking(hooks)
            if missing:
                follower.lacks(what, missing)
                continue
            followed.append(watcher)
            for observer, place in hooks.items():
                owner = _owner(place)
                stack.enter_context(
                    watch(owner, place[2], getattr(watcher, observer), follower.failed)
                )
        thread = threading.get_ident()

        def stepped(*_: Any) -> None:
            if threading.get_ident() != thread:
                return
            follower.step += 1
            try:
                with recorder.quiet():
                    for watcher in followed:
                        for unit, memory in watcher.shards():
                            follower.stepped(unit, memory)
            except Exception as error:  # the program's step is done, and goes on
                follower.failed(error)

        stack.callback(register_optimizer_step_post_hook(stepped).remove)
        yield


def lacking(hooks: Hooks) -> list[str]:
    """Of what is watched, what this torch does not have."""
    return [
        ".".join(part for part in place if part)
        for place in hooks.values()
        if (owner := _owner(place)) is None or place[2] not in vars(owner)
    ]


def _owner(place: tuple[str, str, str]) -> Any:
    """The module or class that a hook point is in; None if this torch has none of that name."""
    try:
        module: ModuleType = importlib.import_module(place[0])
    except ImportError:
        return None
    return getattr(module, place[1], None) if place[1] else module


def is_shard(tensor: Any) -> bool:
    """Whether a tensor found among a model's parameters is FSDP's: a flat parameter, or a shard."""
    if getattr(
        tensor, "_fsdp_flattened", False
    ):  # set by FlatParamHandle, also on original parameters
        return True
    if not isinstance(tensor, DTensor):
        return False
    return any(param.sharded_param is tensor for group in _groups() for param in group.fsdp_params)


def _groups() -> Iterator[Any]:
    """The parameter groups of every module that `fully_shard` was called for."""
    states = importlib.import_module("torch.distributed._composable_state")._module_state_mapping
    for reference in list(states.values()):
        state = reference()
        groups_ = getattr(state, "_fsdp_param_groups", None)
        if groups_ is None:
            group = getattr(state, "_fsdp_param_group", None)
            groups_ = [] if group is None else [group]
        yield from groups_
