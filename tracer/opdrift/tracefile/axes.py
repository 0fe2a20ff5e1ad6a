"""Where the batch, or a padded length, lies in a tensor; shared by the recording and the reading half.

An axis is followed as a *step*: the bytes of storage from one of its items to the next, which no view
changes. Its *position* in a tensor, a dim of size `outer * size * inner`, is found again from the
strides, so views need no rules (notes: diagnosis, 4).
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, Self, TypeVar

BATCH: Final = 0
"""The axis of the batch; axes from 1 are padded lengths and say which `Extents` they have."""


#: Bits of `flags` in the table `axes`.
MIXED: Final = 1  #: an item depends on other samples of the batch, or on how many there are
UNKNOWN: Final = 2  #: it depends on the batch, but where the batch lies could not be followed
UNSURE: Final = (
    4  #: where it lies is known, but something in it could not be followed, so it may be mixed
)
LENGTH_UNKNOWN: Final = 8  #: padding is somewhere in it, and where could not be followed


class Position(NamedTuple):
    """Where an axis lies: `dim` has `outer * size * inner` elements, item n is [..., n, ...] of the middle."""

    dim: int
    outer: int
    size: int
    inner: int
    axis: int = BATCH


class Step(NamedTuple):
    """An axis in a storage: how far its items are apart, in bytes, and how many there are."""

    stride: int
    size: int
    axis: int = BATCH


class Missing(enum.Enum):
    """Why a step has no position in a tensor."""

    GONE = "gone"
    """The tensor holds one item of the axis."""
    CUT = "cut"
    """It holds some of the items, or not as a dim of its own."""


@dataclass(frozen=True, slots=True)
class Extents:
    """Which part of a padded axis is valid.

    Attributes:
        size: Items of the axis, padding included.
        valid: Start and length for each sample; None where that is not known.
    """

    size: int
    valid: tuple[tuple[int, int] | None, ...]

    def is_padded(self, sample: int) -> bool:
        """Whether the valid part of a sample is less than all, or not known."""
        return self.valid[sample] != (0, self.size)


def locate(step: Step, shape: Sequence[int], strides: Sequence[int]) -> Position | Missing:
    """Find a step in a tensor of this storage; `strides` in bytes.

    A dim can hold the axis only if it runs over all of it, so in a tensor without overlaps there is at
    most one such dim.
    """
    cut = False
    for dim, (n, stride) in enumerate(zip(shape, strides, strict=True)):
        if n < 2 or stride <= 0:
            continue
        if step.stride % stride == 0:
            inner = step.stride // stride
            if n % (step.size * inner) == 0:
                return Position(dim, n // (step.size * inner), step.size, inner, step.axis)
        # does walking along this dim move along the axis?
        if stride < step.stride * step.size and stride * (n - 1) >= step.stride:
            cut = True
    return Missing.CUT if cut else Missing.GONE


def step_of(position: Position, strides: Sequence[int]) -> Step | None:
    """The step of a position in a tensor with these strides (bytes); None for an expanded dim."""
    stride = strides[position.dim] * position.inner
    return Step(stride, position.size, position.axis) if stride > 0 else None


def fits(position: Position, shape: Sequence[int]) -> bool:
    """Whether a tensor of this shape can hold an axis there."""
    dim, outer, size, inner, _ = position
    return 0 <= dim < len(shape) and shape[dim] == outer * size * inner > 0


class Factor(NamedTuple):
    """A part of a dim: its size, and the axis that it is."""

    size: int
    axis: int | None


def factor(shape: Sequence[int], positions: Iterable[Position]) -> list[Factor] | None:
    """Split dims so that each axis has one of its own; None if two axes overlap.

    The product of the factors of a dim is its size, so a contiguous tensor can be reshaped to them.
    """
    places = list(positions)
    found: list[Factor] = []
    for dim, n in enumerate(shape):
        here = {(p.inner, p.inner * p.size): p.axis for p in places if p.dim == dim}
        bounds = sorted({1, n, *(bound for pair in here for bound in pair)}) if n else [0]
        if not here:
            found.append(Factor(n, None))
            continue
        parts = []
        for low, high in itertools.pairwise(bounds):
            if high % low:
                return None
            parts.append(Factor(high // low, here.pop((low, high), None)))
        if here:
            return None
        found += reversed(parts)
    return found


def outer_inner(shape: Sequence[int], position: Position) -> tuple[int, int]:
    """A contiguous tensor as (outer, batch, inner): the elements before and after the batch."""
    before = math.prod(shape[: position.dim]) * position.outer
    return before, position.inner * math.prod(shape[position.dim + 1 :])


class Reshapable(Protocol):
    """What `valid_part` needs of an array: one of NumPy's, or a tensor."""

    def reshape(self, *sizes: int) -> Self:
        """The same elements in another shape."""

    def __getitem__(self, index: tuple[int | slice, ...]) -> Self:
        """A part of it."""


Array = TypeVar("Array", bound=Reshapable)


def valid_part(
    data: Array,
    factors: Sequence[Factor],
    sample: int,
    extents: Sequence[Extents],
) -> Array | None:
    """One sample of a tensor without its padding.

    Args:
        data: A contiguous tensor; an element may be several items of the array.
        factors: Of its dims, as `factor` gives them.
        sample: Number of the sample.
        extents: The extents of axis n at index n - 1.

    Returns:
        A view whose items are those of the sample, in order; None if its valid part is not known.
    """
    index: list[int | slice] = []
    for part in factors:
        if part.axis is None:
            index.append(slice(None))
        elif part.axis == BATCH:
            index.append(sample)
        else:
            valid = extents[part.axis - 1].valid[sample]
            if valid is None:
                return None
            index.append(slice(valid[0], sum(valid)))
    return data.reshape(*(part.size for part in factors), -1)[tuple(index)]
