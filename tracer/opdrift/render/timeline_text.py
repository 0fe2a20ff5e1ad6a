"""A leaf's timeline for a terminal, and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from opdrift.render.page import Column, Page
from opdrift.render.words import cell, count, name, plural, readable
from opdrift.timeline import Event, What

#: Of a longer timeline so many events at each end are shown; JSON has all.
_SHOWN: Final = 12
#: So many last hexadecimal digits of a digest tell contents of one leaf apart.
_DIGITS: Final = 8

_WORDS: Final[Mapping[What, str]] = {
    "start": "on entry",
    "memory": "memory",
    "named": "seen",
    "load": "copy in",
    "draw": "drawn",
    "fill": "filled",
    "write": "written",
    "hidden": "HIDDEN",
    "use": "read",
    "gather": "gathered",
    "kept": "kept",
    "cast": "cast",
    "move": "moved",
    "free": "freed",
    "reshard": "resharded",
    "data": ".data",
    "resize": "resized",
    "end": "at exit",
}


def timeline(page: Page, events: Sequence[Event]) -> None:
    """The events as a table: op, step, what, which content, by whom."""
    steps = has_steps(events)
    columns = (
        Column("op", align="right"),
        *((Column("step", align="right"),) if steps else ()),
        Column("what"),
        Column("content", named=True),
        Column("by"),
    )
    rows = event_rows(events, steps=steps)
    if not _fits(page, columns, rows):
        short = event_rows(events, steps=steps, lines=False)  # the op says more than its line
        rows = short if _fits(page, columns, short) else rows
    page.entries(columns, rows)


def _fits(page: Page, columns: Sequence[Column], rows: Sequence[tuple[str, ...]]) -> bool:
    return page.fits(columns, [row for row in rows if len(row) == len(columns)])


def has_steps(events: Sequence[Event]) -> bool:
    """Whether the program marked steps."""
    return any(event.step is not None for event in events)


def event_rows(
    events: Sequence[Event], *, steps: bool, lines: bool = True
) -> list[tuple[str, ...]]:
    """A row an event: op, step if there are `steps`, what, content, by whom; one text for those left out.

    Args:
        events: The events.
        steps: Whether there is a column for the step.
        lines: Whether an op that wrote is told with its line of the program.
    """
    shown, skipped = list(events), len(events) - 2 * _SHOWN
    if skipped > 1:
        shown = [*shown[:_SHOWN], *shown[-_SHOWN:]]
    rows: list[tuple[str, ...]] = []
    for number, event in enumerate(shown):
        if skipped > 1 and number == _SHOWN:
            rows.append((f"... {plural(skipped, 'event')} more; --format json lists all",))
        step = (count(event.step) if event.step is not None else "",) if steps else ()
        by = _by(event, lines=lines)
        rows.append((count(event.seq), *step, _WORDS[event.what], _content(event), by))
    return rows


def _content(event: Event) -> str:
    if event.content is None or event.digest is None:
        return ""
    again = " again" if event.again else ""
    return f"{event.content} {event.digest % 16**_DIGITS:0{_DIGITS}x}{again}"


def _by(event: Event, *, lines: bool) -> str:
    said = []
    if event.by is not None:
        op = event.by.removesuffix(".default")
        said.append(f"{name(op)} in {cell(event.module)}" if event.module else name(op))
    if event.intact is False:
        said.append("NOT what was sent")
    if event.note:
        said.append(readable(event.note))
    if event.until is not None:
        said.append(f"{plural(event.times - 1, 'op')} more until {count(event.until)}")
    if event.what == "hidden":
        said.append("changed, and no recorded op wrote it")
    if lines and event.source and event.what in ("load", "draw", "fill", "write", "data", "resize"):
        said.append(readable(event.source))
    return ", ".join(said)


def event_object(event: Event) -> dict[str, Any]:
    """An event as JSON; the digest as 16 hexadecimal digits, because JSON numbers end at 2^53."""
    found = asdict(event)
    found["digest"] = None if event.digest is None else f"{event.digest:016x}"
    return found
