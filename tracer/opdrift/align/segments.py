"""Group the ops of a trace, and take what lies in groups out of columns, without a loop over the groups."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from opdrift.tokens import Words, mix
from opdrift.tracefile.columns import Ints


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows with equal keys, in order.

    Attributes:
        keys: The keys, ascending, each once.
        order: Row numbers, those of one key after another.
        offsets: Where in `order` each key's rows begin; one more at the end.
    """

    keys: Ints
    order: Ints
    offsets: Ints

    @classmethod
    def of(cls, key: Ints) -> Groups:
        """Group rows by a column of keys."""
        order = np.argsort(key, kind="stable")
        grouped = key[order]
        first = np.flatnonzero(
            np.concatenate([np.ones(min(len(key), 1), np.bool_), grouped[1:] != grouped[:-1]])
        )
        return cls(grouped[first], order, np.append(first, len(key)))

    @property
    def lengths(self) -> Ints:
        """How many rows each key has."""
        return np.diff(self.offsets)

    def find(self, keys: Ints) -> Ints:
        """The number of each of some keys; -1 for those that no row has."""
        if not len(self.keys):
            return np.full(len(keys), -1, np.int64)
        place = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.where(self.keys[place] == keys, place, -1)

    def rows(self, number: int) -> Ints:
        """The rows of one key."""
        return self.order[self.offsets[number] : self.offsets[number + 1]]

    def rows_of(self, numbers: Ints) -> Ints:
        """The rows of several keys, one after another."""
        return self.order[spread(self.offsets[numbers], self.lengths[numbers])]

    def words(self, words: Words) -> Words:
        """A word per key for what its rows have, in their order."""
        if not len(self.keys):
            return np.zeros(0, np.uint64)
        within = spread(np.zeros(len(self.keys), np.int64), self.lengths).astype(np.uint64)
        return np.add.reduceat(mix(words[self.order], within), self.offsets[:-1])


def spread(starts: Ints, lengths: Ints) -> Ints:
    """The numbers from each start on, `lengths` of them, one stretch after another."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    found: Ints = np.arange(total) + np.repeat(starts - (ends - lengths), lengths)
    return found
