"""What a rank handed to a collective and what it was handed back, as far as contents are known."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from opdrift import composition
from opdrift.records import TensorArgument
from opdrift.tracefile.fingerprints import Fingerprint
from opdrift.tracefile.reader import Trace
from opdrift.world.collectives import Collective, World
from opdrift.world.messages import Message

#: Which argument of a c10d op holds what a rank gives, as far as contents are looked at.
_GIVEN: Final = {
    "all_reduce": 0, "broadcast": 0, "reduce": 0, "send": 0, "all_gather": 1, "reduce_scatter": 1, "gather": 1,
    "scatter": 1, "all_to_all": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Handed:
    """A tensor's content: one fingerprint, or those of parts that make it up, in order.

    A result that arrives later is often read in parts only: views of a bucket.
    """

    parts: tuple[Fingerprint, ...]

    @property
    def key(self) -> tuple[int, int, int]:
        """Equal exactly for equal contents."""
        content = composition.joined(self.parts)
        return content.raw, content.n, content.code

    @property
    def digest(self) -> composition.Content:
        """Its digest, composed where it is known in parts."""
        return composition.joined(self.parts)

    @property
    def whole(self) -> Fingerprint | None:
        """Its fingerprint; None where only parts have one."""
        return self.parts[0] if len(self.parts) == 1 else None

    @property
    def n(self) -> int:
        """How many components it has."""
        return sum(part.n for part in self.parts)


def given(world: World, part: Collective | Message) -> Sequence[Handed | None]:
    """What a rank gave, a tensor each; None where that is not known."""
    if part.index is None:
        return ()
    trace = world.traces[part.rank]
    if _is_functional(part):
        values = list(trace.op(part.index).inputs)
    else:
        values = _argument(trace, part.index, _GIVEN.get(part.what, 0))
    known = [_known(world, part.rank, value) for value in values]
    if isinstance(part, Message) or part.what != "all_gather":
        return known
    return [None if each is None or _is_outdated(world, part, each) else each for each in known]


def _is_outdated(world: World, part: Collective, known: Handed) -> bool:
    """Whether an integration read another content of what is sent: nothing tells a recorder of a hidden write."""
    marks = world.gathers(part.rank)
    at = bisect_left(marks, part.seq, key=lambda mark: mark.seq)
    shard = marks[at].fields.get("shard") if at < len(marks) else None
    if not isinstance(shard, dict):
        return False
    raw, n, code = known.key
    return (shard["n"], shard["code"]) == (n, code) and int(shard["raw"], 16) != raw


def got(world: World, part: Collective | Message) -> Sequence[Handed | None]:
    """What a rank got, a tensor each; None where that is not known."""
    if part.index is None:
        return ()
    op = world.traces[part.rank].op(part.index)
    functional = _is_functional(part)
    values = _waited(world, part.rank, op.outputs) if functional else op.outputs[: op.mutated]
    return [_known(world, part.rank, value) for value in values]


def _is_functional(part: Collective | Message) -> bool:
    return part.op.startswith("_c10d_functional.")


def _argument(trace: Trace, index: int, position: int) -> list[int]:
    """The values of one argument of an op: `inputs` holds those of all, in order."""
    op = trace.op(index)
    at = 0
    for place, (_, argument) in enumerate(op.signature.arguments):
        count = _tensors_in(argument)
        if place == position:
            return list(op.inputs[at : at + count])
        at += count
    return []


def _tensors_in(argument: object) -> int:
    if isinstance(argument, TensorArgument):
        return 1
    return sum(map(_tensors_in, argument)) if isinstance(argument, tuple) else 0


def _waited(world: World, rank: int, outputs: Sequence[int]) -> list[int]:
    """What a functional collective returned, as it is once `wait_tensor` has filled it; 0 where nobody waited."""
    columns = world.traces[rank].values
    found = []
    for output in outputs:
        near = world.neighbours(rank).of(output)
        later = near[columns.write[near] == columns.write[output] + 1]
        known = later[columns.fingerprint[later] >= 0]
        found.append(int(known[0]) if len(known) else 0)
    return found


def _known(world: World, rank: int, value: int) -> Handed | None:
    own = world.traces[rank].fingerprint(value) if value else None
    if own is not None:
        return Handed((own,))
    parts = _parts(world, rank, value) if value else ()
    return Handed(parts) if parts else None


def _parts(world: World, rank: int, value: int) -> tuple[Fingerprint, ...]:
    """Fingerprints of parts that make up a value end to end; none if they do not."""
    trace = world.traces[rank]
    columns = trace.values
    near = world.neighbours(rank).in_state(value)
    candidates = near[columns.fingerprint[near] >= 0]
    start = end = int(columns.offset[value])
    found: list[Fingerprint] = []
    for part in candidates[np.argsort(columns.offset[candidates], kind="stable")].tolist():
        fingerprint = trace.fingerprint(part) if int(columns.offset[part]) == end else None
        if fingerprint is not None and _is_dense(trace, part):
            found.append(fingerprint)
            end += math.prod(trace.meta(part).shape)
    return tuple(found) if end - start == math.prod(trace.meta(value).shape) else ()


def _is_dense(trace: Trace, value: int) -> bool:
    meta, step = trace.meta(value), 1
    for size, stride in zip(reversed(meta.shape), reversed(meta.stride), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True
