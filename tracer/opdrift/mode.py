"""The dispatch mode: sees every op, packs one row, and changes nothing.

One op costs: read the inputs' values, intern the signature, find the source line, run the op, bump
write counts, register and fingerprint the outputs, pack a row (notes: recorder, sections 2 and 3).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from struct import pack_into
from sys import _getframe
from threading import get_ident
from time import perf_counter_ns as now
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Size, Tensor
from torch.nn import Parameter
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from opdrift.buffers import IDS, MANY_IDS, OP, OP_BYTES, OPS, PACK_IDS
from opdrift.choices import (
    ADDS,
    ATTENTION,
    STEERED,
    added_requires_grad,
    general_switches,
    operands_require_grad,
    switches,
    why_not_fast,
)
from opdrift.collectives import Collectives, takes_part, waited
from opdrift.memory import InFlight, Use, under_way
from opdrift.neutral import (
    DispatchKeys,
    filled_parts,
    has_complex,
    hide_from_dynamo,
    is_synchronous,
    needs_repair,
    numbers_as_tensors,
    run,
    silent,
    work_of,
    written_tensors,
)
from opdrift.plans import Plan, encode
from opdrift.randomness import Seeds, digest_before
from opdrift.records import (
    COMPILED,
    GRAD_ENABLED,
    PENDING,
    RAISED,
    REREAD,
    TRACER_FAILED,
    UNFINGERPRINTED,
)
from opdrift.values import PLAIN, Values

if TYPE_CHECKING:
    from types import FrameType

    from opdrift.batches.tracking import Batches
    from opdrift.buffers import ThreadBuffers
    from opdrift.kernels import Watch
    from opdrift.kernels.answers import Answers
    from opdrift.sources import Sources

#: Arguments that are their own identity.
_FIXED: Final = frozenset({torch.dtype, torch.device, torch.layout, torch.memory_format, str})
#: Tensors that torch itself uses to trace: the call must go through, and has no content.
_TRACING: Final = frozenset({"FakeTensor", "FunctionalTensor"})
_MAX_SIGNATURES: Final = 65536
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
        write_name: Interns a text.
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
        write_name: Callable[[str, int, str], None],
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
        self._write_name = write_name
        self._write_mark = write_mark
        self._flush = flush
        self._failed = failed
        self._collectives = collectives
        self._batches = batches
        self._plans: dict[int, Plan] = {}
        self._plain: frozenset[type] = PLAIN
        self._signatures: dict[tuple[Any, ...], int] = {}
        #: ids of signatures with complex tensors, whose ops need a repair
        self._complex: set[int] = set()
        self._signature_ids = itertools.count(1)
        self._seq = itertools.count(1)
        self._seeds = Seeds()
        #: module path -> why torch.nn did not take its fast path there when it was last called
        self._fast_paths: dict[str, Mapping[str, str]] = {}
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
                plan = self.add_plan(func)
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
                        entry, flags = values.special(t, a, state, entry, use, flags)
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
                signature = self._signature(plan, signature_key, args, kwargs or _NO_ARGUMENTS)
            if plan.asks == ADDS:
                flags |= added_requires_grad(args)
            elif plan.asks == STEERED:
                self.look_at_switches(t)
            elif plan.asks:
                flags |= self._ask(t, plan, args, kwargs or _NO_ARGUMENTS, frame)
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
                flags |= self._collective(t, use, out, ids)
                mutated = len(ids) - ins
            elif plan.writes:
                use = Use(plan, args, kwargs or _NO_ARGUMENTS)
                flags |= self._written(t, use, ids)
                mutated = len(ids) - ins
            kind = type(out)
            if kind is Tensor:
                if plan.settled:
                    try:
                        values.output(t, out, ids, plan)
                    except (RuntimeError, NotImplementedError):
                        self._parts(t, out, ids, plan)
                elif plan.copies:
                    use = Use(plan, args, kwargs or _NO_ARGUMENTS)
                    flags |= self._copied(t, use, out, ids)
            elif kind is tuple or kind is list:
                self._outputs(t, plan, out, ids)
            elif plan.scalar or kind is float or kind is int or kind is bool:
                self._write_mark(t, "scalar", {"value": encode(out)})
            elif kind is not type(None):
                self._outputs(t, plan, (out,), ids)
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

    def _ask(
        self,
        t: ThreadBuffers,
        plan: Plan,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        frame: FrameType,
    ) -> int:
        """Look at what steers the choice of an implementation, before the op has a number."""
        words = why_not_fast(frame)
        if words != self._fast_paths.get(t.path, _NO_ARGUMENTS):
            if len(self._fast_paths) >= _MAX_SIGNATURES:
                self._fast_paths.clear()
            self._fast_paths[t.path] = words
            self._write_mark(t, "fast-path", words)
        if plan.asks != ATTENTION:
            return 0
        self.look_at_switches(t)
        return operands_require_grad(args, kwargs)

    def look_at_switches(self, t: ThreadBuffers) -> None:
        """Notice a switch that changed at a line that is known, where nobody looks at flags."""
        found = switches()
        if found != t.switches:
            t.switches = found
            self._sources.on_new_line()

    def look_at_general_switches(self, t: ThreadBuffers) -> None:
        """As `look_at_switches`, for the few that reach every op: at a module's call."""
        found = general_switches()
        if found != t.switches[: len(found)]:
            self.look_at_switches(t)

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
                self._written(t, use, [])
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
            signature = self._signature(use.plan, tuple(key), tuple(use.args), _NO_ARGUMENTS)
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
            entry, flags = values.special(t, a, state, entry, use, flags)
        ids.append(entry[0])
        key.append(entry[1])
        return flags

    # ---- outputs -------------------------------------------------------------------------------------

    def _outputs(self, t: ThreadBuffers, plan: Plan, out: Any, outputs: list[int]) -> None:
        for item in out:
            if isinstance(item, Tensor):
                if type(item).__torch_dispatch__ is not Tensor.__torch_dispatch__:
                    continue  # made by an inner mode (FakeTensor): its memory, if any, is not ours to read
                try:
                    self._values.output(t, item, outputs, plan)
                except (RuntimeError, NotImplementedError):
                    self._parts(t, item, outputs, plan)
            elif isinstance(item, list | tuple):
                self._outputs(t, plan, item, outputs)

    def _parts(self, t: ThreadBuffers, out: Tensor, outputs: list[int], plan: Plan) -> None:
        for part in parts(out):
            self._values.output(t, part, outputs, plan)

    def _copied(self, t: ThreadBuffers, use: Use, out: Tensor, outputs: list[int]) -> int:
        """What a copy returned, which may not have arrived yet if it comes from a device."""
        in_flight = None if use.plan.writes else self._under_way(use, out)
        if in_flight is not None:
            self._values.arriving(t, out, outputs, in_flight)
            return PENDING | UNFINGERPRINTED
        self._outputs(t, use.plan, (out,), outputs)
        return 0

    def _written(self, t: ThreadBuffers, use: Use, outputs: list[int]) -> int:
        strided: list[Tensor] = []
        for tensor in filled_parts(*use):
            try:
                tensor.untyped_storage()
                tensor.stride()
                strided.append(tensor)
            except (RuntimeError, NotImplementedError):
                strided.extend(parts(tensor))
        in_flight = self._under_way(use, strided[0]) if use.plan.copies and strided else None
        self._values.written(t, strided, outputs, use=use, in_flight=in_flight)
        return 0 if in_flight is None else PENDING | UNFINGERPRINTED

    def _under_way(self, use: Use, target: Tensor) -> InFlight | None:
        """As `under_way`; where everything is waited for at once, so is this."""
        found = under_way(use, target)
        if found is not None and self._collectives.synchronised:
            found.wait()
            return None
        return found

    def _collective(self, t: ThreadBuffers, use: Use, out: Any, outputs: list[int]) -> int:
        """A collective's output is not there when the mode regains control (H1).

        A synchronous one may be waited for here, since the program waits next anyway; an asynchronous
        one never: on gloo a second wait hangs or writes the result again (integrity I1).
        """
        work = work_of(out)
        tensors = written_tensors(*use)
        readable = "reduce_scatter" not in use.plan.name and use.plan.waits
        if work is None or (use.plan.waits and is_synchronous(*use)):
            if work is None or waited(work):
                self._values.written(t, tensors, outputs)
                return 0
            self._values.written(t, tensors, outputs, in_flight=InFlight(None, readable=False))
            return PENDING | UNFINGERPRINTED
        if use.plan.waits and self._collectives.settled(work, readable=readable):
            self._values.written(t, tensors, outputs)
            return 0
        self._values.written(t, tensors, outputs, in_flight=InFlight(work, readable=readable))
        return PENDING | UNFINGERPRINTED

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
        return NotImplemented

    # ---- interning -----------------------------------------------------------------------------------

    def add_plan(self, func: Any, make: Callable[[Any, int], Plan] = Plan) -> Plan:
        """Tell the trace of an op that it does not know yet."""
        plan = self._plans[id(func)] = make(func, len(self._plans) + 1)
        plan.joins = takes_part(plan)
        plan.repair = plan.joins or needs_repair(plan)
        self._write_name("op", plan.id, plan.describe())
        return plan

    def _signature(
        self, plan: Plan, key: tuple[Any, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> int:
        if len(self._signatures) >= _MAX_SIGNATURES:
            # bounded; ids go on, a signature seen again gets a second one
            self._signatures.clear()
            self._complex.clear()
        found = self._signatures[key] = next(self._signature_ids)
        if has_complex(args) or has_complex(kwargs.values()):
            self._complex.add(found)
        text = {
            "op": plan.id,
            "args": [self._encode(a) for a in args],
            "kwargs": {n: self._encode(a) for n, a in kwargs.items()},
        }
        self._write_name("signature", found, json.dumps(text))
        return found

    def _encode(self, a: Any) -> Any:
        if isinstance(a, Tensor):
            try:
                known = self._values.value_of(a)
            except (RuntimeError, NotImplementedError):
                # one TensorArgument a part, so that arguments and inputs stay in step
                return [self._encode(part) for part in parts(a)]
            return (
                {"t": known[1][1]}
                if known is not None and known[1] is not None
                else {"x": "tensor"}
            )
        if isinstance(a, list | tuple):
            return [self._encode(item) for item in a]
        return encode(a)


def add_literal(key: list[Any], a: Any, kind: type) -> bool:
    """Add an argument without tensors to a signature's key; False, and nothing added, if it is none.

    As keys 1 == 1.0 == True and 0.0 == -0.0 and nan != nan, so floats go in as hex, bools tagged.
    """
    if kind is int or a is None:
        key.append(a)
    elif kind is float:
        key.append(a.hex())
    elif kind is bool:
        key.append("T" if a else "F")
    elif kind is list or kind is tuple or kind is Size:
        before = len(key)
        key.append("[")
        for item in a:
            inner = type(item)
            if inner is int:
                key.append(item)
            elif not add_literal(key, item, inner):
                del key[before:]
                return False
        key.append("]")
    elif kind in _FIXED:
        key.append(kind)
        key.append(a)
    elif kind is complex:
        key.append(str(a))
    else:
        return False
    return True


def parts(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that hold a sparse or nested tensor's content; none for opaque layouts (mkldnn)."""
    with silent(), torch.no_grad():
        if tensor.is_nested:
            return list(tensor.unbind())
        if tensor.layout is torch.sparse_coo:
            return [tensor._indices(), tensor._values()]
        if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
            return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
        if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
            return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []


hide_from_dynamo(RecordingMode.__torch_dispatch__)
