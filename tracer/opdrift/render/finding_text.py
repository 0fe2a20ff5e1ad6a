"""Findings of one run for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from opdrift.records import Finding
from opdrift.render import card
from opdrift.render.page import Page, Screen
from opdrift.render.words import count, name, plural, readable, scope


def finding_report(
    findings: Sequence[Finding], screen: Screen, *, notes: Sequence[str] = ()
) -> str:
    """Each finding with its evidence and remedy; `notes` say what could not be checked."""
    page = Page(screen)
    if not findings:
        page.line(
            "nothing found: no hidden write, no early or uninitialised read, no NaN or infinity, no bad gather, move or collective",
            "good",
        )
    else:
        page.line(plural(len(findings), "finding"), "bad")
    for finding in findings:
        page.line()
        page.line(_place(finding), "strong", indent=2)
        for field in card.why(finding.cause):
            page.field(field.label, field.lines, field.tone)
    if notes:
        page.line()
    for note in notes:
        page.line(f"note: {readable(note)}", hang=6)
    return page.render()


def _place(finding: Finding) -> str:
    what = [finding.kind, *(name(part) for part in (finding.name, finding.op) if part)]
    return ", ".join([*what, f"in {scope(finding.module)}", *_when(finding)])


def _when(finding: Finding) -> list[str]:
    numbers = (("op", finding.seq), ("step", finding.step), ("rank", finding.rank))
    return [f"{word} {count(number)}" for word, number in numbers if number is not None]


def one_line(finding: Finding) -> str:
    """A finding in one line, for a list."""
    when = ", ".join(_when(finding))
    where = f" ({when})" if when else ""
    return f"{finding.kind}{where}: {readable(finding.cause.summary)}"
