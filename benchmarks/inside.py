"""How much of a step is spent inside what an integration does, and in announcing collectives."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from opdrift import spool
from opdrift.collectives import Collectives
from opdrift.recorder import Recorder
from opdrift_integrations import patching


class Stopwatch:
    """CPU time of this thread inside the functions that are put under it; one inside another counts once."""

    def __init__(self) -> None:
        self.spent = 0
        self._depth = 0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            start = time.thread_time_ns()
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:
                    self.spent += time.thread_time_ns() - start

        return timed


def written(recorder: Recorder) -> None:
    """Have all that was recorded so far on disk, so that what it takes counts where it belongs."""
    recorder._spool.flush(recorder._owner)


@contextlib.contextmanager
def watched(*modules: Any) -> Iterator[tuple[Stopwatch, Stopwatch]]:
    """Time all that integrations do, and all that announces collectives, of recordings begun inside the block.

    Args:
        modules: Those of integrations that also run after an optimizer's step.
    """
    integrations, collectives = Stopwatch(), Stopwatch()
    with contextlib.ExitStack() as stack:
        for name in ("_started", "_finish"):
            timed = integrations.around(getattr(patching, name))
            stack.enter_context(mock.patch.object(patching, name, timed))
        for module in modules:
            register = module.register_optimizer_step_post_hook
            stack.enter_context(
                mock.patch.object(
                    module,
                    "register_optimizer_step_post_hook",
                    lambda hook, register=register: register(integrations.around(hook)),
                )
            )
        # much of what marks say becomes JSON when they go to disk
        timed = integrations.around(spool.as_text)
        stack.enter_context(mock.patch.object(spool, "as_text", timed))
        timed = collectives.around(Collectives.issue)
        stack.enter_context(mock.patch.object(Collectives, "issue", timed))
        yield integrations, collectives
