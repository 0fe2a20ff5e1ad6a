"""Pair the ops of two traces: scopes first, then the ops of a scope in order, then what moved between scopes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from opdrift.align.calls import CallTree, Maps, match_calls, rename, wrapper_prefix
from opdrift.align.sequence import Level, Refined, Window, increasing, refine
from opdrift.contents import Contents
from opdrift.tokens import Words, mix, word
from opdrift.tracefile.reader import Ints

__all__ = ["Maps", "Pairing", "align"]

#: Levels of `_levels` from which on a pair must have something besides its name in common.
_WEAK_IN_SCOPE: Final = 3
_WEAK_ACROSS: Final = 1


@dataclass(frozen=True, slots=True)
class Pairing:
    """Which left op corresponds to which right op.

    Attributes:
        left: Op indexes of the pairs in the left trace, ascending.
        right: Op indexes of the pairs in the right trace.
        right_of: Per left op the right one, -1 if it has none.
        left_of: Per right op the left one, -1 if it has none.
        home: The call of each op, per side; a backward op counts to its forward op's.
        method: How the pairs were found, for people.
        fallback_reason: Why a part could only be paired by occurrence; None if all was paired by rule.
    """

    left: Ints
    right: Ints
    right_of: Ints
    left_of: Ints
    home: tuple[Ints, Ints]
    method: str
    fallback_reason: str | None


def align(left: Contents, right: Contents, *, maps: Maps = ()) -> Pairing:
    """Pair the ops of two traces.

    Ops inserted or removed on one side shift nothing; modules that were renamed, moved or reordered
    are found by their structure and by the values they return.

    Args:
        left: The left trace.
        right: The right trace.
        maps: Pairs of a path on the left and its name on the right.
    """
    # The search breaks ties by the side it starts from: always start from the same one, so that
    # exchanging the traces exchanges the answer and nothing else.
    swapped = _rank(right) < _rank(left)
    if swapped:
        found = _align(right, left, [(b, a) for a, b in maps])
        home = (found.home[1], found.home[0])
    else:
        found = _align(left, right, list(maps))
        home = found.home
    i, j = (found.right, found.left) if swapped else (found.left, found.right)
    order = np.argsort(i, kind="stable")
    right_of, left_of = (
        (found.left_of, found.right_of) if swapped else (found.right_of, found.left_of)
    )
    return Pairing(i[order], j[order], right_of, left_of, home, found.method, found.fallback_reason)


def _rank(contents: Contents) -> tuple[int, bytes, bytes]:
    ops = contents.trace.ops
    return len(ops), contents.tokens.full.tobytes(), contents.by_place.tobytes()


def _align(left: Contents, right: Contents, maps: list[tuple[str, str]]) -> Pairing:
    method = ["scopes by path, then ops by signature and occurrence"]
    if not maps and (prefix := wrapper_prefix(left.trace.calls, right.trace.calls)):
        maps = [prefix]
        side = "right" if prefix[1] else "left"
        method.append(f"{side} paths carry the prefix {prefix[1] or prefix[0]!r}")
    trees = CallTree(left, rename(maps)), CallTree(right, lambda path: path)
    calls = match_calls(*trees)
    renamed = sum(
        1 for i, j in enumerate(calls.tolist()) if j >= 0 and trees[0].paths[i] != trees[1].paths[j]
    )
    if renamed:
        method.append(f"{renamed} renamed scopes by structure")
    pairs = _Pairs(left, right)
    _within_scopes(pairs, trees, calls)
    _across_scopes(pairs)
    reason = None
    if pairs.cut_short:
        rows, columns = pairs.cut_short
        reason = f"a stretch of {rows} against {columns} ops has no op that occurs once in both; it was paired by occurrence"
    i = np.flatnonzero(pairs.right_of >= 0)
    return Pairing(
        i,
        pairs.right_of[i],
        pairs.right_of,
        pairs.left_of,
        (trees[0].home, trees[1].home),
        "; ".join(method),
        reason,
    )


@dataclass
class _Pairs:
    """Pairs as they are found."""

    left: Contents
    right: Contents
    right_of: Ints = field(init=False)
    left_of: Ints = field(init=False)
    cut_short: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        self.right_of = np.full(len(self.left.trace.ops), -1, np.int64)
        self.left_of = np.full(len(self.right.trace.ops), -1, np.int64)

    def add(self, left: Ints, right: Ints) -> None:
        self.right_of[left] = right
        self.left_of[right] = left

    def drop(self, left: int) -> None:
        self.left_of[self.right_of[left]] = -1
        self.right_of[left] = -1

    def add_refined(self, refined: Refined, left: Ints, right: Ints, weak: int) -> None:
        """Take over pairs of positions in two lists of ops, and drop those that rest on a name alone."""
        i, j = left[refined.left], right[refined.right]
        self.add(i, j)
        if refined.cut_short:
            self.cut_short = max(self.cut_short or (0, 0), refined.cut_short)
        for op in i[refined.level >= weak].tolist():
            if not self._supported(op, int(self.right_of[op])):
                self.drop(op)

    def _supported(self, i: int, j: int) -> bool:
        """Whether an input of both is the same: by content, or because a pair made it."""
        a, b = self.left.trace.ops.inputs[i], self.right.trace.ops.inputs[j]
        if not len(a) or not len(b):
            return bool(self.left.tokens.full[i] == self.right.tokens.full[j])
        for x, y in zip(a.tolist(), b.tolist(), strict=False):
            if self.left.by_place[x] and self.left.by_place[x] == self.right.by_place[y]:
                return True
            if self.left.by_lineage[x] and self.left.by_lineage[x] == self.right.by_lineage[y]:
                return True
            p, q = int(self.left.producer[x]), int(self.right.producer[y])
            if p >= 0 and q >= 0 and self.right_of[p] == q:
                return True
        return False


def _within_scopes(pairs: _Pairs, trees: tuple[CallTree, CallTree], calls: Ints) -> None:
    """Pair the ops of paired calls, forward and backward ops apart."""
    left, right = _Segments(pairs.left, trees[0].home), _Segments(pairs.right, trees[1].home)
    whole: list[tuple[Ints, Ints]] = []
    for key in left.keys:
        call, phase = key >> 1, key & 1
        if calls[call] < 0:
            continue
        a, b = left.ops(key), right.ops(int(calls[call]) << 1 | phase)
        if not len(b):
            continue
        if len(a) == len(b) and left.word(key) == right.word(int(calls[call]) << 1 | phase):
            whole.append((a, b))
            continue
        pairs.add_refined(refine(_levels(pairs, a, b)), a, b, _WEAK_IN_SCOPE)
    if whole:
        pairs.add(np.concatenate([a for a, _ in whole]), np.concatenate([b for _, b in whole]))


class _Segments:
    """The ops of each call and phase, in order; a key is call * 2 + phase."""

    def __init__(self, contents: Contents, home: Ints) -> None:
        key = home << 1 | contents.trace.ops.phase
        self._order = np.argsort(key, kind="stable")
        grouped = key[self._order]
        self._at: dict[int, tuple[int, int, int]] = {}
        if not len(key):
            return
        starts = np.flatnonzero(np.concatenate([[True], grouped[1:] != grouped[:-1]]))
        ends = np.concatenate([starts[1:], [len(key)]])
        within = (np.arange(len(key)) - np.repeat(starts, ends - starts)).astype(np.uint64)
        words = np.add.reduceat(mix(contents.tokens.full[self._order], within), starts)
        for k, start, end, word_ in zip(grouped[starts], starts, ends, words, strict=True):
            self._at[int(k)] = int(start), int(end), int(word_)

    @property
    def keys(self) -> list[int]:
        return list(self._at)

    def ops(self, key: int) -> Ints:
        start, end, _ = self._at.get(key, (0, 0, 0))
        return self._order[start:end]

    def word(self, key: int) -> int:
        """A word for the signatures of the ops in order."""
        return self._at[key][2]


def _levels(pairs: _Pairs, a: Ints, b: Ints) -> list[Level]:
    """By what ops are recognised: result, whole signature, layouts, name, family."""
    left, right = pairs.left.tokens, pairs.right.tokens
    return [
        Level(_results(pairs.left, a, "left"), _results(pairs.right, b, "right"), anchored=True),
        Level(left.full[a], right.full[b]),
        Level(left.shape[a], right.shape[b]),
        Level(left.name[a], right.name[b]),
        Level(left.family[a], right.family[b]),
    ]


def _results(contents: Contents, ops: Ints, side: str) -> Words:
    """A word for op and result; one that nothing equals for ops that do not compute from a tensor."""
    trace, tokens = contents.trace, contents.tokens
    outputs = trace.ops.outputs
    has_output = outputs.offsets[ops + 1] > outputs.offsets[ops]
    first = (
        outputs.values[np.minimum(outputs.offsets[ops], max(len(outputs.values) - 1, 0))]
        if len(outputs.values)
        else ops * 0
    )
    content = np.where(has_output, contents.by_place[first], np.uint64(0))
    speaks = (content != 0) & ~tokens.factory[ops] & ~tokens.view[ops] & ~tokens.uninitialised[ops]
    nothing = mix(ops.astype(np.uint64), np.full(len(ops), word(side), np.uint64))
    return np.where(speaks, mix(tokens.name[ops], content), nothing)


def _across_scopes(pairs: _Pairs) -> None:
    """Pair what is left over in the stretches between pairs that keep the order, whatever the scope."""
    rest_left, rest_right = np.flatnonzero(pairs.right_of < 0), np.flatnonzero(pairs.left_of < 0)
    if not len(rest_left) or not len(rest_right):
        return
    i = np.flatnonzero(pairs.right_of >= 0)
    if len(i):
        i = i[increasing(pairs.right_of[i])]
    j = pairs.right_of[i]
    # number of fixed pairs before each op: ops with the same number lie in the same stretch
    before_left = np.searchsorted(i, rest_left)
    before_right = np.searchsorted(j, rest_right)
    windows = [
        Window(int(a0), int(a1), int(b0), int(b1))
        for a0, a1, b0, b1 in _common_stretches(before_left, before_right)
    ]
    if windows:
        refined = refine(_levels(pairs, rest_left, rest_right), windows)
        pairs.add_refined(refined, rest_left, rest_right, _WEAK_ACROSS)


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
