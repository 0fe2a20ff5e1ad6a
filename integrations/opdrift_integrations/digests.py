"""Digests in the fields of marks."""

from __future__ import annotations

from typing import Any

from opdrift.plugins import Digest


def as_field(digest: Digest | None) -> dict[str, Any] | None:
    """A digest in JSON's types; raw is 16 hex digits, because JSON numbers end at 2^53."""
    if digest is None:
        return None
    return {"raw": f"{digest.raw:016x}", "n": digest.n, "code": digest.code}


def same(one: Digest | None, other: Digest | None) -> bool | None:
    """Whether two contents are equal; None if one of them could not be read."""
    if one is None or other is None:
        return None
    return (one.raw, one.n, one.code) == (other.raw, other.n, other.code)
