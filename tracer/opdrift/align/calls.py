"""Pair the module calls of two traces: by path and occurrence, then by what they are where names changed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final

import numpy as np

from opdrift.align.segments import Groups
from opdrift.align.sequence import Level, increasing, refine
from opdrift.align.tree import CallTree
from opdrift.tokens import Words, mix
from opdrift.tracefile.columns import Ints
from opdrift.tracefile.reader import Trace

Maps = Sequence[tuple[str, str]]
#: Paths of the other side must explain at least this part of the paths for a prefix to be assumed.
_PREFIX_SHARE: Final = 0.8


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


def paths_of(trace: Trace) -> set[str]:
    """The paths of all modules that were called."""
    return {trace.call_name(path)[0] for path in np.unique(trace.call_columns.path[1:]).tolist()}


def wrapper_prefix(left: Trace, right: Trace) -> tuple[str, str] | None:
    """A prefix that all paths of one side carry and those of the other do not, as a map; None if there is none.

    Where one run wraps its model (`module.` of data parallelism), its paths are those of the other with a
    prefix.
    """
    a, b = paths_of(left), paths_of(right)
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
    return _Matching(left, right).run()


class _Matching:
    """Calls as they are paired, from the outermost inwards."""

    def __init__(self, left: CallTree, right: CallTree) -> None:
        self._left = left
        self._right = right
        self._found = np.full(len(left), -1, np.int64)
        self._taken = np.zeros(len(right), np.bool_)
        #: Pairs whose own calls are still to be paired; those that call the same modules, in bulk.
        self._open: list[tuple[int, int]] = []
        self._alike: list[tuple[int, int]] = []

    def run(self) -> Ints:
        """Pair everything that can be paired."""
        self._pair(0, 0)
        self._inwards()
        while self._moved():
            pass
        return self._found

    def _pair(self, i: int, j: int) -> None:
        self._found[i], self._taken[j] = j, True
        alike = self._left.shape[i] == self._right.shape[j]
        (self._alike if alike else self._open).append((i, j))

    def _inwards(self) -> None:
        while self._open:
            i, j = self._open.pop()
            self._children(self._left.children(i).tolist(), self._right.children(j).tolist())
        # what two calls of the same modules in the same order call is paired in order, all of it
        mine, theirs = (np.array([pair[side] for pair in self._alike], np.int64) for side in (0, 1))
        self._alike.clear()
        while len(mine := self._left.below(mine)):
            theirs = self._right.below(theirs)
            self._found[mine], self._taken[theirs] = theirs, True

    def _moved(self) -> bool:
        """Pair calls that are left over on both sides by their paths: a module below another parent."""
        left, right = self._left, self._right
        rest = np.flatnonzero(self._found < 0), np.flatnonzero(~self._taken)
        groups = Groups.of(_numbers(left.path[rest[0]])), Groups.of(_numbers(right.path[rest[1]]))
        shared = groups[1].find(groups[0].keys)
        both = np.flatnonzero(shared >= 0)
        # the outermost, which are the earliest, first: they bring theirs with them
        for number in both[np.argsort(groups[0].order[groups[0].offsets[both]])].tolist():
            mine = [i for i in rest[0][groups[0].rows(number)].tolist() if self._found[i] < 0]
            other = rest[1][groups[1].rows(int(shared[number]))].tolist()
            theirs = [j for j in other if not self._taken[j]]
            if mine and theirs:
                self._repeated(mine, theirs)
                self._inwards()
        return len(both) > 0

    # ---- the calls of one pair -------------------------------------------------------------------------

    def _children(self, a: list[int], b: list[int]) -> None:
        """Pair calls below one pair of parents: equal paths by occurrence, the rest by what they are."""
        if not a or not b:
            return
        left, right = self._left, self._right
        if np.array_equal(left.path[a], right.path[b]):
            self._in_turn(a, b)
            return
        for i, j in _renamed_by_weights(left, right, a, b):
            self._pair(i, j)
        groups: dict[int, tuple[list[int], list[int]]] = {}
        for i, path in zip(a, left.path[a].tolist(), strict=True):
            if self._found[i] < 0:
                groups.setdefault(path, ([], []))[0].append(i)
        for j, path in zip(b, right.path[b].tolist(), strict=True):
            if not self._taken[j]:
                groups.setdefault(path, ([], []))[1].append(j)
        rest: tuple[list[int], list[int]] = ([], [])
        for group, other in groups.values():
            if group and other:
                self._repeated(group, other)
            rest[0].extend(group if not other else ())
            rest[1].extend(other if not group else ())
        if rest[0] and rest[1]:
            self._renamed(sorted(rest[0]), sorted(rest[1]))

    def _in_turn(self, a: list[int], b: list[int]) -> None:
        for i, j in zip(a, b, strict=True):
            self._pair(i, j)

    def _repeated(self, a: list[int], b: list[int]) -> None:
        """Pair calls of one path in order; where one side has more, by what they returned or did.

        What a backward pass makes once more is paired apart.
        """
        left, right = self._left, self._right
        if len(a) == len(b):
            self._in_turn(a, b)
            return
        first = [i for i in a if left.repeats[i] < 0], [j for j in b if right.repeats[j] < 0]
        if first[0] and first[1] and len(first[0]) + len(first[1]) < len(a) + len(b):
            again = [i for i in a if left.repeats[i] >= 0], [j for j in b if right.repeats[j] >= 0]
            self._repeated(*first)
            if again[0] and again[1]:
                self._repeated(*again)
            return
        levels = [
            Level(left.values[a], right.values[b]),
            Level(left.structure[a], right.structure[b]),
            Level(np.ones(len(a), np.uint64), np.ones(len(b), np.uint64)),
        ]
        self._refined(levels, a, b)

    def _renamed(self, a: list[int], b: list[int]) -> None:
        """Pair calls whose paths have no counterpart: by weights and results, then type and structure in order."""
        left, right = self._left, self._right
        known: list[tuple[int, int]] = []
        for words in ((left.weights, right.weights), (left.values, right.values)):
            done = {i for i, _ in known}, {j for _, j in known}
            rest = [i for i in a if i not in done[0]], [j for j in b if j not in done[1]]
            known += _once_in_both(words, *rest)
        known.sort()
        for i, j in known:
            self._pair(i, j)
        # those in an order that both runs share split what is left; modules may also run in another order
        kept = increasing(np.array([j for _, j in known], np.int64)).tolist() if known else []
        fixed = dict(known[k] for k in kept)
        loose = {i for i, _ in known if i not in fixed}, {j for i, j in known if i not in fixed}
        a, b = [i for i in a if i not in loose[0]], [j for j in b if j not in loose[1]]
        levels = [
            Level(*_anchors(fixed, a, b), anchored=True),
            Level(mix(left.structure[a], left.type[a]), mix(right.structure[b], right.type[b])),
            Level(mix(left.names[a], left.type[a]), mix(right.names[b], right.type[b])),
            Level(left.names[a], right.names[b]),
        ]
        self._refined(levels, a, b)

    def _refined(self, levels: list[Level], a: list[int], b: list[int]) -> None:
        refined = refine(levels)
        for i, j in zip(refined.left.tolist(), refined.right.tolist(), strict=True):
            if self._found[a[i]] < 0:
                self._pair(a[i], b[j])


def _renamed_by_weights(
    left: CallTree, right: CallTree, a: list[int], b: list[int]
) -> list[tuple[int, int]]:
    """Pairs of calls that exchanged or shifted their names, told by the weights that they read.

    Names are believed, unless following the weights instead pairs all calls in the order in which they
    run, and the names do not: they pair across, or a side has calls that the other lacks. So weights that
    were loaded into the wrong modules are still found there.
    """
    places = _places(left.path, a), _places(right.path, b)
    named = sorted((i, places[1][p]) for p, i in places[0].items() if p in places[1])
    mine, theirs = left.weights[a], right.weights[b]
    if all(mine[i] == theirs[j] or not mine[i] or not theirs[j] for i, j in named):
        return []
    pairs = _once_in_both((left.weights, right.weights), a, b)
    weighted = min(int(np.count_nonzero(mine)), int(np.count_nonzero(theirs)))
    if len(pairs) < weighted or not _ascends(pairs):
        return []
    return pairs if len(a) != len(b) or not _ascends(named) else []


def _places(words: Words, calls: list[int]) -> dict[int, int]:
    """Where each word that one call of a list has stands in it."""
    found: dict[int, int] = {}
    for place, w in enumerate(words[calls].tolist()):
        found[w] = -1 if w in found else place
    return {w: place for w, place in found.items() if place >= 0}


def _once_in_both(words: tuple[Words, Words], a: list[int], b: list[int]) -> list[tuple[int, int]]:
    """Calls with equal words that no other call of the list has, in the order of the left ones; 0 is no word."""
    places = _places(words[0], a), _places(words[1], b)
    return [(a[i], b[places[1][w]]) for w, i in places[0].items() if w and w in places[1]]


def _ascends(pairs: list[tuple[int, int]]) -> bool:
    return all(x[1] < y[1] for x, y in pairwise(pairs))


def _anchors(fixed: dict[int, int], a: list[int], b: list[int]) -> tuple[Words, Words]:
    """Words that are equal for the pairs of `fixed` and for nothing else."""
    taken = set(fixed.values())
    left = [4 * fixed[i] if i in fixed else 4 * i + 1 for i in a]
    right = [4 * j if j in taken else 4 * j + 2 for j in b]
    return np.array(left, np.uint64), np.array(right, np.uint64)


def _numbers(words: Words) -> Ints:
    return words.view(np.int64)
