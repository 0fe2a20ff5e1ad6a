"""Contents of hand-built values, and the fingerprint records that belong to them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from hashlib import blake2b
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from opdrift import tfp1

Array = npt.NDArray[Any]
#: "*" another content, "~" one that differs in the last bits.
Change = Literal["", "*", "~"]

#: How a dtype's numbers are held; bfloat16 as a float32 whose lower half is zero.
NUMPY: Final = {
    "float32": "<f4",
    "float64": "<f8",
    "float16": "<f2",
    "bfloat16": "<f4",
    "int64": "<i8",
    "int32": "<i4",
    "int8": "i1",
    "bool": "u1",
}
_CODES: Final = {
    "float32": tfp1.Code.F32,
    "float64": tfp1.Code.F64,
    "float16": tfp1.Code.F16,
    "bfloat16": tfp1.Code.BF16,
    "int64": tfp1.Code.I64,
    "int32": tfp1.Code.I32,
    "int8": tfp1.Code.I8,
    "bool": tfp1.Code.U8,
}
_SMALLEST_NORMAL: Final = {
    tfp1.Code.F32: 2.0**-126,
    tfp1.Code.F64: 2.0**-1022,
    tfp1.Code.F16: 2.0**-14,
    tfp1.Code.BF16: 2.0**-126,
}
_WHOLE_NUMBERS: Final = ("int64", "int32", "int8", "bool")


def seed(text: str) -> int:
    """A number that follows from a text, the same in every process."""
    return int.from_bytes(blake2b(text.encode(), digest_size=4).digest(), "little")


def noise(text: str, shape: Sequence[int], dtype: str) -> Array:
    """An array that follows from a text: normal numbers, or small integers."""
    random = np.random.default_rng(seed(text))
    if dtype in _WHOLE_NUMBERS:
        return random.integers(0, 2 if dtype == "bool" else 100, tuple(shape)).astype(NUMPY[dtype])
    return rounded(random.standard_normal(tuple(shape)), dtype)


def rounded(array: Array, dtype: str) -> Array:
    """Round to a dtype; bfloat16 stays a float32 with the lower half zero."""
    found = np.asarray(array).astype(NUMPY[dtype])
    if dtype == "bfloat16":
        bits = found.view("<u4")
        found = ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view("<f4")
    return found


def changed(array: Array, change: Change) -> Array:
    """The content with a change applied."""
    if change == "*":
        return (array + np.asarray(np.random.default_rng(7).integers(1, 5, array.shape))).astype(
            array.dtype
        )
    if change == "~":
        flat = array.copy().reshape(-1)
        flat[:3] = np.nextafter(flat[:3], np.inf)
        return flat.reshape(array.shape)
    return array


def dense(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides."""
    stride: list[int] = []
    step = 1
    for size in reversed(tuple(shape)):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def fingerprint_row(value: int, content: Array, dtype: str) -> dict[str, Any]:
    """The row of the table `tensors` for a content."""
    code = _CODES[dtype]
    bits = _component_bits(content, dtype)
    numbers = content.astype(np.float64).reshape(-1)
    finite = numbers[np.isfinite(numbers)]
    positions = tfp1.sample_positions(len(bits))
    row: dict[str, Any] = {
        "value": value,
        "raw": tfp1.raw_of(bits.tolist(), code.bytes),
        "n": len(bits),
        "code": int(code),
        "min": float(finite.min(initial=math.inf)),
        "max": float(finite.max(initial=-math.inf)),
        "absmax": float(np.abs(finite).max(initial=0.0)),
        "sum": float(finite.sum()),
        "ssq": float((finite * finite).sum()),
        "nan": int(np.isnan(numbers).sum()),
        "pinf": int((numbers == np.inf).sum()),
        "ninf": int((numbers == -np.inf).sum()),
        "zero": int((numbers == 0).sum()),
        "subnormal": int(
            ((numbers != 0) & (np.abs(numbers) < _SMALLEST_NORMAL.get(code, 0.0))).sum()
        ),
        "sketch": _sketch(numbers, code),
        "sample": bits[list(positions)].tobytes(),
    }
    return row


def _component_bits(content: Array, dtype: str) -> Array:
    flat = np.ascontiguousarray(content).reshape(-1)
    if dtype == "bfloat16":
        return (flat.view("<u4") >> np.uint32(16)).astype("<u2")
    return flat.view(f"<u{flat.dtype.itemsize}")


@cache
def _slots(n: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Bucket and sign of each component."""
    pairs = [tfp1.sketch_slot(i) for i in range(n)]
    return np.array([p[0] for p in pairs]), np.array([p[1] for p in pairs])


def _sketch(numbers: Array, code: tfp1.Code) -> bytes:
    if len(numbers) <= tfp1.SAMPLES:
        return b""
    buckets, signs = _slots(len(numbers))
    sums = np.zeros(64)
    np.add.at(sums, buckets, signs * np.where(np.isfinite(numbers), numbers, 0.0))
    kept = tfp1.stored_buckets(code.bytes, len(numbers))
    folded: Array = sums.reshape(-1, kept).sum(0)
    if code.bytes < 4:
        return bytes(folded.astype("<f4").tobytes())
    return bytes(folded.astype("<f8").view(np.uint8).reshape(kept, 8)[:, 3:].tobytes())
