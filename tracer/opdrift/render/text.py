"""The verdict card: a diagnosis for a terminal, verdict first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from rich.text import Text

from opdrift.records import ACROSS_RANKS, RANK_ENDED, Diagnosis, Divergence, TraceSummary, Verdict
from opdrift.render import card
from opdrift.render.growth import stretches
from opdrift.render.page import Column, Page, Screen
from opdrift.render.words import (
    cell,
    count,
    moment,
    name,
    pattern_of,
    plural,
    ratio,
    readable,
    scope,
    side,
    size,
    typed,
)

_TONES: Final[Mapping[Verdict, str]] = {
    "identical": "good",
    "rounding": "strong",
    "diverged": "bad",
}
#: Rows of each list that are shown; the rest is counted, and JSON has them all.
_ROWS: Final = 8
#: The growth bars' scale, powers of ten: the last bit of fp64 is far left, everything lost is right.
_SCALE: Final = (-9.0, 0.0)
_BAR: Final = 18
#: What makes a comparison a view of both runs.
_SIDES: Final = " --side-by-side"


def render(
    diagnosis: Diagnosis,
    screen: Screen,
    *,
    module_types: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
    seen: bool = False,
) -> str:
    """The report.

    Args:
        diagnosis: What to say.
        screen: Where it will be read.
        module_types: Class names of module paths, for the card.
        options: What chose what was compared, for the next command: `--samples`, `0:1`.
        seen: Both runs stand side by side below it already.
    """
    page = Page(screen)
    page.line(card.headline(diagnosis), _TONES[diagnosis.verdict], hang=2)
    shown = card.focus(diagnosis)
    if shown is not None and diagnosis.verdict != "identical":
        _card(page, diagnosis, shown, (module_types or {}).get(shown.module))
        _origins(page, diagnosis)
    _ranks(page, diagnosis)
    if diagnosis.verdict != "identical":
        _environment(page, diagnosis)
        _amplifiers(page, diagnosis)
        _growth(page, diagnosis)
        _unpaired(page, diagnosis)
    _notes(page, diagnosis)
    if diagnosis.verdict != "identical":
        _sides(page, diagnosis)
    if diagnosis.verdict != "identical" and diagnosis.exact:
        _next(page, further(diagnosis, shown, options), seen=seen)
    return page.render()


def verdict_line(diagnosis: Diagnosis, screen: Screen) -> str:
    """The first line alone, for `-q`."""
    page = Page(Screen(None, screen.color, screen.unicode))
    page.line(card.headline(diagnosis), _TONES[diagnosis.verdict])
    return page.render()


def _card(page: Page, diagnosis: Diagnosis, shown: Divergence, module_type: str | None) -> None:
    page.line()
    for field in card.card(shown, module_type=module_type):
        page.field(field.label, field.lines, field.tone)
    sooner = card.earlier(diagnosis)
    if sooner is not None:
        page.field("earlier", (sooner,))
    others = card.other_causes(diagnosis)
    if others:
        page.field(
            "besides", [f"{c.slug} ({c.confidence}): {readable(c.summary)}" for c in others[:_ROWS]]
        )


def _origins(page: Page, diagnosis: Diagnosis) -> None:
    groups = card.other_origins(diagnosis)
    if not groups:
        return
    total = sum(g.number for g in groups)
    page.heading(f"{plural(total, 'other independent origin')}")
    columns = (
        Column("where", keep=9, shorten=True),
        Column("op", keep=3),
        Column("", align="right", keep=5),
        Column("difference", align="right", keep=6),
        Column("cause", keep=4),
        Column("first op", align="right", keep=2),
    )
    rows = [
        (
            g.place,
            g.op,
            f"x{count(g.number)}" if g.number > 1 else "",
            size(g.largest) if g.largest is not None else "?",
            g.slug,
            count(g.first_seq) if g.first_seq is not None else "",
        )
        for g in groups[:_ROWS]
    ]
    page.entries(columns, rows)
    _rest(page, len(groups))


def _rest(page: Page, total: int) -> None:
    if total > _ROWS:
        page.line(f"and {count(total - _ROWS)} more; --format json lists all", "quiet", indent=2)


def _ranks(page: Page, diagnosis: Diagnosis) -> None:
    if not diagnosis.ranks:
        return
    page.heading("rank by rank")
    rows = [
        (str(rank), one.verdict, _short_place(one)) for rank, one in sorted(diagnosis.ranks.items())
    ]
    page.entries(
        (
            Column("rank", align="right"),
            Column("verdict", keep=8),
            Column("first", keep=7, shorten=True),
        ),
        rows,
    )


def _short_place(one: Diagnosis) -> str:
    shown = card.focus(one)
    if shown is None or one.verdict == "identical":
        return ""
    if shown.cause.slug in ("other-rank", RANK_ENDED):
        return readable(shown.cause.summary)
    if shown.kind == "leaf":
        return name(shown.name or card.NAMELESS)
    return f"op {card.at(shown.seq, one.left, one.right)}, {name(shown.op or '')} in {scope(shown.module)}"


def _environment(page: Page, diagnosis: Diagnosis) -> None:
    differing = diagnosis.environment
    if not differing:
        return
    page.heading("environment that differs")
    columns = (Column("name"), Column("left"), Column("right"))
    rows = [(name(d.name), side(d.left), side(d.right)) for d in differing[:_ROWS]]
    if page.fits(columns, rows):
        page.table(columns, rows)
    else:  # a value without the other side's tells nothing: one below the other, both whole
        for title, left, right in rows:
            page.line(title, indent=2)
            page.line(f"left   {left}", indent=4, hang=7)
            page.line(f"right  {right}", indent=4, hang=7)
    _rest(page, len(differing))


def _amplifiers(page: Page, diagnosis: Diagnosis) -> None:
    if not diagnosis.amplifiers:
        return
    page.heading("ops that amplify the difference")
    columns = (
        Column("module", shorten=True),
        Column("op", keep=3),
        Column("seq", align="right", keep=4),
        Column("in", align="right", keep=6),
        Column("out", align="right", keep=7),
        Column("gain", align="right", keep=8),
    )
    found = sorted(diagnosis.amplifiers, key=lambda a: -a.gain)
    rows = [
        (
            cell(a.module),
            name(a.op),
            count(a.seq.left) if a.seq.left is not None else "",
            size(a.input_difference),
            size(a.output_difference),
            ratio(a.gain),
        )
        for a in found[:_ROWS]
    ]
    page.entries(columns, rows)
    _rest(page, len(found))


def _growth(page: Page, diagnosis: Diagnosis) -> None:
    if not diagnosis.growth:
        return
    page.heading("largest relative difference along the run")
    points = stretches(diagnosis.growth)
    lonely = any(point.unpaired for point in points)
    columns = (
        Column("module", shorten=True),
        Column("ops", align="right", keep=3),
        Column("differ", align="right", keep=4),
        *([Column("left only", align="right", keep=4)] if lonely else []),
        Column("largest", align="right", keep=8),
        Column("", keep=2),
    )
    rows: list[tuple[str | Text, ...]] = []
    for point in points:
        known = point.largest
        drawn = page.text(
            bar(known, page.screen) if point.differing and known is not None else "", "bad"
        )
        alone = [count(point.unpaired) if point.unpaired else ""] if lonely else []
        rows.append(
            (point.place, count(point.ops), count(point.differing), *alone, point.said, drawn)
        )
    page.table(columns, rows)


def bar(difference: float, screen: Screen) -> str:
    """A bar whose length is the logarithm of a relative difference; eighths where Unicode allows."""
    low, high = _SCALE
    exponent = (
        low if difference <= 0 else math.log10(difference) if math.isfinite(difference) else high
    )
    length = max(0.0, min(1.0, (exponent - low) / (high - low))) * _BAR
    if not screen.unicode:
        return "#" * max(1, round(length))
    return "█" * max(1, round(length))


def _unpaired(page: Page, diagnosis: Diagnosis) -> None:
    groups = card.lone_ops(diagnosis)
    if not groups:
        return
    page.heading("ops that only one run has")
    columns = (
        Column("side"),
        Column("op", keep=7),
        Column("", align="right", keep=6),
        Column("module", keep=5, shorten=True),
    )
    page.entries(
        columns,
        [(g.side, name(g.op), f"x{count(g.number)}", cell(g.place)) for g in groups[:_ROWS]],
    )
    _rest(page, len(groups))


def _notes(page: Page, diagnosis: Diagnosis) -> None:
    lines = list(diagnosis.notes)
    if diagnosis.verdict == "identical" and diagnosis.environment:
        lines.append(f"settings that differ and change nothing here: {_settings(diagnosis)}")
    if diagnosis.alignment.fallback_reason:
        lines.append(
            f"aligned by {diagnosis.alignment.method}: {diagnosis.alignment.fallback_reason}"
        )
    if lines:
        page.line()
    for text in lines:
        page.line(f"note: {readable(text)}", hang=6)


def _settings(diagnosis: Diagnosis) -> str:
    names = [name(d.name) for d in diagnosis.environment]
    more = f" and {count(len(names) - _ROWS)} more" if len(names) > _ROWS else ""
    return ", ".join(names[:_ROWS]) + more


def _sides(page: Page, diagnosis: Diagnosis) -> None:
    page.line()
    for word, one in (("left ", diagnosis.left), ("right", diagnosis.right)):
        page.line(f"{word}  {describe(one)}", "quiet", hang=7)


def describe(one: TraceSummary) -> str:
    """Which trace a side is, in one line."""
    label = f' "{name(one.label)}"' if one.label else ""
    rank = f", rank {one.rank} of {one.world_size}" if one.world_size and one.world_size > 1 else ""
    whole = "" if one.complete else ", incomplete"
    torch = f", torch {name(one.torch)}" if one.torch else ""
    device = f", {name(one.device)}" if one.device else ""
    created = f", {moment(one.created)}" if one.created else ""
    return f"{name(one.path)}{label}: {plural(one.ops, 'op')}{whole}{torch}{device}{rank}{created}"


def _next(page: Page, commands: Sequence[str], *, seen: bool) -> None:
    page.line()
    *others, last = commands
    if last.endswith(_SIDES):  # two runs: there is a page of both
        both = last.removesuffix(_SIDES) + " --format html -o report.html"
        commands = [*others, *([] if seen else [last]), both]
    for number, command in enumerate(commands):
        page.command("      " if number else "next: ", command)


def further(
    diagnosis: Diagnosis, shown: Divergence | None, options: Sequence[str] = ()
) -> list[str]:
    """The commands that look further into what a report opens with; `options` as in `render`."""
    commands = list(_shown(diagnosis, shown))
    if diagnosis.alignment.method == ACROSS_RANKS:
        run = Path(diagnosis.left.path).parent
        return [*commands, f"opdrift show {typed(str(run))} --findings"]
    left, right = (typed(one.path) for one in (diagnosis.left, diagnosis.right))
    return [
        *commands,
        " ".join(["diff-trace", left, right, *map(typed, options)]) + _SIDES,
    ]


def _shown(diagnosis: Diagnosis, shown: Divergence | None) -> Iterator[str]:
    """Looks at a divergence: in the left trace if it is there; across ranks in both."""
    if shown is None:
        return
    across = diagnosis.alignment.method == ACROSS_RANKS
    sides = ((diagnosis.left, shown.seq.left), (diagnosis.right, shown.seq.right))
    if shown.name is not None and (across or shown.kind in ("leaf", "hidden-write")):
        leaf = typed(pattern_of(shown.name))
        commands = [f"opdrift show {typed(one.path)} --leaf {leaf}" for one, _ in sides]
    else:
        commands = [
            f"opdrift show {typed(one.path)} --op {seq}"
            for one, seq in sides
            # a rank that was killed in an op has only announced it
            if seq is not None and (one.complete or seq <= one.ops)
        ]
    yield from commands if across else commands[:1]
