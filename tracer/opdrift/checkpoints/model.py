"""The parameters and buffers of a trace, with every content that they were seen to hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from opdrift.checkpoints.stored import Key
from opdrift.leaves import BEFORE
from opdrift.tracefile.columns import Ints
from opdrift.tracefile.reader import Trace


@dataclass(frozen=True, slots=True)
class Own:
    """A parameter or buffer of the model.

    Attributes:
        name: Its name.
        kind: "parameter" or "buffer".
        dtype: Of its first content that is known.
        shape: The same.
        value: That content.
        keys: Every content that is known, the first one first.
        contents: The values of those.
        constant: The first content is one number throughout, which tells little.
    """

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]
    value: int
    keys: tuple[Key, ...]
    contents: tuple[int, ...]
    constant: bool

    @property
    def size(self) -> int:
        """Elements."""
        return prod(self.shape)


class Model:
    """What one trace knows of its model."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self.tensors = {own.name: own for own in self._all()}

    @cached_property
    def passing(self) -> frozenset[str]:
        """Buffers that no state dict holds."""
        marks = [mark for mark in self._trace.marks if mark.kind == "model"]
        return frozenset(name for m in marks for name in m.fields.get("non_persistent") or ())

    def _all(self) -> Iterator[Own]:
        trace, rows = self._trace, dict[str, list[int]]()
        kinds: dict[str, str] = {}
        for leaf in trace.leaves:
            if leaf.name and leaf.kind in ("parameter", "buffer"):
                rows.setdefault(leaf.name, []).append(leaf.value)
                if leaf.when in BEFORE:
                    kinds.setdefault(leaf.name, leaf.kind)
        for name, kind in kinds.items():
            values = [v for value in rows[name] for v in self._history(value)]
            known = [(v, f) for v in values if (f := trace.fingerprint(v)) is not None]
            if not known:
                continue
            first, content = known[0]
            meta = trace.meta(first)
            by_key: dict[Key, int] = {}
            for each, fingerprint in known:
                by_key.setdefault(fingerprint.key, each)
            keys, contents = tuple(by_key), tuple(by_key.values())
            constant = not content.nonfinite and content.min == content.max
            yield Own(name, kind, meta.dtype, meta.shape, first, keys, contents, constant)

    def _history(self, value: int) -> list[int]:
        """A value, and what else its part of the storage held, before it and later."""
        columns, (order, storages) = self._trace.values, self._by_storage
        storage = columns.storage[value]
        start, end = np.searchsorted(storages, [storage, storage + 1])
        same = order[start:end]
        alike = (columns.offset[same] == columns.offset[value]) & (
            columns.meta[same] == columns.meta[value]
        )
        return [value, *same[alike].tolist()]

    @cached_property
    def _by_storage(self) -> tuple[Ints, Ints]:
        """Values in the order of their storages, and those."""
        storage = self._trace.values.storage
        order = np.argsort(storage, kind="stable")
        return order, storage[order]
