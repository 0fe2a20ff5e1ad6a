"""What became of a checkpoint, for a terminal and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, Final

from opdrift.checkpoints import Check, Missing, in_parts, sentence
from opdrift.records import TRACE_SCHEMA
from opdrift.render.json import safe
from opdrift.render.page import Page, Screen
from opdrift.render.words import name, plural
from opdrift.wording import listed

#: Names of one kind that are listed.
_ROWS: Final = 12


def checkpoint_report(found: Check, screen: Screen) -> str:
    """How much of the checkpoint reached the model, what did not, and what is not of it."""
    page = Page(screen)
    page.line(sentence(found), "good" if found.whole else "bad", hang=2)
    if found.extra:
        verb = "is" if len(found.extra) == 1 else "are"
        page.line(f"{len(found.extra)} of the model's {found.own} tensors {verb} not in it", "bad")
    parts = in_parts(found)
    if parts is not None:
        page.line(parts, "bad", hang=2)
    page.line()
    if found.ranks:
        page.field("ranks", list(_ranks(found)))
    page.field("names", list(_renamed(found)))
    for label, lines in (
        ("missing", [_missing(each) for each in found.missing]),
        (
            "exchanged",
            [f"{name(a)} is in the model as {name(b)}" for a, b in found.exchanged.items()],
        ),
        ("fused", [f"{name(a)} is {', '.join(map(name, b))}" for a, b in found.fused.items()]),
        (
            "unknown",
            [f"{name(each)}: cast in a way that the trace cannot judge" for each in found.unknown],
        ),
        ("not in it", [name(each) for each in found.extra]),
    ):
        _list(page, label, lines)
    return page.render()


def _ranks(found: Check) -> Iterator[str]:
    yield f"judged on {listed(found.ranks)}"
    if found.unjudged:
        verb = "names" if len(found.unjudged) == 1 else "name"
        yield f"{listed(found.unjudged)} {verb} no parameters: not judged"


def _renamed(found: Check) -> Iterator[str]:
    if not found.renamed:
        yield "as in the model"
    for each in found.renamed:
        number = plural(each.count, "name")
        if not each.own:
            yield f"{name(each.stored)}. is left out of {number}"
        elif not each.stored:
            yield f"{name(each.own)}. is put before {number}"
        else:
            yield f"{name(each.stored)}. is {name(each.own)}. in {number}"


def _missing(each: Missing) -> str:
    if each.own is None:
        return f"{name(each.name)}: the model has nothing of that name and size"
    instead = each.part or each.origin or "the model holds something else"
    where = f"on {listed(each.lacking)}, " if each.reached else ""
    return f"{name(each.own)}: {where}{instead}"


def _list(page: Page, label: str, lines: list[str]) -> None:
    if lines:
        more = [f"and {len(lines) - _ROWS} more"] if len(lines) > _ROWS else []
        page.field(label, [*lines[:_ROWS], *more])


def as_object(found: Check) -> dict[str, Any]:
    """The answer as JSON types: schema `opdrift.trace/1`, key `checkpoint`."""
    return {"schema": TRACE_SCHEMA, "checkpoint": safe({**asdict(found), "whole": found.whole})}
