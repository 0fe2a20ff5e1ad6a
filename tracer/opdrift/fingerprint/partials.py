"""What a device computes of a fingerprint, and how the host finishes it.

A device splits a tensor into parts and writes one partial row for each, without reading anything back.
The digest is a sum over digits and the statistics are sums, counts and extremes, so the host can put parts
together in a fixed order whenever the rows arrive: results repeat bit for bit from run to run, and the
digest, counts, extremes and sample are those of every other implementation.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from opdrift.fingerprint.row import HAS_RAW, HAS_SAMPLE, HAS_SKETCH, HAS_STATISTICS, ROW
from opdrift.fingerprint.tensors import FIRST_FP8_KIND
from opdrift.tfp1 import SAMPLES, VERSION, Code, P, R

PARTIAL: Final = np.dtype(
    [
        # The digest of the part's components with weights from r^0 on, not reduced: sums over lanes of
        # the low 32 bits and of the rest. For components of 8 bytes: of their low halves ...
        ("low", "<i8"),
        ("high", "<i8"),
        ("low_upper", "<i8"),  # ... and of their high halves, whose weights lack one factor r
        ("high_upper", "<i8"),
        ("nan", "<i8"),
        ("pinf", "<i8"),
        ("ninf", "<i8"),
        ("zero", "<i8"),
        ("sub", "<i8"),
        ("min", "<f8"),
        ("max", "<f8"),
        ("sum", "<f8"),
        ("ssq", "<f8"),
        ("pad", "<i8", 3),
        ("sample", "<u8", SAMPLES),  # of the whole item; in its first part only
        ("sketch", "<f8", 64),
    ]
)
"""Words that a component's type has no use for may hold anything."""
WORDS: Final = PARTIAL.itemsize // 8
SAMPLE_WORD: Final = PARTIAL.fields["sample"][1] // 8 if PARTIAL.fields else 0
SKETCH_WORD: Final = PARTIAL.fields["sketch"][1] // 8 if PARTIAL.fields else 0

_WIDTHS: Final = np.array([code.bytes for code in Code])
_ADDED: Final = ("nan", "pinf", "ninf", "zero", "sub", "sum", "ssq")
_JOINS: Final = {**dict.fromkeys(_ADDED, np.add), "min": np.minimum, "max": np.maximum}

Partials = NDArray[np.void]
Rows = NDArray[np.void]
Words = NDArray[np.uint64]


class Ticket(NamedTuple):
    """What the next partial rows are parts of."""

    value: int
    """The caller's id."""
    kind: int
    """How the memory was read; see `tensors.kinds_by_dtype`."""
    n: int
    """Components of an item."""
    items: int
    """1, or how many items of a batch; each has its rows in turn."""
    parts: int
    """Rows of an item."""
    span: int
    """Components of every part but the last."""


def finish(partials: Partials, tickets: Sequence[Ticket]) -> Rows:
    """The fingerprints that partial rows amount to, one for each item of each ticket.

    Args:
        partials: Rows of type PARTIAL, in the order of the tickets and whole.
        tickets: What was launched, in order.
    """
    if not tickets:
        return np.zeros(0, ROW)
    fields = np.fromiter(chain.from_iterable(tickets), np.int64, 6 * len(tickets)).reshape(-1, 6)
    numbers = _numbers(fields[:, 3])
    values, kinds, counts, _, parts, spans = np.repeat(fields, fields[:, 3], axis=0).T
    codes = np.where(kinds >= FIRST_FP8_KIND, int(Code.FP8), kinds)
    starts = np.concatenate([[0], np.cumsum(parts)[:-1]])
    whole = partials[: int(parts.sum())]

    rows = np.zeros(len(values), ROW)
    rows["value"], rows["n"], rows["code"] = values, counts, codes
    rows["version"], rows["flags"] = VERSION, HAS_RAW | HAS_SAMPLE
    rows["item"] = numbers
    rows["raw"] = _digests(whole, starts, parts, spans, _WIDTHS[codes])
    present = np.arange(SAMPLES) < np.minimum(counts, SAMPLES)[:, None]
    rows["sample"] = np.where(present, whole["sample"][starts], 0)
    # what was not written may look like anything, infinities and NaNs included
    with np.errstate(all="ignore"):
        _add_statistics(rows, whole, starts, codes)
    return rows


def _numbers(items: NDArray[np.int64]) -> NDArray[np.int64]:
    """0, 1, ... anew for each ticket."""
    starts = np.cumsum(items) - items
    return np.arange(int(items.sum())) - np.repeat(starts, items)


# -- digest ---------------------------------------------------------------------------------------


def _digests(
    partials: Partials,
    starts: NDArray[np.int64],
    parts: NDArray[np.int64],
    spans: NDArray[np.int64],
    widths: NDArray[np.int64],
) -> Words:
    joined = _join(partials["low"], partials["high"])
    wide = np.repeat(widths == 8, parts)
    if wide.any():
        upper = _join(partials["low_upper"][wide], partials["high_upper"][wide])
        joined[wide] = _reduce(joined[wide] + _multiply(upper, np.uint64(R)))
    if len(starts) == len(partials):
        return joined
    weights = [
        _weights(int(span) * (2 if width == 8 else 1), int(count))
        for span, width, count in zip(spans, widths, parts, strict=True)
    ]
    weighted = _multiply(joined, np.concatenate(weights))
    low = np.add.reduceat(weighted & _M32, starts)  # below 2^32 each: billions of parts fit
    high = np.add.reduceat(weighted >> _32, starts)
    return _join(low, high)


@lru_cache(maxsize=64)
def _weights(step: int, count: int) -> Words:
    """r^0, r^step, r^(2 step), ...: the weight of each part's first digit."""
    weights, weight, ratio = [], 1, pow(R, step, P)
    for _ in range(count):
        weights.append(weight)
        weight = weight * ratio % P
    found = np.array(weights, np.uint64)
    found.flags.writeable = False
    return found


_P: Final = np.uint64(P)
_M31: Final = np.uint64((1 << 31) - 1)
_M32: Final = np.uint64((1 << 32) - 1)
_1, _31, _32, _61 = (np.uint64(n) for n in (1, 31, 32, 61))


def _reduce(x: Words) -> Words:
    """`x mod P`, of any 64-bit x."""
    folded = (x & _P) + (x >> _61)
    return np.where(folded >= _P, folded - _P, folded)


def _turn(x: Words, by: np.uint64) -> Words:
    """`x * 2^by mod P`, for x below P: a rotation of 61 bits."""
    rest = _61 - by
    return ((x & ((_1 << rest) - _1)) << by) | (x >> rest)


def _join(low: NDArray[Any], high: NDArray[Any]) -> Words:
    """`low + 2^32 high mod P`."""
    turned = _turn(_reduce(high.astype(np.uint64)), _32)
    return _reduce(_reduce(low.astype(np.uint64)) + turned)


def _multiply(a: Words, b: Words | np.uint64) -> Words:
    """`a * b mod P`, for a and b below P: schoolbook multiplication with digits of 31 bits."""
    a0, a1, b0, b1 = a & _M31, a >> _31, b & _M31, b >> _31
    middle = _reduce(a1 * b0 + a0 * b1)  # below 2^62
    # 2^62 = 2 and the rest is below 2^62: the sum stays below 2^64
    return _reduce(_reduce(a0 * b0) + (a1 * b1 << _1) + _turn(middle, _31))


# -- statistics -----------------------------------------------------------------------------------


def _add_statistics(
    rows: Rows, partials: Partials, starts: NDArray[np.int64], codes: NDArray[np.int64]
) -> None:
    """Fill in counts, extremes, sums and sketch; nothing but the defaults for raw bytes."""
    numbers = codes != Code.RAW
    rows["flags"][numbers] |= HAS_STATISTICS | HAS_SKETCH
    if len(starts) == len(partials):  # of one part each
        joined = partials
        sketch = partials["sketch"]
    else:
        joined = np.zeros(len(starts), PARTIAL)
        for name, join in _JOINS.items():
            joined[name] = join.reduceat(partials[name], starts)
        sketch = np.add.reduceat(partials["sketch"], starts, axis=0)
    for name in _ADDED:
        rows[name] = np.where(numbers, joined[name], 0)
    low, high = np.where(numbers, joined["min"], np.inf), np.where(numbers, joined["max"], -np.inf)
    rows["min"], rows["max"] = low + 0.0, high + 0.0  # -0 becomes 0: which comes first is chance
    rows["absmax"] = np.where(low <= high, np.maximum(np.abs(low), np.abs(high)), 0.0)
    narrow = numbers & (_WIDTHS[codes] < 4)
    rows["sketch"][narrow] = sketch[narrow].astype(np.float32).view(np.uint8)
    wide = numbers & ~narrow
    rows["sketch"][wide] = (sketch[wide, :32] + sketch[wide, 32:]).view(np.uint8)
