"""What integrations and exporters must look like, and how installed ones are found."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, runtime_checkable

from opdrift.errors import InvalidOptionError

if TYPE_CHECKING:
    from argparse import ArgumentParser, Namespace
    from importlib.metadata import EntryPoint
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt

    from opdrift.records import Diagnosis, Pick
    from opdrift.tracefile.columns import Ints
    from opdrift.tracefile.reader import Trace

INTEGRATIONS_GROUP: Final = "opdrift.integrations"
EXPORTERS_GROUP: Final = "opdrift.exporters"

#: What a comparison says of an op: a difference begins at it, or reached it; the other run has no such op.
OpStatus = Literal["equal", "origin", "receiver", "unpaired", "unknown"]
OP_STATUSES: Final[tuple[OpStatus, ...]] = ("equal", "origin", "receiver", "unpaired", "unknown")


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

    def form(
        self,
        kind: str,
        shared: Mapping[str, Any],
        rest: Callable[[], Mapping[str, Any]] | None = None,
    ) -> Callable[..., None]:
        """What writes marks that share fields, which become JSON only once; it is called with the others.

        `rest` makes further shared ones when the first of the marks goes to disk.
        """

    def scope(self, name: str) -> AbstractContextManager[None]:
        """Ops inside run in the scope `name`, below the current one."""

    def pause(self) -> AbstractContextManager[None]:
        """Ops inside are not recorded."""

    def quiet(self) -> AbstractContextManager[None]:
        """Ops inside are the integration's own: nobody sees them, no mode of the program either, and they have no graph."""

    def name_tensor(self, tensor: Any, name: str, *, kind: str = "parameter") -> Digest | None:
        """Give a tensor's present content a name; it is fingerprinted now, also if it is a view.

        Returns the digest of what it holds where that was read for this, or as the last op made it; else None.
        """

    def name_tensors(
        self, named: Iterable[tuple[Any, str, Digest | None]], *, kind: str = "parameter"
    ) -> None:
        """As `name_tensor`, of many, each with the digest of its present content where that was read just now."""

    def digest(self, tensor: Any) -> Digest | None:
        """The digest of a tensor's present content; None if it cannot be read now."""

    def digests(self, contents: Iterable[tuple[Any, Sequence[int]]]) -> Sequence[Digest | None]:
        """As `digest`, of stretches that follow each other: (tensor, elements of each stretch), each of its own digest."""

    def cast_digests(
        self, contents: Iterable[tuple[Any, Sequence[int]]], dtype: Any
    ) -> tuple[Sequence[Digest], Sequence[Digest]] | None:
        """As `digests`, and what the contents are in another precision; None if they have to be cast to know that."""

    def digests_left(
        self, contents: Iterable[tuple[Any, Sequence[int]]]
    ) -> Sequence[Digest] | None:
        """As `digests`, of what the last ops that wrote contents left, without reading; None if that is not known of all."""

    def versions(self, tensors: Iterable[Any]) -> Sequence[tuple[int, int]]:
        """Of each tensor's storage a number that no other has, and how often it is known to have been written."""

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


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """A call of a module that begins.

    Attributes:
        id: Of the call, as in the trace.
        parent: The call that it is made in; 0 outside every module.
        path: Of the module.
        kind: Its class, or "scope".
        number: Which call of that path, from 0.
        training: `module.training`.
    """

    id: int
    parent: int
    path: str
    kind: str
    number: int
    training: bool


@runtime_checkable
class SeesModules(Protocol):
    """An integration that wants to know which module call each recorded thread is in. Both are called on that thread."""

    def entered(self, call: ModuleCall) -> None:
        """A module's call began, or a scope of the program."""
        ...

    def returned(self, call: int) -> None:
        """Calls ended; the thread is in this one again, 0 being the program outside every module.

        While an exception leaves a module, `sys.exception()` is that.
        """
        ...


@runtime_checkable
class SeesMarks(Protocol):
    """An integration that wants to know of the marks that the program and other integrations write."""

    def marked(self, kind: str, fields: Mapping[str, Any]) -> None:
        """A mark was written."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Comparison:
    """What a comparison with another run says of one process of the exported run.

    Attributes:
        baseline: The same process of the other run, the left side.
        diagnosis: The answer for this process; the exported run is its right side.
        status: Per op, its place in `OP_STATUSES`.
        counterpart: Per op, the index of the baseline's op that it is paired with; -1 if there is none.
        first: Index of the op at which the runs come apart, or that first uses the leaf which differs; None where
            that is no op of this process.
    """

    baseline: Trace
    diagnosis: Diagnosis
    status: npt.NDArray[np.int8]
    counterpart: Ints
    first: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Process:
    """One process (rank) of the run that is exported.

    Attributes:
        trace: What it recorded.
        ops: Indices of the ops that were asked for, ascending.
        whole: All ops were asked for.
        comparison: What `--against` found; None without it.
        kernels: Which implementation ran, for ops by their indices where it is known; it takes a while for many.
    """

    trace: Trace
    ops: Ints
    whole: bool
    comparison: Comparison | None
    kernels: Callable[[Sequence[int]], Mapping[int, Pick]]


@dataclass(frozen=True, slots=True, eq=False)
class Export:
    """What an exporter is to do.

    Attributes:
        processes: One of a run that was not distributed. Each is read from disk when it is asked for, and
            again when it is asked for again: go through them once, and hold one at a time.
        options: Of the command line, those that `Exporter.add_arguments` declared among them.
        output: Where to write, a file or a folder to make; nobody sees it before all is written. None if nothing
            is to be written.
        progress: To be called now and then with how much of how much is done.
        warn: Tells the user something in one sentence.
    """

    processes: Sequence[Process]
    options: Namespace
    output: Path | None
    progress: Callable[[int, int], None]
    warn: Callable[[str], None]


class Exporter(Protocol):
    """Turns a trace into another format: `opdrift export NAME TRACE`.

    The docstring of its class is its help, the first line its summary. The class is loaded to list it, so its
    module imports no library but in `export`.
    """

    #: What it writes, if it writes.
    writes: Literal["file", "folder"]
    #: Modules that must be importable, and the extra of opdrift that installs them ("" if none does).
    requires: tuple[str, ...]
    extra: str

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare options of its own. Taken are TRACE, -o, --force, --rank, --scope, --steps, --against, --map."""

    def suffix(self, options: Namespace) -> str | None:
        """The suffix of what is written if no -o says where, such as ".json"; None to write nothing.

        A folder holds files of this suffix only.

        Raises:
            OpdriftError: The options do not fit together.
        """
        ...

    def export(self, export: Export) -> str:
        """Write or send it; return a sentence that says what.

        Raises:
            ExportError: Something was not taken: nothing may be left out in silence.
        """
        ...


def installed_exporters() -> dict[str, EntryPoint]:
    """Name -> entry point of each installed exporter; nothing is imported yet."""
    return {point.name: point for point in entry_points(group=EXPORTERS_GROUP)}


def installed_integrations() -> dict[str, Any]:
    """Name -> entry point of each installed integration; nothing is imported yet."""
    return dict(_integrations_along(tuple(sys.path)))


def check_integrations(names: Sequence[str]) -> None:
    """Refuse names of integrations that are not installed.

    Raises:
        InvalidOptionError: One is not.
    """
    known = installed_integrations()
    unknown = [name for name in names if name not in known]
    if unknown:
        raise InvalidOptionError(
            f"There is no integration {', '.join(map(repr, unknown))}; installed are {', '.join(sorted(known)) or 'none'}."
        )


@cache
def _integrations_along(path: tuple[str, ...]) -> dict[str, Any]:
    """They are looked for once a search path: that reads a file of every distribution, some milliseconds."""
    return {point.name: point for point in entry_points(group=INTEGRATIONS_GROUP)}
