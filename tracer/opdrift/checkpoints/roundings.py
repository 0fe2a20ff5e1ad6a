"""Whether a stored tensor and a parameter are one content, of which one side was rounded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from opdrift.components import Doubles, numbers, rounded
from opdrift.tfp1 import Code
from opdrift.tracefile.fingerprints import Fingerprint

_CODES: Final = {
    "float32": Code.F32,
    "float64": Code.F64,
    "float16": Code.F16,
    "bfloat16": Code.BF16,
}
_NAMES: Final = {code: name for name, code in _CODES.items()}
#: What weights are rounded to and widened again.
_NARROW: Final = (Code.BF16, Code.F16)


@dataclass(frozen=True, slots=True)
class Rounding:
    """One side's numbers are the other's, rounded.

    Attributes:
        side: Which holds the rounded ones.
        dtype: To what they were rounded; the side may hold them in a wider type.
    """

    side: Literal["file", "model"]
    dtype: str


def rounding(sample: tuple[float, ...], dtype: str, own: Fingerprint) -> Rounding | None:
    """How two contents of other digests are one up to rounding, as far as their samples show.

    Args:
        sample: Components of the stored tensor, at the same places as the fingerprint's.
        dtype: What they are stored as.
        own: A content of the model.
    """
    stored, held = np.array(sample, np.float64), numbers(own)
    code = _CODES.get(dtype)
    if code is None or held is None or len(stored) != len(held) or not len(held):
        return None
    if np.array_equal(stored, held, equal_nan=True):
        return None  # what differs lies elsewhere, and is no rounding
    if held.min() == held.max() and own.min != own.max:
        return None  # the sample is a constant where the content is none
    for to in dict.fromkeys((code, *_NARROW)):
        if _is(rounded(held, to), stored):
            return Rounding("file", _NAMES[to])
    for to in _NARROW:
        if _is(rounded(stored, to), held):
            return Rounding("model", _NAMES[to])
    return None


def _is(one: Doubles | None, other: Doubles) -> bool:
    return one is not None and np.array_equal(one, other, equal_nan=True)
