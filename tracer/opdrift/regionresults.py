"""Results of compiled code that no module returned, and what the other run has for them.

A compiled function that wraps a model leaves no call of the model, and its result is no module's. It is what nobody
read, held against what nobody read in the other run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from opdrift.contents import Contents
from opdrift.flow import unread
from opdrift.leaves import LeafTable
from opdrift.matches import made
from opdrift.pairs import Compared

#: What results are matched by: shape and dtype.
_Form = tuple[tuple[int, ...], str]


@dataclass(frozen=True, slots=True)
class RegionResults:
    """What calls of generated code without a counterpart returned.

    Attributes:
        pairs: Left and right values.
        alone: Run (0 for left, 1 for right) and value, where none of a function's results has a counterpart.
    """

    pairs: tuple[tuple[int, int], ...]
    alone: tuple[tuple[int, int], ...]


def results_of_regions(
    compared: Compared,
    tables: tuple[LeafTable, LeafTable],
    known: tuple[set[int], set[int]],
) -> RegionResults:
    """Match them by form: what outlived both runs first, then in order, then from the last one back.

    Args:
        compared: Both runs.
        tables: Leaves of each.
        known: Values of each run that are matched already.
    """
    contents = compared.left, compared.right
    ends = [_ends(contents[n], tables[n], known[n]) for n in (0, 1)]
    pairs: list[tuple[int, int]] = []
    alone: list[tuple[int, int]] = []
    for number in (0, 1):
        own = _returned(compared, number, ends[number])
        taken = {pair[1 - number] for pair in pairs}
        theirs = [v for v in ends[1 - number] if v not in taken]
        alive = tuple({leaf.value for leaf in tables[n].alive} for n in (number, 1 - number))
        mine = [v for values in own.values() for v in values]
        found = dict(_matched(contents, number, (mine, theirs), (alive[0], alive[1])))
        pairs += [(a, b) if number == 0 else (b, a) for a, b in found.items()]
        for values in own.values():
            if values and not any(v in found for v in values):
                alone += [(number, v) for v in values]
    return RegionResults(tuple(pairs), tuple(alone))


def _ends(contents: Contents, table: LeafTable, known: Iterable[int]) -> list[int]:
    """Values that nobody read, or that outlived the run, and that are named nowhere; one for each state."""
    of = contents.states.of
    passed = {int(of[v]) for v in (*known, *(leaf.value for leaf in table.outputs))}
    kept = [leaf.value for leaf in table.alive]
    found: dict[int, int] = {}
    unseen = unread(contents)
    read = {op for v in unseen if (op := int(contents.producer[v])) >= 0} - {
        int(contents.producer[v]) for v in unseen if int(contents.output_slot[v]) == 0
    }
    for value in sorted((*unseen, *kept)):
        # what an op returns beside a result that is read (a mean, a seed) is for the backward pass
        beside = int(contents.producer[value]) in read and value not in kept
        if int(of[value]) not in passed and not (beside and not _is_of_region(contents, value)):
            found[int(of[value])] = value
    return list(found.values())


def _is_of_region(contents: Contents, value: int) -> bool:
    return made(contents, value)[0] in contents.regions.at


def _returned(compared: Compared, number: int, ends: Iterable[int]) -> dict[str | None, list[int]]:
    """By function what the calls of a run that have no counterpart returned; what backward passes made is gradients."""
    contents = (compared.left, compared.right)[number]
    partner = (compared.pairing.right_of, compared.pairing.left_of)[number]
    found: dict[str | None, list[int]] = defaultdict(list)
    for value in ends:
        op = made(contents, value)[0]
        call = contents.regions.at.get(op)
        if call is not None and partner[op] < 0 and call.graph.direction != "backward":
            found[call.graph.function].append(value)
    return found


def _matched(
    contents: tuple[Contents, Contents],
    number: int,
    values: tuple[list[int], list[int]],
    alive: tuple[set[int], set[int]],
) -> Iterable[tuple[int, int]]:
    """Pairs of values of one form."""
    forms: tuple[dict[_Form, list[int]], dict[_Form, list[int]]] = (
        defaultdict(list),
        defaultdict(list),
    )
    for side, those, by_form in zip(
        (contents[number], contents[1 - number]), values, forms, strict=True
    ):
        for value in those:
            meta = side.trace.meta(value)
            by_form[tuple(meta.shape), meta.dtype].append(value)
    for form, mine in forms[0].items():
        theirs = forms[1].get(form, [])
        kept = [v for v in mine if v in alive[0]], [v for v in theirs if v in alive[1]]
        if kept[0] and len(kept[0]) == len(kept[1]):
            yield from zip(*kept, strict=True)
            mine = [v for v in mine if v not in alive[0]]
            theirs = [v for v in theirs if v not in alive[1]]
        # calls before those that count, such as a warm-up, are more in one run
        both = min(len(mine), len(theirs))
        yield from zip(mine[len(mine) - both :], theirs[len(theirs) - both :], strict=True)
