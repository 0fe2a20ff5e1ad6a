"""What steers the choice of an implementation, looked at before an op runs; what changed is written down."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from opdrift.choices import (
    ATTENTION,
    general_switches,
    operands_require_grad,
    switches,
    why_not_fast,
)

if TYPE_CHECKING:
    from types import FrameType

    from opdrift.buffers import ThreadBuffers
    from opdrift.plans import Plan
    from opdrift.sources import Sources

#: Of so many modules it is remembered why their fast path was not taken.
_MAX_FAST_PATHS: Final = 65536
_NONE: Final[Mapping[str, str]] = {}


class Steering:
    """Looks at switches, and at why torch.nn did not take a fast path.

    Args:
        sources: Told of a change at a line that is known, where nobody looks at flags.
        write_mark: Writes a mark: (thread buffers, kind, fields).
    """

    def __init__(
        self,
        sources: Sources,
        write_mark: Callable[[ThreadBuffers, str, Mapping[str, Any]], None],
    ) -> None:
        self._sources = sources
        self._write_mark = write_mark
        #: module path -> why torch.nn did not take its fast path there when it was last called
        self._fast_paths: dict[str, Mapping[str, str]] = {}

    def ask(
        self,
        t: ThreadBuffers,
        plan: Plan,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        frame: FrameType,
    ) -> int:
        """Look at what steers an attention, before the op has a number; returns the op's flags."""
        words = why_not_fast(frame)
        if words != self._fast_paths.get(t.path, _NONE):
            if len(self._fast_paths) >= _MAX_FAST_PATHS:
                self._fast_paths.clear()
            self._fast_paths[t.path] = words
            self._write_mark(t, "fast-path", words)
        if plan.asks != ATTENTION:
            return 0
        self.look_at_switches(t)
        return operands_require_grad(args, kwargs)

    def look_at_switches(self, t: ThreadBuffers) -> None:
        """Notice a switch that changed at a line that is known, where nobody looks at flags."""
        found = switches()
        if found != t.switches:
            t.switches = found
            self._sources.on_new_line()

    def look_at_general_switches(self, t: ThreadBuffers) -> None:
        """As `look_at_switches`, for the few that reach every op: at a module's call."""
        found = general_switches()
        if found != t.switches[: len(found)]:
            self.look_at_switches(t)
