"""Record a run: the life cycle around the dispatch mode, and what integrations may use."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from time import perf_counter_ns as now
from types import TracebackType
from typing import Any, Final, Literal, Self, cast

import torch
from torch.nn import Module

from opdrift import environment
from opdrift.buffers import ThreadBuffers
from opdrift.errors import InvalidOptionError, RecorderStateError
from opdrift.fingerprint.engine import load_engine
from opdrift.imports import watch_imports
from opdrift.mode import RecordingMode
from opdrift.naming import Naming
from opdrift.neutral import around_compilation, dispatch_keys, silent
from opdrift.options import Options, check_options
from opdrift.plugins import Integration, OwnsParameters, installed_integrations
from opdrift.records import TRACE_SCHEMA, Batch
from opdrift.scopes import Scopes
from opdrift.sources import Sources
from opdrift.tracefile.writer import TraceWriter, claim
from opdrift.values import Values

log = logging.getLogger("opdrift")

#: A busy thread flushes after this time; an idle program is flushed by the watchdog.
_FLUSH_NS: Final = 900_000_000
_MAX_FAILURES: Final = 100


@dataclass(frozen=True, slots=True)
class Digest:
    """A content as tfp1 sees it."""

    raw: int
    n: int
    code: int


def record(
    path: str | os.PathLike[str],
    *,
    model: Module | Mapping[str, Module] | None = None,
    inputs: Mapping[str, torch.Tensor] | None = None,
    batch: Batch | None = None,
    integrations: Literal["auto"] | Sequence[str] = "auto",
    kernels: Literal["auto", "full", "off"] = "auto",
    integrity: Literal["auto", "full", "off"] = "auto",
    label: str = "",
    overwrite: bool = False,
) -> Recorder:
    """Record every op that runs inside a `with` block into a trace.

    The run is not changed: outputs, gradients, random state, layouts, exceptions and compiled code stay
    the same bit for bit. A failure inside the tracer is logged and noted in the trace, never raised.

    Args:
        path: The folder to make. In a distributed run each rank writes `path/rank-00000` and so on.
        model: A module, or a mapping of name to module: names scopes and leaves, and its parameters and
            buffers are fingerprinted on entry. Without it, root modules are found at their first call.
        inputs: Names of input tensors. Without it, the arguments of the root module's forward are named
            by its signature.
        batch: The leading batch of this run.
        integrations: "auto" attaches those whose library the program has imported (also later, while it
            is recorded); or names; or `()` for none.
        kernels: How much to find out about kernels: "auto" what is free, "full" more at a cost (not there
            yet: it is logged, and recorded as "auto"), "off".
        integrity: How often leaves are read again at use to find writes that no op made: "auto" within
            1.5 % of the run's time, "full" at every use, "off".
        label: A name for the run, shown in reports.
        overwrite: Replace a trace at `path`.

    Raises:
        InvalidOptionError: An argument is outside its range.
        TraceExistsError: `path` is taken (raised on entering the `with`).
        TraceNotWritableError: `path` cannot be written (raised on entering the `with`).
    """
    return Recorder(
        check_options(
            path,
            model=model,
            inputs=inputs,
            batch=batch,
            integrations=integrations,
            kernels=kernels,
            integrity=integrity,
            label=label,
            overwrite=overwrite,
        )
    )


class Recorder:
    """A recording; made by `record`, used once as a context manager."""

    def __init__(self, options: Options) -> None:
        self.path = options.path
        self._options = options
        self._state: Literal["new", "open", "closed"] = "new"
        self._stack = ExitStack()
        self._failures: dict[tuple[str, str], int] = {}
        self._names: deque[tuple[str, int, str]] = deque()
        self._leaves: deque[tuple[str, str, str, int, int, int]] = deque()
        self._marks: deque[tuple[int, int, str, int, int, str]] = deque()
        self._threads: dict[int, ThreadBuffers] = {}
        self._lock = threading.Lock()
        self._pid = 0
        self._ops_written = 0

    # ---- life cycle ------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if self._state != "new":
            raise RecorderStateError(
                f"This recorder of {self.path} was used before. A recorder records once: call opdrift.record() again."
            )
        rank, world_size = _rank()
        folder = claim(self.path, rank=rank, overwrite=self._options.overwrite)
        self._engine = load_engine()
        self._row = self._engine.ROW
        self._pid = os.getpid()
        self._started = now()
        self._flags = environment.Flags()
        self._writer = TraceWriter(folder, self._header(rank, world_size))
        self._flags.changed()
        self._values = Values(
            f"_opdrift_{id(self):x}_{self._started:x}",
            self._engine,
            write_name=self._write_name,
            write_leaf=self._leaves.append,
            flush=self._flush,
            integrity=self._options.integrity,
        )
        self._naming = Naming(
            self._values, write_mark=self._write_mark, write_leaf=self._leaves.append
        )
        self._sources = Sources(self._write_name)
        self._scopes = Scopes(
            self._thread,
            self._sources,
            write_name=self._write_name,
            flush=self._flush,
            failed=self._failed,
            on_root=self._root_called,
            on_root_done=self._root_returned,
        )
        self._mode = RecordingMode(
            self._values,
            self._sources,
            thread=self._thread,
            write_name=self._write_name,
            write_mark=self._write_mark,
            flush=self._flush,
            failed=self._failed,
        )
        self._mode.use_keys(dispatch_keys())
        self._state = "open"
        if self._options.kernels == "full":
            log.warning("kernels='full' is not there yet: kernels are named by rule, as with 'auto'.")
        try:
            self._open()
        except BaseException:
            self._stack.close()
            self._writer.abandon()
            self._state = "closed"
            raise
        return self

    def _open(self) -> None:
        self._look_for_imports = self._stack.enter_context(watch_imports(self._wanted_imports()))
        for name in self._options.integrations or ():
            integration = self._load_integration(installed_integrations()[name])
            if integration is not None:
                self._attach(integration)
        with silent():  # after the integrations: some own parameters
            self._guarded("names", self._name_given)
        self._scopes.on()
        self._stack.callback(self._scopes.off)
        self._stop = threading.Event()
        self._watchdog = threading.Thread(target=self._watch, name="opdrift watchdog", daemon=True)
        self._watchdog.start()
        self._values.opened = now()
        self._flush(self._thread())
        self._mode.__enter__()  # type: ignore[no-untyped-call]

    def _wanted_imports(self) -> dict[str, Callable[[], None]]:
        """What to do once a library is loaded: attach its integration; keep out of dynamo's way."""
        wanted: dict[str, Callable[[], None]] = {"torch._dynamo.callback": self._dynamo_loaded}
        if self._options.integrations is None:
            for point in installed_integrations().values():
                integration = self._load_integration(point)
                if integration is not None:
                    wanted[integration.library] = partial(self._attach, integration)
        return wanted

    def _name_given(self) -> None:
        t = self._thread()
        for prefix, model in self._options.models.items():
            self._scopes.add(model, prefix)
            self._naming.model(t, model, prefix)
        for name, tensor in self._options.inputs.items():
            self._naming.tensor(t, tensor, name, "input", "entry")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._state != "open":
            return
        self._mode.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        # integrations may still write marks as they leave
        self._guarded("closing", self._stack.close)
        self._state = "closed"
        self._stop.set()
        # a child that was forked inside the `with` writes nothing: the files are the parent's
        if os.getpid() != self._pid:
            return
        self._watchdog.join()
        with silent():
            self._guarded("closing", self._name_rest)
        self._close(error)

    def _close(self, error: BaseException | None) -> None:
        for t in list(self._threads.values()):
            self._flush(t)
        if not self._mode.recording:
            self._writer.abandon()
            return
        footer = {
            "ops": self._ops_written,
            "ended": "ok" if error is None else "raised",
            "exception": None if error is None else f"{type(error).__name__}: {error}"[:2000],
            "failures": [
                {"where": where, "error": what, "count": count}
                for (where, what), count in self._failures.items()
            ],
            "notes": [
                f"{count} contents were not fingerprinted: {reason}"
                for reason, count in self._values.skipped.items()
            ],
        }
        try:
            with silent():
                self._writer.close(footer)
        except Exception as problem:
            self._disk_failed(problem)

    # ---- what users and integrations call ----------------------------------------------------------------

    def mark(self, kind: str, **fields: Any) -> None:
        """Write a mark: something that is no op. Fields are JSON types.

        Raises:
            RecorderStateError: The recorder is not open.
            InvalidOptionError: A field is no JSON type.
        """
        self._must_be_open("mark")
        try:
            json.dumps(fields)
        except (TypeError, ValueError) as error:
            raise InvalidOptionError(
                f"mark({kind!r}) has a field that is no JSON value: {error}. Use numbers, text, lists and dicts."
            ) from None
        self._write_mark(self._thread(), kind, fields)

    def scope(self, name: str) -> AbstractContextManager[None]:
        """Ops inside run in the scope `name`, below the present one."""
        self._must_be_open("scope")
        return self._scopes.scope(name)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Ops inside, on this thread, are not recorded. What they write is seen later as a hidden write."""
        self._must_be_open("pause")
        t = self._thread()
        t.paused += 1
        try:
            yield
        finally:
            t.paused -= 1

    def name_tensor(self, tensor: torch.Tensor, name: str, *, kind: str = "parameter") -> None:
        """Give a tensor's present content a name in the trace; it is fingerprinted now, also if it is a view.

        Args:
            tensor: A strided tensor on any device; one whose memory is freed is named without content.
            name: The leaf's name.
            kind: "parameter", "buffer", "input" or "constant".
        """
        self._must_be_open("name_tensor")
        with silent():
            t = self._thread()
            self._guarded(
                "name_tensor", lambda: self._naming.tensor(t, tensor, name, kind, "gather")
            )

    def digest(self, tensor: torch.Tensor) -> Digest | None:
        """The digest of a tensor's present content; None if it cannot be read now (freed, meta, in flight)."""
        with silent():
            if self._engine.can_fingerprint(tensor) is not None:
                return None
            row = self._engine.fingerprint(tensor)
            return Digest(int(row["raw"]), int(row["n"]), int(row["code"]))

    def clean_path(self, module: Module) -> str | None:
        """The scope path of a module, wrapper segments stripped; None if the module is unknown."""
        return self._scopes.path_of(module)

    def _must_be_open(self, what: str) -> None:
        if self._state != "open":
            raise RecorderStateError(
                f"{what}() was called on a recorder that is not open. Call it inside `with opdrift.record(...) as recorder:`."
            )

    # ---- modules and flags -------------------------------------------------------------------------------

    def _root_called(
        self, t: ThreadBuffers, module: Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """A module was called from outside every module."""
        self._look_for_imports()
        self._note_changed_flags(t)
        with silent():
            if not self._naming.knows(module):
                self._naming.model(t, module, self._scopes.path_of(module) or "")
            self._naming.arguments(t, module, args, kwargs)

    def _root_returned(self, t: ThreadBuffers, module: Module, call: int, output: Any) -> None:
        with silent():
            self._naming.results(t, call, output)

    def _note_changed_flags(self, t: ThreadBuffers) -> None:
        changed = self._flags.changed()
        if changed:
            self._write_mark(t, "flags", {name: list(pair) for name, pair in changed.items()})

    def _name_rest(self) -> None:
        t = self._thread()
        t.call, t.path = 0, ""
        self._note_changed_flags(t)
        self._naming.rest(t)

    # ---- integrations --------------------------------------------------------------------------------------

    def _load_integration(self, point: Any) -> Integration | None:
        try:
            return cast("Integration", point.load()())
        except Exception as error:
            self._failed(f"integration {point.name}", error)
            return None

    def _attach(self, integration: Integration) -> None:
        try:
            self._stack.enter_context(integration.attach(self))
            if isinstance(integration, OwnsParameters):
                self._naming.owners.append(integration)
        except Exception as error:
            self._failed(f"integration {integration.name}", error)

    def _dynamo_loaded(self) -> None:
        def off() -> None:
            self._scopes.off()
            self._write_mark(self._thread(), "compile", {"event": "start"})

        def on() -> None:
            if self._state == "open":
                self._scopes.on()
            self._write_mark(self._thread(), "compile", {"event": "end"})

        self._stack.callback(around_compilation(off, on))

    # ---- threads, failures -----------------------------------------------------------------------------------

    def _thread(self) -> ThreadBuffers:
        ident = threading.get_ident()
        found = self._threads.get(ident)
        if found is None:
            found = self._threads[ident] = ThreadBuffers(min(len(self._threads), 255), self._row)
        return found

    def _guarded(self, where: str, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:
            self._failed(where, error)

    def _failed(self, where: str, error: BaseException) -> None:
        """Note a failure of the tracer; it is logged once a place."""
        key = (where, repr(error)[:500])
        count = self._failures.get(key, 0)
        if count or len(self._failures) < _MAX_FAILURES:
            self._failures[key] = count + 1
        if not count:
            log.warning(
                "opdrift could not record everything at %s: %r. The run is not affected; please report this.",
                where,
                error,
            )

    # ---- writing ---------------------------------------------------------------------------------------------

    def _write_name(self, kind: str, ident: int, text: str) -> None:
        self._names.append((kind, ident, text))

    def _write_mark(self, t: ThreadBuffers, kind: str, fields: Mapping[str, Any]) -> None:
        self._marks.append((t.seq, now(), kind, t.call, t.index, json.dumps(fields)))

    def _flush(self, t: ThreadBuffers, *, reset: bool = True) -> None:
        """Write a thread's rows; only the owning thread may reset its buffers."""
        mode = self._mode
        mode.due = now() + _FLUSH_NS
        if not mode.recording:
            t.discard()
            return
        if os.getpid() != self._pid:
            mode.recording = False
            return
        with self._lock, silent():
            try:
                self._ops_written += t.op_count - t.done[0]  # also if they are lost: the reader counts
                # rows are counted before the names are taken, so that a row's names are on disk with it
                counts = t.counts()
                self._drain("names", self._names)
                t.write(self._writer, counts, reset=reset)
                self._drain("leaves", self._leaves)
                self._drain("marks", self._marks)
                self._writer.check()
            except OSError as error:
                self._disk_failed(error)
            except Exception as error:
                self._failed("writing", error)
                if reset:
                    t.discard()
            self._values.prune()

    def _drain(self, table: str, rows: deque[Any]) -> None:
        taken = [rows.popleft() for _ in range(len(rows))]
        if taken:
            self._writer.append(table, list(zip(*taken, strict=True)))

    def _disk_failed(self, error: Exception) -> None:
        self._mode.recording = False
        log.warning(
            "opdrift stopped recording %s: %s. The run goes on; the trace holds what was written before and reads as incomplete.",
            self.path,
            getattr(error, "strerror", None) or error,
        )

    def _watch(self) -> None:
        """Flush what an idle program left; busy threads flush themselves."""
        while not self._stop.wait(1.0):
            if now() <= self._mode.due:
                continue
            for t in list(self._threads.values()):
                if t.pending:
                    self._flush(t, reset=False)

    def _header(self, rank: int | None, world_size: int | None) -> dict[str, Any]:
        seeds = environment.seeds()
        return {
            "schema": TRACE_SCHEMA,
            "fingerprint": "tfp1",
            "label": self._options.label,
            "created": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "torch": torch.__version__,
            "device": environment.device(),
            "rank": rank,
            "world_size": world_size,
            "program": [os.path.basename(a) if i == 0 else a for i, a in enumerate(sys.orig_argv)],
            "flags": {
                **self._flags.snapshot(),
                **{f"seed.{name}": value for name, value in seeds.items()},
            },
            "variables": environment.variables(),
            "versions": environment.versions(),
            "options": self._options.described(),
            "engine": self._engine.name,
            "start_unix_ns": time.time_ns(),
            "start_ns": now(),
        }


def _rank() -> tuple[int | None, int | None]:
    """Rank and world size of a distributed run that is set up, or that a launcher has announced."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        world_size = distributed.get_world_size()
        return (distributed.get_rank(), world_size) if world_size > 1 else (None, None)
    try:
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return None, None
    return (rank, world_size) if world_size > 1 else (None, None)
