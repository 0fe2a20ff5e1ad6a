"""Match results of two runs: by the pair of ops that made them, by content."""

from __future__ import annotations

from collections import defaultdict

from opdrift.contents import Contents
from opdrift.pairs import Compared
from opdrift.records import Leaf

#: What each result of the left run, and each of the right one, is matched by; None for what is not.
Keys = tuple[list[object], list[object]]


def alike(
    keys: Keys, left: list[Leaf], right: list[Leaf]
) -> tuple[list[tuple[Leaf, Leaf]], list[Leaf], list[Leaf]]:
    """Results of equal keys in order, and what is left over on each side."""
    places: dict[object, list[int]] = defaultdict(list)
    for j, key in enumerate(keys[1]):
        if key is not None:
            places[key].append(j)
    taken: dict[int, int] = {}
    for i, key in enumerate(keys[0]):
        if key is not None and places[key]:
            taken[i] = places[key].pop(0)
    pairs = [(left[i], right[j]) for i, j in taken.items()]
    matched = set(taken.values())
    return (
        pairs,
        [leaf for i, leaf in enumerate(left) if i not in taken],
        [leaf for j, leaf in enumerate(right) if j not in matched],
    )


def by_maker(compared: Compared, left: list[Leaf], right: list[Leaf]) -> Keys:
    """The left op that made each value, or whose counterpart did, and which of its outputs it is."""
    a: list[object] = []
    for leaf in left:
        op, slot = made(compared.left, leaf.value)
        a.append((op, slot) if op >= 0 and compared.pairing.right_of[op] >= 0 else None)
    b: list[object] = []
    for leaf in right:
        op, slot = made(compared.right, leaf.value)
        partner = int(compared.pairing.left_of[op]) if op >= 0 else -1
        b.append((partner, slot) if partner >= 0 else None)
    return a, b


def by_content(compared: Compared, left: list[Leaf], right: list[Leaf]) -> Keys:
    """What each value holds, where that is known."""
    a = [int(compared.left.by_place[leaf.value]) or None for leaf in left]
    b = [int(compared.right.by_place[leaf.value]) or None for leaf in right]
    return list(a), list(b)


def made(contents: Contents, value: int) -> tuple[int, int]:
    """The op that wrote a value's storage last, -1 for none, and which of its outputs that is."""
    state = int(contents.states.of[value])
    return int(contents.states.writer[state]), int(contents.root_slot[value])
