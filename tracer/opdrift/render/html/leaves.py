"""Parameters, buffers, inputs and results of both runs: which differ, how they were made, and what they held when."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Final

import numpy as np

from opdrift.align import Maps
from opdrift.align.calls import rename, wrapper_prefix
from opdrift.compare import difference
from opdrift.leaves import BEFORE
from opdrift.pairs import DIFFERENT, EQUAL, Compared
from opdrift.provenance import Lineage
from opdrift.records import Leaf
from opdrift.render.html.markup import Element, Heading, Node, element, folded, section, table
from opdrift.render.leaf_text import HELD, WHEN, came_from
from opdrift.render.timeline_text import event_rows, has_steps
from opdrift.render.trace_text import content
from opdrift.render.words import count, name, plural, side, size
from opdrift.timeline import Timelines
from opdrift.tracefile.reader import Trace

#: Leaves that are listed, differing ones first, and moments of one that are told.
_LISTED: Final = 1_000
_MOMENTS: Final = 50
#: Leaves that differ whose whole history is told.
_HISTORIES: Final = 200
#: Moments that stand for each other: one run may see a parameter on entry, the other when it is gathered.
_STAGE: Final = dict.fromkeys(BEFORE, "start")
#: The parts of a leaf's line, for the style sheet.
_COLUMNS: Final = ("code", "kind", "status", "number", "code layout", "made")
_WORDS: Final = {EQUAL: "equal", DIFFERENT: "differs"}


@dataclass(frozen=True, slots=True)
class Moment:
    """A leaf as both runs saw it at one moment; one side may not have seen it."""

    left: Leaf | None
    right: Leaf | None
    status: str


@dataclass(slots=True)
class LeafRow:
    """A leaf of either run, or of both, with its moments in order."""

    name: str
    kind: str
    moments: list[Moment] = field(default_factory=list)

    @property
    def status(self) -> str:
        """What stands for the whole: that it differs at some moment, else what both runs saw, else which run has it."""
        found = {m.status for m in self.moments}
        for word in ("differs", "not known", "equal"):
            if word in found:
                return word
        return found.pop() if len(found) == 1 else "not known"


def leaf_rows(compared: Compared, maps: Maps) -> list[LeafRow]:
    """Named leaves, what the left run has in its order first; what lived at exit is left out."""
    left, right = compared.left.trace, compared.right.trace
    prefix = None if maps else wrapper_prefix(left, right)
    renamed = rename(maps or ([prefix] if prefix else []))
    rows: dict[tuple[str, str], LeafRow] = {}
    seen: tuple[dict[tuple[str, str, str], list[Leaf]], ...] = (
        defaultdict(list),
        defaultdict(list),
    )
    for number, trace in enumerate((left, right)):
        for leaf in trace.leaves:
            if not leaf.name or leaf.kind == "alive":
                continue
            key: tuple[str, str] = (renamed(leaf.name) if number == 0 else leaf.name, leaf.kind)
            rows.setdefault(key, LeafRow(leaf.name, leaf.kind))
            seen[number][(*key, _STAGE.get(leaf.when, leaf.when))].append(leaf)
    pairs = [
        (key[:2], a, b)
        for key in dict.fromkeys([*seen[0], *seen[1]])
        for a, b in zip_longest(seen[0].get(key, ()), seen[1].get(key, ()))
    ]
    for (key, a, b), status in zip(pairs, _statuses(compared, pairs), strict=True):
        rows[key].moments.append(Moment(a, b, status))
    return list(rows.values())


def _statuses(
    compared: Compared, pairs: Sequence[tuple[tuple[str, ...], Leaf | None, Leaf | None]]
) -> Iterator[str]:
    both = [(a.value, b.value) for _, a, b in pairs if a is not None and b is not None]
    values = np.array(both, np.int64).reshape(-1, 2)
    found = iter(compared.status(values[:, 0], values[:, 1]).tolist())
    for _, a, b in pairs:
        if a is None or b is None:
            yield "right only" if a is None else "left only"
        else:
            yield _WORDS.get(next(found), "not known")


def parameters(compared: Compared, maps: Maps) -> Element | None:
    """The table of leaves: what differs open, what agrees folded, each with its content over time."""
    rows = leaf_rows(compared, maps)
    if not rows:
        return None
    differing = [r for r in rows if r.status not in ("equal", "not known")]
    same = [r for r in rows if r.status in ("equal", "not known")]
    shown = differing[:_LISTED], same[: max(0, _LISTED - len(differing))]
    rest = len(rows) - sum(map(len, shown))
    told = _Told(compared)
    said = f"{count(len(differing))} of {plural(len(rows), 'named leaf').replace('leafs', 'leaves')} differ, or only one run has them."
    return section(
        "parameters", "Parameters, buffers, inputs and results",
        told.listed(shown[0]) if shown[0] else None,
        folded(f"equal in both runs, or not known ({count(len(same))})", told.listed(shown[1])) if shown[1] else None,
        element("p", f"and {count(rest)} more; opdrift show TRACE --leaf GLOB tells of each") if rest else None,
        note=said,
    )  # fmt: skip


class _Told:
    """Says what is known of leaves; keeps where contents came from."""

    def __init__(self, compared: Compared) -> None:
        self._contents = (compared.left, compared.right)
        self._traces: tuple[Trace, Trace] = (compared.left.trace, compared.right.trace)
        self._lineages = tuple(map(Lineage, self._traces))
        self._timelines = tuple(map(Timelines, self._traces))
        self._histories = _HISTORIES

    def listed(self, rows: Sequence[LeafRow]) -> Element:
        """One line a leaf; its content over time unfolds."""
        titles = ("name", "kind", "", "differs by", "layout", "where it came from")
        head = element("p", *_cells(titles), class_="leaf head", aria_hidden="true")
        return element("div", head, *(self._row(r) for r in rows), class_="leaves")

    def _row(self, row: LeafRow) -> Element:
        layouts = [self._layout(0, row), self._layout(1, row)]
        known = list(dict.fromkeys(text for text in layouts if text))
        layout = (
            known[0] if len(known) == 1 else f"left {side(layouts[0])}, right {side(layouts[1])}"
        )
        cells = (name(row.name), row.kind, row.status, self._size(row), layout, self._made(row))
        rest = len(row.moments) - _MOMENTS
        return folded(
            element("span", *_cells(cells), class_="leaf"),
            self._moments(row),
            element("p", f"and {count(rest)} later moments") if rest > 0 else None,
            self._history(row),
        )

    def _layout(self, number: int, row: LeafRow) -> str | None:
        for moment in row.moments:
            leaf = moment.left if number == 0 else moment.right
            if leaf is not None:
                return str(self._traces[number].meta(leaf.value))
        return None

    def _size(self, row: LeafRow) -> str:
        for moment in row.moments:
            if moment.status == "differs" and moment.left is not None and moment.right is not None:
                found = self._apart(moment.left, moment.right)
                return size(found) if found is not None else "?"
        return ""

    def _apart(self, left: Leaf, right: Leaf) -> float | None:
        a = self._contents[0].fingerprint(left.value)
        b = self._contents[1].fingerprint(right.value)
        return None if a is None or b is None else difference(a, b).relative

    def _moments(self, row: LeafRow) -> Element:
        headings = (Heading("when"), Heading("left"), Heading("", "status"), Heading("right"))
        body = [
            (self._when(m), self._held(0, m.left), m.status, self._held(1, m.right))
            for m in row.moments[:_MOMENTS]
        ]
        return table(f"content of {name(row.name)} over time", headings, body)

    def _history(self, row: LeafRow) -> Element | None:
        """What became of a parameter or buffer that differs, in each run."""
        if row.kind not in HELD or row.status != "differs" or not self._histories:
            return None
        self._histories -= 1
        sides = [self._events(row, number) for number in (0, 1)]
        return element("div", *sides, class_="both")

    def _events(self, row: LeafRow, number: int) -> Element | None:
        seen = [leaf for m in row.moments if (leaf := m.right if number else m.left) is not None]
        if not seen:
            return None
        word = ("left", "right")[number]
        events = self._timelines[number].of(seen[0].name, sorted(seen, key=lambda leaf: leaf.seq))
        steps = has_steps(events)
        headings = (
            Heading(f"{word} op", "number"), *((Heading("step", "number"),) if steps else ()), Heading("what"),
            Heading("content", "code"), Heading("by"),
        )  # fmt: skip
        blank = [""] * (len(headings) - 1)
        body = [row if len(row) > 1 else (*blank, *row) for row in event_rows(events, steps=steps)]
        return table(f"what became of {name(row.name)} in the {word} run", headings, body)

    def _made(self, row: LeafRow) -> str:
        """How the first content of either side that differs came to be, else the first."""
        chosen = next((m for m in row.moments if m.status != "equal"), row.moments[0])
        said: Mapping[str, str] = {
            word: came_from(lineage.of(leaf.value))
            for word, lineage, leaf in zip(
                ("left", "right"), self._lineages, (chosen.left, chosen.right), strict=True
            )
            if leaf is not None
        }
        words = dict.fromkeys(said.values())
        if len(words) == 1:
            (same,) = words
            return same
        return "; ".join(f"{word} {text}" for word, text in said.items())

    def _when(self, moment: Moment) -> str:
        leaf = moment.left or moment.right
        assert leaf is not None
        seqs = [str(count(x.seq)) for x in (moment.left, moment.right) if x is not None and x.seq]
        after = f" after op {' / '.join(dict.fromkeys(seqs))}" if seqs else ""
        return f"{WHEN.get(leaf.when, leaf.when)}{after}"

    def _held(self, number: int, leaf: Leaf | None) -> str:
        return "" if leaf is None else content(self._traces[number], leaf.value)


def _cells(texts: Sequence[str]) -> list[Node]:
    """The parts of a leaf's line; spaces between them are for readers that see no columns."""
    return [
        node
        for text, class_ in zip(texts, _COLUMNS, strict=True)
        for node in (element("span", text, class_=class_), " ")
    ]
