"""Say how far two contents are apart, from their fingerprints alone.

Equality is exact (the digest); sizes come from the sketches, or from the samples where they are the
whole content. Every size says how it was obtained, how sure it is, and when not to trust it
(docs/fingerprint.md, Differences).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from opdrift import components, tfp1
from opdrift.records import Sides
from opdrift.tfp1 import SAMPLES, Code
from opdrift.tracefile.fingerprints import Fingerprint

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

#: Buckets are stored with 28 bits after the leading one (components of 4 bytes and more) or as
#: float32, so a difference smaller than this part of the norm is lost in the storing.
_DOUBLE_FLOOR: Final = 2.0**-28
_FLOAT_FLOOR: Final = 2.0**-24

#: Participation ratio below which few elements changed. Of 32 buckets a dense difference has a lower one twice in
#: 100,000 times; of 16 buckets it is below 3 in 1.2 of 100, below 2.25 in 1.5 of 1,000 (a million normal draws).
_FEW: Final = 3.0
_FEW_OF_16: Final = 2.25
_MANY: Final = 32

#: Sums of two implementations agree to this part of the norm (decision 4); a bound must not be made of less.
_AGREEMENT: Final = 1e-9

#: Below this a norm's square has lost bits to underflow.
_SMALLEST_SQUARE: Final = 1e-290

#: So many samples must differ before they are taken to speak for all elements.
_DENSE: Final = 8

#: Digits to try for the one that changed, about 1 us each: with a bucket, 8 million elements of float32.
_SEARCH_LIMIT: Final = 1 << 18
#: The same where no sketch says that one element may have changed, but the samples do not say otherwise.
_BLIND_SEARCH_LIMIT: Final = 1 << 14


@dataclass(frozen=True, slots=True)
class Difference:
    """How far a right content is from a left one.

    Non-finite values count as 0 in the sizes, as they do in the sketch; `nonfinite` and the fields after
    `caveat` tell of them.

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
        few: The sketches say that the difference is in a few elements, or in a few buckets by their order.
        changed_index: The one element that changed, if exactly one did.
        changed_bits: Mask of the bits that changed in it; None where they are not known.
        how: How `relative` was obtained.
        uncertainty: One standard deviation of `relative`; twice that holds for 95 of 100 differences. inf where
            it is only a lower bound.
        width: Bytes of a component, of the wider side.
        caveat: Why the size is not to be trusted, or not to the last digit; empty where it is.
        nan: NaN components of each side.
        pinf: Positive infinities of each side.
        ninf: Negative infinities of each side.
        nonfinite_moved: A sampled component is finite on one side and not on the other.
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
    caveat: str = ""
    nan: Sides[int] = Sides(0, 0)
    pinf: Sides[int] = Sides(0, 0)
    ninf: Sides[int] = Sides(0, 0)
    nonfinite_moved: bool = False
    few: bool = False

    @property
    def nonfinite_changed(self) -> bool:
        """Whether the sides hold other numbers of NaN or infinite values, or are known to hold them elsewhere."""
        counts = (self.nan, self.pinf, self.ninf)
        return self.nonfinite_moved or any(side.left != side.right for side in counts)


def dtype_epsilon(dtype: str) -> float:
    """The distance from 1 to the next number of a dtype (`torch.finfo(dtype).eps`); 0 for exact types."""
    return _EPSILON.get(dtype, 0.0)


def difference(left: Fingerprint, right: Fingerprint) -> Difference:
    """Compare two contents.

    Contents of different component types are compared as numbers: a float32 tensor and its exact
    upcast to float64 are not `equal`, but their `relative` is 0.
    """
    width = max(Code(left.code).bytes, Code(right.code).bytes)
    equal = left.key == right.key and left.fp8 == right.fp8
    none = Difference(
        equal, left.n == right.n, Sides(left.n, right.n), Sides(left.nonfinite, right.nonfinite),
        None, None, None, None, None, None, None, "unavailable", None, width,
        nan=Sides(left.nan, right.nan), pinf=Sides(left.pinf, right.pinf), ninf=Sides(left.ninf, right.ninf),
    )  # fmt: skip
    if equal:
        return replace(
            none, relative=0.0, absolute_l2=0.0, max_abs=0.0, ulp=0.0, how="exact", uncertainty=0.0
        )
    if not none.comparable:
        return replace(none, caveat=f"{left.n} against {right.n} elements")
    sampled = _sampled(left, right, none)
    if sampled.how == "exact":
        return sampled
    sized = _sketched(left, right, sampled) or _estimated(left, right, sampled)
    same_type = (left.code, left.fp8) == (right.code, right.fp8)
    return _single_change(left, right, sized) if same_type else sized


def is_cast(source: Fingerprint, result: Fingerprint) -> bool | None:
    """Whether a content may be another one in another precision; digests cannot tell, since a cast has other bits.

    The sampled elements must be those of the source, rounded as torch rounds, and the sketches may be no further
    apart than rounding takes them.

    Returns:
        None where the fingerprints cannot tell: without a sketch, and for integers, fp8 as the result, and
        bits without numbers in them.
    """
    if source.n != result.n:
        return False
    if (source.code, source.fp8) == (result.code, result.fp8):
        return source.key == result.key
    if not (components.is_float(source) and components.is_float(result)):
        return None
    a, b = components.numbers(source), components.numbers(result)
    wanted = None if a is None else components.rounded(a, Code(result.code))
    if b is None or wanted is None:
        return None
    if not np.array_equal(wanted, b, equal_nan=True):
        return False
    if source.n <= SAMPLES:
        return True
    if source.nan != result.nan:
        return False
    buckets, (norm, guessed) = _bucket_differences(source, result), _norm(source)
    # what overflowed counts as 0 in one of the sketches
    if buckets is None or guessed or source.nonfinite != result.nonfinite:
        return None
    extremes = components.rounded(np.array([source.min, source.max]), Code(result.code))
    if extremes is None or [result.min, result.max] != (extremes + 0.0).tolist():
        return False  # rounding keeps the order, so the largest number is still it
    # An element is off by up to half a unit, a bucket by that of n / K elements of random signs, and of the
    # largest one in full.
    roundoff = _ROUNDOFF.get(Code(result.code), 0.0) + _FLOAT_FLOOR
    spread = _SIGMAS / math.sqrt(len(buckets))
    off = roundoff * (source.absmax + spread * norm)
    off += (
        components.smallest(result) / 2 * (1 + spread * math.sqrt(source.n))
    )  # of subnormal results
    return bool(np.abs(buckets).max() <= off)


#: Half a unit in the last place, relative to the smallest number that has this unit.
_ROUNDOFF: Final = {Code.F32: 2.0**-24, Code.F16: 2.0**-11, Code.BF16: 2.0**-8}
_SIGMAS: Final = 6


# ---- in words ----------------------------------------------------------------------------------------


def describe(difference: Difference) -> str:
    """The difference in words, such as `relative difference 2.6e-7 (from the sketches)` or `one element, index 1093, its sign bit`."""
    if difference.equal:
        return "equal"
    if not difference.comparable:
        return difference.caveat
    parts = []
    if difference.changed_index is not None:
        parts += ["one element", f"index {difference.changed_index}"]
        parts += _bits_in_words(difference)
    elif difference.few:
        parts.append("a few elements")
    parts.append(_size_in_words(difference))
    parts += _nonfinite_in_words(difference)
    return ", ".join(parts)


def _nonfinite_in_words(difference: Difference) -> list[str]:
    if not difference.nonfinite_changed:
        return []
    kinds = (("NaN", difference.nan), ("+inf", difference.pinf), ("-inf", difference.ninf))
    told = [
        f"{name} {side.left} against {side.right}"
        for name, side in kinds
        if side.left != side.right
    ]
    return told or ["NaN or infinite elsewhere"]


def _bits_in_words(difference: Difference) -> list[str]:
    mask = difference.changed_bits
    if mask is None or difference.width == 0:
        return []
    bits = [i for i in range(mask.bit_length()) if mask >> i & 1]
    if bits == [8 * difference.width - 1]:
        return ["its sign bit"]
    return [f"bit {bits[0]}"] if len(bits) == 1 else [f"{len(bits)} bits"]


def _size_in_words(difference: Difference) -> str:
    if difference.relative is None or (difference.how == "statistics" and not difference.relative):
        return "size unknown"
    if difference.relative == 0.0 and difference.how == "exact":
        if difference.nonfinite_changed:
            return "the finite elements equal"
        return "same numbers in other bits (sign of zero, NaN payload or type)"
    if difference.relative == 0.0 and difference.uncertainty:
        return f"relative difference below {number(difference.uncertainty)} (from the sketches)"
    least = "at least " if difference.how == "statistics" else ""
    how = _HOW.get(difference.how, difference.how)
    return f"relative difference {least}{number(difference.relative)} ({how})"


_HOW: Final = {
    "sketch": "from the sketches",
    "sample": "from the samples",
    "statistics": "from the statistics",
}


def number(value: float | None) -> str:
    """A size with two or three digits, as reports write it: `2.6e-7`, `0.0172`, `105`."""
    if value is None or math.isnan(value):
        return "an unknown size"
    if value == math.inf:
        return "infinite"
    if value == 0 or 0.01 <= abs(value) < 1000:
        return f"{value:.3g}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


# ---- what the samples say ----------------------------------------------------------------------------


def _sampled(left: Fingerprint, right: Fingerprint, base: Difference) -> Difference:
    """What the samples say; all there is to say where they are the whole content."""
    a, b, delta = (
        components.numbers(left),
        components.numbers(right),
        components.deltas(left, right),
    )
    if a is None or b is None or delta is None:
        return replace(base, caveat="its bits have no number in them that is known here")
    found = replace(
        base,
        max_abs=float(np.abs(delta).max(initial=0.0)),
        ulp=components.ulps(left, right),
        nonfinite_moved=bool(_kinds(a, b)),
    )
    if len(a) != left.n:
        return found
    size = _length(delta)
    relative = _ratio(size, _length(components.finite(a)))
    found = replace(found, absolute_l2=size, relative=relative, how="exact", uncertainty=0.0)
    return _changed_sample(left, right, found) if left.code == right.code else found


def _kinds(a: Doubles, b: Doubles) -> int:
    """How many pairs are finite on one side only, or infinite on both with other signs."""
    same = (np.isnan(a) & np.isnan(b)) | (a == b) | (np.isfinite(a) & np.isfinite(b))
    return int(np.count_nonzero(~same))


def _changed_sample(left: Fingerprint, right: Fingerprint, found: Difference) -> Difference:
    """The one changed element of contents that are sampled whole."""
    changed = np.flatnonzero(left.sample != right.sample)
    if len(changed) != 1:
        return found
    index = int(changed[0])
    mask = int(left.sample[index]) ^ int(right.sample[index])
    return replace(found, changed_index=index, changed_bits=mask)


# ---- sizes from sketches and statistics --------------------------------------------------------------


def _sketched(left: Fingerprint, right: Fingerprint, base: Difference) -> Difference | None:
    """Sizes from the sketches: ||left - right|| is about ||sketch - sketch||."""
    buckets = _bucket_differences(left, right)
    if buckets is None:
        return None
    size = _length(buckets)
    norm, guessed = _norm(left)
    relative = _ratio(size, norm)
    sparsity = _participation(buckets / size) if size > 0 else None
    floor = max(map(_floor, (left, right)))
    return replace(
        base,
        absolute_l2=size,
        relative=relative,
        sparsity=sparsity,
        few=sparsity is not None and sparsity < (_FEW if len(buckets) >= _MANY else _FEW_OF_16),
        how="sketch",
        uncertainty=_sketch_uncertainty(relative, sparsity, floor, guessed=guessed),
        caveat=_sketch_caveat(relative, floor, guessed=guessed),
    )


def _sketch_caveat(relative: float, floor: float, *, guessed: bool) -> str:
    if guessed:
        return "the squares leave the range of float64, so the norm is the sketch's, too"
    if relative < 4 * floor:
        return f"differences below {floor:.1g} of the norm are lost in stored sketches"
    return ""


def _sketch_uncertainty(
    relative: float, sparsity: float | None, floor: float, *, guessed: bool
) -> float:
    """One standard deviation of a relative difference that comes from sketches.

    A difference that is spread evenly over K buckets has a deviation of 1/sqrt(2K) (Charikar, Chen and
    Farach-Colton, 2002, for the sketch). One that falls into few of them, as a column does, has that of few
    buckets: how many, the participation ratio says. It is at most K, and K/3 for a dense change, so that this is
    more than the deviation of most differences. Measured: twice this holds for 95 of 100 or more (noise, scaling,
    offsets, rows, columns, permutations, rounding; tests/tracer/test_compare_truth.py).
    """
    if math.isinf(relative):
        return math.inf
    spread = 0.0 if sparsity is None else 1 / math.sqrt(2 * sparsity)
    if guessed:
        spread = math.hypot(spread, 1 / math.sqrt(2 * _DENSE))
    return math.hypot(relative * spread, floor * (1 + relative))  # the right may be much larger


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
    buckets = min(len(left.sketch), len(right.sketch))
    a, b = _folded(left.sketch, buckets), _folded(right.sketch, buckets)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return None
    with np.errstate(over="ignore"):
        found = a - b
    return found if np.isfinite(found).all() else None


def _floor(side: Fingerprint) -> float:
    return _FLOAT_FLOOR if Code(side.code).bytes < 4 else _DOUBLE_FLOOR


def _folded(sketch: Doubles, buckets: int) -> Doubles:
    """A sketch with fewer buckets: a fold is the sum of the halves, and so on."""
    found: Doubles = sketch.reshape(-1, buckets).sum(0)
    return found


def _estimated(left: Fingerprint, right: Fingerprint, base: Difference) -> Difference:
    """From the samples, if they show a dense difference, else a lower bound; for contents without a sketch.

    With d = left - right: abs(||left|| - ||right||) <= ||d||, abs(sum d) <= sqrt(n) ||d||, and a change
    of an extreme value is at most the largest element of d. A sampled difference counts as well.
    """
    if Code.RAW in (left.code, right.code):
        return base  # bits without a number in them
    norms = [norm for norm, guessed in map(_norm, (left, right)) if not guessed]
    if len(norms) < 2:
        return replace(base, caveat="the squares leave the range of float64")
    slack = _AGREEMENT * max(norms)
    bounds = [abs(norms[0] - norms[1]) - slack, base.max_abs or 0.0]
    if left.nonfinite == right.nonfinite == 0:
        bounds.append(abs(left.sum - right.sum) / math.sqrt(max(left.n, 1)) - slack)
        bounds += [abs(left.min - right.min), abs(left.max - right.max)]
    size = max((b for b in bounds if math.isfinite(b)), default=0.0)
    sampled = _sampled_length(left, right)
    if sampled is not None and sampled > size:
        relative = _ratio(sampled, norms[0])
        return replace(
            base,
            absolute_l2=sampled,
            relative=relative,
            how="sample",
            uncertainty=relative * _sample_spread(left, right),
            caveat=f"from {SAMPLES} of {left.n} elements; what lies between them is not seen",
        )
    return replace(
        base,
        absolute_l2=size,
        relative=_ratio(size, norms[0]),
        how="statistics",
        uncertainty=math.inf,
        caveat="a lower bound, from statistics: no sketch was recorded, or it overflowed",
    )


def _sampled_length(left: Fingerprint, right: Fingerprint) -> float | None:
    """The norm of a dense difference, extrapolated from the samples; None where few of them differ."""
    delta = components.deltas(left, right)
    if delta is None or np.count_nonzero(delta) < _DENSE:
        return None
    return _length(delta) * math.sqrt(left.n / len(delta))


def _sample_spread(left: Fingerprint, right: Fingerprint) -> float:
    """One standard deviation of what is extrapolated from the samples, relative to it.

    Of even contents 32 samples give a norm to 1/8; half is said, because few are. More, if few of the
    samples make up the difference, if the same extrapolation misses the norms of the contents, which are
    known, or if they have larger elements than normal numbers (of which n reach sqrt(2 ln n) deviations).
    """
    delta = components.deltas(left, right)
    assert delta is not None
    sparsity = _participation(delta / _length(delta))
    misses = 1.0
    for side in (left, right):
        values = components.numbers(side)
        if values is not None and len(values):
            guess = _length(components.finite(values)) * math.sqrt(side.n / len(values))
            norm = _norm(side)[0]
            usual = norm / math.sqrt(side.n) * math.sqrt(2 * math.log(side.n))
            misses = max(misses, _ratio(norm, guess), _ratio(side.absmax, usual))
    return misses * math.hypot(0.5, 1 / math.sqrt(2 * sparsity))


def _norm(fingerprint: Fingerprint) -> tuple[float, bool]:
    """||content|| over the finite components, and whether it is the sketch's estimate.

    The sum of squares of float64 values overflows from 1e154 on and underflows below 1e-162.
    """
    ssq = fingerprint.ssq
    lost = ssq < _SMALLEST_SQUARE and fingerprint.absmax > 0
    if math.isfinite(ssq) and ssq >= 0 and not lost:
        return math.sqrt(ssq), False
    if fingerprint.sketch is not None and np.isfinite(fingerprint.sketch).all():
        return max(_length(fingerprint.sketch), fingerprint.absmax), True
    return fingerprint.absmax, True


def _ratio(size: float, norm: float) -> float:
    if norm > 0:
        return size / norm
    return 0.0 if size == 0 else math.inf


# ---- one changed element -----------------------------------------------------------------------------


def _single_change(left: Fingerprint, right: Fingerprint, found: Difference) -> Difference:
    """Add which element changed, if one did: the digests say so, with the sketch as second witness."""
    if left.n <= SAMPLES and len(left.sample) == len(right.sample) == left.n:
        return _changed_sample(left, right, found)  # bits without a number in them
    one, bucket, limit = _changed_bucket(left, right)
    if not one:
        return found
    width = Code(left.code).bytes
    # A change that no bucket shows (a sign of zero, a NaN) must be searched for everywhere.
    change = tfp1.locate_single_change(
        left.raw, right.raw, tfp1.digits(left.n, width), width, bucket=bucket, limit=limit
    )
    if change is None or not _is_seen(left, right, change):
        return found
    shift = 32 * change.half
    ulp = found.ulp
    if change.index not in tfp1.sample_positions(left.n):
        # Bit patterns of one sign are in the order of their numbers; over the sign it is not known.
        same_sign = abs(change.delta) << shift < 1 << 8 * width - 2
        counts = components.is_float(left) and not found.nonfinite_changed
        ulp = float(abs(change.delta) << shift) if same_sign and counts else None
    if found.how == "sketch" and left.sketch is not None and found.relative is not None:
        # what falls into one bucket alone is not estimated: only the storing rounds it
        uncertainty = _floor(left) * (1 + found.relative)
        found = replace(found, max_abs=found.absolute_l2, uncertainty=uncertainty)
    return replace(
        found,
        ulp=ulp,
        changed_index=change.index,
        changed_bits=_changed_bits(left, right, change, shift),
    )


def _is_seen(left: Fingerprint, right: Fingerprint, change: tfp1.SingleChange) -> bool:
    """Whether the samples differ where they must, and nowhere else."""
    positions = tfp1.sample_positions(left.n)
    if not len(left.sample) == len(right.sample) == len(positions):
        return True
    changed = [positions[k] for k in np.flatnonzero(left.sample != right.sample)]
    return changed == [change.index] * (change.index in positions)


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


def _changed_bucket(left: Fingerprint, right: Fingerprint) -> tuple[bool, int | None, int]:
    """Whether one element may have changed, the bucket that shows it, if one does, and how long to search."""
    if left.sketch is None or right.sketch is None or len(left.sketch) != len(right.sketch):
        alike = len(left.sample) == len(right.sample)
        few = alike and np.count_nonzero(left.sample != right.sample) <= 1
        return bool(few), None, _BLIND_SEARCH_LIMIT
    # Buckets that hold no changed element are equal to the bit; NaN stands for overflow on both sides.
    # (Traces of earlier versions hold more buckets of small contents.)
    buckets = tfp1.stored_buckets(Code(left.code).bytes, left.n)
    changed = np.flatnonzero(_folded(left.sketch, buckets) != _folded(right.sketch, buckets))
    if not len(changed):
        return True, None, _SEARCH_LIMIT
    return len(changed) == 1, int(changed[0]), _SEARCH_LIMIT
