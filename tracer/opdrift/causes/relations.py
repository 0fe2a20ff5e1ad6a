"""How the weights of two runs are related: under other names, tied on one side, changed in one way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from opdrift.case import Case, Side
from opdrift.causes.evidence import SIDES, counted, some
from opdrift.causes.likeness import Kind, Likeness, likeness
from opdrift.records import Leaf, Sides
from opdrift.tracefile.fingerprints import Fingerprint

Key = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Moved:
    """A parameter whose right content is that of another parameter in the left run."""

    name: str
    source: str


@dataclass(frozen=True, slots=True)
class Tie:
    """Names that are one parameter in one run only."""

    names: tuple[str, ...]
    side: int


class Relations:
    """The parameters and buffers of two runs, held against each other across names."""

    def __init__(self, case: Case) -> None:
        self._case = case

    def moved(self, members: Iterable[Sides[Leaf | None]]) -> list[Moved]:
        """Members that hold, in the right run, what another name holds in the left one; constants are passed over."""
        found = []
        for m in members:
            if m.left is None or m.right is None:
                continue
            key = _key(self._case.right, m.right)
            sources = (
                [n for n in self._names_by_key.get(key, ()) if n != m.left.name] if key else []
            )
            if sources:
                found.append(Moved(m.left.name, _nearest(m.left.name, sources)))
        return found

    @cached_property
    def _names_by_key(self) -> dict[Key, list[str]]:
        found: dict[Key, list[str]] = {}
        for leaf in self._case.left.leaves.starts:
            if leaf.name and leaf.kind in ("parameter", "buffer"):
                key = _key(self._case.left, leaf)
                if key is not None:
                    found.setdefault(key, []).append(leaf.name)
        return found

    @cached_property
    def ties(self) -> list[Tie]:
        """Names that share one tensor in one run, and not in the other, which has them all."""
        groups = _tied(self._case.left), _tied(self._case.right)
        return [
            Tie(tuple(sorted(names)), number)
            for number in (0, 1)
            for names in groups[number]
            if not any(names <= other for other in groups[1 - number])
            and names <= set((self._case.left, self._case.right)[1 - number].leaves.by_name)
        ]

    def tie_words(self, names: Sequence[str]) -> list[str]:
        """What is tied in one run only, of these names."""
        return [
            f"{some(tie.names)} are one tensor in the {SIDES[tie.side]} run and {len(tie.names)} in the other: the tie"
            " was lost, or made, when the model was built or loaded"
            for tie in self.ties
            if set(tie.names) & set(names)
        ]

    def likenesses(self, members: Iterable[Sides[Leaf | None]]) -> list[Likeness]:
        """How each member's contents are related, where that can be told."""
        found = []
        for m in members:
            if m.left is None or m.right is None:
                continue
            a = self._case.left.fingerprint(m.left.value)
            b = self._case.right.fingerprint(m.right.value)
            like = likeness(a, b) if a is not None and b is not None else None
            if like is not None:
                found.append(like)
        return found


def common(found: Sequence[Likeness], *, share: float = 0.5) -> tuple[Kind, list[Likeness]] | None:
    """The way in which most contents changed, and those that did; None where there is no such way."""
    if not found:
        return None
    kind, count = Counter(each.kind for each in found).most_common(1)[0]
    return (kind, [f for f in found if f.kind == kind]) if count > share * len(found) else None


def moved_words(moved: Sequence[Moved], total: int) -> str:
    """Which parameters hold what others do: `q.weight and k.weight are exchanged`."""
    sources = {m.name: m.source for m in moved}
    swaps = [(a, b) for a, b in sources.items() if sources.get(b) == a and a < b]
    if swaps and 2 * len(swaps) == len(moved):
        pairs = [f"{a} and {b}" for a, b in swaps]
        return f"{some(pairs, 3)} are exchanged"
    first = moved[0]
    rest = (
        f", and {counted(len(moved) - 1, 'tensor')} more hold those of others"
        if len(moved) > 1
        else ""
    )
    of = f" of {total} that differ" if total > len(moved) else ""
    return (
        f"{first.name} holds in the right run what {first.source} holds in the left one{rest}{of}"
    )


def _nearest(name: str, sources: Sequence[str]) -> str:
    """The source whose last name is the same, if one is."""
    last = name.rpartition(".")[2]
    return next((s for s in sources if s.rpartition(".")[2] == last), sources[0])


def _key(side: Side, leaf: Leaf) -> Key | None:
    print_ = side.fingerprint(leaf.value)
    return print_.key if print_ is not None and not _constant(print_) else None


def _constant(print_: Fingerprint) -> bool:
    return print_.n < 2 or print_.min == print_.max


def _tied(side: Side) -> list[frozenset[str]]:
    by_value: dict[int, set[str]] = {}
    for leaf in side.leaves.starts:
        if leaf.name and leaf.kind == "parameter" and leaf.when in ("entry", "gather"):
            by_value.setdefault(leaf.value, set()).add(leaf.name)
    return [frozenset(names) for names in by_value.values() if len(names) > 1]
