"""A diagnosis for an issue or a pull request: GitHub's Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

from opdrift.records import Diagnosis
from opdrift.render import card
from opdrift.render.growth import stretches
from opdrift.render.words import count, name, plural, ratio, readable, scope, side, size

#: A word with one of these is set as code: Markdown, HTML, mentions and math then leave it alone;
#: so is a dotted name, which nothing would harm, because it is one.
_SPECIAL: Final = re.compile(r"[\\`*_\[\]<>|#@&~$]|[A-Za-z]\w*\.\w")
#: Code that the causes wrote themselves, layouts such as float32[4, 64], and calls such as model.load(state, strict=True);
#: only as words of their own: a span next to another backtick would end elsewhere.
_CODE: Final = re.compile(
    r"(?:^|(?<= )|(?<=^\()|(?<= \())(`[^`]+`|\w+\[[\d, ]*\]|(?:[A-Za-z_]\w*(?:\.\w+)+|[A-Za-z]\w*_\w*)\([^()`]*\))(?=[,;:.)]*(?: |$))"
)
_TRAILING: Final = ",;:.)"
_ROWS: Final = 20


def render(diagnosis: Diagnosis) -> str:
    """The report: verdict and card as a list, everything else as tables that fold away."""
    lines = [f"**{prose(card.headline(diagnosis))}**", ""]
    shown = card.focus(diagnosis)
    if shown is not None and diagnosis.verdict != "identical":
        for field in card.card(shown):
            lines += _field(field.label, field.lines)
        sooner = card.earlier(diagnosis)
        if sooner is not None:
            lines += _field("earlier", (sooner,))
        for cause in card.other_causes(diagnosis)[:_ROWS]:
            lines += _field("besides", (f"{cause.slug} ({cause.confidence}): {cause.summary}",))
        lines.append("")
    lines += [f"> {prose(note)}" for note in diagnosis.notes]
    lines += [""] if diagnosis.notes else []
    for block in _tables(diagnosis):
        lines += block
    lines += _sides(diagnosis)
    return "\n".join(lines) + "\n"


def prose(text: str) -> str:
    """Text whose odd words are code spans, so that no name can act as markup."""
    parts = _CODE.split(readable(text))
    for i, part in enumerate(parts):
        if i % 2 == 0:
            parts[i] = " ".join(_word(w) for w in part.split(" "))
        elif not part.startswith("`"):
            parts[i] = code(part)
    return "".join(parts)


def _word(word: str) -> str:
    if not _SPECIAL.search(word):
        return word
    core = word.rstrip(_TRAILING) or word
    opening = "(" if core.startswith("(") and len(core) > 1 else ""
    return f"{opening}{code(core[len(opening) :])}{word[len(core) :]}"


def code(text: str) -> str:
    """A code span, fenced by more backticks than the text has in a row; a space for an empty text."""
    shown = readable(text) or " "
    longest = max((len(run) for run in re.findall("`+", shown)), default=0)
    fence = "`" * (longest + 1)
    padding = " " if longest else ""
    return f"{fence}{padding}{shown}{padding}{fence}"


def _field(label: str, entries: Sequence[str]) -> list[str]:
    head, *rest = entries
    lines = [f"- **{label}** {prose(head)}"]
    return lines + [f"  - {prose(entry.strip().removeprefix('- '))}" for entry in rest]


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def row(cells: Sequence[str]) -> str:
        # GitHub wants the bar escaped in a table even inside code, and a backslash before it would undo that
        safe = (cell.replace("\\|", "\\x5c|").replace("|", "\\|") for cell in cells)
        return f"| {' | '.join(safe)} |"

    return [row(titles), "|" + "---|" * len(titles), *(row(r) for r in rows)]


def _folded(title: str, titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    more = [f"and {count(len(rows) - _ROWS)} more", ""] if len(rows) > _ROWS else []
    table = _table(titles, rows[:_ROWS])
    return [f"<details><summary>{title}</summary>", "", *table, "", *more, "</details>", ""]


def _tables(diagnosis: Diagnosis) -> Iterator[list[str]]:
    rows: list[tuple[str, ...]]
    if diagnosis.ranks:
        rows = [
            (str(rank), one.verdict, prose(card.headline(one)))
            for rank, one in sorted(diagnosis.ranks.items())
        ]
        yield _folded("Rank by rank", ("rank", "verdict", "says"), rows)
    groups = card.other_origins(diagnosis)
    if groups and diagnosis.verdict != "identical":
        title = plural(sum(g.number for g in groups), "other independent origin")
        rows = [
            (
                code(g.place),
                code(g.op),
                count(g.number),
                "?" if g.largest is None else size(g.largest),
                g.slug,
            )
            for g in groups
        ]
        yield _folded(title, ("where", "op", "number", "difference", "cause"), rows)
    if diagnosis.environment:
        rows = [
            (code(d.name), code(side(d.left)), code(side(d.right))) for d in diagnosis.environment
        ]
        yield _folded("Environment that differs", ("name", "left", "right"), rows)
    if diagnosis.verdict != "identical":
        yield from _facts(diagnosis)


def _facts(diagnosis: Diagnosis) -> Iterator[list[str]]:
    rows: list[tuple[str, ...]]
    if diagnosis.amplifiers:
        rows = [
            (
                code(scope(a.module)),
                code(name(a.op)),
                size(a.input_difference),
                size(a.output_difference),
                ratio(a.gain),
            )
            for a in diagnosis.amplifiers
        ]
        yield _folded(
            "Ops that amplify the difference", ("module", "op", "in", "out", "gain"), rows
        )
    if diagnosis.growth:
        rows = [
            (
                code(g.place),
                count(g.ops),
                count(g.differing),
                g.said,
            )
            for g in stretches(diagnosis.growth)
        ]
        yield _folded(
            "Largest relative difference along the run",
            ("module", "ops", "differ", "largest"),
            rows,
        )
    lone = card.lone_ops(diagnosis)
    if lone:
        rows = [(g.side, code(name(g.op)), count(g.number), code(scope(g.place))) for g in lone]
        yield _folded("Ops that only one run has", ("side", "op", "number", "module"), rows)


def _sides(diagnosis: Diagnosis) -> list[str]:
    rows = [
        (
            word,
            code(s.path),
            code(s.label or "-"),
            count(s.ops) + ("" if s.complete else " (incomplete)"),
            code(s.torch),
            code(s.device),
        )
        for word, s in (("left", diagnosis.left), ("right", diagnosis.right))
    ]
    return _table(("", "trace", "label", "ops", "torch", "device"), rows)
