"""Hold the inputs and outputs of every pair of ops against each other, in bulk.

Most of two traces is equal; all of it is compared here with array operations on content words. What
differs is looked at one by one elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from opdrift.align import Pairing
from opdrift.asked import Asked, asked_of, otherwise
from opdrift.contents import Contents, Flags
from opdrift.flow import Behind
from opdrift.records import RAISED
from opdrift.tracefile.columns import Ints, Ragged

Statuses = npt.NDArray[np.int8]

UNKNOWN: Final = 0
EQUAL: Final = 1
DIFFERENT: Final = 2
#: Chains of views, and of values of unknown content, are followed this far.
_DEEPEST: Final = 64


@dataclass(frozen=True, slots=True)
class Slots:
    """Corresponding values of pairs: one row a tensor argument, or an output, that both sides have.

    Attributes:
        pair: Row of the pair in the pairing.
        position: Position among the left op's inputs or outputs.
        left: Left value id.
        right: Right value id.
        status: UNKNOWN, EQUAL or DIFFERENT.
    """

    pair: Ints
    position: Ints
    left: Ints
    right: Ints
    status: Statuses


class Compared:
    """What is equal and what differs in the pairs of two traces."""

    def __init__(self, left: Contents, right: Contents, pairing: Pairing) -> None:
        self.left = left
        self.right = right
        self.pairing = pairing
        #: Row of each left op's pair, -1 for ops without one; likewise for right ops.
        self.row_of_left = _rows(pairing.left, len(left.trace.ops))
        self.row_of_right = _rows(pairing.right, len(right.trace.ops))
        self.inputs, self._extra_input = self._input_slots()
        self.outputs = self._output_slots()

    def status(self, left: Ints, right: Ints) -> Statuses:
        """Whether values have the same content, shape and dtype."""
        a, b = self.left, self.right
        place = a.by_place[left], b.by_place[right]
        lineage = a.by_lineage[left], b.by_lineage[right]
        part = a.by_part[left], b.by_part[right]
        whole = a.by_whole[left], b.by_whole[right]
        equal = np.zeros(len(left), np.bool_)
        for one, other in (place, lineage, part, whole):
            equal |= (one == other) & (one != 0)
        blank = ((place[0] == 0) & (lineage[0] == 0)) | ((place[1] == 0) & (lineage[1] == 0))
        blank |= a.tells_nothing(b, left, right)
        return np.where(equal, EQUAL, np.where(blank, UNKNOWN, DIFFERENT)).astype(np.int8)

    # ---- per pair --------------------------------------------------------------------------------------

    @cached_property
    def settings_differ(self) -> Flags:
        """Pairs whose ops or non-tensor arguments differ, or whose tensor arguments are not the same ones."""
        i, j = self.pairing.left, self.pairing.right
        a, b = self.left.tokens, self.right.tokens
        found: Flags = (
            (a.settings[i] != b.settings[j])
            | (a.slots[i] != b.slots[j])
            | (a.family[i] != b.family[j])
        )
        found[_other_code(self)] = (
            False  # the arguments of generated code are in no order of the program's
        )
        found[list(self.asked_otherwise)] = True
        return found

    @cached_property
    def asked(self) -> tuple[Asked, Asked]:
        """What each run asked of its collectives, beside what an op's arguments say."""
        return asked_of(self.left.trace), asked_of(self.right.trace)

    @cached_property
    def asked_otherwise(self) -> dict[int, tuple[str, ...]]:
        """Pairs of which one asked for another reduction, root or ranks, and what of these it is."""
        left, right = self.left.trace, self.right.trace
        same_size = left.header.world_size == right.header.world_size
        found: dict[int, tuple[str, ...]] = {}
        for seq, told in self.asked[0].items():
            index = left.index_of(seq)
            row = -1 if index is None else int(self.row_of_left[index])
            if row < 0:
                continue
            theirs = self.asked[1].get(int(right.ops.seq[self.pairing.right[row]]))
            if theirs is not None and (names := otherwise(told, theirs, same_size=same_size)):
                found[row] = names
        return found

    @cached_property
    def constants(self) -> Flags:
        """Pairs of factories that were asked for different constants: what differs is judged where it is used.

        One that was asked for the same and gave another is an op like any other.
        """
        i, j = self.pairing.left, self.pairing.right
        a, b = self.left.tokens, self.right.tokens
        found: Flags = a.factory[i] & (a.full[i] != b.full[j])
        return found

    @cached_property
    def outputs_differ(self) -> Flags:
        """Pairs with an output that differs, or that only one side has."""
        found: Flags = self._any(self.outputs, DIFFERENT)
        i, j = self.pairing.left, self.pairing.right
        raised = (self.left.trace.ops.flags[i] & RAISED) != (self.right.trace.ops.flags[j] & RAISED)
        found |= raised
        return found

    @cached_property
    def tainted(self) -> Flags:
        """Pairs with an output that differs, or must be taken to, because an input of unknown effect does."""
        found = self.outputs_differ.copy()
        blank_outputs = self._any(self.outputs, UNKNOWN) & ~found
        if not blank_outputs.any():
            return found
        for _ in range(_DEEPEST):
            more = blank_outputs & ~found & self._inputs_differ(found)
            if not more.any():
                break
            found |= more
        return found

    @cached_property
    def inputs_known(self) -> Flags:
        """Pairs all of whose inputs are known on both sides."""
        return ~self._any(self.inputs, UNKNOWN)

    @cached_property
    def input_differs(self) -> Flags:
        """Per row of `inputs`: whether it differs, or is unknown and made by a tainted pair."""
        return self._slot_differs(self.tainted)

    @cached_property
    def input_explained(self) -> Flags:
        """Per row of `inputs`: whether one pair made both values, and its own verdict explains their difference.

        Constant factories explain nothing: what they make is judged where it is first used. So is memory that
        nothing has written. Nor does a view: what counts is what it was taken of.
        """
        rows = _pair_rows(self, self.inputs.left, self.inputs.right)
        explains = self._explains(rows)
        return (rows >= 0) & explains[rows]

    def _explains(self, makers: Ints) -> Flags:
        """Per pair: whether a difference that it hands on is accounted for at it or before it."""
        i = self.pairing.left
        view: Flags = self.left.tokens.view[i]
        fresh: Flags = self.constants | self.left.tokens.uninitialised[i]
        found: Flags = self.tainted & ~fresh & ~view
        through = np.flatnonzero(view[self.inputs.pair] & self.input_differs & (makers >= 0))
        for _ in range(_DEEPEST):
            more = through[found[makers[through]]]
            if not len(more):
                break
            found[self.inputs.pair[more]] = True
            through = through[~found[self.inputs.pair[through]]]
        return found

    def made_by_one_pair(self, left: int, right: int) -> int:
        """Row of the pair that made both values, as the same output or by writing their storages; -1 if none."""
        rows = _pair_rows(self, np.array([left]), np.array([right]))
        return int(rows[0])

    def _inputs_differ(self, tainted: Flags) -> Flags:
        found = np.zeros(len(self.pairing.left), np.bool_)
        found[self.inputs.pair[self._slot_differs(tainted)]] = True
        return found | self._extra_input

    def _slot_differs(self, tainted: Flags) -> Flags:
        slots = self.inputs
        found: Flags = slots.status == DIFFERENT
        blank, rows = self._blank
        if len(blank):
            found[blank] = (rows >= 0) & tainted[rows]
        slot, behind = self._beyond
        found[slot[tainted[behind]]] = True
        return found

    @cached_property
    def _blank(self) -> tuple[Ints, Ints]:
        """Rows of `inputs` of which it is not known if they differ, and the pair that made both values, or -1."""
        blank = np.flatnonzero(self.inputs.status == UNKNOWN)
        return blank, _pair_rows(self, self.inputs.left[blank], self.inputs.right[blank])

    @cached_property
    def _beyond(self) -> tuple[Ints, Ints]:
        """(row of `inputs`, pair behind it): for blank ones that the runs made in different ways.

        Where whole batches are compared the values at the ends of a stretch that only one run has are known,
        so only single samples need this.
        """
        blank, rows = self._blank
        return self._past(blank[rows < 0] if self.left.by_sample else blank[:0])

    def behind_each(self, slots: Ints) -> tuple[Ints, Ints]:
        """(row of `inputs`, pair behind it) as two columns, for many rows; see `behind`."""
        rows = _pair_rows(self, self.inputs.left[slots], self.inputs.right[slots])
        slot, behind = self._past(slots[rows < 0])
        return np.append(slots[rows >= 0], slot), np.append(rows[rows >= 0], behind)

    def _past(self, slots: Ints) -> tuple[Ints, Ints]:
        """The same where no one pair made what both runs read."""
        values = zip(
            slots.tolist(),
            self.inputs.left[slots].tolist(),
            self.inputs.right[slots].tolist(),
            strict=True,
        )
        found = [(slot, row) for slot, left, right in values for row in self._made_of(left, right)]
        table = np.array(found, np.int64).reshape(-1, 2)
        return table[:, 0], table[:, 1]

    def behind(self, slot: int) -> set[int]:
        """The pairs that made what an input was made of, past ops that only one run has."""
        return self.makers(int(self.inputs.left[slot]), int(self.inputs.right[slot]))

    def makers(self, left: int, right: int) -> set[int]:
        """The pair that made both values, else those that made what each was made of."""
        row = self.made_by_one_pair(left, right)
        return {row} if row >= 0 else self._made_of(left, right)

    def _made_of(self, left: int, right: int) -> set[int]:
        """The pairs that made what each of two values was made of, past ops that only one run has."""
        found = set[int]()
        for value, behind, row_of in zip(
            (left, right), self._behind, (self.row_of_left, self.row_of_right), strict=True
        ):
            found |= {int(row_of[op]) for op in behind.ops(value)}
        return found

    @cached_property
    def _behind(self) -> tuple[Behind, Behind]:
        return Behind(self.left, self.pairing.right_of), Behind(self.right, self.pairing.left_of)

    @cached_property
    def agreed(self) -> tuple[Flags, Flags]:
        """Per state of each run, whether an op read all of it as its counterpart read the same contents."""
        equal = self.inputs.status == EQUAL
        found = []
        for contents, values in ((self.left, self.inputs.left), (self.right, self.inputs.right)):
            states, read = contents.states, values[equal]
            flags = np.zeros(len(states.writer), np.bool_)
            flags[states.of[read[contents.whole[read]]]] = True
            found.append(flags)
        return found[0], found[1]

    def inputs_of(self, row: int) -> list[int]:
        """Rows of `inputs` of a pair."""
        return self._input_places.get(row, [])

    def outputs_of(self, row: int) -> list[int]:
        """Rows of `outputs` of a pair."""
        return self._output_places.get(row, [])

    @cached_property
    def _input_places(self) -> dict[int, list[int]]:
        return _places(self.inputs)

    @cached_property
    def _output_places(self) -> dict[int, list[int]]:
        return _places(self.outputs)

    def _any(self, slots: Slots, status: int) -> Flags:
        found = np.zeros(len(self.pairing.left), np.bool_)
        found[slots.pair[slots.status == status]] = True
        return found

    # ---- slots -----------------------------------------------------------------------------------------

    def _input_slots(self) -> tuple[Slots, Flags]:
        """Tensor arguments that count and that both sides have, and which pairs have others."""
        i, j = self.pairing.left, self.pairing.right
        a, b = self.left, self.right
        alike = (a.tokens.slots[i] == b.tokens.slots[j]) & (
            _lengths(a.trace.ops.inputs, i) == _lengths(b.trace.ops.inputs, j)
        )
        other = _other_code(self)
        alike[other] = False
        pair, position, left_at, right_at = _positional(
            np.flatnonzero(alike), a.trace.ops.inputs, b.trace.ops.inputs, i, j
        )
        extra = np.zeros(len(i), np.bool_)
        named = [
            _arguments_of_regions(self, row) if row in other else _by_name(self, row)
            for row in np.flatnonzero(~alike).tolist()
        ]
        if named:
            pair = np.concatenate([pair, *(n.pair for n in named)])
            position = np.concatenate([position, *(n.position for n in named)])
            left_at = np.concatenate([left_at, *(n.left for n in named)])
            right_at = np.concatenate([right_at, *(n.right for n in named)])
            extra[
                [
                    row
                    for row, n in zip(np.flatnonzero(~alike).tolist(), named, strict=True)
                    if n.extra
                ]
            ] = True
        keep = a.counted[left_at] | b.counted[right_at]
        pair, position, left_at, right_at = (
            pair[keep],
            position[keep],
            left_at[keep],
            right_at[keep],
        )
        left, right = a.trace.ops.inputs.values[left_at], b.trace.ops.inputs.values[right_at]
        return Slots(pair, position, left, right, self.status(left, right)), extra

    def _output_slots(self) -> Slots:
        """Outputs in order: what was written with what was written, what was returned with what was returned."""
        i, j = self.pairing.left, self.pairing.right
        a, b = self.left.trace.ops, self.right.trace.ops
        alike = (_lengths(a.outputs, i) == _lengths(b.outputs, j)) & (a.mutated[i] == b.mutated[j])
        pair, position, left_at, right_at = _positional(
            np.flatnonzero(alike), a.outputs, b.outputs, i, j
        )
        rest: list[tuple[int, int, int, int]] = []
        for row in np.flatnonzero(~alike).tolist():
            rest += _unlike_outputs(self, row)
        if rest:
            table = np.array(rest, np.int64)
            pair, position = (
                np.concatenate([pair, table[:, 0]]),
                np.concatenate([position, table[:, 1]]),
            )
            left_at, right_at = (
                np.concatenate([left_at, table[:, 2]]),
                np.concatenate([right_at, table[:, 3]]),
            )
        left, right = a.outputs.values[left_at], b.outputs.values[right_at]
        return Slots(pair, position, left, right, self.status(left, right))


def _rows(ops: Ints, count: int) -> Ints:
    found = np.full(count, -1, np.int64)
    found[ops] = np.arange(len(ops))
    return found


def _places(slots: Slots) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for place, row in enumerate(slots.pair.tolist()):
        found.setdefault(row, []).append(place)
    return found


def _lengths(lists: Ragged, rows: Ints) -> Ints:
    return lists.offsets[rows + 1] - lists.offsets[rows]


def _positional(
    rows: Ints, left: Ragged, right: Ragged, i: Ints, j: Ints
) -> tuple[Ints, Ints, Ints, Ints]:
    """(pair, position, place in left.values, place in right.values) of lists of equal length."""
    lengths = _lengths(left, i[rows])
    pair = np.repeat(rows, lengths)
    position = np.arange(len(pair)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return (
        pair,
        position,
        np.repeat(left.offsets[i[rows]], lengths) + position,
        np.repeat(right.offsets[j[rows]], lengths) + position,
    )


@dataclass(frozen=True, slots=True)
class _Named:
    """Tensor arguments of one pair, matched by name."""

    pair: Ints
    position: Ints
    left: Ints
    right: Ints
    extra: bool


def _by_name(compared: Compared, row: int) -> _Named:
    i, j = int(compared.pairing.left[row]), int(compared.pairing.right[row])
    a, b = compared.left, compared.right
    names = a.tokens.table[int(a.trace.ops.signature[i])].slots
    others = b.tokens.table[int(b.trace.ops.signature[j])].slots
    counts = len(a.trace.ops.inputs[i]), len(b.trace.ops.inputs[j])
    place = {name: k for k, name in enumerate(others[: counts[1]])}
    found = [(k, place[name]) for k, name in enumerate(names[: counts[0]]) if name in place]
    if not found and min(counts):
        found = [
            (k, k) for k in range(min(counts))
        ]  # other argument names: an op of the same family
    starts = int(a.trace.ops.inputs.offsets[i]), int(b.trace.ops.inputs.offsets[j])
    positions = np.array([k for k, _ in found], np.int64)
    return _Named(
        np.full(len(found), row, np.int64),
        positions,
        positions + starts[0],
        np.array([m for _, m in found], np.int64) + starts[1],
        extra=len(found) < max(counts),
    )


def _other_code(compared: Compared) -> list[int]:
    """Rows of calls of generated code that is another one in each run."""
    a, b = compared.left.regions.at, compared.right.regions.at
    found = []
    for op, call in a.items():
        row = int(compared.row_of_left[op])
        other = None if row < 0 else b.get(int(compared.pairing.right[row]))
        if other is not None and other.graph.key != call.graph.key:
            found.append(row)
    return found


def _arguments_of_regions(compared: Compared, row: int) -> _Named:
    """Arguments of two calls of other generated code: by the name of a leaf, then by content, then by form in order.

    What only one of them takes, such as a number of the program, is no input of the other, and says nothing.
    """
    ops = int(compared.pairing.left[row]), int(compared.pairing.right[row])
    sides = compared.left, compared.right
    starts = [int(s.trace.ops.inputs.offsets[op]) for s, op in zip(sides, ops, strict=True)]
    values = [s.trace.ops.inputs[op].tolist() for s, op in zip(sides, ops, strict=True)]
    names = [s.name_of_leaf for s in sides]
    metas = [[s.trace.meta(v) for v in own] for s, own in zip(sides, values, strict=True)]
    keys: tuple[list[list[object]], ...] = tuple(
        [
            [names[n].get(v) for v in values[n]],
            [int(sides[n].by_lineage[v]) or None for v in values[n]],
            [
                None if v in names[n] else (tuple(m.shape), m.dtype)
                for v, m in zip(values[n], metas[n], strict=True)
            ],
        ]
        for n in (0, 1)
    )
    found: dict[int, int] = {}
    for left, right in zip(*keys, strict=True):
        taken = set(found.values())
        places: dict[object, list[int]] = {}
        for m, key in enumerate(right):
            if key is not None and m not in taken:
                places.setdefault(key, []).append(m)
        for k, key in enumerate(left):
            if k not in found and key is not None and places.get(key):
                found[k] = places[key].pop(0)
    positions = np.array(sorted(found), np.int64)
    return _Named(
        np.full(len(found), row, np.int64),
        positions,
        positions + starts[0],
        np.array([found[k] for k in sorted(found)], np.int64) + starts[1],
        extra=False,
    )


def _unlike_outputs(compared: Compared, row: int) -> list[tuple[int, int, int, int]]:
    """Outputs of a pair of which one side writes in place and the other does not, or returns more."""
    i, j = int(compared.pairing.left[row]), int(compared.pairing.right[row])
    a, b = compared.left.trace.ops, compared.right.trace.ops
    starts = int(a.outputs.offsets[i]), int(b.outputs.offsets[j])
    written = int(a.mutated[i]), int(b.mutated[j])
    counts = len(a.outputs[i]), len(b.outputs[j])
    both = min(written)
    found = [(row, k, starts[0] + k, starts[1] + k) for k in range(both)]
    for k in range(min(counts[0] - written[0], counts[1] - written[1])):
        place = written[0] + k
        found.append((row, place, starts[0] + place, starts[1] + written[1] + k))
    if not found and min(counts):
        found.append((row, 0, starts[0], starts[1]))
    return found


def _pair_rows(compared: Compared, left: Ints, right: Ints) -> Ints:
    """Row of the pair that made both of two values; -1 where there is none.

    A pair made them when they are the same output of it, or when it wrote their storages last.
    """
    a, b, pairing = compared.left, compared.right, compared.pairing
    if not len(pairing.left):
        return np.full(len(left), -1, np.int64)
    p, q = a.producer[left], b.producer[right]
    same_output = (
        (p >= 0)
        & (q >= 0)
        & (pairing.right_of[p] == q)
        & (a.output_slot[left] == b.output_slot[right])
    )
    writer = a.states.writer[a.states.of[left]]
    other = b.states.writer[b.states.of[right]]
    written = (writer >= 0) & (other >= 0) & (pairing.right_of[writer] == other)
    # several outputs of one op: views of the first on one side and of the second on the other do not match
    slots = a.root_slot[left], b.root_slot[right]
    written &= (slots[0] == slots[1]) | (slots[0] < 0) | (slots[1] < 0)
    op = np.where(same_output, p, np.where(written, writer, -1))
    return np.where(op >= 0, compared.row_of_left[op], -1)
