"""How much memory a run is known to have held: the storages between their first and their last use."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from opdrift.tracefile.columns import Ints
from opdrift.tracefile.reader import Trace

#: Points of one counter: of more changes, the largest of each stretch.
POINTS: Final = 50_000
_BITS: Final = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Curve:
    """Bytes over time, on one device; the time is that of the ops."""

    device: str
    times: Ints
    bytes: Ints


def live_bytes(trace: Trace) -> Iterator[Curve]:
    """What is known of the memory of each device that the run's tensors were on.

    A lower bound: of a storage as much as its tensors reach over, from the op that made it (a leaf: from the start) to
    the last op that used it, or to the end if it lived then. What ops need for themselves is not seen.
    """
    ops, values = trace.ops, trace.values
    if not len(ops):
        return
    storages = int(values.storage.max(initial=0)) + 1
    first, last = np.full(storages, len(ops), np.int64), np.full(storages, -1, np.int64)
    for ids in (ops.inputs, ops.outputs):
        used, rows = values.storage[ids.values], ids.rows()
        np.minimum.at(first, used, rows)
        np.maximum.at(last, used, rows)
    made = np.full(storages, False)
    made[values.storage[np.flatnonzero(trace.producer >= 0)]] = True
    for leaf in trace.leaves:
        storage = int(values.storage[leaf.value])
        if leaf.when in ("return", "exit"):
            last[storage] = len(ops) - 1
        elif not made[storage]:
            first[storage] = 0
    sizes, devices, names = _sizes(trace, storages)
    exists = (first < len(ops)) & (last >= first) & (np.arange(storages) > 0)
    for number, device in enumerate(names):
        here = exists & (devices == number)
        change = np.zeros(len(ops) + 1, np.int64)
        np.add.at(change, first[here], sizes[here])
        np.subtract.at(change, last[here] + 1, sizes[here])
        level = np.cumsum(change[:-1])
        moved = np.concatenate([np.zeros(1, np.int64), np.flatnonzero(change[1:-1]) + 1])
        chosen = moved if len(moved) <= POINTS else _peaks(level, moved)
        yield Curve(device, ops.start[chosen], level[chosen])


def _peaks(level: Ints, moved: Ints) -> Ints:
    """Of each stretch the place of the largest level."""
    edges = np.linspace(0, len(moved), POINTS + 1).astype(np.int64)
    return np.array(
        [
            moved[start + int(np.argmax(level[moved[start:end]]))]
            for start, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
        ],
        np.int64,
    )


def _sizes(trace: Trace, storages: int) -> tuple[Ints, Ints, list[str]]:
    """Per storage how many bytes its values reach over, and the number of its device; and the devices."""
    values = trace.values
    used = np.unique(values.meta)
    names: dict[str, int] = {}
    span, width = (np.zeros(int(used.max(initial=0)) + 1, np.int64) for _ in range(2))
    device = np.full(len(span), -1, np.int64)
    for ident in used[used > 0].tolist():
        meta = trace.meta_of(ident)
        if meta.device == "meta":
            continue  # nothing is there
        pairs = list(zip(meta.shape, meta.stride, strict=False))
        empty = any(size == 0 for size, _ in pairs)
        span[ident] = 0 if empty else 1 + sum((size - 1) * abs(step) for size, step in pairs)
        width[ident] = item_bytes(meta.dtype)
        device[ident] = names.setdefault(meta.device, len(names))
    reach = np.where(span[values.meta] > 0, (values.offset + span[values.meta]), 0)
    sizes = np.zeros(storages, np.int64)
    np.maximum.at(sizes, values.storage, reach * width[values.meta])
    devices: npt.NDArray[np.int64] = np.full(storages, -1, np.int64)
    np.maximum.at(devices, values.storage, device[values.meta])
    return sizes, devices, list(names)


def item_bytes(dtype: str) -> int:
    """Bytes of an element, from the name of its dtype: `bfloat16`, `float8_e4m3fn`, `complex64`, `bool`."""
    bits = _BITS.search(dtype)
    return max(int(bits.group()) // 8, 1) if bits else 1
