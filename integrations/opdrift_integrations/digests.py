"""Digests in the fields of marks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch

from opdrift.composition import joined
from opdrift.plugins import Digest, RecorderLike

#: Elements that are cast at a time: half a megabyte of bfloat16, which stays in the second cache.
_BLOCK: Final = 1 << 18


def as_field(digest: Digest | None) -> dict[str, Any] | None:
    """A digest in JSON's types; raw is 16 hex digits, because JSON numbers end at 2^53."""
    if digest is None:
        return None
    return {"raw": raw_field(digest), "n": digest.n, "code": digest.code}


def raw_field(digest: Digest) -> str:
    """The hash of a digest, where size and type are said elsewhere."""
    return f"{digest.raw:016x}"


def same(one: Digest | None, other: Digest | None) -> bool | None:
    """Whether two contents are equal; None if one of them could not be read."""
    if one is None or other is None:
        return None
    return (one.raw, one.n, one.code) == (other.raw, other.n, other.code)


def cast_digests(
    recorder: RecorderLike,
    contents: Sequence[tuple[torch.Tensor, Sequence[int]]],
    dtype: torch.dtype,
) -> list[Digest | None]:
    """As `RecorderLike.digests`, of what the contents are in another precision.

    They are cast a block at a time, into memory that the processor still has at hand when the digest reads it.
    """
    found: list[Digest | None] = []
    longest = max(tensor.numel() for tensor, _ in contents)
    scratch = torch.empty(min(_BLOCK, longest), dtype=dtype, device=contents[0][0].device)
    for tensor, sizes in contents:
        pieces: list[list[Digest | None]] = [[] for _ in sizes]
        for start, cuts in _blocks(sizes):
            length = sum(size for _, size in cuts)
            block = scratch[:length].copy_(tensor.reshape(-1)[start : start + length])
            digests = recorder.digests([(block, [size for _, size in cuts])])
            for (number, _), digest in zip(cuts, digests, strict=True):
                pieces[number].append(digest)
        found += [
            end_to_end(digests) if digests else recorder.digest(scratch[:0]) for digests in pieces
        ]
    return found


def _blocks(sizes: Sequence[int]) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Blocks of pieces of these sizes: where each starts, and (number of the piece, elements of it) of what lies in it."""
    start, cuts, room = 0, list[tuple[int, int]](), _BLOCK
    for number, size in enumerate(sizes):
        left = size
        while left:
            taken = min(left, room)
            cuts.append((number, taken))
            left, room = left - taken, room - taken
            if not room:
                yield start, cuts
                start, cuts, room = start + _BLOCK, [], _BLOCK
    if cuts:
        yield start, cuts


def end_to_end(digests: Sequence[Digest | None]) -> Digest | None:
    """What contents laid end to end are; None if one could not be read, or there is none."""
    known = [digest for digest in digests if digest is not None]
    if not known or len(known) < len(digests):
        return None
    return known[0] if len(known) == 1 else joined(known)
