"""The module calls of a trace as arrays, and the words by which they are recognised in another trace."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from itertools import takewhile
from typing import Final

import numpy as np

from opdrift.align.homes import home_calls, recomputing
from opdrift.align.segments import Groups, spread
from opdrift.contents import Contents
from opdrift.tokens import Words, mix, word
from opdrift.tracefile.columns import Ints

_WEIGHTS: Final = frozenset({"parameter", "buffer"})


class CallTree:
    """The calls of one trace; arrays are indexed by call id, and call 0 is the program outside every module.

    Attributes:
        parent: The call that made each call; -1 for call 0.
        path: Path of the module, renamed, as a word.
        relative: Path from the parent's on, as a word.
        type: Type of the module as a word.
        home: The call that each op belongs to.
        repeats: The call that a call in the backward pass makes once more; -1 for others.
    """

    def __init__(self, contents: Contents, rename: Callable[[str], str]) -> None:
        self._contents = contents
        trace = contents.trace
        columns = trace.call_columns
        self.parent = columns.parent.copy()
        self.parent[0] = -1
        names, at = np.unique(columns.path, return_inverse=True)
        named = [trace.call_name(int(path)) for path in names]
        self._texts = [rename(path) for path, _ in named]
        self._text = at
        self.path = np.array([word(path) for path in self._texts], np.uint64)[at]
        self.type = np.array([word(type_) for _, type_ in named], np.uint64)[at]
        self.relative = self._relative()
        # call 0 has no parent: its key is below that of every other call
        self._children = Groups.of(self.parent)
        self._levels = self._by_depth()
        self.home = home_calls(trace)
        self.repeats = self._repeated()
        again = self.repeats[self.home]
        late = recomputing(trace.ops)
        self.home = np.where((again >= 0) & ~late, again, self.home)

    def __len__(self) -> int:
        return len(self.parent)

    def path_of(self, call: int) -> str:
        """The renamed path of a call."""
        return self._texts[int(self._text[call])]

    def children(self, call: int) -> Ints:
        """The calls that a call made, in order."""
        number = int(self._children.find(np.array([call]))[0])
        return self._children.rows(number) if number >= 0 else np.zeros(0, np.int64)

    def below(self, calls: Ints) -> Ints:
        """The calls that some calls made, one call's after another's."""
        numbers = self._children.find(calls)
        return self._children.rows_of(numbers[numbers >= 0])

    def repeated_ops(self) -> Ints:
        """Per op of the backward pass, the op of the forward pass that it repeats; -1 for others and for views."""
        ops, view = self._contents.trace.ops, self._contents.tokens.view.all
        found = np.full(len(ops), -1, np.int64)
        late = np.flatnonzero(recomputing(ops) & ~view)
        if not len(late):
            return found
        first = np.flatnonzero((ops.phase == 0) & ~view)
        again, once = Groups.of(ops.call[late]), Groups.of(ops.call[first])
        place = once.find(self.repeats[again.keys])
        here = np.flatnonzero((self.repeats[again.keys] >= 0) & (place >= 0))
        # what is repeated may stop early: as soon as all that the backward pass needs is there
        here = here[again.lengths[here] <= once.lengths[place[here]]]
        lengths = again.lengths[here]
        if not len(here):
            return found
        mine = late[again.rows_of(here)]
        theirs = first[once.order[spread(once.offsets[place[here]], lengths)]]
        names = self._contents.tokens.name
        same = np.logical_and.reduceat(names[mine] == names[theirs], np.cumsum(lengths) - lengths)
        keep = np.repeat(same, lengths)
        found[mine[keep]] = theirs[keep]
        return found

    # ---- words -----------------------------------------------------------------------------------------

    @cached_property
    def shape(self) -> Words:
        """The modules called below each call, in order."""
        return self._subtree(self.relative, own=False)

    @cached_property
    def structure(self) -> Words:
        """The ops with their layouts in each call and below, going forward; views do not count."""
        return self._subtree(self._direct(self._contents.tokens.shape.all))

    @cached_property
    def names(self) -> Words:
        """The names of those ops."""
        return self._subtree(self._direct(self._contents.tokens.name.all))

    @cached_property
    def values(self) -> Words:
        """What those ops returned."""
        outputs = self._contents.trace.ops.outputs
        contents = self._contents.by_place[outputs.values]
        padded = np.concatenate([contents, np.zeros(1, np.uint64)])
        starts = outputs.offsets[:-1]
        summed = np.add.reduceat(padded, starts) if len(starts) else padded[:0]
        empty = np.diff(outputs.offsets) == 0
        return self._subtree(self._direct(np.where(empty, np.uint64(1), summed)))

    @cached_property
    def weights(self) -> Words:
        """The parameters and buffers that the ops in each call and below read going forward; 0 for none."""
        contents, ops = self._contents, self._contents.trace.ops
        weights = [leaf.value for leaf in contents.trace.leaves if leaf.kind in _WEIGHTS]
        is_weight = np.zeros(len(contents.states.of), np.bool_)
        is_weight[np.array(weights, np.int64)] = (
            contents.states.writer[contents.states.of[np.array(weights, np.int64)]] < 0
        )
        read = np.flatnonzero(is_weight[ops.inputs.values])
        op = ops.inputs.rows()[read]
        keep = ops.phase[op] == 0
        # a weight counts once a call, however often it is read
        both = np.unique(np.stack([ops.call[op[keep]], ops.inputs.values[read[keep]]]), axis=1)
        found = np.zeros(len(self), np.uint64)
        content = contents.by_place[both[1]]
        np.add.at(found, both[0], mix(content, np.ones(len(content), np.uint64)))
        for level in reversed(self._levels):
            np.add.at(found, self.parent[level], found[level])
        return found

    def _direct(self, words: Words) -> Words:
        """A word for the ops of each call alone, as in `structure`; their order counts."""
        all_ops = self._contents.trace.ops
        forward = (all_ops.phase == 0) | recomputing(all_ops)
        ops = np.flatnonzero(forward & ~self._contents.tokens.view.all)
        groups = Groups.of(all_ops.call[ops])
        found = np.zeros(len(self), np.uint64)
        found[groups.keys] = groups.words(words[ops])
        return found

    def _subtree(self, words: Words, *, own: bool = True) -> Words:
        """A word for what each call and all below it have; with `own` False only those below."""
        found = words.copy() if own else np.zeros(len(self), np.uint64)
        for level in reversed(self._levels):
            inner = found[level] if own else mix(found[level], words[level])
            np.add.at(found, self.parent[level], mix(inner, self._ordinal[level]))
        return found

    # ---- the tree --------------------------------------------------------------------------------------

    def _relative(self) -> Words:
        parent = np.maximum(self.parent, 0)
        size = len(self._texts)
        both, at = np.unique(self._text[parent] * size + self._text, return_inverse=True)
        words = [
            word(_below(self._texts[pair // size], self._texts[pair % size]))
            for pair in both.tolist()
        ]
        return np.array(words, np.uint64)[at]

    def _by_depth(self) -> list[Ints]:
        """Calls by depth, without call 0; each call's number among its parent's calls is noted."""
        self._ordinal = np.zeros(len(self), np.uint64)
        starts = np.zeros(len(self._children.keys), np.int64)
        self._ordinal[self._children.order] = spread(starts, self._children.lengths).astype(
            np.uint64
        )
        levels = []
        level = np.zeros(1, np.int64)
        while len(level := self.below(level)):
            levels.append(level)
        return levels

    def _repeated(self) -> Ints:
        """Per call, the call of the forward pass that it makes once more in the backward pass."""
        found = np.full(len(self), -1, np.int64)
        trace = self._contents.trace
        late_ops = recomputing(trace.ops)
        if not late_ops.any():
            return found
        late = np.zeros(len(self), np.bool_)
        late[trace.ops.call[late_ops]] = True
        for level in reversed(self._levels):
            np.logical_or.at(late, self.parent[level], late[level])
        late[0] = False
        roots = np.flatnonzero(late & ~late[np.maximum(self.parent, 0)])
        begins = self._begin()
        earlier: dict[int, list[int]] = {}
        for call in np.flatnonzero(~late & np.isin(self.path, self.path[roots])).tolist():
            earlier.setdefault(int(self.path[call]), []).append(call)
        for root in roots.tolist():
            candidates = earlier.get(int(self.path[root]), [])
            # the last call of the forward pass is the first to be made again
            before = [c for c in reversed(candidates) if c < root]
            match = next((c for c in before if begins[c] == begins[root]), None)
            if match is None and before:
                match = before[0]
            if match is not None:
                candidates.remove(match)
                self._map_below(found, root, match)
        return found

    def _begin(self) -> Words:
        """A word for what the first computing op in each call and below returned."""
        ops = self._contents.trace.ops
        none = len(ops)
        first = np.full(len(self), none, np.int64)
        computing = np.flatnonzero(~self._contents.tokens.view.all)
        np.minimum.at(first, ops.call[computing], computing)
        for level in reversed(self._levels):
            np.minimum.at(first, self.parent[level], first[level])
        has = (first < none) & (np.append(np.diff(ops.outputs.offsets), 0)[first] > 0)
        found = np.zeros(len(self), np.uint64)
        found[has] = self._contents.by_place[ops.outputs.values[ops.outputs.offsets[first[has]]]]
        return found

    def _map_below(self, found: Ints, call: int, other: int) -> None:
        """Note that two calls are the same one in turn, and those below them as far as the first goes."""
        open_ = [(call, other)]
        while open_:
            mine, theirs = open_.pop()
            found[mine] = theirs
            both = zip(self.children(mine).tolist(), self.children(theirs).tolist(), strict=False)
            open_ += takewhile(lambda pair: self.relative[pair[0]] == self.relative[pair[1]], both)


def _below(parent: str, path: str) -> str:
    """A path from its parent's on; the whole of it where it does not lie below."""
    if path == parent:
        return "."
    return path[len(parent) + 1 :] if parent and path.startswith(f"{parent}.") else path
