"""What integrations and exporters must look like, and how installed ones are found."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import cache
from importlib.metadata import entry_points
from typing import Any, Protocol, runtime_checkable

INTEGRATIONS_GROUP = "opdrift.integrations"
EXPORTERS_GROUP = "opdrift.exporters"


class Digest(Protocol):
    """A content as tfp1 sees it: equal contents have equal (raw, n, code)."""

    @property
    def raw(self) -> int:
        """The polynomial hash, below 2**61 - 1."""

    @property
    def n(self) -> int:
        """How many components."""

    @property
    def code(self) -> int:
        """What a component is (tfp1.Code)."""


class RecorderLike(Protocol):
    """The part of a recorder that an integration may use. Tensors are torch's."""

    def mark(self, kind: str, /, **fields: Any) -> None:
        """Write a mark: something that is no op. Fields are JSON types."""

    def scope(self, name: str) -> AbstractContextManager[None]:
        """Ops inside run in the scope `name`, below the current one."""

    def pause(self) -> AbstractContextManager[None]:
        """Ops inside are not recorded."""

    def name_tensor(self, tensor: Any, name: str, *, kind: str = "parameter") -> None:
        """Give a tensor's present content a name; it is fingerprinted now, also if it is a view."""

    def digest(self, tensor: Any) -> Digest | None:
        """The digest of a tensor's present content; None if it cannot be read now."""

    def writes(self, tensor: Any) -> int:
        """How often a tensor's storage is known to have been written; 0 if nothing is known of it."""

    def clean_path(self, module: Any) -> str | None:
        """The scope path of a module, wrapper segments stripped; None if the module is unknown."""


@runtime_checkable
class Integration(Protocol):
    """Makes what a library does visible in the trace.

    The class is loaded to read `library`, whether the library is installed or not: it imports it in `attach`.
    """

    name: str
    #: The module that the program must have imported for `integrations="auto"` to attach this.
    library: str

    def attach(self, recorder: RecorderLike) -> AbstractContextManager[None]:
        """Return a context manager that attaches, and undoes everything at exit, also after an error."""
        ...


@runtime_checkable
class OwnsParameters(Protocol):
    """An integration whose library holds tensors in place of a model's own parameters (shards, flat ones).

    It names the parameters itself when they are put together, and the recorder leaves the stand-ins nameless.
    """

    def owns(self, tensor: Any) -> bool:
        """Whether `tensor`, found among a model's parameters, is a stand-in."""
        ...


@runtime_checkable
class SeesCalls(Protocol):
    """An integration that wants to know when the program calls a model."""

    def called(self, module: Any, args: Any, kwargs: Any) -> None:
        """`module` is about to be called from outside every module; the arguments are not to be changed."""
        ...


class Exporter(Protocol):
    """Turns a trace into another format."""

    name: str

    def export(self, trace: Any, output: str | None, options: Mapping[str, Any]) -> None:
        """Write `trace` to `output`."""


def installed_integrations() -> dict[str, Any]:
    """Name -> entry point of each installed integration; nothing is imported yet."""
    return dict(_integrations_along(tuple(sys.path)))


@cache
def _integrations_along(path: tuple[str, ...]) -> dict[str, Any]:
    """They are looked for once a search path: that reads a file of every distribution, some milliseconds."""
    return {point.name: point for point in entry_points(group=INTEGRATIONS_GROUP)}
