"""Pair ops: those of paired module calls in order, then what is left over between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from opdrift.align.segments import Groups, spread
from opdrift.align.sequence import Effort, Level, Refined, Window, gaps, increasing, refine
from opdrift.contents import Contents
from opdrift.tokens import Words, mix, word
from opdrift.tracefile.columns import Ints

#: Number of a level from which on a pair must have something besides its name in common.
_WEAK_IN_SCOPE: Final = 2
_WEAK_ACROSS: Final = 1
#: Pairs make further pairs by what they feed; this often.
_ROUNDS: Final = 4
#: How far before the first op of a scope the call that was made before it may end.
_BEFORE: Final = 64


@dataclass
class Pairs:
    """Pairs as they are found."""

    left: Contents
    right: Contents
    right_of: Ints = field(init=False)
    left_of: Ints = field(init=False)
    cut_short: tuple[int, int] | None = None
    effort: Effort = field(default_factory=Effort)

    def __post_init__(self) -> None:
        self.right_of = np.full(len(self.left.trace.ops), -1, np.int64)
        self.left_of = np.full(len(self.right.trace.ops), -1, np.int64)

    def add(self, left: Ints, right: Ints) -> None:
        """Pair ops one by one."""
        self.right_of[left] = right
        self.left_of[right] = left

    def drop(self, left: int) -> None:
        """Undo a pair."""
        self.left_of[self.right_of[left]] = -1
        self.right_of[left] = -1

    def add_refined(self, refined: Refined, left: Ints, right: Ints, weak: int) -> None:
        """Take over pairs of positions in two lists of ops, and drop those that rest on a name alone."""
        i, j = left[refined.left], right[refined.right]
        self.add(i, j)
        if refined.cut_short:
            self.cut_short = max(self.cut_short or (0, 0), refined.cut_short)
        doubtful = np.flatnonzero(refined.level >= weak)
        if len(doubtful):
            in_scope = weak == _WEAK_IN_SCOPE
            self._drop_unsupported(i[doubtful], j[doubtful], in_scope=in_scope)
        self._drop_other_casts(i, j)
        self._drop_other_weights(i, j)
        if not self.left.by_sample:
            self._drop_other_moves(i, j)

    def _drop_other_weights(self, i: Ints, j: Ints) -> None:
        """Drop pairs of ops that compute with weights of other names and sizes: one packed projection for three."""
        a, b = self.left.trace.ops.inputs, self.right.trace.ops.inputs
        both = np.minimum(a.offsets[i + 1] - a.offsets[i], b.offsets[j + 1] - b.offsets[j])
        x, y = a.values[spread(a.offsets[i], both)], b.values[spread(b.offsets[j], both)]
        mine = self.weight_states[0][self.left.states.of[x]]
        theirs = self.weight_states[1][self.right.states.of[y]]
        sizes = self.left.layouts.size[x] != self.right.layouts.size[y]
        other = (mine != 0) & (theirs != 0) & (mine != theirs) & sizes
        row = np.repeat(np.arange(len(i)), both)
        for k in np.unique(row[other]).tolist():
            if self.right_of[i[k]] == j[k]:
                self.drop(int(i[k]))

    def _drop_other_casts(self, i: Ints, j: Ints) -> None:
        """Drop pairs of casts of which one casts an input of the run, and the other what the run computed.

        A weight may be computed in one run, gathered or drawn, and be there from the start in the other.
        """
        casts = self.left.tokens.cast[i] & self.right.tokens.cast[j] & (self.right_of[i] == j)
        a, b = i[casts], j[casts]
        made, given = [], []
        for side, ops, weights in zip((self.left, self.right), (a, b), self._weights, strict=True):
            source = side.root[side.trace.ops.inputs.values[side.trace.ops.inputs.offsets[ops]]]
            made.append(side.maker[source] >= 0)
            given.append((side.maker[source] < 0) & (weights[source] == 0))
        for op in a[(made[0] & given[1]) | (given[0] & made[1])].tolist():
            self.drop(op)

    def _drop_other_moves(self, i: Ints, j: Ints) -> None:
        """Drop pairs of ops that only move elements, of which they move other numbers that no pair made."""
        moves = self.left.tokens.moves[i] & self.right.tokens.moves[j] & (self.right_of[i] == j)
        a, b = i[moves], j[moves]
        x = self.left.trace.ops.inputs.values[self.left.trace.ops.inputs.offsets[a]]
        y = self.right.trace.ops.inputs.values[self.right.trace.ops.inputs.offsets[b]]
        p, q = self.left.maker[self.left.root[x]], self.right.maker[self.right.root[y]]
        made = (p >= 0) & (q >= 0)
        apart = (
            made
            & (self.right_of[p] != q)
            & (self.left.layouts.size[x] != self.right.layouts.size[y])
        )
        for op in a[apart].tolist():
            self.drop(op)

    def _drop_unsupported(self, i: Ints, j: Ints, *, in_scope: bool) -> None:
        """Drop the pairs that have no input in common: by content, or because a pair that stays made it.

        Within a call a weight of one name is one input too: in another precision no content of it is equal.
        """
        a, b = self.left.trace.ops.inputs, self.right.trace.ops.inputs
        both = np.minimum(a.offsets[i + 1] - a.offsets[i], b.offsets[j + 1] - b.offsets[j])
        x, y = a.values[spread(a.offsets[i], both)], b.values[spread(b.offsets[j], both)]
        row = np.repeat(np.arange(len(i)), both)
        place, lineage = self.left.by_place[x], self.left.by_lineage[x]
        same = (place != 0) & (place == self.right.by_place[y])
        same |= (lineage != 0) & (lineage == self.right.by_lineage[y])
        if in_scope:
            weight = self._weights[0][self.left.root[x]]
            same |= (weight != 0) & (weight == self._weights[1][self.right.root[y]])
        p, q = self.left.producer[self.left.root[x]], self.right.producer[self.right.root[y]]
        made = (p >= 0) & (q >= 0) & (self.right_of[p] == q)
        held = (both == 0) & (self.left.tokens.full[i] == self.right.tokens.full[j])
        held[row[same]] = True
        if in_scope and self.left.by_sample:
            for k in np.flatnonzero(~held).tolist():
                held[k] = self._may_be(int(i[k]), int(j[k]))
        # the rest stands and falls with the pairs that made its inputs
        leans = np.flatnonzero(made & ~held[row])
        support = np.bincount(row[leans], minlength=len(i))
        carried: dict[int, list[int]] = {}
        for op, k in zip(p[leans].tolist(), row[leans].tolist(), strict=True):
            carried.setdefault(op, []).append(k)
        falling = np.flatnonzero(~held & (support == 0)).tolist()
        while falling:
            op = int(i[falling.pop()])
            self.drop(op)
            for k in carried.pop(op, ()):
                support[k] -= 1
                if not support[k]:
                    falling.append(k)

    @cached_property
    def _weights(self) -> tuple[Words, Words]:
        """Per value a word for the name of the parameter or buffer that it is, 0 for others; per side."""
        return _weights_of(self.left), _weights_of(self.right)

    @cached_property
    def weight_states(self) -> tuple[Words, Words]:
        """The same per state of a storage, for views; 0 also where several weights lie in one."""
        return _of_states(self.left, self._weights[0]), _of_states(self.right, self._weights[1])

    def _may_be(self, i: int, j: int) -> bool:
        """Whether two ops of one name in one call can be the same although no input shows it.

        One sample of batches of other sizes: no two layouts are equal, and contents rarely to the last bit.
        """
        left, right = self.left, self.right
        if left.tokens.name[i] != right.tokens.name[j]:
            return False
        a, b = left.trace.ops.inputs[i], right.trace.ops.inputs[j]
        apart = False
        for p, q in zip(left.maker[left.root[a]], right.maker[right.root[b]], strict=False):
            if p < 0 or q < 0:
                continue
            if self.right_of[p] == q:
                return True
            apart |= self.right_of[p] >= 0 or self.left_of[q] >= 0
        return not apart


def _weights_of(contents: Contents) -> Words:
    found = np.zeros(len(contents.root), np.uint64)
    for leaf in contents.trace.leaves:
        if leaf.name and leaf.kind in ("parameter", "buffer"):
            found[leaf.value] = word(leaf.name)
    return found


def _of_states(contents: Contents, weights: Words) -> Words:
    found = np.zeros(len(contents.states.writer), np.uint64)
    values = np.flatnonzero(weights)
    states = contents.states.of[values]
    found[states] = weights[values]
    found[states[found[states] != weights[values]]] = 0
    return found


#: By what ops of two lists are recognised, in the light of the pairs so far.
By = Callable[[Pairs, Ints, Ints], Level]


def within_scopes(pairs: Pairs, home: tuple[Ints, Ints], calls: Ints) -> None:
    """Pair the ops of paired calls, forward and backward ops apart.

    Args:
        pairs: Receives the pairs.
        home: The call of each op, per side.
        calls: The right call of each left call, -1 where there is none.
    """
    left, right = (
        Groups.of(calls_of << 1 | side.trace.ops.phase)
        for calls_of, side in zip(home, (pairs.left, pairs.right), strict=True)
    )
    words = left.words(pairs.left.tokens.full.all), right.words(pairs.right.tokens.full.all)
    partner = calls[left.keys >> 1]
    here = np.flatnonzero(partner >= 0)
    there = right.find(partner[here] << 1 | left.keys[here] & 1)
    here, there = here[there >= 0], there[there >= 0]
    same = (left.lengths[here] == right.lengths[there]) & (words[0][here] == words[1][there])
    pairs.add(left.rows_of(here[same]), right.rows_of(there[same]))
    # inner calls have higher numbers: what they return helps to pair the ops around them
    for a, b in zip(here[~same][::-1].tolist(), there[~same][::-1].tolist(), strict=True):
        _in_order(pairs, left.rows(a), right.rows(b), inside=int(left.keys[a]) > 1)


def _in_order(pairs: Pairs, a: Ints, b: Ints, *, inside: bool) -> None:
    """Pair two lists of ops of one scope: by result, by what feeds them, then by name.

    What feeds them comes first with the same arguments, then those without such a counterpart by their arguments
    alone: an op that is put before another of its kind does not take its place. Nor does one that is left out behind
    one call take that of its kind behind the next, `inside` of a module: the first of two residuals. A program may
    call a model more often.
    """
    scope = _Scope(pairs, a, b)
    scope.take(_by_result)
    if pairs.left.by_sample:
        # steps of a recurrent layer are more in a longer batch, and those of both directions look alike
        scope.take(_by_weights)
    scope.take_fed(_by_inputs_and_arguments)
    if inside:
        scope.take(_behind_calls)
    scope.take(_by_signature)
    scope.take_fed(_by_inputs)
    scope.take(*_NAMED)


@dataclass
class _Scope:
    """Two lists of ops of one scope while they are paired.

    Attributes:
        left: Ops of the left run.
        right: Ops of the right run.
        holds: No pair was dropped in the last step: without anything left to pair, a further one would change nothing.
    """

    pairs: Pairs
    left: Ints
    right: Ints
    holds: bool = True

    def take(self, *by: By) -> int:
        """Pair what is left between known pairs by levels, from strict to loose.

        Returns:
            How many pairs there are, dropped ones included; 0 if nothing changed.
        """
        pairs, a, b = self.pairs, self.left, self.right
        known = np.flatnonzero(pairs.right_of[a] >= 0)
        partners = np.searchsorted(b, pairs.right_of[a[known]])
        windows = gaps(Window(0, len(a), 0, len(b)), known, partners)
        if not windows and self.holds:
            return 0
        found = refine([level(pairs, a, b) for level in by], windows, effort=pairs.effort)
        found = found.beside(known, partners)
        before = pairs.right_of[a]
        pairs.add_refined(found, a, b, _WEAK_IN_SCOPE)
        self.holds = bool(np.all(pairs.right_of[a[found.left]] == b[found.right]))
        return 0 if np.array_equal(before, pairs.right_of[a]) else len(found.left)

    def take_fed(self, by_inputs: By) -> None:
        """Pair ops that read what pairs made, and so on."""
        count = 0
        for _ in range(_ROUNDS):
            found = self.take(by_inputs)
            if found in (0, count):
                break
            count = found


def across_scopes(pairs: Pairs) -> None:
    """Pair what is left over in the stretches between pairs that keep the order, whatever the scope."""
    a, b = np.flatnonzero(pairs.right_of < 0), np.flatnonzero(pairs.left_of < 0)
    if not len(a) or not len(b):
        return
    i = np.flatnonzero(pairs.right_of >= 0)
    if len(i):
        i = i[increasing(pairs.right_of[i])]
    j = pairs.right_of[i]
    # number of fixed pairs before each op: ops with the same number lie in the same stretch
    stretches = _common_stretches(np.searchsorted(i, a), np.searchsorted(j, b))
    windows = [Window(int(a0), int(a1), int(b0), int(b1)) for a0, a1, b0, b1 in stretches]
    if windows:
        levels = [by(pairs, a, b) for by in (_by_result, *_NAMED)]
        pairs.add_refined(refine(levels, windows, effort=pairs.effort), a, b, _WEAK_ACROSS)


# ---- by what ops are recognised ------------------------------------------------------------------------


def _by_signature(pairs: Pairs, a: Ints, b: Ints) -> Level:
    return Level(pairs.left.tokens.full[a], pairs.right.tokens.full[b])


def _by_layouts(pairs: Pairs, a: Ints, b: Ints) -> Level:
    return Level(pairs.left.tokens.shape[a], pairs.right.tokens.shape[b])


def _by_name(pairs: Pairs, a: Ints, b: Ints) -> Level:
    return Level(pairs.left.tokens.name[a], pairs.right.tokens.name[b])


def _by_family(pairs: Pairs, a: Ints, b: Ints) -> Level:
    return Level(pairs.left.tokens.family[a], pairs.right.tokens.family[b])


_NAMED: Final = (_by_signature, _by_layouts, _by_name, _by_family)


def _behind_calls(pairs: Pairs, a: Ints, b: Ints) -> Level:
    """Whole signature, and which op of other calls ran last before it: what was called inside."""
    before = _last_inside(a, pairs.right_of), _last_inside(b, pairs.left_of)
    numbers = before[0], np.where(before[1] >= 0, pairs.left_of[before[1]], -1)
    left, right = pairs.left.tokens.full, pairs.right.tokens.full
    return Level(
        mix(left[a], (numbers[0] + 1).astype(np.uint64)),
        mix(right[b], (numbers[1] + 1).astype(np.uint64)),
    )


def _last_inside(ops: Ints, partner: Ints) -> Ints:
    """Per op of a scope the last op with a counterpart that ran elsewhere before it; -1 if none did shortly before."""
    first, last = max(int(ops[0]) - _BEFORE, 0), int(ops[-1]) + 1
    inside = partner[first:last] >= 0
    inside[ops - first] = False
    at: Ints = np.maximum.accumulate(np.where(inside, np.arange(first, last), -1))[ops - first]
    return at


def _by_result(pairs: Pairs, a: Ints, b: Ints) -> Level:
    """Equal results of computing ops."""
    return Level(_results(pairs.left, a, "left"), _results(pairs.right, b, "right"), anchored=True)


def _results(contents: Contents, ops: Ints, side: str) -> Words:
    """A word for op and result; one that nothing equals for ops that do not compute from a tensor."""
    trace, tokens = contents.trace, contents.tokens
    outputs = trace.ops.outputs
    if not len(outputs.values):
        return _nothing(ops, side)
    has_output = outputs.offsets[ops + 1] > outputs.offsets[ops]
    first = outputs.values[np.minimum(outputs.offsets[ops], len(outputs.values) - 1)]
    content = np.where(has_output, contents.by_place[first], np.uint64(0))
    speaks = (content != 0) & ~tokens.factory[ops] & ~tokens.view[ops] & ~tokens.uninitialised[ops]
    return np.where(speaks, mix(tokens.name[ops], content), _nothing(ops, side))


def _by_weights(pairs: Pairs, a: Ints, b: Ints) -> Level:
    """The same op with weights of the same names; one that nothing equals for ops without any."""
    named = pairs.weight_states
    return Level(
        _named(pairs.left, a, named[0], "left"),
        _named(pairs.right, b, named[1], "right"),
        anchored=True,
    )


def _named(contents: Contents, ops: Ints, named: Words, side: str) -> Words:
    inputs = contents.trace.ops.inputs
    lengths = inputs.offsets[ops + 1] - inputs.offsets[ops]
    if not lengths.sum():
        return _nothing(ops, side)
    weights = named[contents.states.of[inputs.values[spread(inputs.offsets[ops], lengths)]]]
    summed = np.add.reduceat(np.append(weights, np.uint64(0)), np.cumsum(lengths) - lengths)
    speaks = (lengths > 0) & (summed != 0)
    return np.where(speaks, mix(contents.tokens.name[ops], summed), _nothing(ops, side))


def _by_inputs_and_arguments(pairs: Pairs, a: Ints, b: Ints) -> Level:
    """The same op on what pairs made, with the same other arguments."""
    return _by_inputs(pairs, a, b, alike=True)


def _by_inputs(pairs: Pairs, a: Ints, b: Ints, *, alike: bool = False) -> Level:
    """The same op on what pairs made."""

    def left_number(op: Ints) -> Ints:
        return np.where(pairs.right_of[op] >= 0, op, -1)

    def right_number(op: Ints) -> Ints:
        return pairs.left_of[op]

    return Level(
        _sources(pairs.left, a, left_number, "left", alike=alike),
        _sources(pairs.right, b, right_number, "right", alike=alike),
        anchored=True,
    )


def _sources(
    contents: Contents, ops: Ints, number_of: Callable[[Ints], Ints], side: str, *, alike: bool
) -> Words:
    """A word for op and inputs.

    An input that no pair made counts by its content. One that nothing equals where no input is of a pair.

    Args:
        contents: The side's.
        ops: Its ops.
        number_of: Gives each op that has a counterpart the same number on both sides, and -1 to others.
        side: Its name.
        alike: Whether the other arguments count.
    """
    inputs = contents.trace.ops.inputs
    lengths = inputs.offsets[ops + 1] - inputs.offsets[ops]
    if not lengths.sum():
        return _nothing(ops, side)
    within = spread(np.zeros(len(ops), np.int64), lengths)
    values = inputs.values[spread(inputs.offsets[ops], lengths)]
    roots = contents.root[values]
    maker = contents.maker[roots]
    pair = np.where(maker >= 0, number_of(maker), -1)
    known = mix(
        (pair + 1).astype(np.uint64), np.maximum(contents.root_slot[roots], 0).astype(np.uint64)
    )
    word_of = np.where(pair >= 0, known, contents.by_place[values])
    placed = np.concatenate([mix(word_of, within.astype(np.uint64)), np.zeros(1, np.uint64)])
    starts = np.cumsum(lengths) - lengths
    summed = np.add.reduceat(placed, starts)
    of_pairs = np.add.reduceat(np.concatenate([pair >= 0, [False]]).astype(np.int64), starts)
    speaks = (lengths > 0) & (of_pairs > 0)
    tokens = contents.tokens
    called = (tokens.full if alike else tokens.name)[ops]
    return np.where(speaks, mix(called, summed), _nothing(ops, side))


def _nothing(ops: Ints, side: str) -> Words:
    """Words that no other op has, on either side."""
    return mix(ops.astype(np.uint64), np.full(len(ops), word(side), np.uint64))


def _common_stretches(a: Ints, b: Ints) -> npt.NDArray[np.int64]:
    """Rows (start, end, start, end) of the stretches of equal numbers that both sorted lists have."""
    shared = np.intersect1d(a, b)
    return np.stack(
        [
            np.searchsorted(a, shared, "left"),
            np.searchsorted(a, shared, "right"),
            np.searchsorted(b, shared, "left"),
            np.searchsorted(b, shared, "right"),
        ],
        axis=1,
    )
