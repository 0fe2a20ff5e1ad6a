"""Hold the tensors of a checkpoint against the contents that a trace's parameters and buffers had."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from opdrift.checkpoints.incomplete import arrived_in_part, own_parts
from opdrift.checkpoints.model import Model, Own
from opdrift.checkpoints.names import Renaming, match
from opdrift.checkpoints.parts import made_of
from opdrift.checkpoints.roundings import Rounding, rounding
from opdrift.checkpoints.stored import Key, StoredCheckpoint, StoredTensor
from opdrift.errors import CheckpointError
from opdrift.provenance import Lineage
from opdrift.provenance.ops import short_name
from opdrift.tracefile.reader import Trace

#: Of the smaller side, so many tensors of one architecture have a counterpart of that name and size. A head that was
#: exchanged, or a part of the model, leaves more; two models that share a name or two leave few.
_FITTING: Final = 0.5


@dataclass(frozen=True, slots=True)
class Missing:
    """A tensor of the checkpoint that never reached the model.

    Attributes:
        name: In the checkpoint.
        own: What the model calls it; None if the model has nothing like it.
        origin: In words, where the model's content came from instead; None where that is not known.
        part: In words, which part of the model's content is the checkpoint's; None if none is known to be.
        reached: The ranks whose model did hold it; empty if none did, or if there is one rank.
        lacking: Of a run of several ranks, those that have the parameter and hold something else.
    """

    name: str
    own: str | None
    origin: str | None
    part: str | None = None
    reached: tuple[int, ...] = ()
    lacking: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Check:
    """What became of a checkpoint.

    Attributes:
        source: Where it comes from, in words.
        tensors: How many it holds.
        arrived: Names in the checkpoint -> name in the model, of those whose content the model held.
        casts: How many of them were cast to which dtype on the way.
        rounded: Of those that arrived: name in the checkpoint -> which side holds rounded numbers, where only the
            samples tell.
        exchanged: Of those: name in the checkpoint -> another name of the model that holds it instead.
        fused: Of those: tensors of the model that are several of the checkpoint's, or the other way round.
        missing: Those that never reached the model.
        unknown: Names that cannot be judged: no content of that type and size is in the trace.
        renamed: Leading words that differ.
        extra: Parameters and buffers of the model that are not in the checkpoint.
        own: How many parameters and buffers the trace names.
        ranks: Of a run of several ranks, those that the answer is of.
        unjudged: Those whose traces name no parameters.
    """

    source: str
    tensors: int
    arrived: Mapping[str, str]
    casts: Mapping[str, int]
    rounded: Mapping[str, Rounding]
    exchanged: Mapping[str, str]
    fused: Mapping[str, tuple[str, ...]]
    missing: tuple[Missing, ...]
    unknown: tuple[str, ...]
    renamed: tuple[Renaming, ...]
    extra: tuple[str, ...]
    own: int
    ranks: tuple[int, ...] = ()
    unjudged: tuple[int, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether all of the checkpoint is in the model, and all of the model from it."""
        return not (self.missing or self.exchanged or self.extra)


def dtypes_of(trace: Trace) -> frozenset[str]:
    """In which dtypes the trace's parameters and buffers are held."""
    return frozenset(own.dtype for own in Model(trace).tensors.values())


def check(trace: Trace, checkpoint: StoredCheckpoint) -> Check:
    """What became of a checkpoint's tensors.

    Raises:
        CheckpointError: The trace names no parameter, or the checkpoint is of another model.
    """
    model = Model(trace)
    if not model.tensors:
        raise unnamed(trace)
    matching = Matching(trace, model, checkpoint)
    found = matching.result()
    fitting = matching.fitting(found)
    if matching.suits(found, fitting, found.own):
        return found
    raise other_architecture(found, trace, (len(fitting), found.own), matching.misfit(fitting))


def unnamed(trace: Trace) -> CheckpointError:
    """A trace has nothing that a checkpoint can be held against."""
    return CheckpointError(
        f"{trace.path} names no parameters: record with model=, or call a module inside the recording."
    )


def other_architecture(
    found: Check, trace: Trace, fitting: tuple[int, int], misfit: str | None
) -> CheckpointError:
    """A checkpoint is of another model than that of the trace, of whose tensors so many of so many have a counterpart."""
    fits, own = fitting
    such_as = f"; {misfit}" if misfit is not None else ""
    return CheckpointError(
        f"{found.source} is a checkpoint of another architecture than the model of {trace.path}: by name and"
        f" size {fits or 'none'} of its {found.tensors} tensors {'fit' if fits > 1 else 'fits'} one of the model's"
        f" {own}{such_as}."
    )


class Matching:
    """One checkpoint and one trace."""

    def __init__(self, trace: Trace, model: Model, checkpoint: StoredCheckpoint) -> None:
        self._trace = trace
        self._model = model
        self._checkpoint = checkpoint
        self._lineage = Lineage(trace)
        self._own_parts = own_parts(trace)
        self._stored = {tensor.name: tensor for tensor in checkpoint.tensors}
        self._pairs, self._renamed = match(
            {name: tensor.size for name, tensor in self._stored.items()},
            {name: own.size for name, own in model.tensors.items()},
        )
        by_name, _ = match(dict.fromkeys(self._stored, 0), dict.fromkeys(model.tensors, 0))
        #: name in the checkpoint -> the model's tensor of that name and another size
        self.other_sizes = {
            name: model.tensors[own]
            for name, own in by_name.items()
            if name not in self._pairs and model.tensors[own].size != self._stored[name].size
        }
        #: name in the checkpoint -> to which dtype it was cast; known once there is a result
        self.casts: dict[str, str] = {}
        #: content -> names of the model that held it; of contents that tell something
        self._holders: dict[Key, list[str]] = {}
        for own in model.tensors.values():
            for key in own.keys:
                if not (own.constant and key == own.keys[0]):
                    self._holders.setdefault(key, []).append(own.name)

    def fitting(self, found: Check) -> frozenset[str]:
        """Tensors that have the name and size, or the content, of one of the model's."""
        return frozenset({*self._pairs, *found.arrived})

    def suits(self, found: Check, fitting: frozenset[str], own: int) -> bool:
        """Whether the checkpoint is of this architecture, of whose tensors these fit."""
        return self.holds(found) or len(fitting) >= _FITTING * min(found.tensors, own)

    def is_smaller(self, name: str) -> bool:
        """Whether the model's tensor of this name has fewer elements, as a part of it has."""
        other = self.other_sizes.get(name)
        return other is not None and other.size < self._stored[name].size

    def holds(self, found: Check) -> bool:
        """Whether the model holds a content of the checkpoint that no other one would have."""
        tensors = self._model.tensors
        return any(
            own not in tensors or not tensors[own].constant for own in found.arrived.values()
        )

    def misfit(self, fitting: Container[str]) -> str | None:
        """A tensor of each side that does not fit, in words; None if all of one side do.

        Args:
            fitting: Tensors of the checkpoint that do, on any rank.
        """
        if self.other_sizes:
            name, other = next(iter(self.other_sizes.items()))
            shape = list(self._stored[name].shape)
            return f"{other.name} is {shape} in the checkpoint, {list(other.shape)} in the trace"
        stored = next((t for name, t in self._stored.items() if name not in fitting), None)
        paired = set(self._pairs.values())
        own = next((t for name, t in self._model.tensors.items() if name not in paired), None)
        if stored is None or own is None:
            return None
        return f"the checkpoint has {stored.name} {list(stored.shape)}, the trace {own.name} {list(own.shape)}"

    def result(self) -> Check:
        """What became of the tensors."""
        arrived: dict[str, str] = {}
        roundings: dict[str, Rounding] = {}
        exchanged: dict[str, str] = {}
        rest: list[StoredTensor] = []
        for name, tensor in self._stored.items():
            own = self._model.tensors.get(self._pairs.get(name, ""))
            dtype = None if own is None else _held_as(tensor, own)
            holder = self._holder(tensor)
            if own is not None and dtype is not None:
                arrived[name] = own.name
                if dtype != tensor.dtype:
                    self.casts[name] = dtype
            elif holder is not None:
                arrived[name] = holder
                if own is not None:
                    exchanged[name] = holder
            elif own is not None and (found := self._rounding(tensor, own)) is not None:
                arrived[name] = own.name
                roundings[name] = found
            else:
                rest.append(tensor)
        fused = self._fused(rest, set(arrived.values()))
        for whole, parts in fused.items():
            for name in (whole, *parts):
                if name in self._stored and name not in arrived:
                    arrived[name] = whole if name in parts else parts[0]
        missing, unknown = self._missing(t for t in rest if t.name not in arrived)
        covered = {*arrived.values(), *self._pairs.values(), *fused}
        covered.update(part for parts in fused.values() for part in parts)
        extra = [
            name
            for name in self._model.tensors
            if name not in covered
            and name not in self._model.passing
            and not self._is_tied(name, covered)
        ]
        return Check(
            self._checkpoint.source,
            len(self._stored),
            arrived,
            Counter(self.casts.values()),
            roundings,
            exchanged,
            fused,
            tuple(missing),
            tuple(unknown),
            tuple(self._renamed),
            tuple(extra),
            len(self._model.tensors),
        )

    def _rounding(self, tensor: StoredTensor, own: Own) -> Rounding | None:
        """How one of the parameter's contents is the stored one up to rounding."""
        for value in own.contents:
            content = self._trace.fingerprint(value)
            found = content and rounding(tensor.sample, tensor.dtype, content)
            if found:
                return found
        return None

    def _part(self, tensor: StoredTensor, own: Own) -> str | None:
        """Which part of what the model held is the checkpoint's."""
        parts, rank = self._own_parts.get(own.name), self._trace.header.rank
        for value in own.contents:
            content = self._trace.fingerprint(value)
            if content is not None and content.n == tensor.size:
                found = arrived_in_part(tensor.sample, content, parts, rank)
                if found is not None:
                    return found
        return None

    def _holder(self, tensor: StoredTensor) -> str | None:
        """A name of the model that holds this content, whatever it is called."""
        return next((h[0] for key in tensor.keys.values() if (h := self._holders.get(key))), None)

    def _is_tied(self, name: str, covered: Iterable[str]) -> bool:
        """Whether a name is another one of a tensor that is accounted for."""
        own = self._model.tensors[name]
        tensors = self._model.tensors
        return any(each in tensors and tensors[each].value == own.value for each in covered)

    def _fused(self, rest: list[StoredTensor], taken: set[str]) -> dict[str, tuple[str, ...]]:
        """Wholes on either side that are parts of the other, under the model's names."""
        stored = {t.name: list(t.keys.values()) for t in rest}
        called = {name: self._as_own(name) for name in stored}
        back = {own: name for name, own in called.items()}
        own = {name: each.keys for name, each in self._model.tensors.items() if name not in taken}
        renamed = {called[name]: keys for name, keys in stored.items()}
        found = {
            whole: tuple(back[part] for part in parts) for whole, parts in made_of(own, renamed)
        }
        found |= {back[whole]: parts for whole, parts in made_of(renamed, own)}
        return found

    def _as_own(self, name: str) -> str:
        """What the model would call a tensor of the checkpoint, by what was exchanged elsewhere."""
        for renaming in self._renamed:
            if not renaming.stored or name.startswith(f"{renaming.stored}."):
                rest = name[len(renaming.stored) + 1 :] if renaming.stored else name
                return f"{renaming.own}.{rest}" if renaming.own else rest
        return name

    def _missing(self, rest: Iterable[StoredTensor]) -> tuple[list[Missing], list[str]]:
        missing, unknown = [], []
        for tensor in rest:
            own = self._model.tensors.get(self._pairs.get(tensor.name, ""))
            other = self.other_sizes.get(tensor.name)
            if own is None and other is not None:
                sizes = f"of shape {list(other.shape)}, in the checkpoint {list(tensor.shape)}"
                missing.append(Missing(tensor.name, other.name, sizes))
            elif own is None:
                missing.append(Missing(tensor.name, None, None))
            elif own.dtype in tensor.keys or self._is_drawn(own):
                missing.append(
                    Missing(tensor.name, own.name, self._origin(own), self._part(tensor, own))
                )
            else:
                unknown.append(tensor.name)  # a cast whose digest nobody worked out
        return missing, unknown

    def _first_with(self, own: Own) -> int:
        """The first value with a parameter's content: it may have come past the dispatcher, from a file say."""
        values, prints = self._trace.values, self._trace.fingerprints
        raw = prints.raw[np.maximum(values.fingerprint, 0)]
        for value in np.flatnonzero((values.fingerprint >= 0) & (raw == own.keys[0][0])).tolist():
            content = self._trace.fingerprint(value)
            if content is not None and content.key == own.keys[0] and not own.constant:
                return int(value)
        return own.value

    def _is_drawn(self, own: Own) -> bool:
        """Whether a content is a random draw, cast or not, and so no checkpoint's."""
        return self._lineage.of(own.value).kind == "drawn"

    def _origin(self, own: Own) -> str | None:
        found = self._lineage.of(own.value)
        if found.kind in ("leaf", "copied") and found.root_name in (None, own.name):
            found = self._lineage.of(self._first_with(own))
        op = found.first_op or found.op
        if found.kind == "drawn" and op is not None:
            return f"drawn at random by {short_name(op)}"
        if found.kind == "filled" and op is not None:
            return f"filled by {short_name(op)}"
        return "all one number" if own.constant else None


def _held_as(tensor: StoredTensor, own: Own) -> str | None:
    """In which dtype the model held a stored content, at any time; None if it never did."""
    return next((dtype for dtype, key in tensor.keys.items() if key in own.keys), None)
