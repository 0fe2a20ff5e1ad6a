"""How a difference that came in goes on: sizes along the run, and ops that make it larger."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np

from opdrift.bounds import explained, gain_limit
from opdrift.case import Case
from opdrift.pairs import Slots
from opdrift.records import Amplifier, Sides
from opdrift.sizes import measure
from opdrift.tokens import base
from opdrift.tracefile.columns import Ints

#: Receivers whose sizes are looked at one by one; of more, an even choice.
_LOOKED_AT: Final = 1_500
#: With so many before it is a receiver compared, and so many stretches behind jumps are looked at whole.
_RECENT: Final = 8
_JUMPS: Final = 32
#: No op has a cap below this: what stays within it needs no closer look.
_SMALLEST_CAP: Final = 4.0
#: Ops that put many tensors into one, or take one apart: a part may differ by far more than the whole.
_PUT_TOGETHER: Final = frozenset(
    ["split_with_sizes_copy", "chunk_cat", "all_gather_copy_in", "_allgather_base_", "allgather_"]
)


@dataclass(frozen=True, slots=True)
class Received:
    """Sizes at one receiver.

    Attributes:
        row: Row of the pair.
        before: The largest relative difference among its inputs, None where one is not known.
        after: The largest among its outputs.
        slot: The output that its inputs explain least.
        amplifies: That output's difference is beyond what the op's kind usually gives.
        unexplained: It is beyond what the op can make of its inputs.
    """

    row: int
    before: float | None
    after: float | None
    slot: int | None = None
    amplifies: bool = False
    unexplained: bool = False


def receive(case: Case, rows: Ints) -> list[Received]:
    """Sizes at receivers, in order; of many, an even choice, and all where the difference jumps between two of it."""
    reader = _Reader(case)
    step = max(1, -(-len(rows) // _LOOKED_AT))
    chosen = range(0, len(rows), step)
    found = {k: reader.at(int(rows[k])) for k in chosen}
    for k in _jumps([found[k] for k in chosen]) if step > 1 else ():
        for between in range(chosen[k] + 1, chosen[k + 1]):
            found[between] = reader.at(int(rows[between]))
    return [found[k] for k in sorted(found)]


def _jumps(received: list[Received]) -> list[int]:
    """Places behind which a difference comes in that is larger than those just before can have become."""
    sizes = [max(r.before or 0.0, r.after or 0.0) for r in received]
    found = []
    for k, following in enumerate(received[1:]):
        came = following.before if following.before is not None else following.after
        if came is not None and came > _SMALLEST_CAP * max(sizes[max(0, k + 1 - _RECENT) : k + 1]):
            found.append(k)
    return found[:_JUMPS]


def amplifier(case: Case, received: Received) -> Amplifier:
    """An amplifying receiver as the diagnosis shows it."""
    i, j = int(case.pairing.left[received.row]), int(case.pairing.right[received.row])
    assert received.before is not None
    assert received.after is not None
    return Amplifier(
        op=case.left.name(i),
        module=case.left.module(i),
        seq=Sides(case.left.seq(i), case.right.seq(j)),
        input_difference=received.before,
        output_difference=received.after,
        gain=received.after / received.before,
    )


class _Reader:
    """Measures slots of pairs, each value once."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._inputs = _Sorted(case.compared.inputs)
        self._outputs = _Sorted(case.compared.outputs)
        self._known: dict[tuple[int, int], float | None] = {}

    def at(self, row: int) -> Received:
        """Sizes at one pair."""
        inputs, outputs = self._case.compared.inputs, self._case.compared.outputs
        came = [
            self._relative(inputs, k)
            for k in self._inputs.of(row)
            if self._case.compared.input_differs[k]
        ]
        before = None if not came or None in came else max(v for v in came if v is not None)
        gone = [(k, self._relative(outputs, k)) for k in self._outputs.of(row)]
        sizes = [(int(outputs.position[k]), size) for k, size in gone if size is not None]
        after = max((size for _, size in sizes), default=None)
        if before is None or after is None or not 0 < before < math.inf:
            return Received(row, before, after)
        op = int(self._case.pairing.left[row])
        # a region is judged at its boundary; what is put together or taken apart differs by what each part does
        other = op in self._case.left.regions.at or base(self._case.left.name(op)) in _PUT_TOGETHER
        if after <= _SMALLEST_CAP * before or other:
            return Received(row, before, after)
        overflowed = {int(outputs.position[k]) for k, _ in gone if self._overflows(k)}
        return self._judged(row, before, sizes, overflowed)

    def _judged(
        self, row: int, before: float, sizes: list[tuple[int, float]], overflowed: set[int]
    ) -> Received:
        """Rule of notes diagnosis 2, output by output; what is finite in one run only has no size that could grow.

        Beyond min(formula, cap) times what came in, and what rounding adds, an op amplifies; beyond the
        formula its inputs do not explain it.
        """
        view = self._case.left.views[int(self._case.pairing.left[row])]
        worst = Received(row, before, max(size for _, size in sizes))
        for slot, size in sizes:
            if slot in overflowed:
                continue
            bound, gain = explained(view, slot), gain_limit(view, slot)
            if bound.cannot_judge or size <= min(gain.formula, gain.cap) * before + bound.loose:
                continue
            beyond = size > gain.formula * before + bound.loose and not gain.discrete
            if not worst.amplifies or beyond > worst.unexplained or size > (worst.after or 0.0):
                worst = Received(row, before, size, slot, amplifies=True, unexplained=beyond)
        return worst

    def _overflows(self, k: int) -> bool:
        """Whether an output is finite in one run only, or not everywhere where the other is."""
        outputs = self._case.compared.outputs
        counts = (
            self._case.left.nonfinite(int(outputs.left[k])),
            self._case.right.nonfinite(int(outputs.right[k])),
        )
        return counts[0] != counts[1]

    def _relative(self, slots: Slots, k: int) -> float | None:
        key = int(slots.left[k]), int(slots.right[k])
        if key not in self._known:
            found = measure(self._case, *key)
            self._known[key] = None if found is None or not found.comparable else found.relative
        return self._known[key]


class _Sorted:
    """Finds the slots of a pair."""

    def __init__(self, slots: Slots) -> None:
        self._order = np.argsort(slots.pair, kind="stable")
        self._pairs = slots.pair[self._order]

    def of(self, row: int) -> list[int]:
        """Indexes of the slots of a pair."""
        start, end = np.searchsorted(self._pairs, [row, row + 1])
        return [int(k) for k in self._order[start:end]]
