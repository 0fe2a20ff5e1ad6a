"""Reductions checked element by element, where fingerprints hold the elements: their samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from opdrift import components
from opdrift.compare import number
from opdrift.tfp1 import Code, sample_positions
from opdrift.tracefile.fingerprints import Fingerprint

Doubles = npt.NDArray[np.float64]

#: Whole numbers above this are not told apart as float64.
_EXACT: Final = 2.0**53
#: Smallest normal and largest number by component.
_RANGE: Final[Mapping[Code, tuple[float, float]]] = {
    Code.F64: (2.0**-1022, 1.7e308),
    Code.F32: (2.0**-126, 3.4e38),
    Code.BF16: (2.0**-126, 3.3e38),
    Code.F16: (2.0**-14, 65504.0),
}


def not_at_samples(
    result: Fingerprint, summands: Sequence[Fingerprint], reduction: str | None, tolerance: float
) -> str | None:
    """The first sampled element that is not what was given there, reduced; None if there is none, or that cannot be told.

    Args:
        result: What came out.
        summands: What each rank gave.
        reduction: `SUM` (of whole numbers; that of others has sketches), `MAX`, `MIN` or `PRODUCT`.
        tolerance: Relative error that rounding explains.
    """
    check = _CHECKS.get(reduction or "")
    sampled = [components.numbers(each) for each in (result, *summands)]
    known = [each for each in sampled if each is not None and np.isfinite(each).all()]
    if check is None or len(known) < len(sampled) or len(set(map(len, known))) > 1:
        return None
    found, terms = known[0], np.stack(known[1:])
    wanted, judged = check(terms, Code(result.code), components.is_float(result))
    limit = tolerance * np.abs(wanted) if reduction == "PRODUCT" else 0.0
    wrong = np.flatnonzero(judged & (np.abs(found - wanted) > limit))
    if not len(wrong):
        return None
    k = int(wrong[0])
    return (
        f"its element {sample_positions(result.n)[k]:,} is {number(float(found[k]))}, and what was given there makes"
        f" {number(float(wanted[k]))}"
    )


_Wanted = tuple[Doubles, npt.NDArray[np.bool_]]


def _largest(terms: Doubles, code: Code, is_float: bool) -> _Wanted:
    return terms.max(axis=0), np.ones(terms.shape[1], np.bool_)


def _smallest(terms: Doubles, code: Code, is_float: bool) -> _Wanted:
    return terms.min(axis=0), np.ones(terms.shape[1], np.bool_)


def _sum(terms: Doubles, code: Code, is_float: bool) -> _Wanted:
    """Of whole numbers that do not run over."""
    judged = np.abs(terms).sum(axis=0) < min(_EXACT, 2.0 ** (8 * code.bytes - 1))
    return terms.sum(axis=0), judged & (not is_float)


def _product(terms: Doubles, code: Code, is_float: bool) -> _Wanted:
    """Where no order of the factors runs over, or under."""
    sizes = np.abs(terms)
    low, high = np.minimum(sizes, 1.0).prod(axis=0), np.maximum(sizes, 1.0).prod(axis=0)
    smallest, largest = _RANGE.get(code, (0.0, min(_EXACT, 2.0 ** (8 * code.bytes - 1)) - 1))
    return terms.prod(axis=0), (low >= smallest) & (high <= largest)


_CHECKS: Final[Mapping[str, Callable[[Doubles, Code, bool], _Wanted]]] = {
    "MAX": _largest,
    "MIN": _smallest,
    "SUM": _sum,
    "PRODUCT": _product,
}
