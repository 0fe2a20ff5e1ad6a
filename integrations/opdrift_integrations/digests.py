"""Digests in the fields of marks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from opdrift.composition import joined
from opdrift.plugins import Digest


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


def end_to_end(digests: Sequence[Digest | None]) -> Digest | None:
    """What contents laid end to end are; None if one could not be read, or there is none."""
    known = [digest for digest in digests if digest is not None]
    if not known or len(known) < len(digests):
        return None
    return joined(known)
