"""Undo pairs of copies that copy things which have nothing to do with each other.

`clone` says little of what it is for: two of one shape in one scope may copy a key here and a mask there. Where the
contents differ, and what leads to one shares nothing with what leads to the other, they are no pair.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from opdrift.align.ops import Pairs
from opdrift.contents import Contents
from opdrift.tokens import Words, word
from opdrift.tracefile.columns import Ints

_COPIES: Final = (word("aten.clone.default"), word("aten._to_copy.default"))
#: So many ops without a counterpart are gone back through; where that does not suffice the pair stays.
_FAR: Final = 32


def drop_unrelated(pairs: Pairs) -> None:
    """Undo such pairs."""
    left, right = pairs.left, pairs.right
    i = np.flatnonzero((pairs.right_of >= 0) & np.isin(left.tokens.name.all, _COPIES))
    j = pairs.right_of[i]
    words = _results(left, i), _results(right, j)
    differ = (words[0] != words[1]) & (words[0] != 0) & (words[1] != 0)
    for a, b in zip(i[differ].tolist(), j[differ].tolist(), strict=True):
        mine = _led_by(left, a, lambda op: op if pairs.right_of[op] >= 0 else -1)
        theirs = _led_by(right, b, lambda op: int(pairs.left_of[op]))
        if mine and theirs and mine.isdisjoint(theirs):
            pairs.drop(a)


def _results(contents: Contents, ops: Ints) -> Words:
    """The content of each copy; 0 where it is not known, or the op raised and returned nothing."""
    outputs = contents.trace.ops.outputs
    found = np.zeros(len(ops), np.uint64)
    returned = np.flatnonzero(outputs.offsets[ops + 1] > outputs.offsets[ops])
    found[returned] = contents.by_place[outputs.values[outputs.offsets[ops[returned]]]]
    return found


def _led_by(contents: Contents, op: int, number_of: Callable[[int], int]) -> set[object] | None:
    """The nearest pairs, by number, and the leaves, by content, from which an op's input was made; None if far."""
    inputs = contents.trace.ops.inputs
    found: set[object] = set()
    seen = {op}
    rest = [op]
    while rest:
        for value in inputs[rest.pop()].tolist():
            maker = int(contents.maker[value])
            if maker < 0:
                found.add(("leaf", int(contents.by_place[value])))
            elif (number := number_of(maker)) >= 0:
                found.add(number)
            elif maker not in seen:
                if len(seen) > _FAR:
                    return None
                seen.add(maker)
                rest.append(maker)
    return found
