"""Stay out of the way of the program's own profiler.

Kineto profiles once per process: a second profiler takes the first one's events away in silence, or ends
the process when it reads its own (measured on torch 2.13). What of ours runs must therefore end before the program's
begins, and the only places where that can be seen are the names by which torch's profilers call kineto.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final, Literal

import torch
from torch.autograd import profiler, profiler_legacy

from opdrift.neutral import hide_from_dynamo

Stage = Literal["prepare", "start", "end"]

#: Modules that hold the functions: those that profilers look them up in, and where others may.
_KINETO: Final = (torch._C._autograd, torch.autograd, profiler)
_HOOKS: Final[tuple[tuple[Stage, str, tuple[ModuleType, ...]], ...]] = (
    ("prepare", "_prepare_profiler", _KINETO),  # without a start yet, this is warm-up
    ("start", "_enable_profiler", _KINETO),
    ("end", "_disable_profiler", _KINETO),
    ("start", "_enable_profiler_legacy", (profiler_legacy,)),
    ("end", "_disable_profiler_legacy", (profiler_legacy,)),
)
#: torch's own, whatever stands in their place.
prepare: Final[Callable[..., Any]] = torch._C._autograd._prepare_profiler
start: Final[Callable[..., Any]] = torch._C._autograd._enable_profiler
end: Final[Callable[..., Any]] = torch._C._autograd._disable_profiler


class ProgramsProfiler:
    """Notices the program's profiler before it starts, from `attach` to `detach`.

    Args:
        before: Called before it is prepared or started, on its thread: to end a profile of ours.
    """

    def __init__(self, before: Callable[[], None]) -> None:
        self._before = before
        self._replaced: list[tuple[ModuleType, str, _Hook]] = []
        #: prepared or started, and not ended
        self._at_work = False

    @property
    def runs(self) -> bool:
        """Whether it profiles or warms up now, on this thread or with `torch.profiler` on any."""
        return bool(
            self._at_work or torch._C._autograd._profiler_enabled() or profiler._is_profiler_enabled
        )

    def attach(self) -> bool:
        """Look on from now on; False, and nothing done, if another recorder does."""
        if isinstance(torch._C._autograd._enable_profiler, _Hook):
            return False
        self._at_work = _is_warming_up()
        for stage, name, modules in _HOOKS:
            for module in modules:
                original = getattr(module, name, None)
                if original is not None:
                    hook = _Hook(self, stage, original)
                    setattr(module, name, hook)
                    self._replaced.append((module, name, hook))
        return True

    def detach(self) -> None:
        """Leave torch as it was."""
        while self._replaced:
            module, name, hook = self._replaced.pop()
            hook.programs = None  # it may have been looked up, and not called yet
            if getattr(module, name) is hook:
                setattr(module, name, hook.original)

    def reached(self, stage: Stage) -> None:
        """Its profiler is about to be prepared or started, or has ended."""
        self._at_work = stage != "end"
        if self._at_work:
            self._before()


def _is_warming_up() -> bool:
    """Whether a profiler of the program's was prepared, and has not ended.

    Nothing but the object itself tells: kineto is not asked for it, and a profile of ours would undo it, which ends
    the process when the program's is read. Looking for the object takes tens of milliseconds, once.
    """
    return any(
        isinstance(found, profiler.profile) and found.entered and found.kineto_results is None
        for found in gc.get_referrers(profiler.profile)
    )


class _Hook:
    """Stands in the place of one of torch's functions."""

    def __init__(
        self, programs: ProgramsProfiler, stage: Stage, original: Callable[..., Any]
    ) -> None:
        self.programs: ProgramsProfiler | None = programs
        self.original = original
        self._stage: Stage = stage

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        programs = self.programs
        if programs is None:
            return self.original(*args, **kwargs)
        if self._stage != "end":
            programs.reached(self._stage)
            return self.original(*args, **kwargs)
        try:
            return self.original(*args, **kwargs)
        finally:
            programs.reached("end")


hide_from_dynamo(_Hook.__call__)
