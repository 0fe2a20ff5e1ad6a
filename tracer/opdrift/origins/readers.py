"""Which inputs read what a pair of ops made, by whatever way; found once for all origins of a comparison."""

from __future__ import annotations

from functools import cached_property
from typing import Final

import numpy as np

from opdrift.contents import Contents
from opdrift.pairs import EQUAL, Compared
from opdrift.tracefile.columns import Ints

#: Earlier writes of a storage that are looked at.
_WRITES: Final = 64


class Readers:
    """Inputs that are not equal, by the pairs that made what they read.

    An input may be read past ops that only one run has, or out of a storage that several pairs filled part by part.
    """

    def __init__(self, compared: Compared) -> None:
        self._compared = compared

    def of(self, row: int) -> list[int]:
        """Rows of `inputs` that read what a pair made, in order."""
        slots, starts = self._by_pair
        found: list[int] = slots[starts[row] : starts[row + 1]].tolist()
        return found

    @cached_property
    def _by_pair(self) -> tuple[Ints, Ints]:
        """Rows of `inputs`, those of one pair after another, and where each pair's begin."""
        compared = self._compared
        slots = np.flatnonzero(compared.inputs.status != EQUAL)
        known = [compared.behind_each(slots)]
        for contents, values, row_of in (
            (compared.left, compared.inputs.left, compared.row_of_left),
            (compared.right, compared.inputs.right, compared.row_of_right),
        ):
            known += _written_before(contents, values, row_of, slots)
        slot, row = (np.concatenate(columns) for columns in zip(*known, strict=True))
        table = np.unique(np.stack([row, slot], axis=1), axis=0)
        rows = np.arange(len(compared.pairing.left) + 1)
        return table[:, 1], np.searchsorted(table[:, 0], rows)


def _written_before(
    contents: Contents, values: Ints, row_of: Ints, slots: Ints
) -> list[tuple[Ints, Ints]]:
    """(row of `inputs`, pair that wrote into its storage before the last write); caches are filled part by part."""
    states = contents.states
    state = states.of[values[slots]]
    found = []
    for _ in range(_WRITES):
        state = states.before[state]
        written = (state >= 0) & (states.writer[state] >= 0)
        slots, state = slots[written], state[written]
        if not len(slots):
            break
        rows = row_of[states.writer[state]]
        found.append((slots[rows >= 0], rows[rows >= 0]))
    return found
