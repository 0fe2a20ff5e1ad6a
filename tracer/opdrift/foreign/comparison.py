"""Hold the pairs of two logs against each other: where hashes differ first, and what that may mean."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final, Literal

from opdrift.foreign.matching import Matched
from opdrift.foreign.model import Log, LoggedOp, LoggedTensor

Story = Literal["op", "input", "other-source", "lone"]

#: A norm summed in another order differs by about sqrt(n) units of double precision: no difference of content.
_SUMMATION: Final = 2.0**-53


@dataclass(frozen=True, slots=True)
class Origin:
    """A place where the logs come apart.

    Attributes:
        story: "op": inputs equal as far as known, another output. "input": an input that no earlier op
            explains. "other-source": such an input that an op made which only one run has. "lone": ops
            that only one run has, and nothing else to see.
        left: The left op; None if only the right log has it.
        right: The right op.
        slot: Position of the output ("op") or the input.
        values: That tensor on each side.
        inputs_match: None where inputs were not hashed.
        source: The op that made the input, for "other-source".
    """

    story: Story
    left: LoggedOp | None
    right: LoggedOp | None
    slot: int = 0
    values: tuple[LoggedTensor | None, LoggedTensor | None] = (None, None)
    inputs_match: bool | None = None
    source: LoggedOp | None = None

    @property
    def op(self) -> LoggedOp:
        """The op to show: the left one, where there is one."""
        found = self.left or self.right
        assert found is not None
        return found

    @property
    def distance(self) -> float | None:
        """How far the norms are apart."""
        a, b = self.values
        return a.distance(b) if a is not None and b is not None else None


@dataclass(frozen=True, slots=True)
class Compared:
    """What the pairs say.

    Attributes:
        origins: In the order of the left log.
        differing: Pairs of which an output differs.
        distances: Per pair the largest distance of its outputs' norms; None where unknown.
        checked: Outputs that could be held against each other.
    """

    origins: tuple[Origin, ...]
    differing: tuple[int, ...]
    distances: tuple[float | None, ...]
    checked: int


def compare(left: Log, right: Log, matched: Matched) -> Compared:
    """Go through the pairs in order."""
    state = _State(left, right, matched)
    for place in range(len(matched.pairs)):
        state.look_at(place)
    if not state.origins and (matched.left_only or matched.right_only):
        state.lone_ops()
    return Compared(
        tuple(state.origins), tuple(state.differing), tuple(state.distances), state.checked
    )


def summed_otherwise(distance: float | None, text: str) -> bool:
    """Whether two norms are so close that the same numbers, added in another order, give them."""
    return distance is not None and distance <= 4 * _SUMMATION * math.sqrt(max(_count(text), 1))


def _count(text: str) -> int:
    shape = text.partition("[")[2].partition("]")[0]
    sizes = [int(s) for s in shape.split(",") if s.strip().isdecimal()]
    return math.prod(sizes)


#: A pair of tensors at one position; None where one side has none there.
_Slot = tuple[int, LoggedTensor | None, LoggedTensor | None]


class _State:
    """What has been seen on the way through the pairs."""

    def __init__(self, left: Log, right: Log, matched: Matched) -> None:
        self._left, self._right, self._matched = left, right, matched
        #: Pairs of contents that are known to differ: what reads them is a receiver.
        self._known: set[tuple[object, object]] = set()
        self._sides = (
            _OneSide(left.ops, matched.left_only),
            _OneSide(right.ops, matched.right_only),
        )
        self.origins: list[Origin] = []
        self.differing: list[int] = []
        self.distances: list[float | None] = []
        self.checked = 0

    def look_at(self, place: int) -> None:
        """Look at one pair."""
        i, j = self._matched.pairs[place]
        a, b = self._left.ops[i], self._right.ops[j]
        before, after = list(_slots(a.inputs, b.inputs)), list(_slots(a.outputs, b.outputs))
        if a.overwrites:  # what was there before does not count
            before = before[1:]
        came = [s for s in before if _same(s) is False]
        gone = [s for s in after if _same(s) is False]
        self.checked += sum(_same(s) is not None for s in after)
        distances = [d for s in gone if (d := _distance(s)) is not None]
        self.distances.append(max(distances, default=None) if gone else 0.0)
        fresh = [s for s in came if (_key(s[1]), _key(s[2])) not in self._known]
        if fresh:
            self._inputs(a, b, fresh)
        elif gone and not came:
            self._output(a, b, before, gone)
        for slot in (*came, *gone):
            self._taint(slot)
        if gone:
            self.differing.append(place)

    def _taint(self, slot: _Slot) -> None:
        keys = _key(slot[1]), _key(slot[2])
        self._known.add(keys)
        for side, key in zip(self._sides, keys, strict=True):
            side.tainted.add(key)

    def _output(self, a: LoggedOp, b: LoggedOp, before: list[_Slot], gone: list[_Slot]) -> None:
        """An output differs and no input is known to."""
        known = [same for s in before if (same := _same(s)) is not None]
        if before and not known and self.differing and a.arguments == b.arguments:
            return  # without hashes of the inputs only the first op that differs can be told
        slot, x, y = gone[0]
        if a.view and not known:  # a view differs because what it looks at does
            self.origins.append(Origin("input", a, b, slot, (x, y), False))
        else:
            equal = True if len(known) == len(before) else None
            self.origins.append(Origin("op", a, b, slot, (x, y), equal))

    def _inputs(self, a: LoggedOp, b: LoggedOp, fresh: list[_Slot]) -> None:
        """Inputs differ, and no pair of ops made them so."""
        seen: set[tuple[object, object]] = set()
        for slot, x, y in fresh:
            keys = _key(x), _key(y)
            if keys in seen:
                continue
            seen.add(keys)
            sources = [
                s for side, key in zip(self._sides, keys, strict=True) if (s := side.lone.get(key))
            ]
            follows = any(side.follows(key) for side, key in zip(self._sides, keys, strict=True))
            # an op that only one run has, and that reads what differs already, is no news
            if follows or (not sources and self._may_be_left_out()):
                continue
            story: Story = "other-source" if sources else "input"
            source = sources[0] if sources else None
            self.origins.append(Origin(story, a, b, slot, (x, y), False, source))

    def _may_be_left_out(self) -> bool:
        """In a log of torchtitan ops are missing, so what nothing explains may come from what differs already."""
        return self._left.format == "torchtitan" and bool(self.differing)

    def lone_ops(self) -> None:
        """Nothing that is paired differs, but one run has ops that the other lacks: only if they compute."""
        for side, ops, lone in (
            ("left", self._left.ops, self._matched.left_only),
            ("right", self._right.ops, self._matched.right_only),
        ):
            for op in (ops[i] for i in lone):
                if not op.view:
                    pair = (op, None) if side == "left" else (None, op)
                    self.origins.append(Origin("lone", *pair))
                    return


class _OneSide:
    """Ops that only this run has, by what they returned, and which contents of this run differ."""

    def __init__(self, ops: Sequence[LoggedOp], lone: Sequence[int]) -> None:
        self.lone: dict[object, LoggedOp] = {}
        for place in lone:
            for tensor in ops[place].outputs:
                if (key := _key(tensor)) is not None:
                    self.lone.setdefault(key, ops[place])
        self.tainted: set[object] = set()

    def follows(self, key: object) -> bool:
        """Whether the lone ops that made this content read, at some step back, what differs already."""
        stack, seen = [key], {key}
        while stack:
            op = self.lone.get(stack.pop())
            for tensor in op.inputs if op is not None else ():
                found = _key(tensor)
                if found in self.tainted:
                    return True
                if found not in seen:
                    seen.add(found)
                    stack.append(found)
        return False


def _slots(left: Sequence[LoggedTensor], right: Sequence[LoggedTensor]) -> Iterator[_Slot]:
    for slot, (a, b) in enumerate(zip_longest(left, right)):
        yield slot, a, b


def _same(slot: _Slot) -> bool | None:
    """Whether two tensors agree as far as the logs tell; None where they do not tell."""
    _, left, right = slot
    if left is None or right is None or (left.text and right.text and left.text != right.text):
        return False
    return left.same(right)


def _distance(slot: _Slot) -> float | None:
    _, left, right = slot
    return left.distance(right) if left is not None and right is not None else None


def _key(tensor: LoggedTensor | None) -> object:
    """What a tensor is recognised by where it is read: its hashes; None where it has none that tell."""
    if tensor is None or not tensor.hashes:
        return None
    if all(h.value in (0, 1) for h in tensor.hashes):
        return None  # zeros, and a gradient's seed, are everywhere
    return tuple((h.kind, repr(h.value)) for h in tensor.hashes)
