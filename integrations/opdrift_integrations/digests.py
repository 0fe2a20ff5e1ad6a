"""Digests in the fields of marks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from opdrift.composition import Digests, end_to_end
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


def raw_fields(digests: Sequence[Digest | None]) -> list[str | None]:
    """As `raw_field`, of many."""
    if isinstance(digests, Digests):
        return [f"{raw:016x}" for raw in digests.raws]
    return [None if digest is None else raw_field(digest) for digest in digests]


def same(one: Digest | None, other: Digest | None) -> bool | None:
    """Whether two contents are equal; None if one of them could not be read."""
    if one is None or other is None:
        return None
    return one == other or (one.raw, one.n, one.code) == (other.raw, other.n, other.code)


def cast_digests(
    recorder: RecorderLike,
    contents: Sequence[tuple[torch.Tensor, Sequence[int]]],
    dtype: torch.dtype,
) -> list[Digest | None]:
    """As `RecorderLike.digests`, of what the contents are in another precision.

    They are cast a block at a time, into memory that the processor still has at hand when the digest reads it.
    """
    known = recorder.cast_digests(contents, dtype)
    if known is not None:
        return list(known[1])
    total = sum(size for _, sizes in contents for size in sizes)
    block = torch.empty(min(_BLOCK, total), dtype=dtype, device=contents[0][0].device)
    pieces: list[list[Digest | None]] = []
    waiting: list[
        tuple[list[Digest | None], int]
    ] = []  # the pieces in the block, and how much of each
    filled = 0

    def read() -> None:
        found = recorder.digests([(block, [size for _, size in waiting])])
        for (piece, _), digest in zip(waiting, found, strict=True):
            piece.append(digest)
        waiting.clear()

    for tensor, sizes in contents:
        source, start = tensor.reshape(-1), 0
        for size in sizes:
            pieces.append([])
            end = start + size
            if not size:
                waiting.append((pieces[-1], 0))
            while start < end:
                taken = min(end - start, _BLOCK - filled)
                block[filled : filled + taken].copy_(source[start : start + taken])
                waiting.append((pieces[-1], taken))
                start, filled = start + taken, filled + taken
                if filled == _BLOCK:
                    read()
                    filled = 0
    read()
    return [end_to_end(digests) for digests in pieces]
