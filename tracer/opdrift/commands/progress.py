"""Show on a terminal how far long work is, or that it goes on."""

from __future__ import annotations

import shutil
import sys
import threading
from time import monotonic
from types import TracebackType
from typing import Final

from opdrift.render.words import readable

#: Seconds between two drawings: a terminal far away takes no more, and nobody reads more.
_INTERVAL: Final = 0.1
#: Seconds until work without a known length is spoken of: what is shorter needs no words.
_PATIENCE: Final = 1.0
_WIDTH: Final = 24


class _Line:
    """A line on stderr that is drawn over and gone at the end; nothing where stderr is no terminal."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.shown = not quiet and sys.stderr.isatty()
        self._drawn = 0

    def draw(self, text: str) -> None:
        """Show a text in the place of what was there, cut to one line of the terminal."""
        if not self.shown:
            return
        text = readable(text)[: shutil.get_terminal_size().columns - 1]
        self._write(text.ljust(self._drawn))
        self._drawn = max(self._drawn, len(text))

    def clear(self) -> None:
        """Take the text away, so that something else can be printed."""
        if self._drawn:
            self._write(" " * self._drawn + "\r")
            self._drawn = 0

    def _write(self, text: str) -> None:
        encoding = sys.stderr.encoding or "ascii"
        try:
            sys.stderr.write("\r" + text.encode(encoding, "replace").decode(encoding))
            sys.stderr.flush()
        except OSError:  # the terminal has gone
            self.shown = False


class Progress:
    """A bar, for work whose length is known.

    Args:
        what: The words before the bar.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._line = _Line()
        self._next = 0.0

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
        now = monotonic() if self._line.shown else 0.0
        if not self._line.shown or now < self._next:
            return
        self._next = now + _INTERVAL
        share = min(done / total, 1.0) if total else 1.0
        filled = int(share * _WIDTH)
        self._line.draw(f"{self._what} [{'#' * filled}{'.' * (_WIDTH - filled)}] {share:4.0%}")

    def clear(self) -> None:
        """Take the bar away, so that something else can be printed."""
        self._line.clear()


class Elapsed:
    """The seconds that pass, for work whose length is not known; said once it has taken one.

    Args:
        what: The words before the seconds.
        quiet: Say nothing.
    """

    def __init__(self, what: str, *, quiet: bool = False) -> None:
        self._what = what
        self._stage = ""
        self._line = _Line(quiet=quiet)
        self._over = threading.Event()
        self._clock = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> Elapsed:
        if self._line.shown:
            self._clock.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        if self._line.shown:
            self._clock.join()
        self._line.clear()

    def now(self, stage: str) -> None:
        """Say from now on what of the work is being done."""
        self._stage = f"{stage}, "

    def _tick(self) -> None:
        start = monotonic()
        while not self._over.wait(_PATIENCE):
            self._line.draw(f"{self._what}: {self._stage}{monotonic() - start:.0f} s")
