"""Which values of a trace lie in one storage, and what is known of their contents without decoding them."""

from __future__ import annotations

import numpy as np

from opdrift.tracefile.columns import Ints
from opdrift.tracefile.reader import Trace

Key = tuple[int, int, int]


class Neighbours:
    """The values of each storage of one trace; a look-up costs no pass over all of them."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._storage = trace.values.storage
        self._order = np.argsort(self._storage, kind="stable")
        self._sorted = self._storage[self._order]

    def of(self, value: int) -> Ints:
        """All values in the same storage as this one."""
        return self.in_storage(int(self._storage[value]))

    def in_storage(self, storage: int) -> Ints:
        """All values in a storage."""
        start, end = np.searchsorted(self._sorted, np.array([storage, storage + 1]))
        return self._order[start:end]

    def in_state(self, value: int) -> Ints:
        """The values in the same storage at the same write count."""
        near = self.of(value)
        write = self._trace.values.write
        found: Ints = near[write[near] == write[value]]
        return found

    def parts(self, value: int) -> Ints:
        """The values of the same part of the storage, in the order of the writes."""
        columns, near = self._trace.values, self.of(value)
        found: Ints = near[
            (columns.offset[near] == columns.offset[value])
            & (columns.meta[near] == columns.meta[value])
        ]
        return found[np.argsort(columns.write[found], kind="stable")]

    def versions(self, value: int) -> Ints:
        """Those of the same part whose contents are known."""
        parts = self.parts(value)
        found: Ints = parts[self._trace.values.fingerprint[parts] >= 0]
        return found

    def key(self, value: int) -> Key | None:
        """As `Fingerprint.key`, of a value that has a fingerprint; None for others."""
        row = int(self._trace.values.fingerprint[value])
        if row < 0:
            return None
        prints = self._trace.fingerprints
        return int(prints.raw[row]), int(prints.n[row]), int(prints.code[row])
