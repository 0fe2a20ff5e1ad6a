"""Ops and modules of two runs side by side: around the first divergence, or as a tree."""

from __future__ import annotations

from typing import Final

from opdrift.render.page import Column, Page, Screen
from opdrift.render.rows import MEANINGS, TONES, Row, Rows
from opdrift.render.words import cell, count, name, size
from opdrift.tracefile.reader import Trace

#: Rows on each side of the first divergence, unless `--context` says otherwise.
CONTEXT: Final = 6
#: Cells that an op's name keeps in two columns, on screens of at least this width.
_NAME: Final = 24
_ROOMY: Final = 80


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
    """The ops around the first divergence in two columns; what is the same on the right is left out there."""
    least = _NAME if screen.width is None or screen.width >= _ROOMY else 12
    columns = (
        Column("module", keep=4, shorten=True),
        Column("left", "right", keep=7),
        Column("op", keep=9, shorten=True, least=least),
        Column("output", keep=3),
        Column("", keep=10),
        Column("right", "right", keep=5),
        Column("op", keep=8, shorten=True, least=least),
        Column("output", keep=2),
        Column("differs by", "right", keep=6),
    )
    page, chosen = _opened(rows, context, screen)
    lines = []
    before = None
    for row in chosen:
        found = rows[row]
        module = _module(*_either(rows, found))
        left = _cells(rows.traces[0], found.left)
        right = _cells(rows.traces[1], found.right)
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
    page.table(columns, lines, indent=0)
    return _closed(page)


def _opened(rows: Rows, context: int, screen: Screen) -> tuple[Page, range]:
    page = Page(screen)
    middle = rows.focus
    if middle is None:
        page.heading(f"the first {count(min(len(rows), 2 * context + 1))} ops")
        return page, range(min(len(rows), 2 * context + 1))
    page.heading("ops around the first divergence")
    return page, range(max(0, middle - context), min(len(rows), middle + context + 1))


def _closed(page: Page) -> str:
    page.line(
        "   ".join(f"{mark} {meaning}" for mark, meaning in MEANINGS.items()), "quiet", hang=2
    )
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
