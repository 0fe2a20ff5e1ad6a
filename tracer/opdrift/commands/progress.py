"""Show on a terminal how far long work is."""

from __future__ import annotations

import sys
from time import monotonic
from types import TracebackType
from typing import Final

#: Seconds between two drawings: a terminal far away takes no more, and nobody reads more.
_INTERVAL: Final = 0.1
_WIDTH: Final = 24


class Progress:
    """A bar on stderr, drawn over and gone at the end; nothing where stderr is no terminal.

    Args:
        what: The words before the bar.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._shown = sys.stderr.isatty()
        self._next = 0.0
        self._drawn = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.clear()

    def __call__(self, done: int, total: int) -> None:
        """`done` of `total` is done."""
        now = monotonic() if self._shown else 0.0
        if not self._shown or now < self._next:
            return
        self._next = now + _INTERVAL
        share = min(done / total, 1.0) if total else 1.0
        filled = int(share * _WIDTH)
        self._draw(f"{self._what} [{'#' * filled}{'.' * (_WIDTH - filled)}] {share:4.0%}")

    def clear(self) -> None:
        """Take the bar away, so that something else can be printed."""
        if self._drawn:
            self._draw("")
            self._drawn = 0

    def _draw(self, text: str) -> None:
        try:
            sys.stderr.write("\r" + text.ljust(self._drawn) + ("\r" if not text else ""))
            sys.stderr.flush()
        except OSError:  # the terminal has gone
            self._shown = False
        self._drawn = max(self._drawn, len(text))
