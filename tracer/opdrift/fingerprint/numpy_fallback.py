"""The fingerprint in NumPy, for installations without the compiled core: same digests, 10 to 30 times slower."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from opdrift.fingerprint.row import HAS_RAW, HAS_SAMPLE, HAS_SKETCH, HAS_STATISTICS, ROW, ROW_BYTES
from opdrift.fingerprint.tensors import FIRST_FP8_KIND
from opdrift.tfp1 import (
    CHUNK_SEED,
    FP8_FORMATS,
    ROW_LANES,
    SIGN_SEED,
    VERSION,
    Code,
    P,
    R,
    digits_per_component,
    fp8_smallest_normal,
    fp8_values,
    row_buckets,
    sample_positions,
    splitmix64,
)

_CHUNK: Final = 4096
_BLOCK: Final = 16 * _CHUNK  # components per step: a few MB of temporaries
_LANES: Final = np.arange(ROW_LANES)
_NUMPY_TYPE: Final = {
    Code.F32: np.float32,
    Code.F64: np.float64,
    Code.F16: np.float16,
    Code.I8: np.int8,
    Code.U8: np.uint8,
    Code.I16: np.int16,
    Code.U16: np.uint16,
    Code.I32: np.int32,
    Code.U32: np.uint32,
    Code.I64: np.int64,
    Code.U64: np.uint64,
}
_SMALLEST_NORMAL: Final = {
    Code.F32: 2.0**-126,
    Code.F64: 2.0**-1022,
    Code.F16: 2.0**-14,
    Code.BF16: 2.0**-126,
}

Bytes = NDArray[np.uint8]
Doubles = NDArray[np.float64]


def put(row: int, data: int, n: int, kind: int, value: int) -> None:
    """Write the row of n contiguous components; addresses as the compiled core takes them."""
    _write(row, _memory(data, n * _code(kind).bytes), kind, value)


def put_batch(
    rows: int, data: int, outer: int, batch: int, inner: int, kind: int, value: int
) -> None:
    """Write one row per item of a contiguous (outer, batch, inner) tensor: item b is [:, b, :]."""
    width = _code(kind).bytes
    items = _memory(data, outer * batch * inner * width).reshape(outer, batch, inner * width)
    for item in range(batch):
        written = _write(rows + item * ROW_BYTES, items[:, item].reshape(-1), kind, value)
        written["item"] = item


def raw(data: int, n: int, kind: int) -> int:
    """The digest of n contiguous components, nothing else."""
    width = _code(kind).bytes
    return _raw(_memory(data, n * width), width)


def _code(kind: int) -> Code:
    return Code.FP8 if kind >= FIRST_FP8_KIND else Code(kind)


def _memory(address: int, size: int) -> Bytes:
    if size == 0:  # the address of an empty tensor is 0
        return np.empty(0, np.uint8)
    return np.frombuffer(memoryview((ctypes.c_uint8 * size).from_address(address)), np.uint8)


def _write(address: int, data: Bytes, kind: int, value: int) -> np.void:
    code = _code(kind)
    n = data.size // code.bytes
    rows = _memory(address, ROW_BYTES).view(ROW)
    rows[:] = _EMPTY_ROW
    row: np.void = rows[0]
    row["raw"] = _raw(data, code.bytes)
    row["n"] = n
    row["code"] = code
    row["value"] = value
    positions = list(sample_positions(n))
    row["sample"][: len(positions)] = data.view(f"<u{code.bytes}")[positions]
    if code is not Code.RAW:
        # Infinities and NaNs are data here, and float32 buckets may overflow: no warnings.
        with np.errstate(all="ignore"):
            _write_statistics(row, data, kind, code)
    return row


def _empty_row() -> NDArray[np.void]:
    rows = np.zeros(1, ROW)
    rows["min"], rows["max"] = np.inf, -np.inf
    rows["version"], rows["flags"] = VERSION, HAS_RAW | HAS_SAMPLE
    rows.flags.writeable = False
    return rows


_EMPTY_ROW: Final = _empty_row()


def raws(addresses: Sequence[int], lengths: Sequence[int], kinds: Sequence[int]) -> array[int]:
    """The digests of many contents."""
    return array("Q", map(raw, addresses, lengths, kinds))


def bfloat16_raws(
    addresses: Sequence[int], lengths: Sequence[int]
) -> tuple[array[int], array[int]] | None:
    """The digests of float32, and of what it is as bfloat16; None if NaNs are among it, as the compiled core has it."""
    casts = array("Q")
    for address, n in zip(addresses, lengths, strict=True):
        bits = _memory(address, 4 * n).view("<u4")
        if np.any(bits & 0x7FFFFFFF > 0x7F800000):
            return None
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        casts.append(_raw(rounded.astype("<u2").view(np.uint8), 2))
    return raws(addresses, lengths, [int(Code.F32)] * len(casts)), casts


# -- digest ---------------------------------------------------------------------------------------


@cache
def _weights(width: int) -> tuple[Doubles, int]:
    """The weights of a chunk's 16-bit pieces (or bytes) in limbs of 21, 20 and 20 bits, and r^(its digits)."""
    weights, weight = [], 1
    for _ in range(_CHUNK * digits_per_component(width)):
        weights.append(weight)
        if width >= 4:  # a 32-bit digit is two pieces
            weights.append((weight << 16) % P)
        weight = weight * R % P
    limbs = np.array([(w & 0x1FFFFF, w >> 21 & 0xFFFFF, w >> 41) for w in weights], np.float64)
    limbs.flags.writeable = False
    return limbs, weight


def _raw(data: Bytes, width: int) -> int:
    """One matrix product per block: products of 16 and 21 bits, 2^14 of them, stay exact in float64."""
    limbs, chunk_step = _weights(width)
    pieces = data if width == 1 else data.view("<u2")
    total, scale = 0, 1
    step = len(limbs)
    whole = pieces.size // step * step
    for start in range(0, whole, 16 * step):
        block = pieces[start : min(start + 16 * step, whole)].reshape(-1, step)
        for sums in (block.astype(np.float64) @ limbs).tolist():
            total += _join(sums) * scale
            scale = scale * chunk_step % P
    rest = pieces[whole:]
    if rest.size:
        total += _join((rest.astype(np.float64) @ limbs[: rest.size]).tolist()) * scale
    return total % P


def _join(limb_sums: list[float]) -> int:
    return int(limb_sums[0]) + (int(limb_sums[1]) << 21) + (int(limb_sums[2]) << 41)


# -- statistics -----------------------------------------------------------------------------------


def _values(data: Bytes, kind: int, code: Code) -> Doubles:
    """The components as float64: exact but for 64-bit integers beyond 2^53."""
    if code is Code.FP8:
        table = np.array(fp8_values(FP8_FORMATS[kind - FIRST_FP8_KIND]))
        return table[data]
    if code is Code.BF16:
        return (data.view("<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return data.view(_NUMPY_TYPE[code]).astype(np.float64)


def _write_statistics(row: np.void, data: Bytes, kind: int, code: Code) -> None:
    normal = _SMALLEST_NORMAL.get(code, 0.0)
    if code is Code.FP8:
        normal = fp8_smallest_normal(FP8_FORMATS[kind - FIRST_FP8_KIND])
    low, high, total, squares = np.inf, -np.inf, 0.0, 0.0
    sketch = np.zeros(ROW_LANES)
    for block in range(-(-int(row["n"]) // _BLOCK)):
        start, end = block * _BLOCK * code.bytes, (block + 1) * _BLOCK * code.bytes
        values = kept = _values(data[start:end], kind, code)
        finite = np.isfinite(values)
        if not finite.all():
            kept = values[finite]
            row["nan"] += np.count_nonzero(np.isnan(values))
            row["pinf"] += np.count_nonzero(values == np.inf)
            row["ninf"] += np.count_nonzero(values == -np.inf)
            values = np.where(finite, values, 0.0)
        if kept.size == 0:
            continue
        low, high = min(low, float(kept.min())), max(high, float(kept.max()))
        zeros = kept.size - np.count_nonzero(kept)
        row["zero"] += zeros
        if normal:
            row["sub"] += np.count_nonzero(np.abs(kept) < normal) - zeros
        total += float(kept.sum())
        squares += float((kept * kept).sum())
        sketch += _block_sketch(values, block)
    row["min"], row["max"] = low + 0.0, high + 0.0  # -0 becomes 0: which comes first is chance
    row["absmax"] = max(abs(low), abs(high)) if low <= high else 0.0
    row["sum"], row["ssq"] = total, squares
    row["flags"] |= HAS_STATISTICS | HAS_SKETCH
    if row_buckets(code.bytes) == 32:
        row["sketch"][:] = (sketch[:32] + sketch[32:]).view(np.uint8)
    else:
        row["sketch"][:] = sketch.astype(np.float32).view(np.uint8)


def _block_sketch(values: Doubles, block: int) -> Doubles:
    """The sketch of the values of one block, as tfp1.sketch_slot says."""
    rows = -(-values.size // ROW_LANES)
    padded = np.zeros((rows, ROW_LANES))
    padded.reshape(-1)[: values.size] = values
    plan = _plan(block)
    padded *= plan.signs[:rows]
    moved = padded.reshape(-1).take(plan.sources[:rows])
    sketch = np.zeros(ROW_LANES)
    for chunk in range(-(-rows // 64)):
        sketch += moved[chunk * 64 : chunk * 64 + 64].sum(0)[plan.lanes[chunk]]
    return sketch


@dataclass(frozen=True, slots=True)
class _Plan:
    """What the sketch does with a block of rows; read only."""

    signs: Doubles  # (rows, 64)
    sources: NDArray[np.int64]  # (rows, 64): the component that each bucket takes
    lanes: NDArray[np.int64]  # (chunks, 64): how the chunk's buckets change places at its end


@lru_cache(maxsize=16)  # the first 4 MB of a float32 tensor; 1 MB each
def _plan(block: int) -> _Plan:
    rows = np.arange(_BLOCK // ROW_LANES)
    row = rows + block * len(rows)
    chunks = np.arange(_BLOCK // _CHUNK) + block * (_BLOCK // _CHUNK)
    mixed = _mix32(row)
    words = [splitmix64(SIGN_SEED + k) for k in range(64)]
    negative = np.array([[word >> lane & 1 for lane in range(ROW_LANES)] for word in words])
    return _Plan(
        signs=1.0 - 2.0 * (negative[row & 63] ^ (mixed & 1)[:, None]),
        sources=rows[:, None] * ROW_LANES + (_LANES ^ 8 * ((mixed >> 1) & 7)[:, None]),
        lanes=_LANES ^ (_mix32(chunks ^ CHUNK_SEED) & 63)[:, None],
    )


def _mix32(x: NDArray[np.int64]) -> NDArray[np.int64]:
    """tfp1.mix32 of many; in uint64, where products of 32 bits cannot overflow."""
    mask = np.uint64(0xFFFFFFFF)
    y = x.astype(np.uint64) & mask
    y = y * np.uint64(0x9E3779B1) & mask
    y = (y ^ y >> np.uint64(16)) * np.uint64(0x85EBCA6B) & mask
    y = (y ^ y >> np.uint64(13)) * np.uint64(0xC2B2AE35) & mask
    return (y ^ y >> np.uint64(16)).astype(np.int64)
