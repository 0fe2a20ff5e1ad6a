"""Record what a program does once a future is done: hooks of DistributedDataParallel write their results back there.

Such a callback runs on a thread of the communication library, which no dispatch mode of the program belongs to.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

_FOLLOWERS: Final = "__opdrift_followers__"
#: What takes a callback, of torch's futures.
_NAMES: Final = ("then", "add_done_callback")

# Not state: it only keeps two threads from replacing the same attribute at once.
_lock = threading.Lock()


@contextlib.contextmanager
def following_callbacks(mode: TorchDispatchMode) -> Iterator[None]:
    """Callbacks that are given to a future inside, on a thread under `mode`, run under it, too.

    Any number of recorders may follow them, and leave in any order: they share one wrapper.
    """
    followed = {n: _follow(n, mode) for n in _NAMES if n in vars(torch._C.Future)}
    try:
        yield
    finally:
        for name, modes in followed.items():
            _leave(name, modes, mode)


def _follow(name: str, mode: TorchDispatchMode) -> list[TorchDispatchMode]:
    with _lock:
        present = vars(torch._C.Future)[name]
        modes: list[TorchDispatchMode] | None = getattr(present, _FOLLOWERS, None)
        if modes is None:
            modes = []
            setattr(torch._C.Future, name, _wrapper(present, modes))
        modes.append(mode)
    return modes


def _leave(name: str, modes: list[TorchDispatchMode], mode: TorchDispatchMode) -> None:
    with _lock:
        modes[:] = [other for other in modes if other is not mode]
        present = vars(torch._C.Future)[name]
        # somebody else may have put a wrapper over ours: it stays, and ours below it is idle
        if not modes and getattr(present, _FOLLOWERS, None) is modes:
            setattr(torch._C.Future, name, present.__wrapped__)


def _wrapper(original: Any, modes: list[TorchDispatchMode]) -> Any:
    @functools.wraps(original)
    def take(future: Any, callback: Callable[[Any], Any]) -> Any:
        here = _get_current_dispatch_mode_stack()
        mine = [mode for mode in modes if mode in here]
        return original(future, _under(mine, modes, callback) if mine else callback)

    setattr(take, _FOLLOWERS, modes)
    return take


def _under(
    mine: list[TorchDispatchMode], open_: list[TorchDispatchMode], callback: Callable[[Any], Any]
) -> Callable[[Any], Any]:
    @functools.wraps(callback)
    def run(value: Any) -> Any:
        here = _get_current_dispatch_mode_stack()
        with contextlib.ExitStack() as stack:
            for mode in mine:
                if mode in open_ and mode not in here:
                    _push_mode(mode)
                    stack.callback(_pop_mode)
            return callback(value)

    return run
