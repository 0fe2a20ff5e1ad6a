"""Which name of a checkpoint is which name of the model: the same, or with other words in front."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

#: So many names vote on what was renamed, and so many renamings are looked for.
_VOTERS: Final = 300
_RENAMINGS: Final = 20


@dataclass(frozen=True, slots=True)
class Renaming:
    """Names that begin with `stored` in the checkpoint begin with `own` in the model; "" is nothing."""

    stored: str
    own: str
    count: int


def match(
    stored: Mapping[str, int], own: Mapping[str, int]
) -> tuple[dict[str, str], list[Renaming]]:
    """Pair names whose tensors have as many elements.

    Equal names come first; then, again and again, the exchange of leading words that pairs most of the rest.
    One pair alone makes such an exchange only where words are left out, or added, on one side.

    Args:
        stored: Name in the checkpoint -> elements.
        own: Name in the model -> elements.

    Returns:
        Name in the checkpoint -> name in the model, and what was exchanged.
    """
    pairs = {name: name for name, size in stored.items() if own.get(name) == size}
    left = {name: size for name, size in stored.items() if name not in pairs}
    free = {name: size for name, size in own.items() if name not in pairs}
    renamings = []
    for _ in range(_RENAMINGS):
        best = _best(left, free)
        if best is None:
            break
        found = {
            name: other
            for name, size in left.items()
            if (other := _renamed(name, *best)) is not None and free.get(other) == size
        }
        renamings.append(Renaming(*best, len(found)))
        pairs |= found
        left = {name: size for name, size in left.items() if name not in found}
        free = {name: size for name, size in free.items() if name not in set(found.values())}
    return pairs, renamings


def _renamed(name: str, stored: str, own: str) -> str | None:
    if stored and not name.startswith(f"{stored}."):
        return None
    rest = name[len(stored) + 1 :] if stored else name
    return f"{own}.{rest}" if own else rest


def _best(stored: Mapping[str, int], own: Mapping[str, int]) -> tuple[str, str] | None:
    """The exchange of leading words that most names ask for."""
    by_end: dict[tuple[str, int], list[Sequence[str]]] = defaultdict(list)
    for name, size in own.items():
        words = name.split(".")
        by_end[words[-1], size].append(words)
    votes: Counter[tuple[str, str]] = Counter()
    names = list(stored)
    for name in names[:: max(len(names) // _VOTERS, 1)]:
        words = name.split(".")
        # a set: a name votes once for each exchange, however many it could be
        votes.update({_fronts(words, other) for other in by_end[words[-1], stored[name]]})
    for (front, other), number in votes.most_common():
        if number > 1 or not front or not other:
            return front, other
    return None


def _fronts(one: Sequence[str], other: Sequence[str]) -> tuple[str, str]:
    """What stands before the longest common end of two names."""
    same = 0
    while same < min(len(one), len(other)) and one[-1 - same] == other[-1 - same]:
        same += 1
    return ".".join(one[: len(one) - same]), ".".join(other[: len(other) - same])
