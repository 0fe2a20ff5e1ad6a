"""The page's smaller tables: growth, environment, ops without a counterpart, and which traces these are."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

from opdrift.records import Diagnosis, TraceSummary
from opdrift.render import card
from opdrift.render.growth import stretches
from opdrift.render.html.markup import Element, Heading, Node, element, folded, section, table
from opdrift.render.words import cell, count, moment, name, plural, side

_NUMBER: Final = "number"
_CODE: Final = "code"
#: The bars' scale, powers of ten, as in the terminal.
_SCALE: Final = (-9.0, 0.0)


def growth(diagnosis: Diagnosis, *, measured: str) -> Element | None:
    """How the difference grows along the run: a plot that a script draws, and the same as a table.

    Args:
        diagnosis: What to say.
        measured: Of which ops the plot shows the size, in a sentence; empty where there is no plot.
    """
    if not diagnosis.growth or diagnosis.verdict == "identical":
        return None
    plot = [element("p", measured, class_="note"), element("div", id="plot")] if measured else []
    return section(
        "growth", "Largest relative difference along the run", *plot,
        folded("as a table", _stretches(diagnosis), open_=not plot),
    )  # fmt: skip


def _stretches(diagnosis: Diagnosis) -> Element:
    points = stretches(diagnosis.growth)
    lonely = any(point.unpaired for point in points)
    headings = [
        Heading("module", _CODE),
        Heading("ops", _NUMBER),
        Heading("differ", _NUMBER),
        *([Heading("left only", _NUMBER)] if lonely else []),
        Heading("largest", _NUMBER),
        Heading(""),
    ]
    rows: list[tuple[Node, ...]] = []
    for point in points:
        alone = [count(point.unpaired) if point.unpaired else ""] if lonely else []
        known = point.largest if point.differing else None
        bar: Node = "" if known is None else _bar(known)
        rows.append(
            (point.place, count(point.ops), count(point.differing), *alone, point.said, bar)
        )
    return table("largest relative difference along the run", headings, rows)


def _bar(difference: float) -> Element:
    low, high = _SCALE
    exponent = low if difference <= 0 else high
    if difference > 0 and math.isfinite(difference):
        exponent = math.log10(difference)
    length = max(0.02, min(1.0, (exponent - low) / (high - low)))
    return element("meter", min="0", max="1", value=f"{length:.3f}", aria_hidden="true")


def environment(diagnosis: Diagnosis) -> Element | None:
    """Flags, versions, variables and seeds that differ."""
    if not diagnosis.environment:
        return None
    headings = (Heading("name", _CODE), Heading("left", _CODE), Heading("right", _CODE))
    rows = [(name(d.name), side(d.left), side(d.right)) for d in diagnosis.environment]
    harmless = diagnosis.verdict == "identical"
    return section(
        "environment", "Environment that differs", table("environment", headings, rows),
        note="These settings differ and change nothing here." if harmless else "",
    )  # fmt: skip


def unpaired(diagnosis: Diagnosis) -> Element | None:
    """Ops that only one run has, those of twelve layers in one line."""
    groups = card.lone_ops(diagnosis)
    if not groups:
        return None
    headings = (
        Heading("side"), Heading("op", _CODE), Heading("times", _NUMBER), Heading("module", _CODE),
    )  # fmt: skip
    rows = [(g.side, name(g.op), f"x{count(g.number)}", cell(g.place)) for g in groups]
    return section("unpaired", "Ops that only one run has", table("unpaired ops", headings, rows))


def runs(diagnosis: Diagnosis) -> Element:
    """Which traces these are, and how they were put together."""
    headings = (Heading(""), Heading("left", _CODE), Heading("right", _CODE))
    both = (diagnosis.left, diagnosis.right)
    rows = [(label, *(told(one) for one in both)) for label, told in _ABOUT.items()]
    kept = [row for row in rows if row[1] or row[2]]
    paired = diagnosis.alignment
    said = (
        f"{plural(paired.paired, 'op')} paired, {count(paired.left_only)} only left,"
        f" {count(paired.right_only)} only right"
    )
    return section("runs", "The two runs", table("the two runs", headings, kept), note=said)


def _rank(one: TraceSummary) -> str:
    return f"{one.rank} of {one.world_size}" if one.world_size and one.world_size > 1 else ""


#: What is said of a trace -> how.
_ABOUT: Final[Mapping[str, Callable[[TraceSummary], str]]] = {
    "trace": lambda one: name(one.path),
    "label": lambda one: name(one.label),
    "recorded": lambda one: moment(one.created) if one.created else "",
    "torch": lambda one: name(one.torch),
    "device": lambda one: name(one.device),
    "rank": _rank,
    "ops": lambda one: count(one.ops) + ("" if one.complete else " (incomplete)"),
}
