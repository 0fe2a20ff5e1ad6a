"""Watching which kernels ops run, for `kernels="full"`: what libraries and profilers say while an op runs."""

from __future__ import annotations

from typing import Protocol


class Watch(Protocol):
    """Something that looks at what happens while an op runs.

    Both methods are called on the op's own thread, and neither ever raises. `end` is called whatever happened: the op
    raised, or an interrupt came before `begin`.
    """

    def begin(self, seq: int, name: str, /) -> None:
        """The op with this number and name (`aten.mm.default`) runs next."""

    def end(self, seq: int, /) -> None:
        """It has returned, or raised."""


class CannotWatchError(Exception):
    """Ops cannot be watched, and why: told in the trace and the log, never to the program."""
