"""Attach integrations to a recording, and put down which of them wants to be told of what."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, cast

from opdrift.plugins import (
    Integration,
    OwnsParameters,
    RecorderLike,
    SeesCalls,
    SeesMarks,
    SeesModules,
    installed_integrations,
)


class Attaching:
    """The integrations of one recorder.

    Args:
        recorder: What they are attached to.
        stack: Detaches them.
        failed: Notes a failure of the tracer itself, or of an integration.
        owners: Gets those that own parameters.
        calls: Gets those that see calls of root modules; `modules` those that see all calls, `marks` those that see marks.
    """

    def __init__(
        self,
        recorder: RecorderLike,
        stack: ExitStack,
        *,
        failed: Callable[[str, BaseException], None],
        owners: list[OwnsParameters],
        calls: list[SeesCalls],
        modules: list[SeesModules],
        marks: list[SeesMarks],
    ) -> None:
        self._recorder = recorder
        self._stack = stack
        self._failed = failed
        self._owners = owners
        self._calls = calls
        self._modules = modules
        self._marks = marks

    def given(self, integrations: Sequence[str | Integration]) -> None:
        """Attach those that were asked for, by name or as they are."""
        for each in integrations:
            found = self._load(installed_integrations()[each]) if isinstance(each, str) else each
            if found is not None:
                self._attach(found)

    def wanted(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """Of each that is installed its library, and what attaches it once that is loaded."""
        for point in installed_integrations().values():
            integration = self._load(point)
            if integration is not None:
                yield integration.library, partial(self._attach, integration)

    def _load(self, point: Any) -> Integration | None:
        try:
            return cast("Integration", point.load()())
        except Exception as error:
            self._failed(f"integration {point.name}", error)
            return None

    def _attach(self, integration: Integration) -> None:
        try:
            self._stack.enter_context(integration.attach(self._recorder))
            if isinstance(integration, OwnsParameters):
                self._owners.append(integration)
            if isinstance(integration, SeesCalls):
                self._calls.append(integration)
            if isinstance(integration, SeesModules):
                self._modules.append(integration)
            if isinstance(integration, SeesMarks):
                self._marks.append(integration)
        except Exception as error:
            self._failed(f"integration {integration.name}", error)
