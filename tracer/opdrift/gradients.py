"""Whose gradient a value is: follow it through reductions and an optimizer's step to the parameters that it ends in."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal

import numpy as np

from opdrift.contents import Contents
from opdrift.flow import is_collective, list_length
from opdrift.provenance.ops import COPIES, FILLS, operator
from opdrift.records import Leaf, OpInfo
from opdrift.tracefile.columns import Ints
from opdrift.tracefile.reader import Trace

#: Ops that are looked at on the way from one value: Adam of one tensor takes 10, a bucket of DDP holds many gradients.
_WALK: Final = 4096
#: They lay gradients into the buffer of a collective, or take them out of it.
_PACKING: Final = frozenset({"chunk_cat", "split_with_sizes_copy", "_foreach_copy"})
_BACKWARD: Final = 1
#: By which what a backward pass makes is added to what is there; in place or not.
ADDING: Final = frozenset({"add"})

Role = Literal["parameter", "gradient", "state"]


@dataclass(frozen=True, slots=True)
class Updated:
    """What a value is to an optimizer.

    Attributes:
        names: Parameters that are updated with it, in the order of the updates.
        role: The parameter itself, its gradient, or something that the optimizer keeps or works out.
    """

    names: tuple[str, ...]
    role: Role


def hands_on(info: OpInfo) -> bool:
    """Whether an op lays what it is given elsewhere, or brings it to other ranks, and computes nothing else."""
    plain = operator(info.name)
    return info.view or is_collective(info.name) or plain in _PACKING or plain in COPIES


class Gradients:
    """Follows values of one trace to the parameters that they update.

    Args:
        contents: Columns over its values.

    Attributes:
        trace: That trace.
    """

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self.trace: Trace = contents.trace
        self._updating: dict[int, bool] = {}

    def of(self, values: Iterable[int]) -> Updated | None:
        """What values are to an optimizer; None if none of them is known to update a parameter."""
        start = [v for v in values if v > 0]
        held = [name for v in start for name in self.held(v)]
        if held:
            return Updated(tuple(dict.fromkeys(held)), "parameter")
        found = tuple(dict.fromkeys(name for v in start for name in self._ends(v)))
        if not found:
            return None
        is_gradient = any(self._is_gradient(v) for v in start)
        return Updated(found, "gradient" if is_gradient else "state")

    def updates(self, op: int) -> bool:
        """Whether what an op makes ends in a parameter, by ops that keep its size."""
        if op not in self._updating:
            self._updating[op] = self.of(self.trace.ops.outputs[op].tolist()) is not None
        return self._updating[op]

    def added_to_earlier(self, op: int) -> Updated | None:
        """The parameters to whose gradients an op adds what a later pass made than the one that left them; None if it does not.

        What one pass adds up, it made itself: no forward pass lies between.
        """
        inputs = self.trace.ops.inputs[op].tolist()
        if operator(self._name(op)) not in ADDING or not len(inputs) > 1:
            return None
        there, added = map(self._writer, inputs[:2])
        if not 0 <= there < int(self._forward_before[op]) < added:
            return None
        if operator(self._name(there)).removeprefix("_foreach_") in FILLS:
            return None  # zeroed in place
        found = self.of(inputs[:1])
        return found if found is not None and found.role == "gradient" else None

    def _writer(self, value: int) -> int:
        """The op that wrote what a value holds: gradients of several parameters lie in one storage, written one by one."""
        states = self._contents.states
        state = int(states.of[value])
        while (writer := int(states.writer[state])) >= 0:
            outputs = self.trace.ops.outputs[writer].tolist()
            written = [v for v in outputs if int(states.of[v]) == state]
            earlier = int(states.before[state])
            if earlier < 0 or not written or any(self._overlap(v, value) for v in written):
                break
            state = earlier
        return writer

    @cached_property
    def _forward_before(self) -> Ints:
        """The last op of a forward pass before each op; -1 before the first."""
        ops = self.trace.ops
        is_forward = (ops.call != 0) & (ops.phase != _BACKWARD)
        found: Ints = np.maximum.accumulate(np.where(is_forward, np.arange(len(ops)), -1))
        return found

    def _ends(self, start: int) -> Iterator[str]:
        """Names of the parameters that a value goes into, by ops outside of modules and forward passes."""
        of = self._contents.states.of
        waiting = deque([start, *self._delivered(start)])
        seen = {int(of[value]) for value in waiting}
        looked_at = 0
        while waiting and looked_at < _WALK:
            value = waiting.popleft()
            for op, position in self._readers(value):
                looked_at += 1
                for made in self._goes_on(op, position):
                    state = int(of[made])
                    if state in seen:
                        continue
                    names = self.held(made)
                    if names:
                        yield from names
                        continue
                    seen.add(state)
                    waiting += [made, *self._delivered(made)]

    def _delivered(self, value: int) -> list[int]:
        """Memory of a communication library that the collective filled which made a value: its result is copied from there."""
        states = self._contents.states
        filled = states.delivered.get(int(states.writer[states.of[value]]), ())
        return [self._contents.value_of_state(state) for state in filled]

    def _readers(self, value: int) -> Iterator[tuple[int, int]]:
        """Ops that read a part of what a value holds, and at which of their inputs, until it is written over."""
        states, places = self._reads
        inputs, counted = self.trace.ops.inputs, self._contents.counted
        state = int(self._contents.states.of[value])
        while state >= 0:
            first, last = np.searchsorted(states, np.array([state, state + 1]))
            for place in places[first:last].tolist():
                if counted[place] and self._overlap(int(inputs.values[place]), value):
                    op = int(np.searchsorted(inputs.offsets, place, side="right")) - 1
                    yield op, place - int(inputs.offsets[op])
            state = self._unwritten_after(state, value)

    def _unwritten_after(self, state: int, value: int) -> int:
        """The next state of a storage, if what brought it left a value's elements as they were; else -1.

        The gradients of a bucket are written one by one, and read together.
        """
        after = int(self._after[state])
        writer = int(self._contents.states.writer[after]) if after >= 0 else -1
        if writer < 0:
            return -1
        of = self._contents.states.of
        written = (v for v in self.trace.ops.outputs[writer].tolist() if int(of[v]) == after)
        return -1 if any(self._overlap(v, value) for v in written) else after

    @cached_property
    def _after(self) -> Ints:
        """The state of the same storage after each, -1 for the last one."""
        before = self._contents.states.before
        found = np.full(len(before), -1, np.int64)
        later = np.flatnonzero(before >= 0)
        found[before[later]] = later
        return found

    @cached_property
    def _reads(self) -> tuple[Ints, Ints]:
        """The state of each input of each op, sorted, and its place among all inputs."""
        of = self._contents.states.of[self.trace.ops.inputs.values]
        order = np.argsort(of, kind="stable")
        return of[order], order

    def _goes_on(self, op: int, position: int) -> Sequence[int]:
        """What an op hands on of one of its inputs, if it is a part of a reduction or of an optimizer's step."""
        ops = self.trace.ops
        info = self.trace.op_info(int(ops.signature[op]))
        outputs: list[int] = ops.outputs[op].tolist()
        if not outputs or (
            int(ops.call[op]) and not ops.phase[op] and not is_collective(info.name)
        ):
            return ()
        plain = operator(info.name)
        if hands_on(info):
            return outputs
        if not (info.pointwise or plain.startswith(("_foreach_", "_fused_")) or info.mutates):
            return ()
        size = self._contents.layouts.size
        given = int(size.at(int(ops.inputs[op][position])))
        if plain.startswith(("_foreach_", "_fused_")):
            length = list_length(len(outputs), len(ops.inputs[op]))
            outputs = [v for n, v in enumerate(outputs) if n % length == position % length]
        return [int(v) for v in outputs if int(size.at(v)) >= given]  # no norm of it

    def _is_gradient(self, value: int) -> bool:
        """Whether what a value holds was written by a backward pass, or is a copy of such in its storage."""
        states, phase = self._contents.states, self.trace.ops.phase
        state = int(states.of[value])
        while state >= 0:
            writer = int(states.writer[state])
            if writer >= 0 and (phase[writer] == _BACKWARD or is_collective(self._name(writer))):
                return True
            state = int(states.before[state])
        return False

    def _name(self, op: int) -> str:
        return self.trace.op_info(int(self.trace.ops.signature[op])).name

    def held(self, value: int) -> list[str]:
        """Names of the parameters that a value is, or a part of which it is, whatever they held when they were named."""
        rows = self._by_storage.get(int(self.trace.values.storage[value]), ())
        rows = [row for row in rows if self._overlap(row.value, value)]
        # the parts of several lie in one tensor, which has a name of its own
        parts = [row.name for row in rows if row.kind == "shard"]
        return parts or [row.name for row in rows]

    @cached_property
    def _by_storage(self) -> dict[int, list[Leaf]]:
        storage = self.trace.values.storage
        found: dict[int, list[Leaf]] = {}
        for leaf in self.trace.leaves:
            # a storage that was found changed is told whole, under the name of each parameter in it
            if leaf.kind in ("parameter", "shard") and leaf.name and leaf.when != "changed":
                found.setdefault(int(storage[leaf.value]), []).append(leaf)
        return found

    def _overlap(self, one: int, other: int) -> bool:
        """Whether two values of one storage have elements in common, as far as the first and last of each tell."""
        offset, span = self.trace.values.offset, self._contents.layouts.span
        first, second = int(offset[one]), int(offset[other])
        return first < second + int(span.at(other)) and second < first + int(span.at(one))
