"""Which implementations the ops of both runs ran, and why: side by side, grouped by module."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from opdrift.picks import Picks
from opdrift.records import Pick, Sides
from opdrift.render import card
from opdrift.render.html.markup import Element, Heading, Node, element, folded, section, table
from opdrift.render.rows import Row, Rows
from opdrift.render.words import cell, count, name, readable

#: Ops from the start of each run whose implementation is looked up; of longer runs, those around what counts as well.
_LOOKED_UP: Final = 20_000
#: Rows on each side of what counts, and of how much of it.
_AROUND: Final = 200
_MARKED: Final = 50
_NUMBER: Final = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(slots=True)
class Group:
    """Rows of one op that ran the same two implementations, in modules that differ by a number only."""

    module: str
    op: str
    picks: Sides[Pick | None]
    row: int
    times: int = 0

    @property
    def differs(self) -> bool:
        """Whether the two runs are known to have run other implementations."""
        left, right = self.picks.left, self.picks.right
        return left is not None and right is not None and what(left) != what(right)


def looked_up(rows: Rows, marked: Sequence[int]) -> list[int]:
    """The rows whose implementations the page tells: all of a short run."""
    if len(rows) <= _LOOKED_UP:
        return list(range(len(rows)))
    chosen = np.zeros(len(rows), np.bool_)
    chosen[:_LOOKED_UP] = True
    for row in marked[:_MARKED]:
        chosen[max(0, row - _AROUND) : row + _AROUND + 1] = True
    found: list[int] = np.flatnonzero(chosen).tolist()
    return found


def picks_of(rows: Rows, chosen: Sequence[int]) -> Sides[Mapping[int, Pick]]:
    """Op index -> what it ran, of both runs, for these rows."""
    wanted = np.array(chosen, np.int64)
    found = []
    for trace, ops in zip(rows.traces, (rows.left, rows.right), strict=True):
        index = ops[wanted] if len(wanted) else wanted
        found.append(Picks(trace).among(index[index >= 0].tolist()))
    return Sides(*found)


def title(chosen: Pick) -> str:
    """A pick without its reasons."""
    library = f" [{name(chosen.library)}]" if chosen.library else ""
    return f"{name(chosen.backend or chosen.name)}{library}"


def what(chosen: Pick | None) -> tuple[str, ...]:
    """What tells a pick from another: its title, and the calls that were seen."""
    return () if chosen is None else (title(chosen), *sorted(chosen.observed))


def lines(chosen: Pick, op: str | None = None) -> list[str]:
    """A pick, its reason, what was seen to run, and why not another, as the card says it."""
    refused = {b: why for b, why in chosen.refused.items() if why != chosen.reason}
    return [
        card.pick(chosen, op),
        *card.ran(chosen),
        *(f"not {name(b)}: {readable(why)}" for b, why in refused.items()),
    ]


def groups_of(rows: Rows, picks: Sides[Mapping[int, Pick]]) -> list[Group]:
    """What ran in both runs; where they differ first, then in the order of the run."""
    groups: dict[tuple[str, str, tuple[str, ...], tuple[str, ...]], Group] = {}
    partner = {each.left: each.right for each in together(rows, picks)}
    taken = set(partner.values())
    for row in _picked(rows, picks):
        if row in taken:
            continue
        pair = _pair(rows[row], picks)
        if row in partner:
            pair = Sides(pair.left, _pair(rows[partner[row]], picks).right)
        path, op = _place(rows, row)
        key = (_NUMBER.sub("*", path), op, what(pair.left), what(pair.right))
        group = groups.get(key)
        if group is None:
            group = groups[key] = Group(path, op, pair, row)
        elif group.module != path:
            group.module = key[0]
        group.times += 1
    return sorted(groups.values(), key=lambda g: (not g.differs, g.row))


def together(rows: Rows, picks: Sides[Mapping[int, Pick]]) -> list[Sides[int]]:
    """Rows that stand for each other although they are no pair: what another backend computes in other ops.

    That is so where both runs have as many picks in a module that the other has none for: attention that is one op on
    the left and torch's math path on the right.
    """
    alone: dict[str, tuple[list[int], list[int]]] = {}
    for row in _picked(rows, picks):
        pair = _pair(rows[row], picks)
        if pair.left is None or pair.right is None:
            alone.setdefault(_place(rows, row)[0], ([], []))[pair.left is None].append(row)
    return [
        Sides(a, b)
        for left, right in alone.values()
        if len(left) == len(right)
        for a, b in zip(left, right, strict=True)
    ]


def _pair(row: Row, picks: Sides[Mapping[int, Pick]]) -> Sides[Pick | None]:
    return Sides(
        picks.left.get(row.left) if row.left is not None else None,
        picks.right.get(row.right) if row.right is not None else None,
    )


def _place(rows: Rows, row: int) -> tuple[str, str]:
    """Module and name of a row's op, the left one's where both runs have it."""
    found = rows[row]
    trace = rows.traces[0 if found.left is not None else 1]
    index = found.left if found.left is not None else found.right
    assert index is not None
    path = trace.calls[int(trace.ops.call[index])].path
    return path, trace.op_info(int(trace.ops.signature[index])).name


def _picked(rows: Rows, picks: Sides[Mapping[int, Pick]]) -> list[int]:
    found = np.zeros(len(rows), np.bool_)
    sides = zip(rows.traces, (rows.left, rows.right), (picks.left, picks.right), strict=True)
    for trace, ops, known in sides:
        picked = np.zeros(len(trace.ops) + 1, np.bool_)  # the last stands for rows without an op
        picked[list(known)] = True
        found |= picked[ops]
    chosen: list[int] = np.flatnonzero(found).tolist()
    return chosen


def kernels(rows: Rows, picks: Sides[Mapping[int, Pick]], chosen: Sequence[int]) -> Element | None:
    """Implementations side by side: what differs open, what agrees folded."""
    groups = groups_of(rows, picks)
    if not groups:
        return None
    differing = [g for g in groups if g.differs]
    alone = [g for g in groups if None in (g.picks.left, g.picks.right)]
    same = [g for g in groups if g not in differing and g not in alone]
    note = ""
    if len(chosen) < len(rows):
        note = f"Looked up for {count(len(chosen))} of {count(len(rows))} ops: the first, and those around what counts."
    folds = [
        folded(f"{words} ({count(len(some))})", _side_by_side(rows, some))
        for words, some in (("known of one side only", alone), ("the same on both sides", same))
        if some
    ]
    agree = element("p", "No op is known to have run another kernel in the other run.")
    return section(
        "kernels",
        "Kernels, side by side",
        _side_by_side(rows, differing) if differing else agree,
        *folds,
        note=note,
    )


def _side_by_side(rows: Rows, groups: Sequence[Group]) -> Element:
    headings = (
        Heading("module", "code"), Heading("op", "code"), Heading("times", "number"), Heading("left"), Heading("right"),
        Heading("first", "number"),
    )  # fmt: skip
    body: list[tuple[Node, ...]] = [
        (
            cell(g.module), name(g.op), f"x{count(g.times)}", _pick(g.picks.left, g.op), _pick(g.picks.right, g.op),
            _first(rows, g.row),
        )
        for g in groups
    ]  # fmt: skip
    return table("kernels side by side", headings, body)


def _pick(chosen: Pick | None, op: str) -> Node:
    if chosen is None:
        return "(none, or not known)"
    first, *refused = lines(chosen, op)
    return element(
        "div",
        element("p", first),
        element("ul", *(element("li", line) for line in refused)) if refused else None,
    )


def _first(rows: Rows, row: int) -> Node:
    found = rows[row]
    if found.left is not None:
        seq = int(rows.traces[0].ops.seq[found.left])
        return element("a", count(seq), href=f"#op-{seq}")
    assert found.right is not None
    seq = int(rows.traces[1].ops.seq[found.right])
    return element("a", f"{count(seq)} right", href=f"#right-op-{seq}")
