"""Say what an integration could not do: in the log, and in the trace."""

from __future__ import annotations

import logging

from opdrift.plugins import RecorderLike

_log = logging.getLogger(__name__)


class Failures:
    """What one integration of one recorder could not do; each kind of failure is said once.

    It is the `FailureHandler` of `patching.watch`.

    Args:
        recorder: Where the marks `integration-failed` go.
        library: The field `library` of the marks.
        called: The library in a sentence, if it is called otherwise.
    """

    def __init__(self, recorder: RecorderLike, library: str, called: str | None = None) -> None:
        self._recorder = recorder
        self._library = library
        self._called = called or library
        self._said: set[str] = set()

    def __call__(self, error: Exception) -> None:
        """Something could not be observed; the run goes on."""
        text = f"{type(error).__name__}: {error}"
        if text in self._said:
            return
        self._said.add(text)
        _log.warning(
            "opdrift could not follow %s here, the run goes on: %s",
            self._called,
            text,
            exc_info=error,
        )
        self._recorder.mark("integration-failed", library=self._library, error=text)

    def missing(self, name: str) -> None:
        """This version of the library has not what was to be watched."""
        _log.warning(
            "opdrift looks for %s, which this version of %s does not have: what it does is not in the trace.",
            name,
            self._called,
        )
        self._recorder.mark(
            "integration-failed",
            library=self._library,
            error=f"{name} is not there",
            missing=name,
        )
