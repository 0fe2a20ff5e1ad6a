"""Ops and modules of two runs side by side: around the first divergence, or as a tree."""

from __future__ import annotations

from typing import Final

from rich.text import Text

from opdrift.render.page import Column, Page, Screen
from opdrift.render.rows import MEANINGS, TONES, Row, Rows
from opdrift.render.words import cell, count, name, size
from opdrift.tracefile.reader import Trace

#: Rows on each side of the first divergence, unless `--context` says otherwise.
CONTEXT: Final = 6
#: Cells that an op's name keeps in two columns.
_NAME: Final = 24


def around(rows: Rows, context: int, screen: Screen) -> str:
    """The ops around the first divergence, one line for both runs."""
    columns = (
        Column("", keep=10),
        Column("op", "right", keep=8),
        Column("name", keep=9, shorten=True),
        Column("output", keep=4),
        Column("differs by", "right", keep=6),
        Column("module", keep=5, shorten=True),
    )
    page, chosen = _opened(rows, context, screen)
    lines = []
    for row in chosen:
        found = rows[row]
        trace, index = _either(rows, found)
        text = (
            count(_seq(trace, index)),
            _op(trace, index),
            _output(trace, index),
            _size(rows, row),
            _module(trace, index),
        )
        lines.append((page.text(found.mark, TONES[found.mark]), *text))
    page.table(columns, lines, indent=0)
    return _closed(page)


def side_by_side(rows: Rows, context: int, screen: Screen) -> str:
    """The ops around the first divergence in two columns; what is the same on the right is left out there.

    Where two columns do not fit, an op of both runs is one line, and two where the runs differ in it.
    """
    columns = (
        Column("module", keep=4, shorten=True),
        Column("left", "right", keep=7),
        Column("op", keep=9, shorten=True, least=_NAME),
        Column("output", keep=3),
        Column("", keep=10),
        Column("right", "right", keep=5),
        Column("op", keep=8, shorten=True, least=_NAME),
        Column("output", keep=2),
        Column("differs by", "right", keep=6),
    )
    page, chosen = _opened(rows, context, screen)
    lines = []
    before = None
    resized = False
    for row in chosen:
        found = rows[row]
        module = _module(*_either(rows, found))
        left = _cells(rows.traces[0], found.left)
        right = _cells(rows.traces[1], found.right)
        resized |= bool(left[0] and right[0]) and left[2] != right[2]
        same = found.mark in "=~?" and left[1:] == right[1:]
        lines.append(
            (
                module if module != before else "",
                *left,
                page.text(found.mark, TONES[found.mark]),
                *((right[0], "", "") if same else right),
                _size(rows, row),
            )
        )
        before = module
    # shapes may go where all of them are alike
    needed = [i for i, column in enumerate(columns) if resized or column.title != "output"]
    kept = [columns[i] for i in needed], [[line[i] for i in needed] for line in lines]
    if page.fits(*kept, indent=0):
        page.table(columns, lines, indent=0)
    else:
        _stacked(page, rows, chosen)
    return _closed(page)


def _stacked(page: Page, rows: Rows, chosen: range) -> None:
    """The same one below the other, under the names of the modules."""
    columns = (
        Column("", keep=10),
        Column("left", "right", keep=8),
        Column("right", "right", keep=8),
        Column("op", keep=9, shorten=True),
        Column("output", keep=4),
        Column("differs by", "right", keep=6),
    )
    lines: list[tuple[str | Text, ...]] = []
    before = None
    for row in chosen:
        found = rows[row]
        module = _module(*_either(rows, found))
        if module != before:
            lines.append((module,))
        before = module
        left = _cells(rows.traces[0], found.left)
        right = _cells(rows.traces[1], found.right)
        mark, size = page.text(found.mark, TONES[found.mark]), _size(rows, row)
        if found.left is None:
            lines.append((mark, "", *right, size))
        elif found.right is None:
            lines.append((mark, left[0], "", *left[1:], size))
        elif left[1:] == right[1:]:
            lines.append((mark, left[0], right[0], *left[1:], size))
        else:
            lines.append((mark, left[0], "", *left[1:], ""))
            lines.append(("", "", *right, size))
    page.table(columns, lines, indent=0)


def _opened(rows: Rows, context: int, screen: Screen) -> tuple[Page, range]:
    page = Page(screen)
    middle = rows.focus
    if middle is None:
        page.heading(f"the first {count(min(len(rows), 2 * context + 1))} ops")
        return page, range(min(len(rows), 2 * context + 1))
    where = (
        "ops around the first divergence"
        if rows.leaf is None
        else f"ops around the first that reads {name(rows.leaf)}, which differs"
    )
    page.heading(where)
    return page, range(max(0, middle - context), min(len(rows), middle + context + 1))


def _closed(page: Page) -> str:
    page.pieces((f"{mark} {meaning}" for mark, meaning in MEANINGS.items()), "quiet")
    return page.render()


def _either(rows: Rows, row: Row) -> tuple[Trace, int]:
    if row.left is not None:
        return rows.traces[0], row.left
    assert row.right is not None
    return rows.traces[1], row.right


def _cells(trace: Trace, index: int | None) -> tuple[str, str, str]:
    if index is None:
        return "", "", ""
    return count(_seq(trace, index)), _op(trace, index), _output(trace, index)


def _seq(trace: Trace, index: int) -> int:
    return int(trace.ops.seq[index])


def _op(trace: Trace, index: int) -> str:
    return name(trace.op_info(int(trace.ops.signature[index])).name).removesuffix(".default")


def _output(trace: Trace, index: int) -> str:
    outputs = [v for v in trace.ops.outputs[index].tolist() if v]
    return str(trace.meta(outputs[0])) if outputs else ""


def _module(trace: Trace, index: int) -> str:
    return cell(trace.calls[int(trace.ops.call[index])].path)


def _size(rows: Rows, row: int) -> str:
    if rows[row].mark not in "x~":
        return ""
    found = rows.size(row)
    return "" if found is None else size(found)
