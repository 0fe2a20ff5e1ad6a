"""How far a padded axis is valid for each sample, and what ops make of that."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from opdrift.tracefile.axes import Extents

Valid = tuple[int, int] | None
Parts = Sequence[tuple[int, "int | None"]]


class Lengths:
    """The extents of one recording; an axis number n > 0 stands for the n-th of them.

    Args:
        write: Called with the number and the extents when new ones turn up.
    """

    def __init__(self, write: Callable[[int, Extents], None]) -> None:
        self.known: list[Extents] = []
        self._axes: dict[Extents, int] = {}
        self._write = write

    def __getitem__(self, axis: int) -> Extents:
        return self.known[axis - 1]

    def axis(self, size: int, valid: Sequence[Valid]) -> int | None:
        """The number of these extents; None if they are known for no sample."""
        if all(part is None for part in valid):
            return None
        extents = Extents(size, tuple(valid))
        found = self._axes.get(extents)
        if found is None:
            self.known.append(extents)
            found = self._axes[extents] = len(self.known)
            self._write(found, extents)
        return found

    def seed(self, size: int, lengths: Sequence[int], *, left: bool) -> int | None:
        """The axis of an input that is padded to `size` on one side."""
        valid = [
            (size - length if left else 0, length) if 0 <= length <= size else None
            for length in lengths
        ]
        return self.axis(size, valid)

    def window(
        self, axis: int, size: int, *, stride: int, outputs: Callable[[int], int]
    ) -> int | None:
        """What a convolution or pooling makes of an axis.

        Args:
            axis: The axis.
            size: How many outputs all of it gives.
            stride: Inputs from one output to the next.
            outputs: How many outputs so many inputs give.

        Returns:
            The axis of the outputs. A sample whose start is not a multiple of the stride is not known:
            alone, its windows would begin elsewhere.
        """

        def change(start: int, length: int) -> Valid:
            found = outputs(length)
            if found <= 0:
                return 0, 0
            return (start // stride, found) if start % stride == 0 else None

        return self._each(axis, size, change)

    def stretched(self, axis: int, size: int, *, factor: int) -> int | None:
        """Each item becomes `factor` items."""
        return self._each(axis, size, lambda start, length: (start * factor, length * factor))

    def transposed_window(
        self, axis: int, size: int, *, stride: int, outputs: Callable[[int], int]
    ) -> int | None:
        """What a transposed convolution makes of an axis."""

        def change(start: int, length: int) -> Valid:
            found = outputs(length) if length else 0
            return (start * stride, found) if found > 0 else (0, 0)

        return self._each(axis, size, change)

    def flipped(self, axis: int) -> int | None:
        """The axis in reverse."""
        size = self[axis].size
        return self._each(axis, size, lambda start, length: (size - start - length, length))

    def joined(self, parts: Parts) -> int | None:
        """Parts laid end to end, each (size, axis); without an axis, all of it is valid.

        A sample is known if its valid parts touch, so that together they are what it is alone.
        """
        samples = len(next(self[axis].valid for _, axis in parts if axis))
        valid = [self._joined(parts, sample) for sample in range(samples)]
        return self.axis(sum(size for size, _ in parts), valid)

    def _joined(self, parts: Parts, sample: int) -> Valid:
        start, end, offset = 0, 0, 0
        for size, axis in parts:
            part = self[axis].valid[sample] if axis else (0, size)
            if part is None:
                return None
            if part[1]:
                if end == start:  # nothing so far
                    start = end = offset + part[0]
                if offset + part[0] != end:
                    return None
                end += part[1]
            offset += size
        return start, end - start

    def _each(self, axis: int, size: int, change: Callable[[int, int], Valid]) -> int | None:
        return self.axis(size, [part and change(*part) for part in self[axis].valid])
