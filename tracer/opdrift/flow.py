"""Follow values through one trace: what reaches an output, and what a value was made of."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from opdrift.contents import Contents, Flags
from opdrift.tokens import base
from opdrift.tracefile.columns import Ints

#: Ops whose result leaves the tensors: a Python number that steers the program, or another rank.
_STEERING: Final = frozenset(["_local_scalar_dense", "is_nonzero", "equal", "item"])
#: Ops whose inputs and outputs are held as lists at a time.
_BLOCK: Final = 1 << 15
#: So many tensors may stand behind the lists that an op is given.
_BEHIND_LISTS: Final = 3
#: A walk back through unpaired ops stops after this many.
_WALK: Final = 20_000


def is_collective(name: str) -> bool:
    """Whether an op of this name talks to other ranks: what it gives depends on what they do."""
    return name.startswith(("c10d.", "_c10d_functional."))


def list_length(outputs: int, inputs: int) -> int:
    """How long the lists are that an op on lists of tensors is given, from how many tensors it returns and is given in all.

    Behind the lists there may be tensors for all of them: a factor, a learning rate, what a GradScaler found.
    """
    lengths = (
        math.gcd(outputs, inputs - behind) for behind in range(min(_BEHIND_LISTS, inputs) + 1)
    )
    return next((length for length in lengths if length > 1), 1)


def of_the_same(inputs: Sequence[int], outputs: Sequence[int], value: int) -> list[int]:
    """Of what an op on lists of tensors is given, what stands in the place of one that it returns."""
    returned = list(dict.fromkeys(outputs))  # a tensor that is written is returned as well
    length = list_length(len(returned), len(inputs))
    if length == 1 or value not in returned:
        return list(inputs)
    place = returned.index(value) % length
    return [given for n, given in enumerate(inputs) if n % length == place]


def steering_ops(contents: Contents) -> list[int]:
    """Ops that hand a tensor's content to the program itself, or to another process."""
    trace = contents.trace
    named: set[int] = set()
    for signature in contents.tokens.table:
        name = trace.op_info(signature).name
        if base(name) in _STEERING or is_collective(name):
            named.add(signature)
    if not named:
        return []
    hits = np.isin(trace.ops.signature, np.array(sorted(named), np.int64))
    return [int(i) for i in np.flatnonzero(hits)]


def reaching(contents: Contents, values: Iterable[int], ops: Iterable[int] = ()) -> bytearray:
    """Which ops have a part in the given values, or in the given ops; one byte an op."""
    trace, states = contents.trace, contents.states
    # views of the columns, not lists of them: a list of a million numbers takes four times the memory
    of, writer, before = _numbers(states.of), _numbers(states.writer), _numbers(states.before)
    whole = contents.whole.view(np.uint8).data
    live_value, live_state = bytearray(len(of)), bytearray(len(writer))
    live = bytearray(len(trace.ops))
    inside, delivered = contents.regions.at, states.delivered
    for value in values:
        live_value[value] = 1
        live_state[of[value]] = 1
    for op in ops:
        live[op] = 1
    for start in range((len(live) - 1) // _BLOCK * _BLOCK, -1, -_BLOCK):
        ins, ins_at, outs, outs_at = _block(contents, start, min(start + _BLOCK, len(live)))
        for k in range(len(ins_at) - 2, -1, -1):
            op = start + k
            is_live = live[op]
            if op in delivered:
                is_live = is_live or any(live_state[state] for state in delivered[op])
            for value in outs[outs_at[k] : outs_at[k + 1]]:
                state = of[value]
                if writer[state] != op:
                    is_live = is_live or live_value[value]
                elif live_state[state]:
                    is_live = 1
                    # a write into a part leaves the rest as it was
                    if not whole[value] and before[state] >= 0:
                        live_state[before[state]] = 1
            if not is_live:
                continue
            live[op] = 1
            # a compiled region reads what its calls of other kernels made, with no op that could be seen
            for inner in inside[op].inside if op in inside else ():
                live[inner] = 1
            for value in ins[ins_at[k] : ins_at[k + 1]]:
                live_value[value] = 1
                live_state[of[value]] = 1
    return live


def made_from(contents: Contents, sources: Iterable[int]) -> tuple[bytearray, bytearray]:
    """Which values, and which states of storages, are made of the given values; one byte each."""
    trace, states = contents.trace, contents.states
    of, writer, before = _numbers(states.of), _numbers(states.writer), _numbers(states.before)
    whole = contents.whole.view(np.uint8).data
    value_is, state_is = bytearray(len(of)), bytearray(len(writer))
    around, reached = contents.regions.around, set[int]()
    for value in sources:
        value_is[value] = 1
        state_is[of[value]] = 1
    for start in range(0, len(trace.ops), _BLOCK):
        end = min(start + _BLOCK, len(trace.ops))
        ins, ins_at, outs, outs_at = _block(contents, start, end)
        for k in range(len(ins_at) - 1):
            given = any(value_is[v] or state_is[of[v]] for v in ins[ins_at[k] : ins_at[k + 1]])
            given = given or start + k in reached
            if given and start + k in around:
                reached.add(around[start + k].op)
            if given and start + k in states.delivered:
                for state in states.delivered[start + k]:
                    state_is[state] = 1
            for value in outs[outs_at[k] : outs_at[k + 1]]:
                state = of[value]
                rest = before[state] if writer[state] == start + k and not whole[value] else -1
                if given or (rest >= 0 and state_is[rest]):
                    value_is[value] = 1
                    state_is[state] = 1
    return value_is, state_is


def _numbers(column: Ints) -> memoryview[int]:
    return np.ascontiguousarray(column).data.cast("B").cast("q")


def _block(
    contents: Contents, start: int, end: int
) -> tuple[list[int], list[int], list[int], list[int]]:
    """Inputs that count of a stretch of ops and where each op's begin, and the same of its outputs."""
    ops = contents.trace.ops
    first, last = int(ops.inputs.offsets[start]), int(ops.inputs.offsets[end])
    counted = contents.counted[first:last]
    kept = np.concatenate([np.zeros(1, np.int64), np.cumsum(counted)])
    ins: list[int] = ops.inputs.values[first:last][counted].tolist()
    ins_at: list[int] = kept[ops.inputs.offsets[start : end + 1] - first].tolist()
    first = int(ops.outputs.offsets[start])
    outs: list[int] = ops.outputs.values[first : int(ops.outputs.offsets[end])].tolist()
    outs_at: list[int] = (ops.outputs.offsets[start : end + 1] - first).tolist()
    return ins, ins_at, outs, outs_at


def unread(contents: Contents) -> list[int]:
    """Values that an op made and no op read: what a run without named outputs was for."""
    states = contents.states
    made = np.flatnonzero(contents.producer >= 0)
    last = states.first_read[states.of[made]] >= len(contents.trace.ops)
    return [int(v) for v in made[last]]


@dataclass(frozen=True, slots=True)
class Ancestry:
    """What a value was made of on one side, back to ops that have a counterpart.

    Attributes:
        ops: Indices of the ops on the way that have none, in order.
        boundary: Values at the other end: made by ops with a counterpart, or leaves.
        cut_short: There were more ops than are followed.
    """

    ops: tuple[int, ...]
    boundary: tuple[int, ...]
    cut_short: bool = False


def ancestry(
    contents: Contents, value: int, counterpart: Ints, agreed: Flags | None = None
) -> Ancestry:
    """Walk back from a value to leaves, and to ops whose `counterpart` (an op index, else -1) is known.

    Views are passed through, with or without a counterpart: what counts is what they were taken of.

    Args:
        contents: The side's.
        value: Where to start.
        counterpart: Per op.
        agreed: Per state, whether the other run is known to have had the same: no further back is of interest.
    """
    ops: set[int] = set()
    boundary: dict[int, None] = {}
    stack, seen = [value], {value}
    while stack and len(ops) < _WALK:
        current = stack.pop()
        op = int(contents.maker[current])
        view = op >= 0 and bool(contents.tokens.view[op])
        same = agreed is not None and current != value and agreed[contents.states.of[current]]
        if op < 0 or (counterpart[op] >= 0 and not view) or same:
            boundary[current] = None
            continue
        if op in ops:
            continue
        if counterpart[op] < 0:
            ops.add(op)
        for source in _sources(contents, current, op):
            if source not in seen:
                seen.add(source)
                stack.append(source)
    return Ancestry(tuple(sorted(ops)), tuple(boundary), bool(stack))


def _sources(contents: Contents, value: int, op: int) -> Iterator[int]:
    """What an op made a value of: its inputs that count, and what the value's storage held where it wrote only a part."""
    inputs, states = contents.trace.ops.inputs, contents.states
    for place, source in enumerate(inputs[op].tolist(), int(inputs.offsets[op])):
        if contents.counted[place]:
            yield source
    state = int(states.of[value])
    earlier = int(states.before[state])
    if int(states.writer[state]) == op and earlier >= 0 and not contents.whole[value]:
        yield contents.value_of_state(earlier)


class Behind:
    """The ops with a counterpart that values of one side were made of, past ops that have none.

    A walk ends where an earlier one began: many values are made of the same stretch of ops.

    Args:
        contents: The side's.
        counterpart: Per op, an op index or -1.
    """

    def __init__(self, contents: Contents, counterpart: Ints) -> None:
        self._contents = contents
        self._counterpart = counterpart
        self._known: dict[int, frozenset[int]] = {}

    def ops(self, value: int) -> frozenset[int]:
        """The ops at the ends of all ways back from a value, as in `ancestry`."""
        if value not in self._known:
            self._known[value] = frozenset(self._walk(value))
        return self._known[value]

    def _walk(self, value: int) -> set[int]:
        contents, found, passed = self._contents, set[int](), set[int]()
        stack, seen = [value], {value}
        while stack and len(passed) < _WALK:
            current = stack.pop()
            if current in self._known:
                found |= self._known[current]
                continue
            op = int(contents.maker[current])
            has_counterpart = op >= 0 and self._counterpart[op] >= 0
            if has_counterpart and not contents.tokens.view[op]:
                found.add(op)
                continue
            if op < 0 or op in passed:
                continue
            if not has_counterpart:
                passed.add(op)
            new = [s for s in _sources(contents, current, op) if s not in seen]
            seen.update(new)
            stack += new
        return found
