"""Pair two sequences of words in order: equal ends first, then anchors, then a bounded search."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import compress
from typing import Final

import numpy as np

from opdrift.align.segments import spread
from opdrift.tokens import Words, mix
from opdrift.tracefile.columns import Ints

#: Windows of at most this many cells are searched for the longest common subsequence.
SEARCHED_CELLS: Final = 250_000
#: All windows of an alignment together: a second or two. Programs that need more have little in common.
ALL_CELLS: Final = 100 * SEARCHED_CELLS
#: Windows of at most this many words are held against each other as sets first.
_SHORT: Final = 1000
#: From this many windows on, those without a common word are sorted out together.
_MANY: Final = 8
#: Lengths of the runs that may serve as anchors where single words repeat.
_RUNS: Final = (1, 4, 16, 64)


@dataclass(slots=True)
class Matches:
    """Positions that were paired, and the largest window for which the search had to be cut short."""

    left: list[Ints] = field(default_factory=list)
    right: list[Ints] = field(default_factory=list)
    cut_short: tuple[int, int] | None = None

    def add(self, left: Ints, right: Ints) -> None:
        """Pair positions one by one."""
        self.left.append(left)
        self.right.append(right)

    def add_run(self, left: int, right: int, length: int) -> None:
        """Pair `length` positions from `left` and `right` on."""
        if length:
            self.add(np.arange(left, left + length), np.arange(right, right + length))

    def sorted(self) -> tuple[Ints, Ints]:
        """All pairs, by left position."""
        if not self.left:
            return np.zeros(0, np.int64), np.zeros(0, np.int64)
        left, right = np.concatenate(self.left), np.concatenate(self.right)
        order = np.argsort(left, kind="stable")
        return left[order], right[order]


@dataclass(slots=True)
class Effort:
    """How many cells may still be searched, over all windows together."""

    cells: int = ALL_CELLS

    def take(self, cells: int) -> bool:
        """Whether a window of this size is searched."""
        if cells > min(SEARCHED_CELLS, self.cells):
            return False
        self.cells -= cells
        return True


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of both sequences that is still to be paired."""

    left: int
    left_end: int
    right: int
    right_end: int


def match(
    left: Words, right: Words, *, anchored: bool = False, effort: Effort | None = None
) -> Matches:
    """Pair positions of equal words so that the pairs keep their order.

    Near linear: equal ends are cut off; words (then runs of words) that occur once on each side split
    what is left; only windows of `SEARCHED_CELLS` are searched. A larger window without anchors is
    paired by occurrence, and `cut_short` says so.

    Args:
        left: Words of the left sequence.
        right: Words of the right sequence.
        anchored: Pair words only where they occur once on each side of a window, or stand at its ends.
        effort: What may be spent on searching; enough for any one sequence if not given.
    """
    found = Matches()
    effort = effort or Effort()
    stack = [Window(0, len(left), 0, len(right))]
    while stack:
        window = _without_equal_ends(stack.pop(), left, right, found)
        rows, columns = window.left_end - window.left, window.right_end - window.right
        if not rows or not columns:
            continue
        a, b = left[window.left : window.left_end], right[window.right : window.right_end]
        if rows + columns <= _SHORT and set(a.tolist()).isdisjoint(b.tolist()):
            continue  # the most frequent case, and ten times faster than to look for anchors
        anchors = _anchors(a, b, anchored)
        if anchors is not None:
            stack += _split(window, anchors[0], anchors[1])
        elif anchored:
            continue
        elif effort.take(rows * columns):
            _longest_common(window, left, right, found)
        else:
            found.cut_short = max(found.cut_short or (0, 0), (rows, columns))
            _by_occurrence(window, left, right, found)
    return found


def _without_equal_ends(window: Window, left: Words, right: Words, found: Matches) -> Window:
    """Pair what is equal at both ends of a window; return the rest."""
    a, b = left[window.left : window.left_end], right[window.right : window.right_end]
    start = _equal_start(a, b)
    found.add_run(window.left, window.right, start)
    end = _equal_start(a[start:][::-1], b[start:][::-1])
    found.add_run(window.left_end - end, window.right_end - end, end)
    return Window(
        window.left + start, window.left_end - end, window.right + start, window.right_end - end
    )


def _equal_start(a: Words, b: Words) -> int:
    """How many words both begin with; looks at doubling stretches, so an early end costs little."""
    length = min(len(a), len(b))
    done, step = 0, 64
    while done < length:
        stop = min(done + step, length)
        unequal = np.flatnonzero(a[done:stop] != b[done:stop])
        if len(unequal):
            return done + int(unequal[0])
        done, step = stop, step * 2
    return length


def _anchors(a: Words, b: Words, single: bool) -> tuple[Ints, Ints] | None:
    """Positions of words, or runs of words, that occur once on each side, in an order both share."""
    for run in _RUNS[:1] if single else _RUNS:
        if min(len(a), len(b)) < run:
            return None
        left, right = _unique_in_both(_runs(a, run), _runs(b, run))
        if len(left):
            keep = increasing(right)
            return left[keep], right[keep]
    return None


def _runs(words: Words, length: int) -> Words:
    """A word for each run of `length` words."""
    found, step = words, 1
    while step < length:
        found = mix(found[:-step], found[step:])
        step *= 2
    return found


def _unique_in_both(a: Words, b: Words) -> tuple[Ints, Ints]:
    """Positions of the words that occur exactly once in each, by left position."""
    left, right = _once(a), _once(b)
    _, i, j = np.intersect1d(a[left], b[right], assume_unique=True, return_indices=True)
    order = np.argsort(left[i], kind="stable")
    return left[i][order], right[j][order]


def _once(words: Words) -> Ints:
    _, first, counts = np.unique(words, return_index=True, return_counts=True)
    single: Ints = first[counts == 1].astype(np.int64)
    return single


def increasing(values: Ints) -> Ints:
    """Positions of a longest increasing subsequence."""
    if np.all(values[1:] > values[:-1]):
        return np.arange(len(values))
    tails: list[int] = []
    at: list[int] = []
    back = np.full(len(values), -1, np.int64)
    for i, value in enumerate(values.tolist()):
        k = _bisect(tails, value)
        back[i] = at[k - 1] if k else -1
        if k == len(tails):
            tails.append(value)
            at.append(i)
        else:
            tails[k], at[k] = value, i
    trail: list[int] = []
    i = at[-1]
    while i >= 0:
        trail.append(i)
        i = int(back[i])
    return np.array(trail[::-1], np.int64)


def _bisect(tails: list[int], value: int) -> int:
    low, high = 0, len(tails)
    while low < high:
        middle = (low + high) // 2
        if tails[middle] < value:
            low = middle + 1
        else:
            high = middle
    return low


def _split(window: Window, left: Ints, right: Ints) -> list[Window]:
    """The windows between anchors; an anchor starts the window after it, where it is an equal end."""
    starts = [(window.left, window.right)]
    previous = (-1, -1)
    for i, j in zip((left + window.left).tolist(), (right + window.right).tolist(), strict=True):
        # next to the anchor before it, it is an equal end of that one's window already
        if (i - 1, j - 1) == previous:
            previous = i, j
        # runs may overlap: the next anchor must not reach back into the one before
        elif i >= starts[-1][0] and j >= starts[-1][1]:
            starts.append((i, j))
            previous = i, j
    ends = [*starts[1:], (window.left_end, window.right_end)]
    return [
        Window(i, k, j, m) for (i, j), (k, m) in zip(starts, ends, strict=True) if k > i and m > j
    ]


def _longest_common(window: Window, left: Words, right: Words, found: Matches) -> None:
    """A longest common subsequence of a small window; of equal ones, that which pairs earlier words."""
    a, b = left[window.left : window.left_end], right[window.right : window.right_end]
    rows, columns = len(a), len(b)
    best = np.zeros((rows + 1, columns + 1), np.int32)
    for i in range(rows - 1, -1, -1):
        equal = np.where(a[i] == b, best[i + 1, 1:] + 1, 0)
        row = np.maximum(equal, best[i + 1, :-1])
        best[i, :-1] = np.maximum.accumulate(row[::-1])[::-1]
    i = j = 0
    lefts: list[int] = []
    rights: list[int] = []
    while i < rows and j < columns and best[i, j]:
        if a[i] == b[j] and best[i, j] == best[i + 1, j + 1] + 1:
            lefts.append(i)
            rights.append(j)
            i, j = i + 1, j + 1
        elif best[i + 1, j] >= best[i, j + 1]:
            i += 1
        else:
            j += 1
    found.add(np.array(lefts, np.int64) + window.left, np.array(rights, np.int64) + window.right)


def _by_occurrence(window: Window, left: Words, right: Words, found: Matches) -> None:
    """Pair the k-th occurrence of a word with the k-th, dropping pairs that would break the order."""
    a = _numbered(left[window.left : window.left_end])
    b = _numbered(right[window.right : window.right_end])
    i, j = _unique_in_both(a, b)
    if len(i):
        keep = increasing(j)
        found.add(i[keep] + window.left, j[keep] + window.right)


def _numbered(words: Words) -> Words:
    """Each word with the number of its occurrence, so that all are different."""
    order = np.argsort(words, kind="stable")
    grouped = words[order]
    first = np.flatnonzero(np.concatenate([[True], grouped[1:] != grouped[:-1]]))
    lengths = np.diff(np.concatenate([first, [len(words)]]))
    number = np.arange(len(words)) - np.repeat(first, lengths)
    found = np.zeros(len(words), np.uint64)
    found[order] = mix(grouped, number.astype(np.uint64))
    return found


@dataclass(frozen=True, slots=True)
class Level:
    """Words of both sequences by which positions may be paired; `anchored` as in `match`."""

    left: Words
    right: Words
    anchored: bool = False


def gaps(window: Window, left: Ints, right: Ints) -> list[Window]:
    """The stretches between pairs that hold something on both sides."""
    i = np.concatenate([[window.left - 1], left, [window.left_end]])
    j = np.concatenate([[window.right - 1], right, [window.right_end]])
    open_ = np.flatnonzero((np.diff(i) > 1) & (np.diff(j) > 1))
    return [Window(int(i[k]) + 1, int(i[k + 1]), int(j[k]) + 1, int(j[k + 1])) for k in open_]


@dataclass(frozen=True, slots=True)
class Refined:
    """Pairs by left position, and the number of the level that gave each."""

    left: Ints
    right: Ints
    level: Ints
    cut_short: tuple[int, int] | None

    def beside(self, left: Ints, right: Ints) -> Refined:
        """These pairs and others that were known before, which count as of the strictest level."""
        order = np.argsort(np.concatenate([left, self.left]), kind="stable")
        level = np.concatenate([np.zeros(len(left), np.int64), self.level])
        return Refined(
            np.concatenate([left, self.left])[order],
            np.concatenate([right, self.right])[order],
            level[order],
            self.cut_short,
        )


def refine(
    levels: list[Level], windows: list[Window] | None = None, *, effort: Effort | None = None
) -> Refined:
    """Pair by the first level, then what it left open, window by window, by the next ones.

    Args:
        levels: From strict to loose.
        windows: Stretches to pair, in order and apart; the whole sequences if not given.
        effort: As in `match`.
    """
    effort = effort or Effort()
    if windows is None:
        windows = [Window(0, len(levels[0].left), 0, len(levels[0].right))]
    lefts: list[Ints] = []
    rights: list[Ints] = []
    numbers: list[Ints] = []
    cut_short: tuple[int, int] | None = None
    for number, level in enumerate(levels):
        shared = _with_common_words(level, windows)
        rest: list[Window] = [w for w, has in zip(windows, shared, strict=True) if not has]
        for window in compress(windows, shared):
            found = match(
                level.left[window.left : window.left_end],
                level.right[window.right : window.right_end],
                anchored=level.anchored,
                effort=effort,
            )
            i, j = found.sorted()
            lefts.append(i + window.left)
            rights.append(j + window.right)
            numbers.append(np.full(len(i), number, np.int64))
            rest += gaps(window, lefts[-1], rights[-1])
            if found.cut_short:
                cut_short = max(cut_short or (0, 0), found.cut_short)
        windows = sorted(rest, key=lambda w: w.left)
    if not lefts:
        nothing = np.zeros(0, np.int64)
        return Refined(nothing, nothing, nothing, None)
    left, right, level_of = (np.concatenate(parts) for parts in (lefts, rights, numbers))
    order = np.argsort(left, kind="stable")
    return Refined(left[order], right[order], level_of[order], cut_short)


def _with_common_words(level: Level, windows: list[Window]) -> list[bool]:
    """Per window, whether a word stands on both sides of it; in bulk, since most have none."""
    if len(windows) < _MANY:
        return [True] * len(windows)
    spans = np.array([(w.left, w.left_end, w.right, w.right_end) for w in windows], np.int64)
    number = np.arange(len(windows))
    keys = []
    for words, start, end in ((level.left, 0, 1), (level.right, 2, 3)):
        lengths = spans[:, end] - spans[:, start]
        of_window = np.repeat(number, lengths)
        keys.append(
            (mix(words[spread(spans[:, start], lengths)], of_window.astype(np.uint64)), of_window)
        )
    common = keys[0][1][np.isin(keys[0][0], keys[1][0])]
    found: list[bool] = (np.bincount(common, minlength=len(windows)) > 0).tolist()
    return found
