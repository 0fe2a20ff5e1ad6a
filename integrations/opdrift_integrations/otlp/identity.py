"""Ids that follow from the run: exporting twice sends the same ids, and a link can be made without asking a backend."""

from __future__ import annotations

from enum import IntEnum
from hashlib import blake2b
from typing import Final

import numpy as np

from opdrift.records import Header
from opdrift.tracefile.columns import Ints

#: The finalizer of splitmix64 (Steele, Lea and Flood, OOPSLA 2014): a bijection, so that no two spans share an id.
_MULTIPLIERS: Final = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS: Final = (np.uint64(30), np.uint64(27), np.uint64(31))


class Kind(IntEnum):
    """What a span is of; with the number of that in the trace it makes the span's id."""

    RUN = 1
    STEP = 2
    CALL = 3
    OP = 4
    MARK = 5


def trace_id(header: Header) -> bytes:
    """16 bytes for one process of a run."""
    return blake2b(f"{header.run_id}#{header.rank}".encode(), digest_size=16).digest()


def span_ids(trace: bytes, kind: Kind, numbers: Ints) -> list[bytes]:
    """8 bytes for each of the things of a kind, by its number: the seq of an op, the id of a call."""
    key = np.uint64(int.from_bytes(trace[8:]))
    x = (numbers.astype(np.uint64) | np.uint64(kind << 56)) ^ key
    for multiplier, shift in zip(_MULTIPLIERS, _SHIFTS, strict=False):
        x = (x ^ (x >> shift)) * multiplier
    x ^= x >> _SHIFTS[2]
    x[x == 0] = key | np.uint64(1)  # an id of zeros is none
    packed = x.astype(">u8").tobytes()
    return [packed[i : i + 8] for i in range(0, len(packed), 8)]


def span_id(trace: bytes, kind: Kind, number: int = 0) -> bytes:
    """One of them."""
    return span_ids(trace, kind, np.array([number], np.int64))[0]
