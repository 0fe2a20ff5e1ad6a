"""Let one divergence stand for all leaves that differ for the same cause."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

from opdrift.origins.model import Origin
from opdrift.records import Cause


class HasCauses(Protocol):
    """An origin that was judged."""

    @property
    def causes(self) -> tuple[Cause, ...]:
        """Its causes, the most specific first."""
        ...


J = TypeVar("J", bound=HasCauses)


def grouped_leaves(origins: Iterable[Origin], judge: Callable[[Origin], J]) -> list[J]:
    """Judge leaf origins, one for each cause and kind of leaf; the first used one stands for the others."""
    groups: dict[tuple[str, str], list[Origin]] = defaultdict(list)
    alone: dict[tuple[str, str], J] = {}
    for origin in origins:
        if origin.kind != "leaf":
            continue
        judged = judge(origin)
        leaf = origin.leaf.left or origin.leaf.right
        key = judged.causes[0].slug, str(leaf.kind) if leaf is not None else ""
        groups[key].append(origin)
        alone.setdefault(key, judged)
    found = []
    for key, members in groups.items():
        if len(members) == 1:
            found.append(alone[key])
            continue
        others = [*members[0].members]
        for member in members[1:]:
            others += [member.leaf, *member.members]
        found.append(judge(members[0].grouped(tuple(others))))
    return found
