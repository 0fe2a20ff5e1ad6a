"""What integrations compute of contents without reading them: wholes from parts, and what was taken off.

A digest is linear in the digits, so the digest of a buffer follows from those of its shards wherever they
were cut. Formulas are those of docs/decisions/0004-fingerprint.md, Composition; `tfp1` has them on plain
integers. Offsets and lengths are in components: a complex element is two.

A cast keeps no digest. Whether a content is another one in another precision, `compare.is_cast` says.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache
from operator import mul
from typing import NamedTuple, overload

from opdrift import tfp1
from opdrift.plugins import Digest
from opdrift.tfp1 import Code


class Content(NamedTuple):
    """A digest that was computed from others instead of from memory."""

    raw: int
    n: int
    code: int

    @property
    def digits(self) -> int:
        """By how many digits it shifts what follows it."""
        return tfp1.digits(self.n, Code(self.code).bytes)


class Digests(Sequence[Content]):
    """Digests of many contents of one component type; each becomes an object where it is asked for.

    Thousands a step are only held against those of the step before, which is one comparison of memory.

    Attributes:
        raws: The hashes, as unsigned 64-bit integers.
        lengths: How many components each content has.
        code: What a component is.
    """

    __slots__ = ("_whole", "code", "lengths", "raws")

    def __init__(self, raws: array[int], lengths: tuple[int, ...], code: int) -> None:
        self.raws = raws
        self.lengths = lengths
        self.code = code
        self._whole: Content | None = None

    @property
    def whole(self) -> Content:
        """What all of them are end to end."""
        if self._whole is None:
            weights = _weights(self.lengths, self.code)
            raw = sum(map(mul, self.raws, weights)) % tfp1.P
            self._whole = Content(raw, sum(self.lengths), self.code)
        return self._whole

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int) -> Content: ...

    @overload
    def __getitem__(self, index: slice) -> Digests: ...

    def __getitem__(self, index: int | slice) -> Content | Digests:
        if isinstance(index, slice):
            return Digests(self.raws[index], self.lengths[index], self.code)
        return Content(self.raws[index], self.lengths[index], self.code)

    def __contains__(self, value: object) -> bool:
        return value is not None and super().__contains__(value)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Digests):
            return (self.raws, self.code, self.lengths) == (other.raws, other.code, other.lengths)
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # as of a list


class Joints:
    """Joins stretches end to end, the same ones again and again: the pieces of each parameter that FSDP gathers.

    Args:
        lengths: Of all stretches.
        groups: Which of them are joined, for each result.
    """

    def __init__(self, lengths: Sequence[int], groups: Sequence[slice]) -> None:
        self._lengths = tuple(lengths)
        self._groups = tuple(groups)
        self._joined = tuple(sum(self._lengths[group]) for group in self._groups)
        #: Component type -> by what each stretch of each group counts.
        self._weights: dict[int, tuple[tuple[int, ...], ...]] = {}

    def of(self, digests: Sequence[Digest | None]) -> Sequence[Digest | None]:
        """What the stretches of each group are end to end; None where one of them could not be read."""
        if not isinstance(digests, Digests) or digests.lengths != self._lengths:
            return [end_to_end(digests[group]) for group in self._groups]
        code, raws, groups = digests.code, digests.raws, self._groups
        weights = self._weights.get(code)
        if weights is None:
            weights = tuple(_weights(self._lengths[group], code) for group in groups)
            self._weights[code] = weights
        joins = zip(groups, weights, strict=True)
        found = [sum(map(mul, raws[group], each)) % tfp1.P for group, each in joins]
        return Digests(array("Q", found), self._joined, code)


def end_to_end(digests: Sequence[Digest | None]) -> Digest | None:
    """What contents laid end to end are; None if one could not be read, or there is none."""
    if isinstance(digests, Digests):
        return digests.whole if len(digests) else None
    known = [digest for digest in digests if digest is not None]
    if not known or len(known) < len(digests):
        return None
    return known[0] if len(known) == 1 else joined(known)


def same(one: Digest, other: Digest) -> bool:
    """Whether two contents are equal; those of different types never are: compare them by their sketches."""
    return (one.raw, one.n, one.code) == (other.raw, other.n, other.code)


def joined(parts: Iterable[Digest]) -> Content:
    """What parts laid end to end are: shards of a flat parameter, chunks along the first dim.

    `raw(x || y) = raw(x) + R**digits(x) * raw(y)` (decision 4, Composition).

    Raises:
        ValueError: There is no part, or they are of several component types.
    """
    found = tuple(parts)
    code = _common_code(found)
    lengths = tuple([part.n for part in found])
    raws = [part.raw for part in found]
    raw = sum(map(mul, raws, _weights(lengths, code))) % tfp1.P
    return Content(raw, sum(lengths), code)


def placed(parts: Iterable[tuple[Digest, int]], n: int) -> Content:
    """What a buffer of n components is that holds parts at given offsets, and zero bytes elsewhere.

    `sum R**digits(offset) * raw(part)` (decision 4, Composition).

    Args:
        parts: Each part and the component at which it starts, in any order.
        n: Components of the buffer.

    Raises:
        ValueError: There is no part, they are of several component types, overlap, or stick out.
    """
    found = sorted(parts, key=lambda part: (part[1], part[0].n))
    code = _common_code([part for part, _ in found])
    end = 0
    for part, offset in found:
        if offset < end:
            raise ValueError(
                f"a part of {part.n} components at {offset} lies before component {end}, where the last part ends"
            )
        end = offset + part.n
    if end > n:
        raise ValueError(f"parts reach to component {end} of a buffer of {n}")
    width = Code(code).bytes
    raw = tfp1.compose((part.raw, tfp1.digits(offset, width)) for part, offset in found)
    return Content(raw, n, code)


def without_padding(whole: Digest, kept: int, padding: Digest | None = None) -> Content:
    """What the first `kept` components of a padded content are.

    `raw(kept) = raw(whole) - R**digits(kept) * raw(padding)` (decision 4, Composition).

    Args:
        whole: The content with its padding at the end.
        kept: Components before the padding.
        padding: What the padding is; None for zero bytes, which add nothing. See `filled`.

    Raises:
        ValueError: Padding and rest are not as long as the whole, or of another component type.
    """
    length = whole.n - kept
    if kept < 0 or length < 0 or (padding is not None and padding.n != length):
        raise ValueError(
            f"{kept} components are to be kept of {whole.n}, and the padding has"
            f" {length if padding is None else padding.n}"
        )
    raw = whole.raw
    if padding is not None:
        code = _common_code([whole, padding])
        raw = tfp1.remove_suffix(raw, tfp1.digits(kept, Code(code).bytes), padding.raw)
    return Content(raw, kept, whole.code)


def filled(bits: int, n: int, code: int) -> Content:
    """So many equal components, given by their bit pattern: padding, a filled tensor, a mask of ones."""
    return Content(tfp1.constant(bits, n, Code(code).bytes), n, code)


def is_gathered(whole: Digest, shards: Iterable[Digest], *, padded: bool = False) -> bool:
    """Whether a buffer is its shards laid end to end, as `joined` puts them.

    Shards that were gathered along another dim than the first do not lie end to end: take the digest of each
    slice of the buffer (`Recorder.digest` takes any layout) and compare it with `same`.

    Args:
        whole: The gathered buffer.
        shards: The shards in order.
        padded: The lengths may differ by zero bytes at the end, of the buffer or of the last shards: such as
            FSDP pads flat parameters with, and takes away again.
    """
    found = tuple(shards)
    if not found or {part.code for part in found} != {whole.code}:
        return False
    end_to_end = joined(found)
    return end_to_end.raw == whole.raw and (padded or end_to_end.n == whole.n)


@lru_cache(maxsize=4096)
def _weights(lengths: tuple[int, ...], code: int) -> tuple[int, ...]:
    """By what parts of such lengths count where they lie end to end: FSDP puts the same ones together at every gather."""
    width = Code(code).bytes
    starts = itertools.accumulate(lengths[:-1], initial=0)
    return tuple(tfp1.shift(tfp1.digits(start, width)) for start in starts)


def _common_code(parts: Sequence[Digest]) -> int:
    codes = {part.code for part in parts}
    if len(codes) != 1:
        names = ", ".join(sorted(Code(code).name for code in codes)) or "none"
        raise ValueError(f"parts of one component type are needed; these are of: {names}")
    return int(codes.pop())
