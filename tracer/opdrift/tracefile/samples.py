"""Where the batch lies in the values of a trace, and what single samples hold."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
import pyarrow as pa

from opdrift.batch import Batch
from opdrift.records import TensorMeta
from opdrift.tfp1 import Code
from opdrift.tracefile.axes import (
    BATCH,
    LENGTH_UNKNOWN,
    MIXED,
    UNKNOWN,
    UNSURE,
    Extents,
    Missing,
    Position,
    Step,
    locate,
    step_of,
)
from opdrift.tracefile.columns import Ints, ValueColumns
from opdrift.tracefile.fingerprints import Fingerprint, FingerprintColumns

_BITS: Final = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Followed:
    """Where the batch, and padded lengths, lie in a value.

    Attributes:
        batch: Where the batch lies: one position, or none; several where samples are held against samples.
        lengths: Where padded lengths lie; each position's `axis` is a number for `Trace.extents`.
        flags: MIXED, UNKNOWN, UNSURE and LENGTH_UNKNOWN of `opdrift.tracefile.axes`.
    """

    batch: tuple[Position, ...]
    lengths: tuple[Position, ...]
    flags: int

    @property
    def mixed(self) -> bool:
        """An item depends on other samples of the batch, or on how many there are."""
        return bool(self.flags & MIXED)

    @property
    def unknown(self) -> bool:
        """It depends on the batch, but where the batch lies could not be followed."""
        return bool(self.flags & UNKNOWN)

    @property
    def unsure(self) -> bool:
        """It may be mixed: something in it could not be followed."""
        return bool(self.flags & UNSURE)

    @property
    def length_unknown(self) -> bool:
        """Padding is somewhere in it, and where could not be followed."""
        return bool(self.flags & LENGTH_UNKNOWN)


class SampleTable:
    """The tables `samples` and `axes` of one trace.

    Args:
        prints: The table `samples` as fingerprints.
        item: Its column `item`.
        axes: The table `axes`.
        values: The values of the trace.
        meta: The layout of a value.
        text: The texts of the trace, by kind and id.
        options: What the run was recorded with.
    """

    def __init__(
        self,
        prints: FingerprintColumns,
        item: Ints,
        axes: pa.Table,
        *,
        values: ValueColumns,
        meta: Callable[[int], TensorMeta],
        text: Mapping[tuple[str, int], str],
        options: Mapping[str, Any],
    ) -> None:
        self.prints = prints
        self._values = values
        self._meta = meta
        self._text = text
        self._axes = axes
        self.batch = _batch(options)
        self._width = int(item.max(initial=0)) + 1
        key = prints.value * self._width + item
        # a value that was recorded again has two rows of the same content: the last one counts
        self._order = np.argsort(key, kind="stable")
        self._keys = key[self._order]
        self._extents: dict[int, Extents] = {}

    def rows(self, values: Ints, sample: int) -> Ints:
        """Rows of `prints` for one sample of many values; -1 where there is none."""
        if not len(self._keys) or not 0 <= sample < self._width:
            return np.full(len(values), -1, np.int64)
        wanted = values * self._width + sample
        at = np.searchsorted(self._keys, wanted, side="right") - 1
        found: Ints = np.where(
            (at >= 0) & (self._keys[at] == wanted), self._order[np.maximum(at, 0)], -1
        )
        return found

    def fingerprint(self, value: int, sample: int) -> Fingerprint | None:
        """The record of one sample of a value, if there is one."""
        row = int(self.rows(np.array([value]), sample)[0])
        if row < 0:
            return None
        found = self.prints[row]
        return found if found.code != Code.FP8 else replace(found, fp8=self._meta(value).dtype)

    def extents(self, axis: int) -> Extents:
        """Which part of a padded axis is valid for each sample."""
        found = self._extents.get(axis)
        if found is None:
            size, valid = json.loads(self._text["extents", axis])
            parts = tuple(None if part is None else (part[0], part[1]) for part in valid)
            found = self._extents[axis] = Extents(size, parts)
        return found

    @property
    def first_extents(self) -> Extents | None:
        """Those of the inputs; None if no padded length was found in them."""
        return self.extents(1) if ("extents", 1) in self._text else None

    def followed(self, value: int) -> Followed | None:
        """Where the axes lie in a value; None if it carries none."""
        own = self.own.get(value)
        if own is not None:
            return own
        near = self._by_state.get(self._state(value))
        if near is None:
            return None
        return _seen_through(self.own[near], self._meta(near), self._meta(value))

    @cached_property
    def own(self) -> Mapping[int, Followed]:
        """What was recorded of values themselves, not of another layout of the same storage."""
        columns = self._axes.to_pydict()
        found = {}
        for value, flags, batch, length in zip(
            *(columns[name] for name in ("value", "flags", "batch", "length")), strict=True
        ):
            found[value] = Followed(
                tuple(self._position(value, [*each, BATCH]) for each in _groups(batch, 3)),
                tuple(self._position(value, each) for each in _groups(length, 4)),
                flags,
            )
        return found

    def _position(self, value: int, stored: Sequence[int]) -> Position:
        dim, outer, inner, axis = stored
        size = self._meta(value).shape[dim] // (outer * inner)
        return Position(dim, outer, size, inner, axis)

    @cached_property
    def _by_state(self) -> Mapping[tuple[int, int], int]:
        """The largest value of each state of a storage of which something was recorded."""
        found: dict[tuple[int, int], int] = {}
        for value in self.own:
            state = self._state(value)
            known = found.get(state)
            if known is None or _count(self._meta(value)) > _count(self._meta(known)):
                found[state] = value
        return found

    def _state(self, value: int) -> tuple[int, int]:
        return int(self._values.storage[value]), int(self._values.write[value])


def _groups(items: Sequence[int], size: int) -> list[Sequence[int]]:
    return [items[i : i + size] for i in range(0, len(items), size)]


def _batch(options: Mapping[str, Any]) -> Batch | None:
    given = options.get("batch")
    return None if given is None else Batch(given["size"], given["lengths"], given["pad_side"])


def _count(meta: TensorMeta) -> int:
    return int(np.prod(meta.shape, dtype=np.int64))


def _bytes(meta: TensorMeta) -> int:
    """Bytes of an element, from the name of its dtype: `bfloat16`, `complex64`, `bool`."""
    bits = _BITS.search(meta.dtype)
    return max(int(bits.group()) // 8, 1) if bits else 1


def _strides(meta: TensorMeta) -> list[int]:
    size = _bytes(meta)
    return [stride * size for stride in meta.stride]


def _seen_through(known: Followed, base: TensorMeta, view: TensorMeta) -> Followed:
    """What is known of one layout of a storage, in another one."""
    strides = _strides(base)
    steps = [step_of(p, strides) for p in (*known.batch, *known.lengths)]
    found = [
        (step, locate(step, view.shape, _strides(view))) for step in steps if isinstance(step, Step)
    ]
    batch = tuple(p for _, p in found if isinstance(p, Position) and p.axis == BATCH)
    lengths = tuple(p for _, p in found if isinstance(p, Position) and p.axis != BATCH)
    flags = known.flags
    if known.batch and not batch:
        flags |= UNKNOWN
    if not lengths and any(p is Missing.CUT and step.axis != BATCH for step, p in found):
        flags |= LENGTH_UNKNOWN
    return Followed(batch, lengths, flags)
