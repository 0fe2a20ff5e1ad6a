"""Pair the module calls of two traces: by path and occurrence, then by structure where names changed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Final

import numpy as np

from opdrift.align.sequence import Level, refine
from opdrift.contents import Contents
from opdrift.records import Call
from opdrift.tokens import Words, mix, word
from opdrift.tracefile.reader import Ints, Trace

Maps = Sequence[tuple[str, str]]
#: Paths of the other side must explain at least this part of the paths for a prefix to be assumed.
_PREFIX_SHARE: Final = 0.8


def home_calls(trace: Trace) -> Ints:
    """The call each op belongs to; a backward op belongs to the call of its forward op.

    The autograd node of an op is created before the op is dispatched, so the op recorded the number
    after its node's.
    """
    ops = trace.ops
    home = ops.call.copy()
    backward = np.flatnonzero((ops.phase == 1) & (ops.node < np.iinfo(np.int64).max))
    forward = np.flatnonzero((ops.phase == 0) & (ops.node > 0))
    if not len(backward) or not len(forward):
        return home
    number, first = np.unique(ops.node[forward], return_index=True)
    place = np.minimum(np.searchsorted(number, ops.node[backward] + 1), len(number) - 1)
    joined = number[place] == ops.node[backward] + 1
    home[backward[joined]] = ops.call[forward[first[place[joined]]]]
    return home


class CallTree:
    """The calls of one trace with what is needed to recognise them."""

    def __init__(self, contents: Contents, rename: Callable[[str], str]) -> None:
        self._contents = contents
        self.calls: Sequence[Call] = contents.trace.calls
        self.paths = ["", *(rename(call.path) for call in self.calls[1:])]
        self.home = home_calls(contents.trace)
        self.children: dict[int, list[int]] = defaultdict(list)
        for call in self.calls[1:]:
            self.children[call.parent].append(call.id)

    @cached_property
    def structure(self) -> list[int]:
        """A word for the ops with their layouts in each call and below."""
        return self._subtree(self._contents.tokens.shape.all)

    @cached_property
    def names(self) -> list[int]:
        """A word for the names of the ops in each call and below."""
        return self._subtree(self._contents.tokens.name.all)

    @cached_property
    def values(self) -> list[int]:
        """A word for what the ops in each call and below returned."""
        outputs = self._contents.trace.ops.outputs
        contents = self._contents.by_place[outputs.values]
        padded = np.concatenate([contents, np.zeros(1, np.uint64)])
        starts = outputs.offsets[:-1]
        summed = np.add.reduceat(padded, starts) if len(starts) else padded[:0]
        empty = np.diff(outputs.offsets) == 0
        return self._subtree(np.where(empty, np.uint64(1), summed))

    def _subtree(self, words: Words) -> list[int]:
        own = self._direct(words)
        for call in reversed(self.calls[1:]):
            own[call.parent] = hash((own[call.parent], own[call.id]))
        return own

    def _direct(self, words: Words) -> list[int]:
        """A word for the ops of each call alone; their order counts."""
        order = np.argsort(self.home, kind="stable")
        home = self.home[order]
        found = np.zeros(len(self.calls), np.uint64)
        if len(order):
            starts = np.flatnonzero(np.concatenate([[True], home[1:] != home[:-1]]))
            lengths = np.diff(np.concatenate([starts, [len(order)]]))
            within = (np.arange(len(order)) - np.repeat(starts, lengths)).astype(np.uint64)
            found[home[starts]] = np.add.reduceat(mix(words[order], within), starts)
        return [int(w) for w in found]


def rename(maps: Maps) -> Callable[[str], str]:
    """A function that gives a left path the name that it has on the right."""

    def apply(path: str) -> str:
        for left, right in maps:
            if path == left:
                return right
            if not left:
                return f"{right}.{path}" if path else right
            if path.startswith(f"{left}."):
                return right + path[len(left) :] if right else path[len(left) + 1 :]
        return path

    return apply


def wrapper_prefix(left: Sequence[Call], right: Sequence[Call]) -> tuple[str, str] | None:
    """A prefix that all paths of one side carry and those of the other do not, as a map; None if there is none.

    Where one run wraps its model (`module.` of data parallelism), its paths are those of the other with a
    prefix.
    """
    a = {call.path for call in left[1:]}
    b = {call.path for call in right[1:]}
    if not a or not b or len(a & b) * 2 > min(len(a), len(b)):
        return None
    forward = _common_prefix(a, b)
    if forward is not None:
        return "", forward
    back = _common_prefix(b, a)
    return (back, "") if back is not None else None


def _common_prefix(plain: set[str], prefixed: set[str]) -> str | None:
    counts: dict[str, int] = defaultdict(int)
    for path in prefixed:
        parts = path.split(".")
        for cut in range(1, len(parts)):
            if ".".join(parts[cut:]) in plain:
                counts[".".join(parts[:cut])] += 1
    if not counts:
        return None
    best = max(sorted(counts), key=lambda p: counts[p])
    named = sum(1 for path in plain if path)
    return best if counts[best] >= _PREFIX_SHARE * max(named, 1) else None


def match_calls(left: CallTree, right: CallTree) -> Ints:
    """The right call of each left call; -1 where there is none."""
    found = np.full(len(left.calls), -1, np.int64)
    taken = np.zeros(len(right.calls), np.bool_)

    def pair(i: int, j: int) -> None:
        found[i], taken[j] = j, True
        work.append((i, j))

    work: list[tuple[int, int]] = []
    pair(0, 0)
    while work:
        while work:
            i, j = work.pop()
            _match_children(left, right, left.children.get(i, []), right.children.get(j, []), pair)
        # A module that moved below another parent is still found by its path.
        rest_left = [c.id for c in left.calls if found[c.id] < 0]
        rest_right = [c.id for c in right.calls if not taken[c.id]]
        shared = {left.paths[i] for i in rest_left} & {right.paths[j] for j in rest_right}
        if shared:
            path = left.paths[next(i for i in rest_left if left.paths[i] in shared)]
            group = [i for i in rest_left if left.paths[i] == path]
            other = [j for j in rest_right if right.paths[j] == path]
            _match_repeated(left, right, group, other, pair)
    return found


def _match_children(
    left: CallTree, right: CallTree, a: list[int], b: list[int], pair: Callable[[int, int], None]
) -> None:
    """Pair calls below one pair of parents: equal paths by occurrence, the rest by structure."""
    groups: dict[str, tuple[list[int], list[int]]] = {}
    for i in a:
        groups.setdefault(left.paths[i], ([], []))[0].append(i)
    for j in b:
        groups.setdefault(right.paths[j], ([], []))[1].append(j)
    rest: tuple[list[int], list[int]] = ([], [])
    for group, other in groups.values():
        if group and other:
            _match_repeated(left, right, group, other, pair)
        rest[0].extend(group if not other else ())
        rest[1].extend(other if not group else ())
    if rest[0] and rest[1]:
        _match_renamed(left, right, sorted(rest[0]), sorted(rest[1]), pair)


def _match_repeated(
    left: CallTree, right: CallTree, a: list[int], b: list[int], pair: Callable[[int, int], None]
) -> None:
    """Pair calls of one path in order; where one side has more, by what they returned or did."""
    if len(a) == len(b):
        for i, j in zip(a, b, strict=True):
            pair(i, j)
        return
    same = word("the same path")
    levels = [
        _level(left.values, right.values, a, b),
        _level(left.structure, right.structure, a, b),
        _level([same] * len(left.calls), [same] * len(right.calls), a, b),
    ]
    _pair_refined(levels, a, b, pair)


def _match_renamed(
    left: CallTree, right: CallTree, a: list[int], b: list[int], pair: Callable[[int, int], None]
) -> None:
    """Pair calls whose paths have no counterpart: by result, then type and structure, in order."""
    types = [word(c.type) for c in left.calls], [word(c.type) for c in right.calls]
    levels = [
        _level(left.values, right.values, a, b),
        _level(_joined(left.structure, types[0]), _joined(right.structure, types[1]), a, b),
        _level(_joined(left.names, types[0]), _joined(right.names, types[1]), a, b),
        _level(left.names, right.names, a, b),
    ]
    _pair_refined(levels, a, b, pair)


def _pair_refined(
    levels: list[Level], a: list[int], b: list[int], pair: Callable[[int, int], None]
) -> None:
    refined = refine(levels)
    for i, j in zip(refined.left.tolist(), refined.right.tolist(), strict=True):
        pair(a[i], b[j])


def _joined(first: list[int], second: list[int]) -> list[int]:
    return [hash(both) for both in zip(first, second, strict=True)]


def _level(left: list[int], right: list[int], a: list[int], b: list[int]) -> Level:
    mask = (1 << 64) - 1
    return Level(
        np.array([left[i] & mask for i in a], np.uint64),
        np.array([right[j] & mask for j in b], np.uint64),
    )
