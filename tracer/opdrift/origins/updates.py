"""What each run made of a parameter between two of its uses, outside of its modules: the update of an optimizer.

One run may hold the parameter whole, the other in parts. What they call to update it, and with which numbers, is the same
for a whole and for a part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from opdrift.case import Case, Side
from opdrift.compare import difference
from opdrift.origins.model import Origin
from opdrift.origins.regions import region_of
from opdrift.pairs import DIFFERENT, EQUAL
from opdrift.records import Leaf, Sides, Signature
from opdrift.shards import differently_sharded, moves_parts, sharding
from opdrift.tokens import base
from opdrift.tracefile.fingerprints import Fingerprint

#: Ops that hand numbers on as they are, or in another type: no part of an update's arithmetic.
_COPYING: Final = frozenset({"_to_copy", "to", "clone", "copy_", "contiguous", "detach"})
#: Ops whose arguments say nothing of an update.
_MAKING: Final = ("zeros", "ones", "full", "empty", "scalar_tensor")
#: Parameters whose updates are compared.
_LOOKED_AT: Final = 32
#: How many earlier contents of a parameter are looked at.
_LOOK_BACK: Final = 64

#: The name of an argument and its number.
Number = tuple[str, object]


@dataclass(frozen=True, slots=True)
class Step:
    """An op of an update: its name, whether of one tensor or of many, in place or not, and its numbers."""

    name: str
    numbers: tuple[Number, ...]


@dataclass(frozen=True, slots=True)
class Update:
    """How one run updated a parameter.

    Attributes:
        ops: In order.
        alone: They are about this parameter, not about all whose parts lie in one tensor.
    """

    ops: tuple[int, ...]
    alone: bool

    def steps(self, side: Side) -> dict[Step, list[int]]:
        """What was called, and the ops that are it."""
        found: dict[Step, list[int]] = {}
        for op in self.ops:
            name = base(side.name(op))
            plain = name not in _COPYING and not name.startswith(_MAKING)
            if plain and not _averages(side, op):
                found.setdefault(step_of(side, op), []).append(op)
        return found


def gathered_parameter(case: Case, left: int, right: int) -> Sides[Leaf | None] | None:
    """The parameter that both values are, gathered in one run at least and written by other ops in each."""
    rows = _parameters(case.left, left), _parameters(case.right, right)
    for name in rows[0]:
        pair = rows[0][name], rows[1].get(name)
        if any(leaf is not None and leaf.when == "gather" for leaf in pair) and all(pair):
            return Sides(*pair)
    return None


def _parameters(side: Side, value: int) -> dict[str, Leaf]:
    """By name the parameters that a value, or what lay in its storage when the run began, was called."""
    rows = side.leaves.of(value)
    first = side.leaves.of_storage(value)
    if not rows and first is not None and first.when != "gather":
        rows = [first]
    return {leaf.name: leaf for leaf in rows if leaf.name and leaf.kind == "parameter"}


def updates_of(case: Case, origin: Origin) -> Sides[Update]:
    """How each run updated the parameter of an origin since both last read the same."""
    name, behind = origin.names[0], since_equal(case, origin)
    return Sides(_update(case.left, name, behind.left), _update(case.right, name, behind.right))


def since_equal(case: Case, origin: Origin) -> Sides[tuple[int, ...]]:
    """The ops behind a parameter that is gathered, since both runs first read what they last had in common of it.

    A part of it is no content that the other run, which holds all of it, ever had: its history goes back to the start.
    """
    region, reader = origin.region, origin.op.left
    if reader is None:
        return region
    name, contents = origin.names[0], case.left.contents
    inputs, pairing = case.compared.inputs, case.pairing
    before = (inputs.status == EQUAL) & (pairing.left[inputs.pair] < reader)
    for side, values in ((case.left, inputs.left), (case.right, inputs.right)):
        storage = side.trace.values.storage
        held = [int(storage[leaf.value]) for leaf in side.leaves.by_name.get(name, ())]
        before &= np.isin(storage[values], held)
    common: object = None
    row = -1
    slots = np.flatnonzero(before)
    for slot in slots[np.argsort(pairing.left[inputs.pair[slots]])][::-1].tolist():
        left, right = int(inputs.left[slot]), int(inputs.right[slot])
        held_by = _parameters(case.left, left), _parameters(case.right, right)
        base_of = int(contents.states.base[contents.states.of[left]])
        found = case.left.trace.fingerprint(base_of) if base_of >= 0 else None
        if found is None or name not in held_by[0] or name not in held_by[1]:
            continue
        if common not in (None, found.key):
            break
        common, row = found.key, int(inputs.pair[slot])
    if row < 0:
        return region
    left, right = int(pairing.left[row]), int(pairing.right[row])
    return Sides(
        tuple(op for op in region.left if op > left),
        tuple(op for op in region.right if op > right),
    )


@dataclass(frozen=True, slots=True)
class Unlike:
    """What only one run does in its update of a parameter.

    Attributes:
        renumbered: The same op of each run, by its index, and what it is called with.
        only: Per run, what else only it calls, with its first op.
        alone: Both updates are about this parameter, not about all that lie in one tensor.
    """

    renumbered: tuple[tuple[Sides[int], Sides[Step]], ...]
    only: Sides[dict[Step, int]]
    alone: bool


def unlike(case: Case, origin: Origin) -> Unlike:
    """How the updates of a parameter differ in what is called."""
    return unlike_updates(case, updates_of(case, origin))


def unlike_updates(case: Case, updates: Sides[Update]) -> Unlike:
    """How two updates differ in what is called."""
    steps = updates.left.steps(case.left), updates.right.steps(case.right)
    alone = updates.left.alone and updates.right.alone
    times = _times(steps[0]), _times(steps[1])
    only: list[dict[Step, int]] = []
    for n in (0, 1):
        own, other = steps[n], steps[1 - n]
        # one run may have updated it more often since both read the same
        more = (s for s in own if len(own[s]) * times[1 - n] > len(other.get(s, ())) * times[n])
        only.append({s: own[s][0] for s in more if alone or s not in other})
    renumbered = []
    for step, op in list(only[0].items()):
        names = [name for name, _ in step.numbers]
        for twin, other_op in only[1].items():
            if twin.name == step.name and [name for name, _ in twin.numbers] == names and names:
                renumbered.append((Sides(op, other_op), Sides(step, twin)))
                del only[0][step], only[1][twin]
                break
    return Unlike(tuple(renumbered), Sides(only[0], only[1]), alone)


def _times(steps: dict[Step, list[int]]) -> int:
    """How often a run updated the parameter: as often as it called what it called last."""
    return len(max(steps.values(), key=lambda ops: ops[-1], default=[0]))


def _update(side: Side, name: str, region: tuple[int, ...]) -> Update:
    states, ops = side.contents.states, side.trace.ops
    own, begun = _held(side, name), side.starts.since(name)
    found: list[int] = []
    needed: dict[int, set[int]] = {}  # by state, the values of it that the update goes back to
    for op in sorted(region, reverse=True):
        written = [v for v in ops.outputs[op].tolist() if int(states.writer[states.of[v]]) == op]
        used = any(_is_needed(side, needed, v) for v in written)
        # how it was drawn and loaded is no update of it
        if not _is_arithmetic(side, op) or side.seq(op) <= begun:
            continue
        if not used and not any(own.overlaps(side, v) for v in written):
            continue
        # where the parameter may be anywhere, at least no norm of all gradients is it, nor what one is made of
        if not own.alone and not any(_size(side, v) in side.leaves.sizes for v in written):
            continue
        if not own.alone and not side.gradients.updates(op):
            continue
        found.append(op)
        # a factor that all gradients are multiplied with is made of all of them; a part may be one element
        shapes = {side.trace.meta(v).shape for v in written} - {()}
        for v in ops.inputs[op].tolist():
            shape = side.trace.meta(v).shape
            if math.prod(shape) > 1 or shape in shapes:
                needed.setdefault(int(states.of[v]), set()).add(v)
    return Update(tuple(reversed(found)), own.alone)


def _is_needed(side: Side, needed: dict[int, set[int]], written: int) -> bool:
    """Whether an op writes what is gone back to; what it leaves as it was in the same storage was written before.

    The gradients of a flat parameter lie in one storage, and each may be written by an op of its own.
    """
    states = side.contents.states
    state = int(states.of[written])
    values = needed.get(state)
    if not values:
        return False
    _, first, end = _place(side, written)
    left = {v for v in values if not _overlap(_place(side, v), first, end)}
    if left and int(states.before[state]) >= 0:
        needed.setdefault(int(states.before[state]), set()).update(left)
    return len(left) < len(values)


def _overlap(place: tuple[int, int, int], first: int, end: int) -> bool:
    return place[1] < end and first < place[2]


@dataclass(frozen=True, slots=True)
class _Held:
    """Where a run holds a parameter, or this rank's part of it, between its uses.

    Attributes:
        places: Storages, with the first element there and the one after the last.
        alone: That is known; else it may be anywhere: another rank holds all of it, beside what this one holds.
    """

    places: frozenset[tuple[int, int, int]]
    alone: bool

    def overlaps(self, side: Side, value: int) -> bool:
        """Whether a value has elements there."""
        if not self.alone:
            return True
        storage, first, end = _place(side, value)
        return any(place[0] == storage and _overlap(place, first, end) for place in self.places)


def _held(side: Side, name: str) -> _Held:
    parts = [
        leaf
        for leaf in side.trace.leaves
        if leaf.name == name and leaf.kind == "shard" and 0 not in side.trace.meta(leaf.value).shape
    ]
    if parts or name in sharding(side.trace):
        return _Held(frozenset(_place(side, leaf.value) for leaf in parts), bool(parts))
    rows = side.leaves.by_name.get(name, ())
    return _Held(frozenset(_place(side, leaf.value) for leaf in rows), alone=True)


def _place(side: Side, value: int) -> tuple[int, int, int]:
    values = side.trace.values
    first = int(values.offset[value])
    return int(values.storage[value]), first, first + _size(side, value)


def _size(side: Side, value: int) -> int:
    return math.prod(side.trace.meta(value).shape)


def _is_arithmetic(side: Side, op: int) -> bool:
    """Whether an op is called outside of modules and of the backward pass, and hands on more than a view or a collective."""
    ops = side.trace.ops
    outside = not int(ops.call[op]) and not ops.phase[op]
    return outside and not side.contents.tokens.view[op] and not moves_parts(side.name(op))


def _averages(side: Side, op: int) -> bool:
    """Whether an op divides what was just reduced by a part of the number of ranks: a mean that is taken in two steps."""
    states, inputs = side.contents.states, side.trace.ops.inputs[op].tolist()
    if base(side.name(op)).rstrip("_") != "div" or not inputs:
        return False
    maker = int(states.writer[states.of[inputs[0]]])
    number = next((n for _, n in _numbers(side.op(op).signature)), None)
    if maker < 0 or not isinstance(number, (int, float)) or number < 1:
        return False
    return any(
        mark.kind == "collective"
        and mark.seq == side.seq(maker)
        and mark.fields.get("reduction") != "AVG"
        and len(mark.fields.get("ranks") or ()) % number == 0
        for mark in side.trace.marks
    )


def step_of(side: Side, op: int) -> Step:
    """An op as a step of an update."""
    return step_in(side.op(op).signature)


def step_in(signature: Signature) -> Step:
    """The same of what an op was called with."""
    name = base(signature.op.name).removeprefix("_foreach_").rstrip("_")
    return Step(name, tuple(_numbers(signature)))


def _numbers(signature: Signature) -> Iterator[Number]:
    for name, given in signature.arguments:
        value = given
        if isinstance(value, tuple) and value and len(set(map(str, value))) == 1:
            value = value[0]  # the same for each of many tensors
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            yield name, value


def updated_otherwise(case: Case, *, numbers: bool = False) -> Iterator[Origin]:
    """Parameters that the runs keep in different ways and update by other calls, where each is read first after it.

    Where one run computes in another type its parameters differ from the start, and sizes tell nothing of an update.

    Args:
        case: Both runs.
        numbers: Only calls with other numbers: what else one run calls may come to the same.
    """
    apart = differently_sharded(case.left.trace, case.right.trace)
    inputs, pairing = case.compared.inputs, case.pairing
    backward = np.flatnonzero(case.left.trace.ops.phase)
    if not apart or not len(backward):
        return
    looked_at: set[str] = set()
    order = np.lexsort((inputs.position, pairing.left[inputs.pair]))
    differs = inputs.status[order] == DIFFERENT
    after = pairing.left[inputs.pair[order]] > backward[0]
    for slot in order[differs & after].tolist():
        origin = gathered_origin(case, slot)
        if origin is None or origin.names[0] in looked_at:
            continue
        updates = updates_of(case, origin)
        if not updates.left.ops or not updates.right.ops:
            continue
        looked_at.add(origin.names[0])
        found = unlike(case, origin)
        alone = bool(found.only.left) != bool(found.only.right)
        if found.renumbered or (alone and not numbers):
            yield origin
        if len(looked_at) == _LOOKED_AT:
            return


def gathered_origin(case: Case, slot: int) -> Origin | None:
    """A parameter that an op reads, as where the runs part; None where neither run gathered it.

    Args:
        case: Both runs.
        slot: The place among the inputs that are compared.
    """
    inputs, pairing = case.compared.inputs, case.pairing
    values = int(inputs.left[slot]), int(inputs.right[slot])
    leaf = gathered_parameter(case, *values)
    if leaf is None:
        return None
    row = int(inputs.pair[slot])
    op: Sides[int | None] = Sides(int(pairing.left[row]), int(pairing.right[row]))
    return Origin(
        kind="structure",
        story="gathered",
        op=op,
        row=row,
        values=Sides(*values),
        slot=int(inputs.position[slot]),
        order=float(pairing.left[row]),
        leaf=leaf,
        region=region_of(case, *values).ops,
    )


# ---- sizes -----------------------------------------------------------------------------------------------


def contents_of(case: Case, origin: Origin) -> Sides[Fingerprint | None]:
    """What each run computes with of the parameter of an origin: all of it, whatever view of it an op reads."""
    values, leaf = origin.values, origin.leaf
    return Sides(
        _whole(case.left, values.left, leaf.left), _whole(case.right, values.right, leaf.right)
    )


def _whole(side: Side, value: int | None, leaf: Leaf | None) -> Fingerprint | None:
    if value is None or leaf is None:
        return None
    states = side.contents.states
    state = int(states.of[value])
    held = leaf.value if int(states.of[leaf.value]) == state else int(states.base[state])
    found = side.trace.fingerprint(held) if held >= 0 else None
    size = math.prod(side.trace.meta(leaf.value).shape)
    return found if found is not None and found.n == size else None


def change_of(case: Case, origin: Origin) -> float | None:
    """By how much a run updated the parameter, in parts of its norm; None where neither run tells.

    A run that keeps the parameter whole tells it by what lay in the same memory before; one that gathers it, by what it
    gathered before.
    """
    after, before = contents_of(case, origin), before_of(case, origin)
    for now, then in ((after.left, before.left), (after.right, before.right)):
        if now is not None and then is not None:
            return difference(now, then).relative
    return None


def before_of(case: Case, origin: Origin) -> Sides[Fingerprint | None]:
    """What the parameter of an origin held in each run before it was updated; None where a run does not tell."""
    after, values, region = contents_of(case, origin), origin.values, origin.region
    return Sides(
        _before(case.left, values.left, after.left, region.left, origin),
        _before(case.right, values.right, after.right, region.right, origin),
    )


def _before(
    side: Side,
    value: int | None,
    now: Fingerprint | None,
    region: tuple[int, ...],
    origin: Origin,
) -> Fingerprint | None:
    if value is None or now is None:
        return None
    for found in (_kept_before(side, value, region), _named_before(side, value, origin)):
        if found is not None and found.n == now.n and found.key != now.key:
            return found
    return None


def _kept_before(side: Side, value: int, region: tuple[int, ...]) -> Fingerprint | None:
    """What lay in the memory of a value before the ops of a region wrote into it."""
    states, written = side.contents.states, set(region)
    state = int(states.of[value])
    for _ in range(_LOOK_BACK):
        if state < 0 or int(states.writer[state]) not in written:
            break
        state = int(states.before[state])
    held = int(states.base[state]) if state >= 0 else -1
    return side.trace.fingerprint(held) if held >= 0 else None


def _named_before(side: Side, value: int, origin: Origin) -> Fingerprint | None:
    """What had the name of the parameter last, before this content of it."""
    rows = side.leaves.by_name.get(origin.names[0], [])
    state = int(side.contents.states.of[value])
    now = next((n for n, r in enumerate(rows) if int(side.contents.states.of[r.value]) == state), 0)
    return side.trace.fingerprint(rows[now - 1].value) if now else None
