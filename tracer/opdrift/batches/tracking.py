"""Carry the batch through the ops of a run, and record the samples of what it makes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from opdrift.batches.calls import COUNT, Call, Operand, Placed, Rule, settle
from opdrift.batches.lengths import Lengths
from opdrift.batches.operands import (
    Arguments,
    counts,
    has_storage,
    is_part,
    kind_of,
    read_arguments,
    replaced,
    results,
    tensors,
)
from opdrift.batches.rows import SampleRows
from opdrift.batches.rules import base_name, plain_name, rule_for
from opdrift.batches.seeds import Input, Seed, find_seeds
from opdrift.batches.tracks import LOST, Track, Tracks, track_of
from opdrift.neutral import written_tensors
from opdrift.storages import key_of
from opdrift.tracefile.axes import BATCH, LENGTH_UNKNOWN, UNKNOWN, UNSURE, Extents, Position, Step

if TYPE_CHECKING:
    from opdrift.batch import Batch
    from opdrift.plans import Plan
    from opdrift.storages import StorageState
    from opdrift.tracefile.writer import TraceWriter
    from opdrift.values import Values

_MAX_DECISIONS: Final = 65536
_MAX_LEARNED: Final = 4096
_MASKS: Final = frozenset({torch.bool, torch.uint8})

Layout = tuple[torch.Size, tuple[int, ...]]


class Decision(NamedTuple):
    """What an op makes of its operands' tracks.

    `layouts` are those of its outputs when it was decided: steps depend on them, and some ops choose them by
    the content. `learned` says where the axes lie in operands of which nothing was known.
    """

    layouts: tuple[Layout, ...]
    tracks: tuple[Track, ...]
    learned: tuple[tuple[int, tuple[Position, ...]], ...]


class Batches:
    """The followed batch of one recorder.

    What an op makes of it is decided once for a signature and the tracks of its operands.

    Args:
        batch: What the user said of it.
        values: The values of the recorder.
        write_extents: Called with the number and extents of each padded axis.
        write_mark: Called with the fields of a mark that says where the batch was found.
        failed: Notes that a rule failed; what the op made is unknown then.
    """

    def __init__(
        self,
        batch: Batch,
        values: Values,
        *,
        write_extents: Callable[[int, Extents], None],
        write_mark: Callable[[Mapping[str, Any]], None],
        failed: Callable[[str, BaseException], None],
    ) -> None:
        self._batch = batch
        self._values = values
        self._write_mark = write_mark
        self._failed = failed
        self._tracks = Tracks(f"{values.key}_batch")
        self._lengths = Lengths(write_extents)
        self._rows = SampleRows(
            values.engine,
            batch.size,
            self._lengths,
            devices=values.devices,
            is_elsewhere=values.is_elsewhere,
        )
        self._rules: dict[int, Rule | None] = {}
        self._decisions: dict[tuple[int, tuple[Track | None, ...]], Decision] = {}
        self._learned: dict[int, None] = {}
        self._padded: int | None = None
        self._told: set[tuple[str, Seed]] = set()
        self._active = False

    @property
    def is_full(self) -> bool:
        """Whether so many rows wait that they should be written."""
        return self._rows.is_full

    def notes(self) -> list[str]:
        """What a user should know who asked for samples and gets none."""
        size, lengths = self._batch.size, self._batch.lengths
        where = "of a module that was called from outside every other, nor of inputs="
        if size > 1 and not self._active:
            return [f"no sample was recorded: no input {where}, has a leading dim of {size}"]
        if lengths is not None and self._padded is None:
            return [
                f"padding counts as content: no input {where}, has a dim of {max(lengths)},"
                " the longest sample's length"
            ]
        return []

    def write(self, writer: TraceWriter) -> None:
        """Append what waits to the trace."""
        self._rows.write(writer)

    # ---- where it begins -----------------------------------------------------------------------------

    def seed(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Find the batch in the inputs of a root module, as far as no op of the run has said where it is.

        Once they are fingerprinted, `record` is to be called for them.
        """
        given = [(name, tensor) for name, tensor in named if has_storage(tensor)]
        inputs = [Input(name, tuple(tensor.shape), kind_of(tensor)) for name, tensor in given]
        seeds, self._padded = find_seeds(inputs, self._batch, self._padded)
        told: dict[str, Any] = {}
        for (name, tensor), seed in zip(given, seeds, strict=True):
            track = self._tracks.of(tensor)
            if track is not None and track.carries:
                continue
            if (name, seed) not in self._told:
                self._told.add((name, seed))
                told[name] = {
                    "batch": seed.batch,
                    "lengths": seed.lengths,
                    "unknown": seed.unknown or seed.length_unknown,
                }
            placed = self._placed(seed, tensor)
            if placed.positions or placed.flags:
                self._active = True
                self._tracks.put(tensor, track_of(placed, tensor))
        if told:
            self._write_mark({"inputs": told})

    def returned(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Record the samples of what a root module returned.

        Where the batch could not be followed to a result (packed or nested sequences, sorted rows), it is taken to lie
        in it as in an input, and said to be unsure.
        """
        given = [(name, tensor) for name, tensor in named if has_storage(tensor)]
        self.record(tensor for _, tensor in given)
        for name, tensor in given:
            track = self._tracks.of(tensor)
            if track is None or not track.flags & UNKNOWN:
                continue
            seen = Input(name, tuple(tensor.shape), kind_of(tensor))
            (seed,), _ = find_seeds([seen], self._batch, self._padded)
            placed = self._placed(seed, tensor)
            if any(p.axis == BATCH for p in placed.positions) and not placed.flags:
                self._learn(tensor, placed.positions)

    def _placed(self, seed: Seed, tensor: Tensor) -> Placed:
        shape = tensor.shape
        found = [] if seed.batch is None else [Position(seed.batch, 1, shape[seed.batch], 1, BATCH)]
        axis = None
        if seed.lengths and self._padded is not None and self._batch.lengths is not None:
            left = self._batch.pad_side == "left"
            axis = self._lengths.seed(self._padded, self._batch.lengths, left=left)
        if axis is not None:
            found += [Position(dim, 1, shape[dim], 1, axis) for dim in seed.lengths]
        flags = UNKNOWN if seed.unknown else 0
        return Placed(tuple(found), flags | (LENGTH_UNKNOWN if seed.length_unknown else 0))

    # ---- through an op ---------------------------------------------------------------------------------

    def follow(
        self, plan: Plan, signature: int, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
    ) -> None:
        """Say where the batch lies in what an op returned or wrote, and record the samples of that.

        To be called once its outputs are registered and fingerprinted.
        """
        if not self._active:
            return
        if plan.id not in self._rules:
            self._rules[plan.id] = rule_for(plan.func)
        rule = self._rules[plan.id]
        if rule is None:
            return
        given = read_arguments(plan, args, kwargs)
        operands = [*tensors(given[0]), *tensors(given[1].values())]
        tracks = tuple(map(self._tracks.of, operands))
        if not any(tracks):
            if not operands and counts(plan, args):
                self._tracks.put(out, Track((Step(out.element_size(), len(out), COUNT),)))
            return
        outputs = results(plan, args, kwargs, out)
        layouts = tuple((output.shape, output.stride()) for output in outputs)
        decision = self._decisions.get((signature, tracks))
        if decision is None or decision.layouts != layouts:
            try:
                decision = self._decide(plan, rule, given, operands, tracks, outputs)
            except Exception as error:
                self._failed(f"the batch of {plan.name}", error)
                decision = Decision(layouts, (LOST,) * len(outputs), ())
            if len(self._decisions) >= _MAX_DECISIONS:
                self._decisions.clear()
            self._decisions[signature, tracks] = decision
        written = written_tensors(plan, args, kwargs) if plan.writes else []
        for output, track in zip(outputs, decision.tracks, strict=True):
            self._set(output, track, written)
        for index, positions in decision.learned:
            self._learn(operands[index], positions)
        self.record(operands)  # a part of a buffer is fingerprinted when it is taken
        self.record(outputs)

    def carry(self, tensors: Iterable[Tensor]) -> bool:
        """Whether the batch, or a padded length, is known to be in any of the tensors."""
        return any(track is not None and track.carries for track in map(self._tracks.of, tensors))

    def lose(self, outputs: Sequence[Tensor], written: Sequence[Tensor]) -> None:
        """Say that what came out of code that cannot be followed depends on the batch, somewhere.

        Args:
            outputs: What it returned and what it wrote into.
            written: The latter alone.
        """
        strided = [output for output in outputs if has_storage(output)]
        for output in strided:
            self._set(output, LOST, written)
        self.record(strided)

    def _decide(
        self,
        plan: Plan,
        rule: Rule,
        given: Arguments,
        operands: Sequence[Tensor],
        tracks: Sequence[Track | None],
        outputs: Sequence[Tensor],
    ) -> Decision:
        """Apply the rule of an op."""
        seen = iter(
            self._operand(index, tensor, track, overwritten=plan.overwrites and index == 0)
            for index, (tensor, track) in enumerate(zip(operands, tracks, strict=True))
        )
        schema = getattr(plan.func, "_schema", None)
        call = Call(
            plan.name if schema is None else plain_name(base_name(plan.func)),
            [replaced(item, seen) for item in given[0]],
            {name: replaced(item, seen) for name, item in given[1].items()},
            [tuple(output.shape) for output in outputs],
            self._lengths,
            {} if schema is None else {a.name: i for i, a in enumerate(schema.arguments)},
        )
        found = [
            track_of(settle(call, k, rule(call, k)), output) for k, output in enumerate(outputs)
        ]
        learned = {each.operand: each.positions for each in call.learned}
        layouts = tuple((output.shape, output.stride()) for output in outputs)
        return Decision(layouts, tuple(found), tuple(learned.items()))

    def _operand(
        self, index: int, tensor: Tensor, track: Track | None, *, overwritten: bool
    ) -> Operand:
        if not has_storage(tensor):
            return Operand(index, (), flags=LOST.flags)
        shape, mask = tuple(tensor.shape), tensor.dtype in _MASKS
        if track is None:
            return Operand(index, shape, boolean=mask)
        positions, flags = self._tracks.located(track, tensor)
        counted = next((p.dim for p in positions if p.axis == COUNT), None)
        followed = tuple(p for p in positions if p.axis != COUNT)
        return Operand(index, shape, followed, 0 if overwritten else flags, mask, counted)

    def _set(self, output: Tensor, track: Track, written: Sequence[Tensor]) -> None:
        if type(output) is Parameter:
            return  # an optimiser's step: a weight stays a weight
        known = self._tracks.of(output)
        if any(output is tensor for tensor in written):
            if known is not None and is_part(output):
                steps = tuple(sorted({*known.steps, *track.steps}))
                track = Track(steps, known.flags | track.flags)
            self._tracks.put(output, track)
        elif known is None:  # else it is an alias of something known
            self._tracks.put(output, track)

    # ---- records ---------------------------------------------------------------------------------------

    def _learn(self, tensor: Tensor, positions: tuple[Position, ...]) -> None:
        """Record what an op lined up with the batch, or with a padded length, without its carrying one."""
        if type(tensor) is Parameter or not has_storage(tensor):
            return
        state = self._state(tensor)
        entry = None if state is None else state.values.get(key_of(tensor))
        if state is None or entry is None or entry[0] in self._learned:
            return
        if not state.may_be_read(tensor):
            return
        if len(self._learned) >= _MAX_LEARNED:
            self._learned.clear()
        value = entry[0]
        self._learned[value] = None
        track = self._tracks.of(tensor)
        flags = 0 if track is None else self._tracks.located(track, tensor)[1]
        if flags & UNKNOWN and any(p.axis == BATCH for p in positions):
            flags = flags & ~UNKNOWN | UNSURE
        flags &= ~LENGTH_UNKNOWN
        self._rows.add(tensor, value, positions, flags, alone=value != state.hashed)

    def record(self, given: Iterable[Tensor]) -> None:
        """Record the samples of those tensors that were fingerprinted since the last time."""
        for tensor in given:
            known = self._tracks.known(tensor)
            if known is None or known.track is None or not known.carries:
                continue
            state = self._state(tensor)
            if state is None or state.hashed == known.recorded:
                continue
            entry = state.values.get(key_of(tensor))
            if entry is not None and entry[0] == state.hashed:
                known.recorded = entry[0]
                positions, flags = self._tracks.located(known.track, tensor)
                self._rows.add(tensor, entry[0], positions, flags, alone=False)

    def _state(self, tensor: Tensor) -> StorageState | None:
        return getattr(tensor.untyped_storage(), self._values.key, None)
