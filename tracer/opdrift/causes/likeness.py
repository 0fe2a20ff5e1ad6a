"""What turned one content into another: another order, a factor, a cast, few levels, zeros; from fingerprints.

Counts and statistics hold for any order of the elements, so they tell contents that were rearranged or
scaled from contents that are others. Each test says what chance would give.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from opdrift import components
from opdrift.compare import Difference, difference
from opdrift.tfp1 import SAMPLES, Code
from opdrift.tracefile.fingerprints import Fingerprint

Kind = Literal[
    "rearranged",
    "negated",
    "scaled",
    "zeroed",
    "constant",
    "cast",
    "levels",
    "rounding",
    "near",
    "far",
]
Doubles = npt.NDArray[np.float64]

#: Fewer elements than this agree in their extremes by chance, or hold one number.
_ENOUGH: Final = 8
#: Sums and squares in another order: below 1e-15 for 1e6 elements, since they are of float64.
_SAME_SUM: Final = 1e-9
#: Two rows of a thousand exchanged are this far apart; less is what rounding and casts do, which can leave the
#: extremes and the sums as they were.
_REARRANGED: Final = 1e-3
#: A factor is the same in the extremes, the sum and the norm up to one rounding of float32 an element.
_SAME_FACTOR: Final = 1e-6
#: Bits of a float32 that a narrower type does not keep, and the type's unit roundoff 2^-p.
_CASTS: Final = (("bfloat16", 16, 2.0**-8), ("float16 or TF32", 13, 2.0**-11))
#: Levels of a symmetric scale, and intervals of an asymmetric one, from 8 bits to 4.
_SYMMETRIC: Final = (127.0, 128.0, 7.0, 8.0)
_ASYMMETRIC: Final = (255.0, 15.0)
#: Multiples of a step come this close to whole numbers, in steps: 127 roundings of float32. All of 32
#: sampled elements do by chance with a probability below 1e-80.
_ON_STEP: Final = 1e-4
#: Half a step of 8 bits over a row, relative to the norm: between a 64-row matrix of equal numbers and one outlier a row.
_EIGHT_BITS: Final = (5e-4, 0.05)
#: What unlike orders of summation, or exp and sqrt of another instruction set, leave of a drawn number.
_ROUNDING: Final = 5e-7
#: Weights of one training are this near; independent ones are 1.4 apart.
_NEAR: Final = 0.5
#: So many standard deviations may a size lie off what is expected.
_DEVIATIONS: Final = 3


@dataclass(frozen=True, slots=True)
class Likeness:
    """How a right content is related to a left one.

    Attributes:
        kind: "rearranged": the same numbers in another order. "negated", "scaled": by one factor. "zeroed":
            some elements are 0, the others the same. "constant": one side holds a single number. "cast": the numbers of one side fit a narrower type.
            "levels": one side holds whole multiples of one step. "rounding": apart by what rounding
            leaves. "near": other numbers of nearly the same direction. "far": anything else.
        words: What says so.
        side: 0 for left or 1 for right: the one that was changed, where that can be told.
        detail: The factor, the type or the number of steps, as text.
    """

    kind: Kind
    words: str
    side: int | None = None
    detail: str = ""


def likeness(left: Fingerprint, right: Fingerprint) -> Likeness | None:
    """How two contents of one size are related; None where they cannot be held against each other."""
    gap = difference(left, right)
    if (
        not gap.comparable
        or gap.relative is None
        or left.n != right.n
        or left.nonfinite
        or right.nonfinite
    ):
        return None
    for ask in (_constant, _zeroed, _rearranged, _scaled, _cast, _levels, _eight_bits):
        found = ask(left, right, gap)
        if found is not None:
            return found
    if gap.relative <= _ROUNDING:
        return Likeness("rounding", "they differ by what rounding leaves of computed numbers")
    return Likeness("near" if gap.relative < _NEAR else "far", "")


def _constant(left: Fingerprint, right: Fingerprint, gap: Difference) -> Likeness | None:
    """One side holds a single number, the other does not."""
    one = [p.min == p.max for p in (left, right)]
    if left.n < 2 or one[0] == one[1]:
        return None
    side = 0 if one[0] else 1
    number = f"{(left, right)[side].min:.6g}"
    return Likeness(
        "constant",
        f"all {left.n} elements of the {('left', 'right')[side]} run are {number}",
        side,
        number,
    )


def _rearranged(left: Fingerprint, right: Fingerprint, gap: Difference) -> Likeness | None:
    """Equal counts, extremes, sums and norms: chance gives two equal extremes of 24 bits once in 1e14."""
    same = (
        left.code == right.code
        and left.n >= _ENOUGH
        and left.min < left.max
        and (left.min, left.max, left.zero, left.subnormal)
        == (right.min, right.max, right.zero, right.subnormal)
        and math.isclose(left.ssq, right.ssq, rel_tol=_SAME_SUM)
        and abs(left.sum - right.sum) <= _SAME_SUM * math.sqrt(left.n * left.ssq)
    )
    if not same or gap.relative is None or gap.relative < _REARRANGED:
        return None
    return Likeness(
        "rearranged",
        f"both hold the same numbers in another order: minimum {left.min:.6g}, maximum {left.max:.6g}, sum"
        f" {left.sum:.6g} and norm {math.sqrt(left.ssq):.6g} are equal",
    )


def _scaled(left: Fingerprint, right: Fingerprint, gap: Difference) -> Likeness | None:
    """One factor takes the extremes, the sum and the norm of one content to those of the other."""
    if left.n < _ENOUGH or left.ssq <= 0 or right.ssq <= 0 or left.min == left.max:
        return None
    factor = math.sqrt(right.ssq / left.ssq)
    negative = math.isclose(left.min * -factor, right.max, rel_tol=_SAME_FACTOR) and math.isclose(
        left.max * -factor, right.min, rel_tol=_SAME_FACTOR
    )
    positive = math.isclose(left.min * factor, right.min, rel_tol=_SAME_FACTOR) and math.isclose(
        left.max * factor, right.max, rel_tol=_SAME_FACTOR
    )
    if not (negative or positive) or math.isclose(factor, 1.0, rel_tol=_SAME_FACTOR) > negative:
        return None
    signed = -factor if negative and not positive else factor
    a, b = _samples(left), _samples(right)
    if a is None or b is None or len(a) != len(b):
        return None
    if not np.allclose(b, signed * a, rtol=_SAME_FACTOR, atol=_SAME_FACTOR * right.absmax):
        return None  # scaled and rearranged, or one extreme element in common by chance
    if math.isclose(signed, -1.0, rel_tol=_SAME_FACTOR):
        return Likeness("negated", "every number has the other sign", detail="-1")
    return Likeness(
        "scaled", f"every number is {signed:.6g} times the left one", detail=f"{signed:.6g}"
    )


def _zeroed(left: Fingerprint, right: Fingerprint, gap: Difference) -> Likeness | None:
    """||a - b||^2 = ||a||^2 - ||b||^2 where b is a with some elements set to 0; the sampled others are equal."""
    for number, (more, fewer) in enumerate(((right, left), (left, right))):
        lost = fewer.ssq - more.ssq
        if more.zero <= fewer.zero or lost <= 0 or not gap.absolute_l2 or gap.relative is None:
            continue
        spread = _DEVIATIONS * (gap.uncertainty or 0.0) / gap.relative
        if abs(gap.absolute_l2 / math.sqrt(lost) - 1) > spread + _SAME_FACTOR:
            continue
        a, b = _samples(more), _samples(fewer)
        if a is None or b is None or len(a) != len(b):
            continue
        kept = a != 0
        if not kept.any() or not np.array_equal(a[kept], b[kept]):
            continue
        side = 1 - number
        return Likeness(
            "zeroed",
            f"{more.zero - fewer.zero} of {more.n} elements are 0 in the {('left', 'right')[side]} run, the others"
            " are the same in both: pruned, masked or never copied",
            side,
        )
    return None


def _cast(left: Fingerprint, right: Fingerprint, gap: Difference) -> Likeness | None:
    """The sampled numbers of one side have no bits below a narrower type's, those of the other have."""
    if left.code != Code.F32 or right.code != Code.F32 or left.n < _ENOUGH or gap.relative is None:
        return None
    for dtype, bits, roundoff in _CASTS:
        lost = np.uint64((1 << bits) - 1)
        fits = [not (p.sample & lost).any() for p in (left, right)]
        if fits[0] == fits[1] or gap.relative > roundoff:
            continue
        side = 0 if fits[0] else 1
        return Likeness(
            "cast",
            f"every sampled number of the {('left', 'right')[side]} run fits {dtype}, those of the other do not, and"
            f" they are {gap.relative:.1e} apart (one rounding to it leaves up to {roundoff:.1e})",
            side,
            dtype,
        )
    return None


def _levels(left: Fingerprint, right: Fingerprint, gap: Difference) -> Likeness | None:
    """The sampled numbers of one side are whole multiples of one step that its extremes give."""
    if gap.relative is None or gap.relative > _NEAR:
        return None
    steps = [_steps_of(p) for p in (left, right)]
    if bool(steps[0]) == bool(steps[1]):
        return None
    side = 0 if steps[0] else 1
    return Likeness(
        "levels",
        f"the sampled elements of the {('left', 'right')[side]} run are whole multiples of one step, {steps[side]} of"
        " them up to the largest",
        side,
        str(steps[side]),
    )


def _steps_of(print_: Fingerprint) -> int | None:
    values = _samples(print_)
    if values is None or len(values) < SAMPLES or print_.absmax <= 0:
        return None
    candidates = [(print_.absmax / n, n) for n in _SYMMETRIC]
    candidates += [((print_.max - print_.min) / n, n) for n in _ASYMMETRIC]
    for step, count in candidates:
        multiples = values / step
        if np.all(np.abs(multiples - np.round(multiples)) < _ON_STEP):
            return int(count)
    return None


def _eight_bits(left: Fingerprint, right: Fingerprint, gap: Difference) -> Likeness | None:
    """Nearly all elements moved a little, and the largest did not: a scale that the largest of each row gives.

    A scale per row shows in no other statistic; noise, training and casts move the largest element as well.
    """
    low, high = _EIGHT_BITS
    if left.code != Code.F32 or right.code != Code.F32 or _is_coarse(left.absmax):
        return None  # numbers of few bits have their largest in common by chance
    a, b = _samples(left), _samples(right)
    if gap.relative is None or not low < gap.relative < high or a is None or b is None:
        return None
    if len(a) < SAMPLES or np.count_nonzero(a != b) < len(a) * 3 // 4:
        return None
    if not math.isclose(left.absmax, right.absmax, rel_tol=_SAME_FACTOR):
        return None
    if np.abs(a - b).max() > left.absmax / 127:
        return None
    side = 1 if right.zero > left.zero else 0 if left.zero > right.zero else None
    return Likeness(
        "levels",
        f"all sampled elements moved by less than 1/127 of the largest ({gap.relative:.1e} in all), and the largest,"
        f" {left.absmax:.6g}, did not move: as rounding to 8 bits with a scale a row leaves them",
        side,
        "127",
    )


def _is_coarse(number: float) -> bool:
    """Whether a float32 has no bits below those of a narrower type."""
    return not int(np.float32(number).view(np.uint32)) & 0x1FFF


def _samples(print_: Fingerprint) -> Doubles | None:
    return components.numbers(print_) if components.is_float(print_) else None
