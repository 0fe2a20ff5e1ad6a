"""Say which elements of one sample's record a view shows, in numbers that mean the same in a batch of any size.

Of a value that carries the batch, one sample's valid part is recorded: its elements in row-major order, as in a
run of that sample alone. A view of that value has no record. What it shows of the sample is a walk through
the record: a start, and for each dim how many steps of how many elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from opdrift.records import TensorMeta
from opdrift.tracefile.axes import BATCH, Extents, factor
from opdrift.tracefile.samples import Followed


@dataclass(frozen=True, slots=True)
class Shown:
    """What a view shows of one sample's record.

    Attributes:
        start: Element of the record that it begins with.
        walk: (how many, how far apart) of each dim, outer dims first; dims that continue each other are one.
        padding: It shows nothing of the valid part: all that it holds of the sample is padding.
    """

    start: int
    walk: tuple[tuple[int, int], ...]
    padding: bool = False

    @property
    def count(self) -> int:
        """How many elements it shows."""
        return 0 if self.padding else math.prod(n for n, _ in self.walk)


@dataclass(frozen=True, slots=True)
class _Factor:
    """A part of a dim of the recorded value.

    Attributes:
        size: Its items.
        stride: Elements of memory from one item to the next.
        axis: The axis that it is, None for none.
        kept: Items of it that are in the record.
        first: The item with which they begin.
        step: Elements of the record from one item to the next.
    """

    size: int
    stride: int
    axis: int | None
    kept: int
    first: int
    step: int


class Part:
    """One sample's part of a recorded value.

    Args:
        meta: Layout of the value.
        followed: Where the axes lie in it; None if it carries none, so that all of it is recorded.
        sample: Number of the sample.
        extents: The extents of each padded axis.
    """

    def __init__(
        self,
        meta: TensorMeta,
        followed: Followed | None,
        sample: int,
        extents: dict[int, Extents],
    ) -> None:
        self._sample = sample
        self._factors = _factors(meta, followed, sample, extents)

    def shown(self, view: TensorMeta, shift: int) -> Shown | None:
        """What a view shows of it; None if that cannot be said.

        Args:
            view: Layout of the view.
            shift: Elements of memory from the beginning of the value to that of the view.
        """
        if self._factors is None:
            return None
        by_stride = sorted(self._factors, key=lambda f: -f.stride)
        begin = _decomposed(shift, by_stride)
        steps = _steps(view, by_stride, begin) if begin is not None else None
        if begin is None or steps is None or not _within(by_stride, begin, steps):
            return None
        return self._restricted(by_stride, begin, steps)

    def _restricted(
        self, factors: list[_Factor], begin: list[int], steps: list[tuple[int, list[int]]]
    ) -> Shown | None:
        """The walk through the record: one item of the batch, and of each padded axis the valid ones."""
        start, padding = 0, False
        gone: set[int] = set()
        counts = [n for n, _ in steps]
        for place, f in enumerate(factors):
            along = [k for k, (_, vector) in enumerate(steps) if vector[place]]
            first = begin[place]
            if f.axis is None or (f.axis != BATCH and f.kept == f.size):
                start += first * f.step
                continue
            if len(along) > 1 or any(sum(map(bool, steps[k][1])) > 1 for k in along):
                return None
            step = steps[along[0]][1][place] if along else 1
            count = steps[along[0]][0] if along else 1
            low = max(-(-(f.first - first) // step), 0)
            high = min((f.first + f.kept - 1 - first) // step, count - 1)
            if f.axis == BATCH:
                if low != high:
                    return None  # it holds other samples only
                gone.update(along)
                continue
            if low > high:
                padding = True
                continue
            start += (first + low * step - f.first) * f.step
            for k in along:
                counts[k] = high - low + 1
        walk = [
            (counts[k], sum(a * f.step for a, f in zip(vector, factors, strict=True)))
            for k, (_, vector) in enumerate(steps)
            if k not in gone
        ]
        return Shown(0, (), padding=True) if padding else Shown(start, _joined(walk))


def _factors(
    meta: TensorMeta, followed: Followed | None, sample: int, extents: dict[int, Extents]
) -> list[_Factor] | None:
    """The parts of a value's dims with their steps in the record, outer dims first."""
    positions = (*followed.batch, *followed.lengths) if followed is not None else ()
    found: list[_Factor] = []
    step = 1
    for dim in range(len(meta.shape) - 1, -1, -1):
        here = [p._replace(dim=0) for p in positions if p.dim == dim]
        parts = factor(meta.shape[dim : dim + 1], here)
        if parts is None:
            return None
        stride = meta.stride[dim]
        for size, axis in reversed(parts):
            if size > 1 and stride <= 0:
                return None  # elements lie on each other
            kept, first = size, 0
            if axis == BATCH:
                kept, first = 1, sample
            elif axis is not None:
                valid = extents[axis].valid[sample]
                if valid is None:
                    return None
                first, kept = valid
            if size > 1:
                found.append(_Factor(size, stride, axis, kept, first, 0 if axis == BATCH else step))
            stride *= size
            step *= kept
    found.reverse()
    return found


def _decomposed(distance: int, factors: Sequence[_Factor]) -> list[int] | None:
    """A distance in memory as items of each factor, the largest strides first; None if it is none."""
    if distance < 0:
        return None
    found = []
    for f in factors:
        items = min(distance // f.stride, f.size - 1)
        found.append(items)
        distance -= items * f.stride
    return None if distance else found


def _steps(
    view: TensorMeta, factors: Sequence[_Factor], begin: Sequence[int]
) -> list[tuple[int, list[int]]] | None:
    """Each dim of a view as (how many, items of each factor a step); a dim over several factors is split."""
    found: list[tuple[int, list[int]]] = []
    for size, stride in zip(view.shape, view.stride, strict=True):
        if size == 1:
            continue
        parts: list[tuple[int, list[int]]] = []
        while size > 1:
            vector = _decomposed(stride, factors) if stride else [0] * len(factors)
            if vector is None:
                return None
            place = next((k for k, items in enumerate(vector) if items), None)
            inner = factors[place].size if place is not None else size
            whole = place is not None and sum(vector) == 1 and not begin[place]
            if whole and size > inner and size % inner == 0:
                parts.append((inner, vector))
                size, stride = size // inner, stride * inner
                continue
            parts.append((size, vector))
            break
        found += reversed(parts)
    return found


def _within(
    factors: Sequence[_Factor], begin: Sequence[int], steps: Sequence[tuple[int, list[int]]]
) -> bool:
    """Whether the walk stays inside each factor, so that its steps are what they seem."""
    last = list(begin)
    for count, vector in steps:
        for place, items in enumerate(vector):
            last[place] += (count - 1) * items
    return all(end < f.size for end, f in zip(last, factors, strict=True))


def _joined(walk: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Without dims of one item; dims that continue each other as one."""
    found: list[tuple[int, int]] = []
    for count, step in walk:
        if count == 1:
            continue
        if found and found[-1][1] == count * step:
            found[-1] = (found[-1][0] * count, step)
        else:
            found.append((count, step))
    return tuple(found)
