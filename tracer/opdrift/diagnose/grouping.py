"""Let one divergence stand for all leaves, and all ops, that differ for the same cause."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from typing import Protocol, TypeVar

from opdrift.case import Case, Side
from opdrift.causes.gradients import is_gradient
from opdrift.origins.model import Origin
from opdrift.pairs import DIFFERENT
from opdrift.records import Cause, Sides
from opdrift.sizes import Size
from opdrift.tokens import family


class HasCauses(Protocol):
    """An origin that was judged."""

    @property
    def origin(self) -> Origin:
        """The origin."""
        ...

    @property
    def size(self) -> Size:
        """How large it is."""
        ...

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


def by_setting(
    case: Case, judged: Iterable[J], alike: Callable[[J, tuple[Origin, ...], tuple[str, ...]], J]
) -> list[J]:
    """Let the first op that was called with another argument stand for those called with the same other argument.

    So does the first extra write by one line stand for its others, and what one run does to a gradient for what it does to
    the other gradients there.

    One setting, a learning rate or an epsilon, reaches many ops: they are one origin, not many.

    Args:
        case: The comparison.
        judged: Origins in order.
        alike: Makes an origin stand for others, and for their ops in words.
    """
    first: dict[Hashable, int] = {}
    found: list[J] = []
    others: dict[int, list[Origin]] = defaultdict(list)
    for each in judged:
        keys = _setting_keys(case, each)
        at = next((first[key] for key in keys if key in first), None)
        for key in keys:
            first.setdefault(key, len(found) if at is None else at)
        if at is None:
            found.append(each)
        else:
            others[at].append(each.origin)
    return [
        alike(each, tuple(others[i]), tuple(_in_words(case, other) for other in others[i]))
        if i in others
        else each
        for i, each in enumerate(found)
    ]


def without_types_that_follow(case: Case, judged: Iterable[J]) -> list[J]:
    """Leave out equal numbers that are made in another type, and casts, because leaves are of that type.

    A program asks a tensor for its type when it makes a constant to go with it, or casts another to it.

    Args:
        case: The comparison.
        judged: Origins in order, leaves first.
    """
    found: list[J] = []
    of_leaves: set[tuple[str | None, str | None]] = set()
    holders: set[str] = set()
    for each in judged:
        origin, gap = each.origin, each.size.difference
        types = _types(case, origin.values)
        if origin.kind == "leaf" and each.causes[0].slug == "dtype":
            of_leaves.add(types)
            holders.update(name.rpartition(".")[0] for name in origin.names)
        follows = (
            origin.kind == "op"
            and types in of_leaves
            and {(s.name, s.left, s.right) for s in origin.settings} == {("dtype", *types)}
            and gap is not None
            and gap.relative == 0
        )
        follows |= any(_only_casts(case, origin, types, holders) for types in of_leaves)
        if not follows and not _equal_beside_others(case, each):
            found.append(each)
    return found


def _only_casts(
    case: Case, origin: Origin, types: tuple[str | None, str | None], holders: set[str]
) -> bool:
    """Whether all that one run has more is casts to its own type of two, in or for modules that hold such leaves."""
    ops = origin.region.left, origin.region.right
    reader = case.left.module(int(case.pairing.left[origin.row])) if origin.row >= 0 else None
    return (
        origin.kind == "structure"
        and any(ops)
        and all(
            side.name(op) == "aten._to_copy.default"
            and (side.module(op) in holders or reader in holders)
            and side.trace.meta(side.op(op).outputs[0]).dtype == own
            for side, own, found in zip((case.left, case.right), types, ops, strict=True)
            for op in found
        )
    )


def _equal_beside_others(case: Case, judged: HasCauses) -> bool:
    """Whether the numbers are equal in both types, and what reads them reads something else that differs as well.

    What comes of them is no news then: the other input tells of it.
    """
    origin, gap = judged.origin, judged.size.difference
    if origin.story != "region" or origin.row < 0 or gap is None or gap.nonfinite_changed:
        return False
    inputs = case.compared.inputs
    return gap.relative == 0 and any(
        inputs.status[k] == DIFFERENT and int(inputs.position[k]) != origin.slot
        for k in case.compared.inputs_of(origin.row)
    )


def _types(case: Case, values: Sides[int | None]) -> tuple[str | None, str | None]:
    left, right = values.left, values.right
    return (
        None if left is None else case.left.trace.meta(left).dtype,
        None if right is None else case.right.trace.meta(right).dtype,
    )


def _setting_keys(case: Case, judged: HasCauses) -> list[Hashable]:
    """What two ops have in common if one setting is behind both: the op and the argument, or its two values."""
    origin = judged.origin
    shown = origin.shown
    if shown is None:
        return []
    side, slug = (case.left, case.right)[shown[0]], judged.causes[0].slug
    if origin.story == "written":
        return [(slug, side.name(shown[1]), shown[0], str(side.op(shown[1]).source))]
    if origin.story == "region" and is_gradient(case, origin):
        return [
            (
                slug,
                *(
                    _done(s, ops)
                    for s, ops in zip(
                        (case.left, case.right),
                        (origin.region.left, origin.region.right),
                        strict=True,
                    )
                ),
            )
        ]
    if origin.kind != "op" or not origin.settings:
        return []
    names = tuple(s.name for s in origin.settings)
    values = tuple((s.left, s.right) for s in origin.settings)
    where = side.op(shown[1]).call.type, side.op(shown[1]).phase
    return [(slug, family(side.name(shown[1])), names, where), (slug, values, where)]


def _done(side: Side, ops: tuple[int, ...]) -> Hashable:
    """What ops do, and by which line of the program."""
    return tuple(dict.fromkeys((side.name(op), str(side.op(op).source)) for op in ops))


def _in_words(case: Case, origin: Origin) -> str:
    shown = origin.shown
    return "" if shown is None else f"op {(case.left, case.right)[shown[0]].seq(shown[1])}"
