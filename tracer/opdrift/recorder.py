"""Record a run: the life cycle around the dispatch mode, and what integrations may use."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from time import perf_counter_ns as now
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch.nn import Module
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from opdrift import environment
from opdrift.attaching import Attaching
from opdrift.batch import Batch
from opdrift.batches.tracking import Batches
from opdrift.boundaries import GRAPHS, Boundaries, around_generated_code, why_none_is_seen
from opdrift.choices import switches
from opdrift.collectives import Collectives
from opdrift.compilations import Compilations
from opdrift.contentcalls import ContentCalls
from opdrift.digesting import Digesting
from opdrift.errors import RecorderStateError
from opdrift.fingerprint.devices import Devices
from opdrift.fingerprint.engine import load_engine
from opdrift.futures import following_callbacks
from opdrift.headers import header_of, rank_here
from opdrift.imports import watch_imports
from opdrift.interning import Interning
from opdrift.kernels.answers import Answers
from opdrift.kernels.full import watching
from opdrift.marks import Marks
from opdrift.mode import RecordingMode
from opdrift.naming import Naming
from opdrift.neutral import Unseen, around_compilation, dispatch_keys, silent
from opdrift.options import (
    Options,
    check_options,
    check_text,
)
from opdrift.plugins import (
    Integration,
    SeesCalls,
)
from opdrift.scopes import Scopes, name_arguments, walk
from opdrift.shortfalls import Shortfalls
from opdrift.sources import Sources, raised_at
from opdrift.spool import FLUSH_NS, Spool
from opdrift.tracefile.claiming import claim
from opdrift.tracefile.writer import TraceWriter
from opdrift.values import Values

if TYPE_CHECKING:
    from opdrift.buffers import ThreadBuffers


def record(
    path: str | os.PathLike[str],
    *,
    model: Module | Mapping[str, Module] | None = None,
    inputs: Mapping[str, torch.Tensor] | None = None,
    batch: Batch | None = None,
    integrations: Literal["auto"] | Sequence[str | Integration] = "auto",
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
        batch: The leading batch of this run: each sample of what carries it is recorded by itself, too, which
            reads contents twice.
        integrations: "auto" attaches those whose library the program has imported (also later, while it
            is recorded); or names, "auto" among them if you like, and integrations that you made; or `()` for
            none.
        kernels: How much to find out about kernels: "auto" what is free, "full" also what oneDNN and MKL say of
            each op on a CPU (implementation, sizes, threads) and the kernels that each op launches on a GPU,
            which makes ops slower, "off".
        integrity: How often leaves are read again at use to find writes that no op made: "auto" within
            1.5 % of the run's time, "full" at every use, and what ops made on the CPU as well, "off".
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


class Recorder(ContentCalls):
    """A recording; made by `record`, used once as a context manager."""

    def __init__(self, options: Options) -> None:
        self.path = options.path
        self._options = options
        self._state: Literal["new", "open", "closed"] = "new"
        self._stack = ExitStack()
        self._shortfalls = Shortfalls()
        self._failed, self._guarded = self._shortfalls.failed, self._shortfalls.guarded
        #: threads that called modules, and whose ops are not recorded
        self._unrecorded: set[int] = set()
        self._told_of_calls: list[SeesCalls] = []

    def __fspath__(self) -> str:
        """The trace's path: a recorder can be given where a path can, such as to `opdrift.diff`."""
        return os.fspath(self.path)

    # ---- life cycle ------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if self._state != "new":
            raise RecorderStateError(
                f"This recorder of {self.path} was used before. A recorder records once: call opdrift.record() again."
            )
        rank, world_size = rank_here()
        self._engine = load_engine()
        claimed = claim(self.path, rank=rank, overwrite=self._options.overwrite)
        with ExitStack() as undo:
            # if it cannot be opened nothing is recorded, and the path is as it was
            undo.callback(claimed.give_back)
            self._state = "closed"
            self._prepare(claimed.folder, rank, world_size)
            undo.callback(self._give_up)
            self._state = "open"
            self._open()
            undo.pop_all()
        self._guarded("replacing the old trace", claimed.keep)
        return self

    def _prepare(self, folder: Path, rank: int | None, world_size: int | None) -> None:
        self._flags = environment.Flags()
        self._variables = environment.variables()
        header = header_of(
            self._options,
            self._flags.snapshot(),
            self._variables,
            engine=self._engine.name,
            rank=rank,
            world_size=world_size,
        )
        self._writer = TraceWriter(folder, header)
        self._flags.changed()
        self._spool = spool = Spool(
            self._writer,
            self._engine.ROW,
            columns=self._engine.columns,
            failed=self._failed,
            stopped=self._stopped,
        )
        self._owner = spool.thread()
        self._devices = Devices(self._engine, say=self._fingerprinted_by, failed=self._failed)
        spool.arrived = self._devices.take
        self._values = Values(
            f"_opdrift_{id(self):x}_{now():x}",
            self._engine,
            write_name=spool.name,
            write_leaf=spool.leaf,
            flush=spool.flush,
            integrity=self._options.integrity,
            devices=self._devices,
            thread=spool.thread,
        )
        self._digesting = Digesting(self._engine, self._values, self._devices)
        spool.after_flush = self._values.prune
        self._batches = self._follow_batch()
        self._marks = Marks(
            spool, self._guarded, failed=self._failed, must_be_open=self._must_be_open
        )
        self._naming = Naming(self._values, write_mark=spool.mark, write_leaf=spool.leaf)
        self._sources = Sources(spool.name)
        self._sources.on_new_line = self._note_flags_here
        self._mode = RecordingMode(
            self._values,
            self._sources,
            thread=spool.thread,
            interning=Interning(self._values, spool.name),
            write_mark=spool.mark,
            flush=spool.flush,
            failed=self._failed,
            collectives=Collectives(
                spool.announce,
                self._sources,
                self._values,
                synchronised=self._options.synchronised,
            ),
            batches=self._batches,
        )
        self._mode.use_keys(dispatch_keys())
        if self._options.kernels != "off":
            self._mode.answers = Answers(spool.mark, self._failed)
        self._scopes = Scopes(
            self._here,
            self._sources,
            write_name=spool.name,
            flush=spool.flush,
            failed=self._failed,
            on_root=self._root_called,
            on_call=self._mode.steering.look_at_general_switches,
            on_root_done=self._root_returned,
        )
        self._compilations = Compilations(
            lambda kind, fields: spool.mark(spool.thread(), kind, fields), failed=self._failed
        )
        self._attaching = Attaching(
            self,
            self._stack,
            failed=self._failed,
            owners=self._naming.owners,
            calls=self._told_of_calls,
            modules=self._scopes.watchers,
            marks=self._marks.told,
        )
        self._boundaries = Boundaries(
            self._mode,
            self._values,
            self._sources,
            here=self._here,
            before=self._compilations.tell,
            failed=self._failed,
            batches=self._batches,
        )

    def _follow_batch(self) -> Batches | None:
        """What follows the batch; None where nobody asked, or where one sample without lengths is the batch."""
        batch = self._options.batch
        if batch is None or (batch.size == 1 and batch.lengths is None):
            return None
        spool = self._spool
        found = Batches(
            batch,
            self._values,
            write_extents=lambda axis, extents: spool.name(
                "extents", axis, json.dumps([extents.size, extents.valid])
            ),
            write_mark=lambda fields: spool.mark(spool.thread(), "batch", fields),
            failed=self._failed,
        )
        spool.others.append(found.write)
        return found

    @contextmanager
    def _seeding(self, named: Sequence[tuple[str, torch.Tensor]]) -> Iterator[None]:
        """Find the batch in inputs before they are fingerprinted, and record their samples after it."""
        if self._batches is None:
            yield
            return
        self._guarded("the batch", partial(self._batches.seed, named))
        yield
        self._guarded("the batch", partial(self._batches.record, [tensor for _, tensor in named]))

    def _give_up(self) -> None:
        """Leave nothing attached, after an error while opening."""
        self._state = "closed"
        self._stack.close()
        self._writer.abandon()

    def _open(self) -> None:
        self._look_for_imports = self._stack.enter_context(watch_imports(self._wanted_imports()))
        self._attaching.given(self._options.integrations)
        with silent():  # after the integrations: some own parameters
            self._guarded("names", self._name_given)
        self._stack.callback(self._scopes.off)
        self._scopes.on()
        self._stack.callback(self._spool.stop)
        self._spool.start()
        if self._options.kernels == "full":
            self._guarded("kernels", self._watch_kernels)
        self._values.rereading.opened = now()
        # what was named goes to disk with the first ops; a flush of its own takes two milliseconds
        self._owner.due = now() + FLUSH_NS
        if torch.distributed.is_available():
            self._stack.enter_context(following_callbacks(self._mode))
        self._mode.__enter__()  # type: ignore[no-untyped-call]

    def _watch_kernels(self) -> None:
        watches = watching(
            partial(self._spool.mark, self._owner, "kernels"),
            stopped=self._shortfalls.kernels_unwatched,
            failed=self._failed,
        )
        self._mode.watches = self._stack.enter_context(watches)

    def _wanted_imports(self) -> dict[str, Callable[[], None]]:
        """What to do once a library is loaded: attach its integration; keep out of dynamo's way."""
        wanted: dict[str, Callable[[], None]] = {
            "torch._dynamo.callback": lambda: self._guarded("torch._dynamo", self._dynamo_loaded),
            GRAPHS: lambda: self._guarded("torch._inductor", self._inductor_loaded),
        }
        if self._options.automatic:
            wanted.update(self._attaching.wanted())
        return wanted

    def _name_given(self) -> None:
        t = self._spool.thread()
        for prefix, model in self._options.models.items():
            self._scopes.add(model, prefix)
            self._naming.model(t, model, prefix)
        inputs = self._options.inputs
        with self._seeding(list(inputs.items())):
            for name, tensor in inputs.items():
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
        if not self._spool.is_ours():
            return  # a child that was forked inside the `with`
        with silent():
            self._guarded("closing", self._name_rest)
        self._spool.arrived = self._devices.finish
        self._spool.finish()
        self._devices.release()
        self._spool.close(self._footer(error))

    def _footer(self, error: BaseException | None) -> dict[str, Any]:
        self._shortfalls.lost_contents(self._values.skipped)
        return {
            "ops": self._spool.ops_written,
            "ended": "ok" if error is None else "raised",
            "exception": None if error is None else f"{type(error).__name__}: {error}"[:2000],
            "raised_at": None if error is None else raised_at(error),
            "failures": self._shortfalls.failures,
            "notes": self._notes(),
        }

    def _fingerprinted_by(self, device: str, by: str, why: Sequence[str]) -> None:
        """What fingerprints a device's tensors was found out, or has changed."""
        fields = {"device": device, "by": by, "why": list(why)}
        self._spool.mark(self._spool.thread(), "fingerprints", fields)
        if why:
            self._shortfalls.slow_device(device, by, why)

    def _stopped(self) -> None:
        self._mode.recording = False

    def _notes(self) -> list[str]:
        notes = self._shortfalls.notes
        notes += filter(None, [why_none_is_seen()])
        if self._batches is not None:
            notes += self._batches.notes()
        if self._unrecorded:
            notes.append(
                f"{len(self._unrecorded)} other threads called modules: their ops are not in this trace,"
                " since a recording belongs to the thread that began it"
            )
        return notes

    # ---- what users and integrations call ----------------------------------------------------------------

    def mark(self, kind: str, /, **fields: Any) -> None:
        """Write a mark: something that is no op. Fields are JSON types; inf and nan become text.

        Raises:
            RecorderStateError: The recorder is not open.
            InvalidOptionError: `kind` is no text, or a field no JSON type.
        """
        self._must_be_open("mark")
        self._marks.mark(kind, fields)

    def form(
        self,
        kind: str,
        shared: Mapping[str, Any],
        rest: Callable[[], Mapping[str, Any]] | None = None,
    ) -> Callable[..., None]:
        """What writes marks that share fields, and is called with the others; shared ones become JSON only once.

        Args:
            kind: Of the marks.
            shared: Fields of all of them. Nothing may change the mapping from now on; forms that are given the same one
                share its JSON.
            rest: Makes further ones that all share, once the first of the marks goes to disk. It must not look at what may
                have changed by then; what it raises is noted as a failure of the tracer.

        Raises:
            RecorderStateError: The recorder is not open.
            InvalidOptionError: As `mark`; or, when what is returned is called, a field is given again.
        """
        self._must_be_open("form")
        return self._marks.form(kind, shared, rest)

    def scope(self, name: str) -> AbstractContextManager[None]:
        """Ops inside run in the scope `name`, below the present one.

        Raises:
            RecorderStateError: The recorder is not open.
            InvalidOptionError: `name` is no text, or empty.
        """
        self._must_be_open("scope")
        check_text("scope", "name", name)
        return self._scopes.scope(name)

    def pause(self) -> AbstractContextManager[None]:
        """Ops inside, on this thread, are not recorded.

        What they write into parameters, buffers and inputs is seen later as a hidden write.

        Raises:
            RecorderStateError: The recorder is not open.
        """
        self._must_be_open("pause")
        return self._paused(self._spool.thread())

    @contextmanager
    def _paused(self, t: ThreadBuffers) -> Iterator[None]:
        t.paused += 1
        try:
            yield
        finally:
            t.paused -= 1

    def quiet(self) -> AbstractContextManager[None]:
        """Ops inside are an integration's own: no mode or subclass sees them, and they have no graph.

        Unlike those inside `pause`, they do not come by this recorder or by a mode of the program, which takes
        several times as long as a small op does.

        Raises:
            RecorderStateError: The recorder is not open.
        """
        self._must_be_open("quiet")
        return Unseen()

    def clean_path(self, module: Module) -> str | None:
        """The scope path of a module, wrapper segments stripped; None if the module is unknown.

        Raises:
            RecorderStateError: The recorder is not open.
        """
        self._must_be_open("clean_path")
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
        self._compilations.tell()
        self._note_changed_flags(t)
        with silent():
            if not self._naming.knows(module):
                self._naming.model(t, module, self._scopes.path_of(module) or "")
            with self._seeding(list(name_arguments(module, args, kwargs))):
                self._naming.arguments(t, module, args, kwargs)
            for each in self._told_of_calls:
                self._guarded("a call", partial(each.called, module, args, kwargs))

    def _root_returned(self, t: ThreadBuffers, module: Module, call: int, output: Any) -> None:
        with silent():
            self._naming.results(t, call, output)
            if self._batches is not None:  # views are fingerprinted when they are named
                self._batches.returned(walk("output", output))

    def _note_flags_here(self) -> None:
        """At a line that is new: a `with` block may have changed flags before it."""
        t = self._here()
        if t is not None and self._state == "open":
            self._note_changed_flags(t, in_op=True)

    def _note_changed_flags(self, t: ThreadBuffers, *, in_op: bool = False) -> None:
        changed = self._flags.changed(in_op=in_op)
        if changed:
            self._spool.mark(t, "flags", {name: list(pair) for name, pair in changed.items()})
            t.switches = switches()

    def _note_seldom_changes(self, t: ThreadBuffers) -> None:
        """Flags that nobody looked at during the run, and variables, that changed at some time in it."""
        for kind, changed in (
            ("flags", self._flags.changed_since_snapshot()),
            ("variables", environment.changed_variables(self._variables)),
        ):
            if changed:
                fields = {name: list(pair) for name, pair in changed.items()}
                self._spool.mark(t, kind, fields)

    def _name_rest(self) -> None:
        t = self._spool.thread()
        t.call, t.path = 0, ""
        self._compilations.tell()
        self._note_changed_flags(t)
        self._note_seldom_changes(t)
        self._naming.rest(t)

    # ---- what is imported meanwhile ------------------------------------------------------------------------

    def _dynamo_loaded(self) -> None:
        def off(ident: str) -> None:
            self._scopes.off()
            self._compilations.began(ident)

        def on(ident: str) -> None:
            if self._state == "open":
                self._scopes.on()
            self._compilations.ended(ident)

        self._stack.callback(around_compilation(off, on))

    def _inductor_loaded(self) -> None:
        self._stack.callback(around_generated_code(self._boundaries.begin))

    # ---- threads, failures -----------------------------------------------------------------------------------

    def _here(self) -> ThreadBuffers | None:
        """The buffers of the current thread; None for one whose ops are not recorded.

        A dispatch mode belongs to a thread, and goes with autograd's work to those of its devices. Hooks
        are process-wide: what other threads call is theirs, or another recorder's.
        """
        ident = threading.get_ident()
        if ident == self._owner.ident:
            return self._owner
        if self._mode in _get_current_dispatch_mode_stack():
            return self._spool.thread()
        self._unrecorded.add(ident)
        return None
