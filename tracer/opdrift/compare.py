"""Say how far two contents are apart, from their fingerprints alone.

Equality is exact (the digest); sizes come from the sketches, or from the samples where they are the
whole content. Every size says how it was obtained and how sure it is (notes: fingerprint, 4).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from opdrift import tfp1
from opdrift.records import Sides
from opdrift.tfp1 import SAMPLES, Code
from opdrift.tracefile.reader import Fingerprint

How = Literal["exact", "sketch", "sample", "statistics", "unavailable"]
Doubles = npt.NDArray[np.float64]

#: Distance from 1 to the next number, by dtype as torch writes it; what is absent here is exact.
_EPSILON: Final = {
    "float64": 2.0**-52,
    "float32": 2.0**-23,
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
    "float8_e4m3fn": 2.0**-3,
    "float8_e4m3fnuz": 2.0**-3,
    "float8_e5m2": 2.0**-2,
    "float8_e5m2fnuz": 2.0**-2,
    "float8_e8m0fnu": 1.0,
    "complex128": 2.0**-52,
    "complex64": 2.0**-23,
    "complex32": 2.0**-10,
}

#: Component code -> bits of the significand after the leading one, smallest normal exponent.
_FLOATS: Final = {
    Code.F32: (23, -126),
    Code.F64: (52, -1022),
    Code.F16: (10, -14),
    Code.BF16: (7, -126),
}
#: Component code -> how NumPy reads it; bfloat16 is widened first, fp8's format is not recorded.
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

#: Buckets are stored with 28 bits after the leading one (components of 4 bytes and more) or as
#: float32, so a difference smaller than this part of the norm is lost in the storing.
_FLOOR: Final = {32: 2.0**-28, 64: 2.0**-24}

#: So many samples must differ before they are taken to speak for all elements.
_DENSE: Final = 8

#: Digits to try for the one that changed, about 1 us each.
_SEARCH_LIMIT: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Difference:
    """How far a right content is from a left one.

    Non-finite values count as 0 in the sizes, as they do in the sketch; `nonfinite` tells of them.

    Attributes:
        equal: The same bits and the same component type.
        comparable: Both have the same number of components, so that sizes have a meaning.
        n: Number of components of each side (a complex element has two).
        nonfinite: Non-finite components of each side.
        relative: ||left - right|| / ||left||; inf where the left is all zero. With `how`
            "statistics" a lower bound.
        absolute_l2: ||left - right||.
        max_abs: Largest difference among the samples; exact where `how` is "exact" or one element changed.
        ulp: The same in units in the last place of the coarser of the two types; None for integers.
        sparsity: Participation ratio of the bucket differences: about 1 for one changed element,
            a third of the buckets for a dense change. None where no sketch was recorded.
        changed_index: The one element that changed, if exactly one did.
        changed_bits: Mask of the bits that changed in it; None where they are not known.
        how: How `relative` was obtained.
        uncertainty: One standard deviation of `relative`; inf where it is only a lower bound.
        width: Bytes of a component, of the wider side.
    """

    equal: bool
    comparable: bool
    n: Sides[int]
    nonfinite: Sides[int]
    relative: float | None
    absolute_l2: float | None
    max_abs: float | None
    ulp: float | None
    sparsity: float | None
    changed_index: int | None
    changed_bits: int | None
    how: How
    uncertainty: float | None
    width: int

    @property
    def nonfinite_changed(self) -> bool:
        """Whether one side holds more NaN or infinite values than the other."""
        return self.nonfinite.left != self.nonfinite.right


def dtype_epsilon(dtype: str) -> float:
    """The distance from 1 to the next number of a dtype (`torch.finfo(dtype).eps`); 0 for exact types."""
    return _EPSILON.get(dtype, 0.0)


def difference(left: Fingerprint, right: Fingerprint) -> Difference:
    """Compare two contents.

    Contents of different component types are compared as numbers: a float32 tensor and its exact
    upcast to float64 are not `equal`, but their `relative` is 0.
    """
    n, nonfinite = Sides(left.n, right.n), Sides(left.nonfinite, right.nonfinite)
    width = max(Code(left.code).bytes, Code(right.code).bytes)
    equal = left.key == right.key
    none = Difference(
        equal, left.n == right.n, n, nonfinite,
        None, None, None, None, None, None, None, "unavailable", None, width,
    )  # fmt: skip
    if equal:
        return replace(
            none, relative=0.0, absolute_l2=0.0, max_abs=0.0, ulp=0.0, how="exact", uncertainty=0.0
        )
    if not none.comparable:
        return none
    sampled = _sampled(left, right, none)
    if sampled.how == "exact":
        return sampled
    sized = _sketched(left, right, sampled) or _estimated(left, right, sampled)
    return _single_change(left, right, sized) if left.code == right.code else sized


def describe(difference: Difference) -> str:
    """The difference in words, such as `2.6e-07 relative (sketch)` or `one element, index 1093, sign bit`."""
    if difference.equal:
        return "equal"
    if not difference.comparable:
        return f"{difference.n.left} against {difference.n.right} elements"
    parts = []
    if difference.changed_index is not None:
        parts += ["one element", f"index {difference.changed_index}"]
        parts += _bits_in_words(difference)
    elif difference.sparsity is not None and difference.sparsity < 3:
        parts.append("a few elements")
    parts.append(_size_in_words(difference))
    if difference.nonfinite_changed:
        parts.append(
            f"non-finite values {difference.nonfinite.left} against {difference.nonfinite.right}"
        )
    return ", ".join(parts)


def _bits_in_words(difference: Difference) -> list[str]:
    mask = difference.changed_bits
    if mask is None or difference.width == 0:
        return []
    bits = [i for i in range(mask.bit_length()) if mask >> i & 1]
    if bits == [8 * difference.width - 1]:
        return ["sign bit"]
    return [f"bit {bits[0]}"] if len(bits) == 1 else [f"{len(bits)} bits"]


def _size_in_words(difference: Difference) -> str:
    if difference.relative is None or (difference.how == "statistics" and not difference.relative):
        return "size unknown"
    if difference.relative == 0.0 and difference.how == "exact":
        return "same numbers in other bits (sign of zero, NaN payload or type)"
    if difference.how == "statistics":
        return f"at least {difference.relative:.2g} relative (statistics)"
    return f"{difference.relative:.2g} relative ({difference.how})"


# ---- values of the samples -------------------------------------------------------------------------


def _decoded(fingerprint: Fingerprint) -> Doubles | None:
    """The sampled components as numbers; None where the code does not say what the bits mean."""
    bits, code = fingerprint.sample, Code(fingerprint.code)
    if len(bits) != min(fingerprint.n, SAMPLES):
        return None
    if code == Code.BF16:
        return (bits.astype("<u4") << np.uint32(16)).view("<f4").astype(np.float64)
    if code in _LAYOUTS:
        return bits.astype(f"<u{code.bytes}").view(_LAYOUTS[code]).astype(np.float64)
    return None


def _sampled(left: Fingerprint, right: Fingerprint, base: Difference) -> Difference:
    """What the samples say; all there is to say where they are the whole content."""
    a, b = _decoded(left), _decoded(right)
    if a is None or b is None:
        return base
    delta = _finite(a) - _finite(b)
    found = replace(
        base,
        max_abs=float(np.abs(delta).max(initial=0.0)),
        ulp=_ulp(left, right, a, b),
    )
    if len(a) != left.n:
        return found
    size = _length(delta)
    relative = _ratio(size, _length(_finite(a)))
    found = replace(found, absolute_l2=size, relative=relative, how="exact", uncertainty=0.0)
    return _changed_sample(left, right, found) if left.code == right.code else found


def _changed_sample(left: Fingerprint, right: Fingerprint, found: Difference) -> Difference:
    """The one changed element of contents that are sampled whole."""
    changed = np.flatnonzero(left.sample != right.sample)
    if len(changed) != 1:
        return found
    index = int(changed[0])
    mask = int(left.sample[index]) ^ int(right.sample[index])
    return replace(found, changed_index=index, changed_bits=mask)


def _finite(values: Doubles) -> Doubles:
    return np.where(np.isfinite(values), values, 0.0)


def _ulp(left: Fingerprint, right: Fingerprint, a: Doubles, b: Doubles) -> float | None:
    """The largest distance in units in the last place of the coarser type, where both are finite."""
    codes = Code(left.code), Code(right.code)
    both = np.isfinite(a) & np.isfinite(b)
    if not all(code in _FLOATS for code in codes) or not both.any():
        return None
    if codes[0] == codes[1]:
        x, y = (_places(side.sample[both], codes[0].bytes) for side in (left, right))
        # The difference of two places can exceed int64: taken modulo 2**64, it is right.
        apart = np.where(x > y, x - y, y - x).view(np.uint64)
        return float(apart.max())
    a, b = a[both], b[both]
    bits, lowest = _FLOATS[min(codes, key=lambda code: _FLOATS[code][0])]
    exponent = np.frexp(np.maximum(np.abs(a), np.abs(b)))[1] - 1
    spacing = np.ldexp(1.0, np.maximum(exponent, lowest) - bits)
    return float((np.abs(a - b) / spacing).max())


def _places(bits: npt.NDArray[np.uint64], width: int) -> npt.NDArray[np.int64]:
    """Floats' bit patterns as places in the order of the numbers of their type; both zeros are 0."""
    sign = np.uint64(1 << 8 * width - 1)
    magnitude = (bits & (sign - np.uint64(1))).view(np.int64)
    return np.where(bits & sign, -magnitude, magnitude)


# ---- sizes from sketches and statistics --------------------------------------------------------------


def _sketched(left: Fingerprint, right: Fingerprint, base: Difference) -> Difference | None:
    """Sizes from the sketches: ||left - right|| is about ||sketch - sketch||, deviation 1/sqrt(2K)."""
    buckets = _bucket_differences(left, right)
    if buckets is None:
        return None
    size = _length(buckets)
    norm = _norm(left)
    relative = None if norm is None else _ratio(size, norm)
    return replace(
        base,
        absolute_l2=size,
        relative=relative,
        sparsity=_participation(buckets / size) if size > 0 else None,
        how="unavailable" if relative is None else "sketch",
        uncertainty=None if relative is None else _sketch_uncertainty(relative, left, right),
    )


def _length(vector: Doubles) -> float:
    """The norm; scaled first, since squares of float64 values may overflow."""
    scale = float(np.abs(vector).max(initial=0.0))
    return scale * float(np.linalg.norm(vector / scale)) if scale > 0 else 0.0


def _participation(direction: Doubles) -> float:
    """(sum d^2)^2 / sum d^4 of a vector of length 1: over how many of its elements it is spread."""
    return 1 / float((direction**4).sum())


def _bucket_differences(left: Fingerprint, right: Fingerprint) -> Doubles | None:
    """Left minus right, bucket by bucket; None where a sketch is missing or overflowed."""
    if left.sketch is None or right.sketch is None:
        return None
    a, b = left.sketch, right.sketch
    if len(a) != len(b):
        a, b = _folded(a), _folded(b)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return None
    return a - b


def _folded(sketch: Doubles) -> Doubles:
    """64 buckets as 32: the fold is the sum of the halves."""
    return sketch[:32] + sketch[32:] if len(sketch) == 64 else sketch


def _sketch_uncertainty(relative: float, left: Fingerprint, right: Fingerprint) -> float:
    assert left.sketch is not None
    assert right.sketch is not None
    buckets = min(len(left.sketch), len(right.sketch))
    floor = max(_FLOOR[len(left.sketch)], _FLOOR[len(right.sketch)])
    return math.hypot(relative / math.sqrt(2 * buckets), floor) if relative < math.inf else math.inf


def _estimated(left: Fingerprint, right: Fingerprint, base: Difference) -> Difference:
    """From the samples, if they show a dense difference, else a lower bound; for contents without a sketch.

    With d = left - right: abs(||left|| - ||right||) <= ||d||, abs(sum d) <= sqrt(n) ||d||, and a change
    of an extreme value is at most the largest element of d. A sampled difference counts as well.
    """
    if Code.RAW in (left.code, right.code):
        return base  # bits without a number in them
    norms = _norm(left), _norm(right)
    if norms[0] is None or norms[1] is None:
        return base
    bounds = [abs(norms[0] - norms[1]), base.max_abs or 0.0]
    if left.nonfinite == right.nonfinite == 0:
        bounds.append(abs(left.sum - right.sum) / math.sqrt(max(left.n, 1)))
        bounds += [abs(left.min - right.min), abs(left.max - right.max)]
    size = max((b for b in bounds if math.isfinite(b)), default=0.0)
    sampled = _sampled_length(left, right)
    if sampled is not None and sampled > size:
        relative = _ratio(sampled, norms[0])
        return replace(
            base, absolute_l2=sampled, relative=relative, how="sample", uncertainty=relative / 2
        )
    return replace(
        base,
        absolute_l2=size,
        relative=_ratio(size, norms[0]),
        how="statistics",
        uncertainty=math.inf,
    )


def _sampled_length(left: Fingerprint, right: Fingerprint) -> float | None:
    """The norm of a dense difference, extrapolated from the samples; None where few of them differ."""
    a, b = _decoded(left), _decoded(right)
    if a is None or b is None:
        return None
    delta = _finite(a) - _finite(b)
    if np.count_nonzero(delta) < _DENSE:
        return None
    return _length(delta) * math.sqrt(left.n / len(delta))


# ---- one changed element -----------------------------------------------------------------------------


def _single_change(left: Fingerprint, right: Fingerprint, found: Difference) -> Difference:
    """Add which element changed, if one did: the digests say so, with the sketch as second witness."""
    if left.n <= SAMPLES and len(left.sample) == len(right.sample) == left.n:
        return _changed_sample(left, right, found)  # bits without a number in them
    one, bucket = _changed_bucket(left, right)
    if not one:
        return found
    width = Code(left.code).bytes
    # A change that no bucket shows (a sign of zero, a NaN) must be searched for everywhere.
    change = tfp1.locate_single_change(
        left.raw, right.raw, tfp1.digits(left.n, width), width, bucket=bucket, limit=_SEARCH_LIMIT
    )
    if change is None:
        return found
    shift = 32 * change.half
    ulp = found.ulp
    if change.index not in tfp1.sample_positions(left.n):
        # Bit patterns of one sign are in the order of their numbers; over the sign it is not known.
        same_sign = abs(change.delta) << shift < 1 << 8 * width - 2
        ulp = float(abs(change.delta) << shift) if same_sign and left.code in _FLOATS else None
    return replace(
        found,
        max_abs=found.absolute_l2 if found.how == "sketch" else found.max_abs,
        ulp=ulp,
        changed_index=change.index,
        changed_bits=_changed_bits(left, right, change, shift),
    )


def _changed_bits(
    left: Fingerprint, right: Fingerprint, change: tfp1.SingleChange, shift: int
) -> int | None:
    """The mask of changed bits: from the sample if it holds the element, else of a change by a power of two."""
    positions = tfp1.sample_positions(left.n)
    if change.index in positions and len(left.sample) == len(right.sample) == len(positions):
        at = positions.index(change.index)
        return int(left.sample[at]) ^ int(right.sample[at])
    size = abs(change.delta)
    return size << shift if size & (size - 1) == 0 else None


def _changed_bucket(left: Fingerprint, right: Fingerprint) -> tuple[bool, int | None]:
    """Whether one element may have changed, and the bucket that shows it, if one does."""
    if left.sketch is None or right.sketch is None or len(left.sketch) != len(right.sketch):
        return False, None
    # Buckets that hold no changed element are equal to the bit; NaN stands for overflow on both sides.
    changed = np.flatnonzero(left.sketch != right.sketch)
    if not len(changed):
        return True, None
    return len(changed) == 1, int(changed[0])


def _norm(fingerprint: Fingerprint) -> float | None:
    """||content|| over the finite components; None where the squares overflowed or were not taken."""
    ssq = fingerprint.ssq
    return math.sqrt(ssq) if math.isfinite(ssq) and ssq >= 0 else None


def _ratio(size: float, norm: float) -> float:
    if norm > 0:
        return size / norm
    return 0.0 if size == 0 else math.inf
