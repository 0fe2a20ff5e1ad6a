"""Lists, counts and ranks as sentences of all readers write them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def some(names: Sequence[str], limit: int = 4) -> str:
    """A list of names, cut after a few: `a, b, c and 12 more`."""
    if len(names) <= limit:
        return ", ".join(names)
    return f"{', '.join(names[:limit])} and {len(names) - limit} more"


def counted(count: int, noun: str) -> str:
    """`1 op`, `2 ops`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def listed(ranks: Iterable[int]) -> str:
    """`rank 1`, `ranks 0, 1 and 2`, `ranks 1 to 7`."""
    found = list(ranks)
    if len(found) == 1:
        return f"rank {found[0]}"
    if len(found) > 3 and found == list(range(found[0], found[-1] + 1)):
        return f"ranks {found[0]} to {found[-1]}"
    return f"ranks {', '.join(map(str, found[:-1]))} and {found[-1]}"
