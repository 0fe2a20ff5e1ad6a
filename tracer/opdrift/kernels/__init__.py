"""Watching which kernels ops run, for `kernels="full"`: what libraries and profilers say while an op runs."""

from __future__ import annotations

from typing import Protocol


class Watch(Protocol):
    """Something that looks at what happens while an op runs.

    Both methods are called on the op's own thread, `end` also after an op that raised, and neither ever raises.
    """

    def begin(self, seq: int) -> None:
        """The op with this number runs next."""

    def end(self, seq: int) -> None:
        """It has returned, or raised."""
