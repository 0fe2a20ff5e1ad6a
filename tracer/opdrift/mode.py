"""The dispatch mode: sees every op, packs one row, and changes nothing.

One op costs: read the inputs' values, intern the signature, find the source line, run the op, bump
write counts, register and fingerprint the outputs, pack a row (notes: recorder, sections 2 and 3).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from struct import pack_into
from sys import _getframe
from threading import get_ident
from time import perf_counter_ns as now
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from opdrift.buffers import IDS, MANY_IDS, OP, OP_BYTES, OPS, PACK_IDS
from opdrift.choices import ADDS, ATTENTION, STEERED, added_requires_grad
from opdrift.collectives import Collectives
from opdrift.interning import Interning, add_literal, parts
from opdrift.memory import Use
from opdrift.neutral import (
    DispatchKeys,
    hide_from_dynamo,
    numbers_as_tensors,
    run,
)
from opdrift.outcomes import Outcomes
from opdrift.placements import Placements
from opdrift.plans import Plan, encode
from opdrift.randomness import Seeds, digest_before
from opdrift.records import (
    COMPILED,
    GRAD_ENABLED,
    RAISED,
    REREAD,
    TRACER_FAILED,
)
from opdrift.steering import Steering
from opdrift.values import PLAIN, Values

if TYPE_CHECKING:
    from types import FrameType

    from opdrift.batches.tracking import Batches
    from opdrift.buffers import ThreadBuffers
    from opdrift.kernels import Watch
    from opdrift.kernels.answers import Answers
    from opdrift.sources import Sources

#: Tensors that torch itself uses to trace: the call must go through, and has no content.
_TRACING: Final = frozenset({"FakeTensor", "FunctionalTensor"})
_NO_ARGUMENTS: Final[dict[str, Any]] = {}

current_node: Final[Callable[[], Any]] = torch._C._current_autograd_node
sequence_number: Final = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
is_grad_enabled: Final = torch.is_grad_enabled


class RecordingMode(TorchDispatchMode):
    """Records the ops of the threads that run under it.

    Args:
        values: Identity and content of tensors.
        sources: Source lines.
        thread: The buffers of the current thread.
        interning: Known ops and signatures.
        write_mark: Writes a mark: (thread buffers, kind, fields).
        flush: Empties a full buffer.
        failed: Notes a failure of the tracer itself.
        collectives: Writes down collectives before they are issued.
        batches: Follows the batch, if the run was recorded with `batch=`.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Without this, torch.compile falls back to eager for the rest of the process (H5)."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: else every op goes through two wrapper frames and imports torch._dynamo."""
        return False

    def __init__(
        self,
        values: Values,
        sources: Sources,
        *,
        thread: Callable[[], ThreadBuffers],
        interning: Interning,
        write_mark: Callable[[ThreadBuffers, str, Mapping[str, Any]], None],
        flush: Callable[[ThreadBuffers], None],
        failed: Callable[[str, BaseException], None],
        collectives: Collectives,
        batches: Batches | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._values = values
        self._key = values.key
        self._sources = sources
        self._codes = sources.codes
        self._thread = thread
        self._me = thread()
        self._write_mark = write_mark
        self._flush = flush
        self._failed = failed
        self._collectives = collectives
        self._batches = batches
        self.interning = interning
        self._plans = interning.plans
        self._plain: frozenset[type] = PLAIN
        self._signatures = interning.signatures
        self._complex = interning.complex
        self._outcomes = Outcomes(values, collectives, write_mark)
        self._placements = Placements(values, write_mark)
        self._seq = itertools.count(1)
        self._seeds = Seeds()
        self.steering = Steering(sources, write_mark)
        self._keys: DispatchKeys | None = None
        #: whether anything is still written; False after a fork or when the disk failed
        self.recording = True
        #: what looks on while an op runs
        self.watches: tuple[Watch, ...] = ()
        #: what torch says of the backends of an attention that has run
        self.answers: Answers | None = None

    def use_keys(self, keys: DispatchKeys | None) -> None:
        """The program's own dispatch keys, for ops that need them."""
        self._keys = keys

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run one op, and record it."""
        plan = self._plans.get(id(func))
        if plan is None:
            try:
                plan = self.interning.add_plan(func)
            except Exception as error:
                self._failed(str(func), error)
                return func(*args, **(kwargs or _NO_ARGUMENTS))
        if types and not self._plain.issuperset(types) and not self._all_plain(types):
            return self._subclass(plan, types, args, kwargs or _NO_ARGUMENTS)
        t = self._me
        if get_ident() != t.ident:
            t = self._thread()
        if t.paused or not self.recording:
            return run(plan, args, kwargs or _NO_ARGUMENTS, self._keys)
        flags = 0
        state: Any
        entry: Any
        try:
            values, attribute = self._values, self._key
            frame = _getframe(1)
            code = self._codes.get(id(frame.f_code))
            source = code and code.lines and code.lines.get(frame.f_lasti)
            if not source:
                source = self._sources.find(frame, t.source)
                if self._sources.passed_compiled:
                    flags = COMPILED
            key: list[Any] = [plan.id]
            #: value ids: of the inputs, then of the outputs
            ids: list[int] = []
            for a in args:
                kind = type(a)
                if kind is Tensor or kind is Parameter:
                    try:
                        storage = a.untyped_storage()
                        state = getattr(storage, attribute, None)
                        entry = state and state.values.get(
                            (a.shape, a.stride(), a.storage_offset(), a.dtype)
                        )
                    except (RuntimeError, NotImplementedError):  # sparse, mkldnn, nested
                        use = Use(plan, args, kwargs or _NO_ARGUMENTS)
                        flags = self._other(t, a, None, key, ids, use, flags)
                        continue
                    if entry is None:
                        use = Use(plan, args, kwargs or _NO_ARGUMENTS)
                        if a.is_nested:  # a strided one has a storage, but no sizes
                            flags = self._other(t, a, None, key, ids, use, flags)
                            continue
                        entry = values.adopt(t, a, use, compiled=flags & COMPILED)
                        state = getattr(storage, attribute)
                    elif state.at and (
                        storage.data_ptr() != state.at
                        or (state.version is not None and a._version != state.version)
                        or (
                            t.clock > values.rereading.gate
                            and not values.rereading.passes_over(state.leaf)
                        )
                    ):
                        use = Use(plan, args, kwargs or _NO_ARGUMENTS)
                        known = entry
                        entry = values.rereading.look(
                            t, a, state, entry, use, compiled=flags & COMPILED
                        )
                        if entry is not known:
                            flags |= REREAD
                    if state.special is not None:
                        use = Use(plan, args, kwargs or _NO_ARGUMENTS)
                        entry, flags = values.unsettled.look(t, a, state, entry, use, flags)
                    if kind is Parameter and (state.leaf is None or state.leaf.made):
                        values.meet_parameter(t, a, state, entry)
                    ids.append(entry[0])
                    key.append(entry[1])
                elif kind is int or a is None:
                    key.append(a)
                elif not add_literal(key, a, kind):
                    use = Use(plan, args, kwargs or _NO_ARGUMENTS)
                    flags = self._other(t, a, kind, key, ids, use, flags)
            if kwargs:
                for name, a in kwargs.items():
                    key.append(name)
                    kind = type(a)
                    if not add_literal(key, a, kind):
                        flags = self._other(t, a, kind, key, ids, Use(plan, args, kwargs), flags)
            signature_key = tuple(key)
            signature = self._signatures.get(signature_key)
            if signature is None:
                signature = self.interning.add_signature(
                    plan, signature_key, args, kwargs or _NO_ARGUMENTS
                )
            if plan.asks == ADDS:
                flags |= added_requires_grad(args)
            elif plan.asks == STEERED:
                self.steering.look_at_switches(t)
            elif plan.asks:
                flags |= self.steering.ask(t, plan, args, kwargs or _NO_ARGUMENTS, frame)
            node = current_node()
            grad = is_grad_enabled()
            if grad:
                flags |= GRAD_ENABLED
            if node is None:
                # forward: what the autograd node will be called
                phase, number = 0, sequence_number()
            elif grad and t.call:
                # a module called in the backward pass, as checkpointing does: it makes nodes of its own
                phase, number = 1, sequence_number()
            else:
                phase, number = 1, node._sequence_nr() & 0x7FFFFFFFFFFFFFFF
            seq = t.seq = next(self._seq)
            rng = self._random_state(t, args, kwargs or _NO_ARGUMENTS) if plan.seeded else 0
        except Exception as error:
            self._failed(plan.name, error)
            return self._unrecorded(t, Use(plan, args, kwargs or _NO_ARGUMENTS))

        repaired = None
        started = now()
        try:
            if self.watches:
                out = self._watched(seq, plan, args, kwargs or _NO_ARGUMENTS, frame)
            elif plan.repair or signature in self._complex:
                out = self._run(plan, args, kwargs or _NO_ARGUMENTS, frame)
            elif kwargs:
                out = plan.call(*args, **kwargs)
            else:
                out = plan.call(*args)
        except BaseException as error:
            repaired = numbers_as_tensors(plan, args, error)
            if repaired is None:
                row = (seq, started, now() - started, number, rng, signature, source, phase)
                self._cut_short(t, plan, ids, len(ids), 0, *row, flags | RAISED)
                raise
        if repaired is not None:  # outside the handler, so that an error of the op has no context
            out = self._watched(seq, plan, repaired, kwargs or _NO_ARGUMENTS, frame)
        ended = now()

        ins = len(ids)
        mutated = 0
        try:
            if plan.collective:
                use = Use(plan, args, kwargs or _NO_ARGUMENTS)
                flags |= self._outcomes.collective(t, use, out, ids)
                mutated = len(ids) - ins
            elif plan.writes:
                use = Use(plan, args, kwargs or _NO_ARGUMENTS)
                flags |= self._outcomes.written(t, use, ids)
                mutated = len(ids) - ins
            kind = type(out)
            if kind is Tensor:
                if plan.settled:
                    try:
                        values.output(t, out, ids, plan)
                    except (RuntimeError, NotImplementedError):
                        self._outcomes.in_parts(t, out, ids, plan)
                elif plan.copies:
                    use = Use(plan, args, kwargs or _NO_ARGUMENTS)
                    flags |= self._outcomes.copied(t, use, out, ids)
            elif kind is tuple or kind is list:
                self._outcomes.returned(t, plan, out, ids)
            elif plan.scalar or kind is float or kind is int or kind is bool:
                self._write_mark(t, "scalar", {"value": encode(out)})
            elif kind is not type(None):
                self._outcomes.returned(t, plan, (out,), ids)
            took = ended - started
            # fmt: off
            self.commit(
                t, ids, ins, mutated, seq, started, took, number, rng, signature, source, phase, flags
            )
            # fmt: on
            t.clock = ended
            if ended > t.due:
                self._flush(t)
        except Exception as error:
            self._failed(plan.name, error)
            row = (seq, started, ended - started, number, rng, signature, source, phase)
            self._cut_short(t, plan, ids, ins, mutated, *row, flags | TRACER_FAILED)
        if plan.asks == ATTENTION and self.answers is not None:
            use, state = Use(plan, args, kwargs or _NO_ARGUMENTS), t.switches
            self.answers.after(t, seq, use, signature=signature, flags=flags, switches=state)
        if self._batches is not None:
            self._follow(self._batches, t, plan, signature, args, kwargs or _NO_ARGUMENTS, out)
        return out

    def _run(
        self, plan: Plan, args: tuple[Any, ...], kwargs: Mapping[str, Any], frame: FrameType
    ) -> Any:
        """Run an op that needs a repair; a collective is on disk before it is issued."""
        if not plan.joins:
            return run(plan, args, kwargs, self._keys)
        try:
            self._collectives.issue(self._thread(), plan, args, kwargs, frame)
        except Exception as error:
            self._failed(f"announcing {plan.name}", error)
        out = run(plan, args, kwargs, self._keys)
        self._collectives.after(plan, out)
        return out

    def _watched(
        self,
        seq: int,
        plan: Plan,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        frame: FrameType,
    ) -> Any:
        """Run an op while others look on."""
        try:
            for watch in self.watches:
                watch.begin(seq, plan.name)
            return self._run(plan, args, kwargs, frame)
        finally:
            for watch in reversed(self.watches):
                watch.end(seq)

    def _random_state(
        self, t: ThreadBuffers, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> int:
        seeded = self._seeds.changed(args, kwargs)
        if seeded is not None:
            self._write_mark(t, "seed", seeded)
        return digest_before(args, kwargs)

    def _follow(
        self,
        batches: Batches,
        t: ThreadBuffers,
        plan: Plan,
        signature: int,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        out: Any,
    ) -> None:
        """Follow the batch through an op that is recorded."""
        try:
            batches.follow(plan, signature, args, kwargs, out)
            if batches.is_full:
                self._flush(t)
        except Exception as error:
            self._failed(f"the batch of {plan.name}", error)

    # ---- rows ----------------------------------------------------------------------------------------

    def commit(
        self,
        t: ThreadBuffers,
        ids: list[int],
        ins: int,
        mutated: int,
        seq: int,
        started: int,
        took: int,
        number: int,
        rng: int,
        signature: int,
        source: int,
        phase: int,
        flags: int,
    ) -> None:
        """Append an op's row and its value ids, `ins` of inputs first."""
        count, row, at = len(ids), t.op_count, t.id_count
        if row == OPS or at + count > IDS:
            self._flush(t)
            row = at = 0
            if count > IDS:
                t.ids = bytearray(8 * count)  # an op over more tensors than a buffer holds
        if count < MANY_IDS:
            PACK_IDS[count](t.ids, at * 8, *ids)
        else:
            pack_into(f"<{count}q", t.ids, at * 8, *ids)
        t.id_count = at + count
        # in the order of `buffers.OP_FIELDS`
        OP.pack_into(
            t.ops,
            row * OP_BYTES,
            seq,
            started,
            took,
            number,
            rng,
            signature,
            t.call,
            source,
            t.index,
            phase,
            flags,
            mutated,
            ins,
            count - ins,
        )
        t.op_count = row + 1

    def _cut_short(
        self, t: ThreadBuffers, plan: Plan, ids: list[int], ins: int, mutated: int, *row: int
    ) -> None:
        """Append the row of an op that raised, or at which the tracer failed; arguments as `commit`'s."""
        try:
            self.commit(t, ids, ins, mutated, *row)
        except Exception as error:
            self._failed(plan.name, error)

    def _unrecorded(self, t: ThreadBuffers, use: Use) -> Any:
        """Run an op at which the tracer failed; what it writes is known to be other than it was."""
        out = run(*use, self._keys)
        if use.plan.writes:
            try:
                self._outcomes.written(t, use, [])
            except Exception as error:
                self._failed(use.plan.name, error)
        return out

    # ---- calls that the dispatcher does not see --------------------------------------------------------

    def read(self, t: ThreadBuffers, use: Use) -> tuple[list[int], int, int]:
        """Take the tensors that a compiled region is given as those of an op: value ids, signature, flags."""
        key: list[Any] = [use.plan.id]
        ids: list[int] = []
        flags = 0
        for a in use.args:
            flags = self._tensor(t, a, key, ids, use, flags)
        signature = self._signatures.get(tuple(key))
        if signature is None:
            signature = self.interning.add_signature(
                use.plan, tuple(key), tuple(use.args), _NO_ARGUMENTS
            )
        return ids, signature, flags

    def next_seq(self, t: ThreadBuffers) -> int:
        """The number of the next op, which a thread is at from now on."""
        t.seq = next(self._seq)
        return t.seq

    # ---- arguments -----------------------------------------------------------------------------------

    def _other(
        self,
        t: ThreadBuffers,
        a: Any,
        kind: type | None,
        key: list[Any],
        ids: list[int],
        use: Use,
        flags: int,
    ) -> int:
        """An argument that is no plain positional tensor and no literal; returns the op's flags."""
        if kind is list or kind is tuple:
            key.append("[")
            for item in a:
                kind = type(item)
                if not add_literal(key, item, kind):
                    flags = self._other(t, item, kind, key, ids, use, flags)
            key.append("]")
        elif isinstance(a, Tensor):
            key.append("t")
            flags = self._tensor(t, a, key, ids, use, flags)
        else:
            # generator, SymInt, script object, graph of a higher-order op
            key.append(type(a).__qualname__)
        return flags

    def _tensor(
        self,
        t: ThreadBuffers,
        a: Tensor,
        key: list[Any],
        ids: list[int],
        use: Use,
        flags: int,
    ) -> int:
        values = self._values
        if is_lazy(a):
            key.append("lazy")  # a parameter of a lazy module: it has no shape yet
            return flags
        try:
            storage = a.untyped_storage()
            layout = (a.shape, a.stride(), a.storage_offset(), a.dtype)
        except (RuntimeError, NotImplementedError):  # sparse, mkldnn, nested
            key.append(f"{a.layout}{tuple(a.shape) if not a.is_nested else ''}{a.dtype}")
            for part in parts(a):
                flags = self._tensor(t, part, key, ids, use, flags)
            return flags
        state: Any = getattr(storage, self._key, None)
        entry: Any = state and state.values.get(layout)
        if entry is None:
            entry = values.adopt(t, a, use, compiled=flags & COMPILED)
            state = getattr(storage, self._key)
        elif state.at and (
            storage.data_ptr() != state.at
            or (state.version is not None and a._version != state.version)
            or (t.clock > values.rereading.gate and not values.rereading.passes_over(state.leaf))
        ):
            known = entry
            entry = values.rereading.look(t, a, state, entry, use, compiled=flags & COMPILED)
            if entry is not known:
                flags |= REREAD
        if state.special is not None:
            entry, flags = values.unsettled.look(t, a, state, entry, use, flags)
        ids.append(entry[0])
        key.append(entry[1])
        return flags

    def _all_plain(self, types: Sequence[type]) -> bool:
        """Whether no type handles dispatch itself: a bare subclass made inside a mode is listed too."""
        if any(kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ for kind in types):  # type: ignore[attr-defined]
            return False
        self._plain = self._plain.union(types)
        return True

    def _subclass(
        self, plan: Plan, types: Sequence[type], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any:
        """Wrapper subclasses run themselves, and their inner ops come back here as plain ones."""
        if any(kind.__qualname__ in _TRACING for kind in types):
            return run(plan, args, kwargs, self._keys)
        t = self._me if get_ident() == self._me.ident else self._thread()
        if not t.paused and self.recording:
            try:
                self._placements.note(t, plan.name, (*args, *kwargs.values()))
            except Exception as error:
                self._failed(f"placements of {plan.name}", error)
        return NotImplemented


hide_from_dynamo(RecordingMode.__torch_dispatch__)
