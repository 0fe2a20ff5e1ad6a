"""Carry the batch through the ops of a run.

What is known of a storage hangs on its Python object, as values do: which steps its axes take, and
flags. What an op makes of it is decided once for a signature and the tracks of its operands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from opdrift.batches.calls import COUNT, Call, Operand, Placed, Rule, settle
from opdrift.batches.lengths import Lengths
from opdrift.batches.rows import FULL_BYTES, SampleRows
from opdrift.batches.rules import base_name, plain_name, rule_for
from opdrift.batches.seeds import Input, find_seeds
from opdrift.neutral import written_tensors
from opdrift.tracefile.axes import (
    BATCH,
    LENGTH_UNKNOWN,
    UNKNOWN,
    Extents,
    Missing,
    Position,
    Step,
    locate,
    step_of,
)

if TYPE_CHECKING:
    from opdrift.fingerprint.engine import Engine
    from opdrift.plans import Plan
    from opdrift.records import Batch
    from opdrift.tracefile.writer import TraceWriter

_MAX_DECISIONS: Final = 65536
_MAX_LEARNED: Final = 4096
_BOOLEAN: Final = frozenset({torch.bool, torch.uint8})

Layout = tuple[torch.Size, tuple[int, ...]]


class Track(NamedTuple):
    """What is known of a storage: the steps of its axes, and flags."""

    steps: tuple[Step, ...] = ()
    flags: int = 0


class Decision(NamedTuple):
    """What an op makes of its operands' tracks.

    `layouts` are those of its outputs when it was decided: a step depends on them, and some ops choose them
    by the content.
    """

    layouts: tuple[Layout, ...]
    tracks: tuple[Track, ...]
    learned: tuple[tuple[int, tuple[Position, ...]], ...]


class Batches:
    """The followed batch of one recorder.

    Args:
        batch: What the user said of it.
        engine: Computes the fingerprints.
        key: An attribute name of this recorder's own.
        value_of: The id of a tensor's present value; 0 if it has none.
        write_extents: Called with the number and extents of each padded axis.
        write_mark: Called with the fields of a mark that says where the batch was found.
        failed: Notes that a rule failed; what the op made is unknown then.
    """

    def __init__(
        self,
        batch: Batch,
        engine: Engine,
        *,
        key: str,
        value_of: Callable[[Tensor], int],
        write_extents: Callable[[int, Extents], None],
        write_mark: Callable[[Mapping[str, Any]], None],
        failed: Callable[[str, BaseException], None],
    ) -> None:
        self._batch = batch
        self._key = f"{key}_batch"
        self._value_of = value_of
        self._write_mark = write_mark
        self._failed = failed
        self._lengths = Lengths(write_extents)
        self._rows = SampleRows(engine, batch.size, self._lengths)
        self._rules: dict[int, Rule | None] = {}
        self._decisions: dict[tuple[int, tuple[Track | None, ...]], Decision] = {}
        self._places: dict[tuple[Any, ...], tuple[tuple[Position, ...], int]] = {}
        self._learned: dict[int, None] = {}
        self._padded: int | None = None
        self._seen: set[tuple[Any, ...]] = set()
        self._active = False

    @property
    def is_full(self) -> bool:
        """Whether so many rows wait that they should be written."""
        return self._rows.bytes >= FULL_BYTES

    def write(self, writer: TraceWriter) -> None:
        """Append what waits to the trace."""
        self._rows.write(writer)

    # ---- where it begins -----------------------------------------------------------------------------

    def seed(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Find the batch in the inputs of a root module, as far as no op of the run has said where it is."""
        tensors = [(name, tensor) for name, tensor in named if _has_storage(tensor)]
        inputs = [Input(name, tuple(tensor.shape), _kind(tensor)) for name, tensor in tensors]
        seeds, self._padded = find_seeds(inputs, self._batch, self._padded)
        told: dict[str, Any] = {}
        for given, (name, tensor), seed in zip(inputs, tensors, seeds, strict=True):
            track = self._track_of(tensor)
            if track is not None and _carries(track):
                continue
            positions = [] if seed.batch is None else [self._position(given, seed.batch, BATCH)]
            axis = self._length_axis()
            if axis is not None:
                positions += [self._position(given, dim, axis) for dim in seed.lengths]
            flags = (UNKNOWN if seed.unknown else 0) | (
                LENGTH_UNKNOWN if seed.length_unknown else 0
            )
            if (name, seed) not in self._seen:
                self._seen.add((name, seed))
                told[name] = {
                    "batch": seed.batch,
                    "lengths": seed.lengths,
                    "unknown": seed.unknown or seed.length_unknown,
                }
            if positions or flags:
                self._active = True
                self._put(tensor, self._track(Placed(tuple(positions), flags), tensor))
                value = self._value_of(tensor)
                if value:
                    self.record(tensor, value)
        if told:
            self._write_mark({"inputs": told})

    def _length_axis(self) -> int | None:
        if self._padded is None or self._batch.lengths is None:
            return None
        left = self._batch.pad_side == "left"
        return self._lengths.seed(self._padded, self._batch.lengths, left=left)

    @staticmethod
    def _position(given: Input, dim: int, axis: int) -> Position:
        return Position(dim, 1, given.shape[dim], 1, axis)

    # ---- through an op ---------------------------------------------------------------------------------

    def follow(
        self,
        plan: Plan,
        signature: int,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        out: Any,
    ) -> None:
        """Say where the batch lies in what an op returned or wrote; to be called after it, before `record`."""
        if not self._active:
            return
        rule = self._rules.get(plan.id, self)
        if rule is self:
            rule = self._rules[plan.id] = rule_for(plan.func)
        if rule is None:
            return
        given = _operands_of(plan, args, kwargs)
        operands = [*_tensors(given[0]), *_tensors(given[1].values())]
        tracks = tuple(map(self._track_of, operands))
        if not any(tracks):
            if not operands and _is_count(plan, args):
                self._put(out, Track((Step(out.element_size(), len(out), COUNT),)))
            return
        outputs = _outputs(plan, args, kwargs, out)
        layouts = tuple((o.shape, o.stride()) for o in outputs)
        decision = self._decisions.get((signature, tracks))
        if decision is None or decision.layouts != layouts:
            try:
                decision = self._decide(plan, rule, given, operands, tracks, outputs, layouts)  # type: ignore[arg-type]
            except Exception as error:
                self._failed(f"the batch of {plan.name}", error)
                unknown = Track((), UNKNOWN | LENGTH_UNKNOWN)
                decision = Decision(layouts, (unknown,) * len(outputs), ())
            if len(self._decisions) >= _MAX_DECISIONS:
                self._decisions.clear()
            self._decisions[signature, tracks] = decision
        self._apply(decision, plan, args, kwargs, operands, outputs)

    def _decide(
        self,
        plan: Plan,
        rule: Rule,
        given: tuple[Sequence[Any], Mapping[str, Any]],
        operands: Sequence[Tensor],
        tracks: Sequence[Track | None],
        outputs: Sequence[Tensor],
        layouts: tuple[Layout, ...],
    ) -> Decision:
        """Apply the rule of an op."""
        seen = iter(
            self._operand(index, tensor, track, ignored=plan.overwrites and index == 0)
            for index, (tensor, track) in enumerate(zip(operands, tracks, strict=True))
        )
        schema = getattr(plan.func, "_schema", None)
        call = Call(
            plain_name(base_name(plan.func)) if schema is not None else plan.name,
            _replaced(given[0], seen),
            {name: _replaced(item, seen) for name, item in given[1].items()},
            [tuple(shape) for shape, _ in layouts],
            self._lengths,
            {a.name: i for i, a in enumerate(schema.arguments)} if schema is not None else {},
        )
        tracks_out = [
            self._track(settle(call, k, rule(call, k)), output) for k, output in enumerate(outputs)
        ]
        learned = {each.operand: each.positions for each in call.learned}
        return Decision(layouts, tuple(tracks_out), tuple(learned.items()))

    def _operand(
        self, index: int, tensor: Tensor, track: Track | None, *, ignored: bool
    ) -> Operand:
        shape = tuple(tensor.shape)
        boolean = tensor.dtype in _BOOLEAN
        if track is None:
            return Operand(index, shape, boolean=boolean)
        positions, flags = self._located(track, tensor)
        counts = next((p.dim for p in positions if p.axis == COUNT), None)
        followed = tuple(p for p in positions if p.axis != COUNT)
        return Operand(index, shape, followed, 0 if ignored else flags, boolean, counts)

    def _apply(
        self,
        decision: Decision,
        plan: Plan,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        operands: Sequence[Tensor],
        outputs: Sequence[Tensor],
    ) -> None:
        written = written_tensors(plan, args, kwargs) if plan.writes else ()
        for output, track in zip(outputs, decision.tracks, strict=True):
            if type(output) is Parameter:
                continue  # an optimiser's step: a weight is a weight
            known = self._track_of(output)
            if any(output is tensor for tensor in written):
                if known is not None and _is_part(output):
                    track = Track(
                        tuple(sorted({*known.steps, *track.steps})), known.flags | track.flags
                    )
                self._put(output, track)
            elif known is None:  # else an alias of something known
                self._put(output, track)
        for index, positions in decision.learned:
            self._learn(operands[index], positions)

    def _learn(self, tensor: Tensor, positions: tuple[Position, ...]) -> None:
        """Record what was lined up with the batch, or with a padded length, without carrying it."""
        if type(tensor) is Parameter:
            return
        value = self._value_of(tensor)
        if not value or value in self._learned:
            return
        if len(self._learned) >= _MAX_LEARNED:
            self._learned.clear()
        self._learned[value] = None
        track = self._track_of(tensor)
        _, flags = (positions, 0) if track is None else self._located(track, tensor)
        self._rows.add(tensor, value, positions, flags & ~(UNKNOWN | LENGTH_UNKNOWN), alone=True)

    def record(self, tensor: Tensor, value: int) -> None:
        """Record the samples of a value whose fingerprint is being taken."""
        track = self._track_of(tensor) if self._active else None
        if track is None or not _carries(track):
            return
        positions, flags = self._located(track, tensor)
        self._rows.add(tensor, value, positions, flags, alone=False)

    # ---- tracks ----------------------------------------------------------------------------------------

    def _track_of(self, tensor: Tensor) -> Track | None:
        try:
            return getattr(tensor.untyped_storage(), self._key, None)
        except (RuntimeError, NotImplementedError):  # sparse, mkldnn, nested
            return Track((), UNKNOWN)

    def _put(self, tensor: Tensor, track: Track) -> None:
        try:
            storage = tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):
            return
        if track.steps or track.flags:
            setattr(storage, self._key, track)
        elif hasattr(storage, self._key):
            delattr(storage, self._key)

    def _track(self, placed: Placed, tensor: Tensor) -> Track:
        if not placed.positions:
            return Track((), placed.flags)
        strides = _byte_strides(tensor)
        steps = (step_of(position, strides) for position in placed.positions)
        return Track(tuple(sorted({step for step in steps if step is not None})), placed.flags)

    def _located(self, track: Track, tensor: Tensor) -> tuple[tuple[Position, ...], int]:
        """Where a track's axes lie in a tensor of its storage, and flags, also for what is not all there."""
        strides = _byte_strides(tensor)
        key = (track, tensor.shape, strides)
        found = self._places.get(key)
        if found is None:
            if len(self._places) >= _MAX_DECISIONS:
                self._places.clear()
            found = self._places[key] = locate_all(track, tuple(tensor.shape), strides)
        return found


def _carries(track: Track) -> bool:
    """Whether a track tells of the batch or of a padded length."""
    return bool(track.flags) or any(step.axis != COUNT for step in track.steps)


def _is_count(plan: Plan, args: Sequence[Any]) -> bool:
    """Whether an op made 0, 1, ..."""
    if not plan.name.startswith("aten.arange."):
        return False
    start, _, step = (0, args[0], 1) if len(args) == 1 else (*args[:3], 1)[:3]
    return bool(start == 0 and step == 1)


def locate_all(
    track: Track, shape: Sequence[int], strides: Sequence[int]
) -> tuple[tuple[Position, ...], int]:
    """Where the axes of a track lie, and its flags: an axis of which only a part is there is unknown."""
    found = [(step, locate(step, shape, strides)) for step in track.steps]
    positions = tuple(p for _, p in found if isinstance(p, Position))
    flags = track.flags
    batch = [p for step, p in found if step.axis == BATCH]
    if batch and not any(isinstance(p, Position) for p in batch):
        flags |= UNKNOWN
    cut = any(step.axis > BATCH and p is Missing.CUT for step, p in found)
    if cut and not any(p.axis > BATCH for p in positions):
        flags |= LENGTH_UNKNOWN
    return positions, flags


# ---- tensors of a call -------------------------------------------------------------------------------------


def _operands_of(
    plan: Plan, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """The arguments that an op reads: not those of an out= variant."""
    if not kwargs or not plan.writes:
        return args, kwargs
    out = {name for position, name in plan.writes if position is None}
    return args, {name: item for name, item in kwargs.items() if name not in out}


def _tensors(items: Iterable[Any]) -> Iterator[Tensor]:
    for item in items:
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, list | tuple):
            yield from _tensors(item)


def _replaced(item: Any, operands: Iterator[Operand]) -> Any:
    if isinstance(item, Tensor):
        return next(operands)
    if isinstance(item, list | tuple):
        return [_replaced(each, operands) for each in item]
    return item


def _outputs(plan: Plan, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> list[Tensor]:
    """What an op returned, then what else it wrote."""
    found = (
        [out]
        if isinstance(out, Tensor)
        else list(_tensors(out) if isinstance(out, list | tuple) else ())
    )
    if plan.writes:
        for tensor in written_tensors(plan, args, kwargs):
            if not any(tensor is each for each in found):
                found.append(tensor)
    return [tensor for tensor in found if _has_storage(tensor)]


def _has_storage(tensor: Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and not tensor.is_nested
        and type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


def _byte_strides(tensor: Tensor) -> tuple[int, ...]:
    size = tensor.element_size()
    return tuple(stride * size for stride in tensor.stride())


def _is_part(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() < tensor.untyped_storage().nbytes()


def _kind(tensor: Tensor) -> Any:
    if tensor.dtype is torch.bool:
        return "bool"
    return "float" if tensor.is_floating_point() or tensor.is_complex() else "integer"
