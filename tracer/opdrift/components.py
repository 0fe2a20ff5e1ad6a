"""What the components in a fingerprint's sample are as numbers, and how far apart they are."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from opdrift.tfp1 import SAMPLES, Code, fp8_smallest_normal, fp8_values
from opdrift.tracefile.fingerprints import Fingerprint

Doubles = npt.NDArray[np.float64]
Bits = npt.NDArray[np.uint64]

#: Component code -> bits of the significand after the leading one, exponent of the smallest normal number.
_FLOATS: Final = {
    Code.F32: (23, -126),
    Code.F64: (52, -1022),
    Code.F16: (10, -14),
    Code.BF16: (7, -126),
}
#: Component code -> how NumPy reads it; bfloat16 is widened first, fp8 looked up.
_LAYOUTS: Final = {
    Code.F32: "<f4",
    Code.F64: "<f8",
    Code.F16: "<f2",
    Code.I8: "<i1",
    Code.U8: "<u1",
    Code.I16: "<i2",
    Code.U16: "<u2",
    Code.I32: "<i4",
    Code.U32: "<u4",
    Code.I64: "<i8",
    Code.U64: "<u8",
}
_E8M0: Final = "float8_e8m0fnu"


def numbers(fingerprint: Fingerprint) -> Doubles | None:
    """The sampled components as float64; None where it is not known what the bits mean."""
    bits, code = fingerprint.sample, Code(fingerprint.code)
    if len(bits) != min(fingerprint.n, SAMPLES):
        return None
    if code is Code.BF16:
        return (bits.astype("<u4") << np.uint32(16)).view("<f4").astype(np.float64)
    if code is Code.FP8 and fingerprint.fp8:
        return np.array(fp8_values(fingerprint.fp8))[bits.astype(np.intp)]
    if code in _LAYOUTS:
        return bits.astype(f"<u{code.bytes}").view(_LAYOUTS[code]).astype(np.float64)
    return None


def finite(values: Doubles) -> Doubles:
    """Non-finite values as 0, as they count in a sketch."""
    return np.where(np.isfinite(values), values, 0.0)


def deltas(left: Fingerprint, right: Fingerprint) -> Doubles | None:
    """Left minus right of each sampled component; None where it is not known what the bits mean."""
    wide = (Code.I64, Code.U64)
    if left.code in wide and right.code in wide:  # float64 would make 2^53 and 2^53 + 1 one number
        pairs = zip(_whole(left), _whole(right), strict=True)
        return np.array([float(a - b) for a, b in pairs], np.float64)
    a, b = numbers(left), numbers(right)
    return None if a is None or b is None else finite(a) - finite(b)


def _whole(fingerprint: Fingerprint) -> list[int]:
    bits = fingerprint.sample.astype("<u8")
    whole: list[int] = bits.view("<i8" if fingerprint.code == Code.I64 else "<u8").tolist()
    return whole


def is_float(fingerprint: Fingerprint) -> bool:
    """Whether its components are of a floating-point format that is known."""
    return _format(fingerprint) is not None


def smallest(fingerprint: Fingerprint) -> float:
    """The distance of subnormal numbers of its floating-point format; 0 where it is none that is known."""
    found = _format(fingerprint)
    return 0.0 if found is None else math.ldexp(1.0, found[1] - found[0])


def spacing(fingerprint: Fingerprint) -> float:
    """The distance from 1 to the next number of its floating-point format; 0 where it is none that is known."""
    found = _format(fingerprint)
    return 0.0 if found is None else math.ldexp(1.0, -found[0])


def ulps(left: Fingerprint, right: Fingerprint) -> float | None:
    """The largest distance of two sampled components, in units in the last place of the coarser type.

    Only pairs of which both are finite count. None for integers, and where there is no such pair.
    """
    a, b = numbers(left), numbers(right)
    formats = _format(left), _format(right)
    if a is None or b is None or formats[0] is None or formats[1] is None:
        return None
    both = np.isfinite(a) & np.isfinite(b)
    if not both.any():
        return None
    if (left.code, left.fp8) == (right.code, right.fp8):
        x, y = (_places(side, side.sample[both]) for side in (left, right))
        # the difference of two places can exceed int64: taken modulo 2**64, it is right
        return float(np.where(x > y, x - y, y - x).view(np.uint64).max())
    a, b = a[both], b[both]
    bits, lowest = min(formats[0], formats[1])
    exponent = np.frexp(np.maximum(np.abs(a), np.abs(b)))[1] - 1
    spacing = np.ldexp(1.0, np.maximum(exponent, lowest) - bits)
    return float((np.abs(a - b) / spacing).max())


def _format(fingerprint: Fingerprint) -> tuple[int, int] | None:
    """Bits of the significand after the leading one, and the smallest normal exponent."""
    code, name = Code(fingerprint.code), fingerprint.fp8
    if code is not Code.FP8:
        return _FLOATS.get(code)
    if not name:
        return None
    if name == _E8M0:
        return 0, -127
    return 3 if "e4m3" in name else 2, int(np.log2(fp8_smallest_normal(name)))


def _places(fingerprint: Fingerprint, bits: Bits) -> npt.NDArray[np.int64]:
    """Floats' bit patterns as places in the order of the numbers of their type; both zeros are 0."""
    if fingerprint.fp8 == _E8M0:  # it has no sign
        return bits.view(np.int64)
    sign = np.uint64(1 << 8 * Code(fingerprint.code).bytes - 1)
    magnitude = (bits & (sign - np.uint64(1))).view(np.int64)
    return np.where(bits & sign, -magnitude, magnitude)


def rounded(values: Doubles, code: Code) -> Doubles | None:
    """Values in another precision, as torch casts them: to float32 first, to nearest, ties to even.

    None for formats that torch rounds in other ways (fp8 saturates or not) and for integers.
    """
    if code is Code.F64:
        return values
    with np.errstate(over="ignore"):
        single = values.astype(np.float32)
        if code is Code.F32:
            return single.astype(np.float64)
        if code is Code.F16:
            return single.astype(np.float16).astype(np.float64)
    if code is Code.BF16:
        bits = single.view(np.uint32).astype(np.uint64)
        up = np.where(np.isnan(single), 0, 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1)))
        kept = ((bits + up.astype(np.uint64)) & np.uint64(0xFFFF0000)).astype(np.uint32)
        return np.where(np.isnan(single), np.nan, kept.view(np.float32)).astype(np.float64)
    return None
