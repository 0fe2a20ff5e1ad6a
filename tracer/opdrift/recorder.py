"""Record a run: the life cycle around the dispatch mode, and what integrations may use."""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
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
from opdrift.mode import RecordingMode, parts
from opdrift.neutral import around_compilation, dispatch_keys, silent
from opdrift.plugins import Integration, OwnsParameters, installed_integrations
from opdrift.records import TRACE_SCHEMA, Batch
from opdrift.scopes import Scopes, clean, name_arguments, walk
from opdrift.sources import Sources
from opdrift.tracefile.writer import TraceWriter, claim
from opdrift.values import Values

log = logging.getLogger("opdrift")

#: A busy thread flushes after this time; an idle program is flushed by the watchdog.
_FLUSH_NS: Final = 900_000_000
_MAX_FAILURES: Final = 100
_KERNELS: Final = ("auto", "full", "off")
_INTEGRITY: Final = ("auto", "full", "off")

Mapped = Mapping[str, Module]


@dataclass(frozen=True, slots=True)
class Digest:
    """A content as tfp1 sees it."""

    raw: int
    n: int
    code: int


def record(
    path: str | os.PathLike[str],
    *,
    model: Module | Mapped | None = None,
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
        kernels: How much to find out about kernels: "auto" what is free, "full" more at a cost, "off".
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
        Path(path),
        models=_models(model),
        inputs=_inputs(inputs),
        batch=_checked_batch(batch),
        integrations=_integrations(integrations),
        kernels=_choice("kernels", kernels, _KERNELS),
        integrity=_choice("integrity", integrity, _INTEGRITY),
        label=str(label),
        overwrite=bool(overwrite),
    )


class Recorder:
    """A recording; made by `record`, used once as a context manager."""

    def __init__(
        self,
        path: Path,
        *,
        models: Mapped,
        inputs: Mapping[str, torch.Tensor],
        batch: Batch | None,
        integrations: tuple[str, ...] | None,
        kernels: str,
        integrity: str,
        label: str,
        overwrite: bool,
    ) -> None:
        self.path = path
        self._models = models
        self._inputs = inputs
        self._batch = batch
        self._integrations = integrations
        self._kernels = kernels
        self._integrity = integrity
        self._label = label
        self._overwrite = overwrite
        self._state: Literal["new", "open", "closed"] = "new"
        self._stack = ExitStack()
        self._failures: dict[tuple[str, str], int] = {}
        self._names: deque[tuple[str, int, str]] = deque()
        self._leaves: deque[tuple[str, str, str, int, int, int]] = deque()
        self._marks: deque[tuple[int, int, str, int, int, str]] = deque()
        self._threads: dict[int, ThreadBuffers] = {}
        self._lock = threading.Lock()
        self._pid = 0
        self._finals: list[tuple[str, str, torch.nn.Module]] = []
        self._owners: list[OwnsParameters] = []

    # ---- life cycle ------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if self._state != "new":
            raise RecorderStateError(f"This recorder of {self.path} was used before. A recorder records once: call opdrift.record() again.")
        rank, world_size = _rank()
        folder = claim(self.path, rank=rank, overwrite=self._overwrite)
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
            integrity=self._integrity,
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
        try:
            self._open()
        except BaseException:
            self._stack.close()
            self._writer.abandon()
            self._state = "closed"
            raise
        return self

    def _open(self) -> None:
        wanted = {"torch._dynamo.callback": self._dynamo_loaded}
        if self._integrations is None:
            points = installed_integrations()
            for point in points.values():
                integration = self._load_integration(point)
                if integration is not None:
                    wanted[integration.library] = lambda i=integration: self._attach(i)
        else:
            points = installed_integrations()
            for name in self._integrations:
                integration = self._load_integration(points[name])
                if integration is not None:
                    self._attach(integration)
        self._look_for_imports = self._stack.enter_context(watch_imports(wanted))
        with silent():  # after the integrations: some own parameters
            for prefix, model in self._models.items():
                self._scopes.add(model, prefix)
                self._guarded("model", lambda m=model, p=prefix: self._name_model(m, p))
            for name, tensor in self._inputs.items():
                self._guarded("inputs", lambda n=name, x=tensor: self._name(x, n, "input", "entry"))
        self._scopes.on()
        self._stack.callback(self._scopes.off)
        self._stop = threading.Event()
        self._watchdog = threading.Thread(target=self._watch, name="opdrift watchdog", daemon=True)
        self._watchdog.start()
        self._values.opened = now()
        self._mode.due = now() + _FLUSH_NS
        self._flush(self._thread())
        self._mode.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._state != "open":
            return
        self._mode.__exit__(kind, error, trace)
        self._guarded("closing", self._stack.close)  # integrations may still write marks as they leave
        self._state = "closed"
        self._stop.set()
        if os.getpid() != self._pid:  # a child that was forked inside the `with`: the files are the parent's
            return
        self._watchdog.join()
        with silent():
            self._guarded("closing", self._name_what_is_left)
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
            "failures": [{"where": where, "error": what, "count": count} for (where, what), count in self._failures.items()],
            "notes": [f"{count} contents were not fingerprinted: {reason}" for reason, count in self._values.skipped.items()],
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
            raise InvalidOptionError(f"mark({kind!r}) has a field that is no JSON value: {error}. Use numbers, text, lists and dicts.") from None
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
            self._guarded("name_tensor", lambda: self._name(tensor, name, kind, "gather"))

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
            raise RecorderStateError(f"{what}() was called on a recorder that is not open. Call it inside `with opdrift.record(...) as recorder:`.")

    # ---- names of leaves ---------------------------------------------------------------------------------

    def _name(self, tensor: torch.Tensor, name: str, kind: str, when: str) -> None:
        t = self._thread()
        for part_name, part in _plain_parts(name, tensor):
            self._values.name(t, part, part_name, kind, when)

    def _name_model(self, model: Module, prefix: str) -> None:
        non_persistent = []
        for path, module in model.named_modules():
            non_persistent += [clean(".".join(p for p in (prefix, path, name) if p)) for name in module._non_persistent_buffers_set]
        counts = [0, 0]
        for index, (kind, tensors) in enumerate((("parameter", model.named_parameters), ("buffer", model.named_buffers))):
            for path, tensor in tensors(remove_duplicate=False):
                if any(integration.owns(tensor) for integration in self._owners):
                    continue
                self._name(tensor, clean(f"{prefix}.{path}" if prefix else path), kind, "entry")
                counts[index] += 1
        fields = {
            "name": prefix,
            "type": type(model).__name__,
            "training": model.training,
            "parameters": counts[0],
            "buffers": counts[1],
            "non_persistent": sorted(non_persistent),
        }
        self._write_mark(self._thread(), "model", fields)
        self._finals.append((prefix, type(model).__name__, model))

    def _root_called(self, t: ThreadBuffers, module: Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """A module was called from outside every module."""
        self._look_for_imports()
        changed = self._flags.changed()
        if changed:
            self._write_mark(t, "flags", {name: list(pair) for name, pair in changed.items()})
        known = any(model is module or any(m is module for m in model.modules()) for _, _, model in self._finals)
        with silent():
            if not known:
                self._name_model(module, self._scopes.path_of(module) or "")
            for name, tensor in name_arguments(module, args, kwargs):
                for part_name, part in _plain_parts(name, tensor):
                    found = self._values.value_of(part)
                    if found is None or (found[0].leaf is not None and not any(n for n, _ in found[0].leaf.names)):
                        self._values.name(t, part, part_name, "input", "use")

    def _root_returned(self, t: ThreadBuffers, module: Module, call: int, output: Any) -> None:
        t.call, outside = call, t.call
        try:
            with silent():
                for name, tensor in walk("output", output):
                    self._name(tensor, name, "output", "return")
        finally:
            t.call = outside

    def _name_what_is_left(self) -> None:
        """Results that no module returned: gradients, changed parameters and buffers, what still lives."""
        changed = self._flags.changed()
        t = self._thread()
        t.call, t.path = 0, ""
        if changed:
            self._write_mark(t, "flags", {name: list(pair) for name, pair in changed.items()})
        for prefix, _, model in self._finals:
            for kind, tensors in (("parameter", model.named_parameters), ("buffer", model.named_buffers)):
                for path, tensor in tensors():
                    name = clean(f"{prefix}.{path}" if prefix else path)
                    self._name_final(t, tensor, name, kind)
                    if tensor.grad is not None:
                        self._name(tensor.grad, name, "gradient", "exit")
        for value in self._values.alive():
            self._leaves.append(("", "alive", "exit", value, t.seq, 0))

    def _name_final(self, t: ThreadBuffers, tensor: torch.Tensor, name: str, kind: str) -> None:
        for part_name, part in _plain_parts(name, tensor):
            found = self._values.value_of(part)
            if found is not None and found[0].writes:
                self._values.name(t, part, part_name, kind, "exit")

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
                self._owners.append(integration)
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

    def _guarded(self, where: str, action: Any) -> None:
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
            log.warning("opdrift could not record everything at %s: %r. The run is not affected; please report this.", where, error)

    # ---- writing ---------------------------------------------------------------------------------------------

    _ops_written = 0

    def _write_name(self, kind: str, ident: int, text: str) -> None:
        self._names.append((kind, ident, text))

    def _write_mark(self, t: ThreadBuffers, kind: str, fields: Mapping[str, Any]) -> None:
        self._marks.append((t.seq, now(), kind, t.call, t.index, json.dumps(fields)))

    def _flush(self, t: ThreadBuffers, *, reset: bool = True) -> None:
        """Write a thread's rows; only the owning thread may reset its buffers."""
        mode = self._mode
        mode.due = now() + _FLUSH_NS
        if not mode.recording:
            t.op_count = t.value_count = t.fingerprint_count = t.id_count = t.call_count = 0
            return
        if os.getpid() != self._pid:
            mode.recording = False
            return
        with self._lock, silent():
            try:
                ops = t.op_count - t.done[0]
                # rows are counted before the names are taken, so that a row's names are on disk with it
                counts = t.counts()
                self._drain("names", self._names)
                t.write(self._writer, counts, reset=reset)
                self._drain("leaves", self._leaves)
                self._drain("marks", self._marks)
                self._writer.check()
                self._ops_written += ops
            except Exception as error:
                self._disk_failed(error)
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
            "label": self._label,
            "created": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "torch": torch.__version__,
            "device": environment.device(),
            "rank": rank,
            "world_size": world_size,
            "program": [os.path.basename(a) if i == 0 else a for i, a in enumerate(sys.orig_argv)],
            "flags": {**self._flags.snapshot(), **{f"seed.{name}": value for name, value in seeds.items()}},
            "variables": environment.variables(),
            "versions": environment.versions(),
            "options": {
                "kernels": self._kernels,
                "integrity": self._integrity,
                "batch": None if self._batch is None else {"size": self._batch.size, "lengths": self._batch.lengths, "pad_side": self._batch.pad_side},
            },
            "engine": self._engine.name,
            "start_unix_ns": time.time_ns(),
            "start_ns": now(),
        }


def _plain_parts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The plain tensors that hold a tensor's content: itself, a DTensor's local part, a sparse one's components."""
    local = getattr(tensor, "_local_tensor", None)
    if isinstance(local, torch.Tensor):
        tensor = local
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return  # another wrapper subclass: its inner tensors are seen by the ops that it runs
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return  # inside vmap or grad: likewise
    if tensor.layout is torch.strided and not tensor.is_nested:
        yield name, tensor
        return
    for position, part in enumerate(parts(tensor)):
        yield f"{name}.{position}", part


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


def _models(model: Module | Mapped | None) -> Mapped:
    if model is None:
        return {}
    if isinstance(model, Module):
        return {"": model}
    if isinstance(model, Mapping) and all(isinstance(m, Module) for m in model.values()):
        return {str(name): module for name, module in model.items()}
    raise InvalidOptionError(f"model={type(model).__name__} is no nn.Module and no mapping of names to nn.Modules.")


def _inputs(inputs: Mapping[str, torch.Tensor] | None) -> Mapping[str, torch.Tensor]:
    if inputs is None:
        return {}
    if isinstance(inputs, Mapping) and all(isinstance(x, torch.Tensor) for x in inputs.values()):
        return {str(name): tensor for name, tensor in inputs.items()}
    raise InvalidOptionError("inputs= is a mapping of names to tensors, such as {'input_ids': ids}.")


def _checked_batch(batch: Batch | None) -> Batch | None:
    if batch is not None and not isinstance(batch, Batch):
        raise InvalidOptionError(f"batch={batch!r} is no opdrift.Batch. Write batch=opdrift.Batch(size).")
    return batch


def _integrations(names: str | Sequence[str]) -> tuple[str, ...] | None:
    if names == "auto":
        return None
    known = installed_integrations()
    if isinstance(names, str):
        raise InvalidOptionError(f"integrations={names!r}: give 'auto', or a sequence of names from {', '.join(sorted(known))}.")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise InvalidOptionError(f"There is no integration {', '.join(map(repr, unknown))}; installed are {', '.join(sorted(known)) or 'none'}.")
    return tuple(names)


def _choice(name: str, value: str, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise InvalidOptionError(f"{name}={value!r}: choose one of {', '.join(map(repr, choices))}.")
    return value


