"""Lay out lines, labelled fields and tables for a terminal of any width, colour and encoding."""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TextIO

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from opdrift.render.words import readable, relative

#: What reports draw with; a stream that cannot encode them gets ASCII.
SYMBOLS: Final = "…█─│├└✗"
_ASCII: Final = {
    "…": "...",
    "─": "-",
    "│": "|",
    "├": "|",
    "└": "`",
    "✗": "x",
    **dict.fromkeys("▁▂▃▄▅▆▇█", "#"),
}

_STYLES: Final = {
    "plain": "",
    "strong": "bold",
    "good": "green",
    "bad": "red",
    "quiet": "dim",
    "heading": "bold",
}
_LABEL_WIDTH: Final = 11
#: Prose is not set wider than this, however wide the terminal; longer lines are hard to read.
_WIDEST: Final = 120
#: Below this width a label stands on a line of its own, so that the text keeps enough room.
_NARROW: Final = 60


@dataclass(frozen=True, slots=True)
class Screen:
    """What the reader's terminal can show.

    Attributes:
        width: Columns; None where lines need not be wrapped (a file, a pipe).
        color: Whether colours are sent; no meaning is ever in colour alone.
        unicode: Whether bars and marks may leave ASCII.
        folder: Where the reader is; paths below it are shown relative to it.
    """

    width: int | None = None
    color: bool = False
    unicode: bool = False
    folder: str = ""

    @classmethod
    def of(cls, stream: TextIO, environment: Mapping[str, str] = os.environ) -> Screen:
        """What `stream` can show; honours NO_COLOR, FORCE_COLOR, TERM=dumb and COLUMNS."""
        terminal = stream.isatty()
        columns = environment.get("COLUMNS", "")
        width = int(columns) if columns.isdigit() and int(columns) > 0 else None
        if terminal and width is None:
            width = shutil.get_terminal_size().columns
        wanted = bool(environment.get("FORCE_COLOR")) or (
            terminal and environment.get("TERM") != "dumb"
        )
        color = wanted and not environment.get("NO_COLOR")
        return cls(width, color, _encodes(stream.encoding, SYMBOLS), os.getcwd())


def _encodes(encoding: str | None, text: str) -> bool:
    try:
        text.encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        title: Its heading.
        align: Numbers stand to the right.
        keep: Where the table is too wide, columns are cut, and go, in the order of this number, lowest first.
        shorten: Its texts may be cut at the left (paths: the end tells more); others never are.
        least: A column that may be shortened keeps this many cells.
        named: Where a row becomes a line of text, the heading stands before it, as before a number.
    """

    title: str
    align: Literal["left", "right"] = "left"
    keep: int = 9
    shorten: bool = False
    least: int = 12
    named: bool = False


class Page:
    """Lines of a report, laid out as they are added."""

    def __init__(self, screen: Screen) -> None:
        self.screen = screen
        self._lines: list[Text] = []
        self._console = Console(
            file=io.StringIO(),
            width=screen.width or 10_000,
            color_system="standard" if screen.color else None,
            force_terminal=screen.color,
            no_color=not screen.color,
            legacy_windows=False,
            markup=False,
            highlight=False,
            emoji=False,
        )

    def text(self, content: str, tone: str = "plain") -> Text:
        """A piece of a line: escaped, ASCII where the screen needs it, never read as markup."""
        shown = readable(relative(content, self.screen.folder))
        if not self.screen.unicode:
            shown = "".join(_ASCII.get(c, c) for c in shown)
        return Text(shown, style=_STYLES[tone])

    def line(
        self, content: str | Text = "", tone: str = "plain", *, indent: int = 0, hang: int = 0
    ) -> None:
        """A line; what does not fit goes on below, indented by `hang` more."""
        body = content if isinstance(content, Text) else self.text(content, tone)
        self._put(Text(" " * indent), body, Text(" " * (indent + hang)))

    def field(self, label: str, lines: Sequence[str], tone: str = "plain") -> None:
        """A label and its lines; on a narrow screen the label stands above them."""
        narrow = self.screen.width is not None and self.screen.width < _NARROW
        indent = Text("    ") if narrow else Text(" " * (2 + _LABEL_WIDTH))
        head = self.text(f"  {label}", "quiet")
        if narrow:
            self._lines.append(head)
            head = indent
        else:
            head.pad_right(2 + _LABEL_WIDTH - cell_len(head.plain))
        for number, entry in enumerate(lines):
            # a cause's summary is strong, its evidence is not; a list mark hangs two cells
            hang = "  " if entry.startswith("- ") else ""
            nested = len(entry) - len(entry.lstrip(" "))
            body = self.text(entry[nested:], tone if number == 0 or tone == "bad" else "plain")
            margin = Text(indent.plain + " " * nested)
            self._put(margin if number or narrow else head, body, Text(margin.plain + hang))

    def command(self, before: str, command: str) -> None:
        """A command to type: never wrapped, so that it can be copied whole."""
        shown = readable(
            relative(before + command, self.screen.folder)
        )  # its names stay as they are
        self._lines.append(Text(shown, style=_STYLES["quiet"]))

    def pieces(self, pieces: Iterable[str], tone: str = "plain") -> None:
        """Short pieces beside each other; a line ends between two of them, never within one."""
        line = ""
        for piece in pieces:
            longer = f"{line}   {piece}" if line else piece
            if line and self.screen.width is not None and cell_len(longer) > self.screen.width:
                self.line(line, tone)
                longer = f"  {piece}"
            line = longer
        self.line(line, tone, hang=2)

    def heading(self, title: str) -> None:
        """An empty line, then the title of a section."""
        self._lines.append(Text(""))
        self.line(title, "heading")

    def fits(
        self, columns: Sequence[Column], rows: Sequence[Sequence[str | Text]], *, indent: int = 2
    ) -> bool:
        """Whether `table` would show these rows whole: no column gone, nothing cut."""
        heads = [c.title for c in columns]
        cells = [
            [c if isinstance(c, Text) else self.text(c) for c in row] for row in (heads, *rows)
        ]
        whole = indent + sum(_longest(cells, i) + 2 for i in range(len(columns))) - 2
        return self.screen.width is None or whole <= self.screen.width

    def entries(
        self, columns: Sequence[Column], rows: Sequence[Sequence[str | Text]], *, indent: int = 2
    ) -> None:
        """A table whose every column counts: where one would have to go, each row becomes a line of text instead."""
        cells = [[c if isinstance(c, Text) else self.text(c) for c in row] for row in rows]
        heads = [self.text(column.title) for column in columns]
        whole = [heads, *(row for row in cells if len(row) == len(columns))]
        if len(self._fitting(columns, whole, indent)) == len(columns):
            self.table(columns, rows, indent=indent)
            return
        for row in cells:
            titled = row if len(row) < len(columns) else _titled(columns, row)
            self.line(Text(", ").join(titled), indent=indent, hang=2)

    def table(
        self, columns: Sequence[Column], rows: Sequence[Sequence[str | Text]], *, indent: int = 2
    ) -> None:
        """Rows below headings. A narrow screen loses whole columns, then the ends of paths; never digits.

        A row of one text among rows of several stands over those that follow.
        """
        cells = [[c if isinstance(c, Text) else self.text(c) for c in row] for row in rows]
        heads = [self.text(c.title, "quiet") for c in columns]
        whole = [heads, *(row for row in cells if len(row) == len(columns))]
        shown = self._fitting(columns, whole, indent)
        widths = self._widths(columns, shown, whole, indent)
        if any(columns[i].title for i in shown):
            cells.insert(0, heads)
        for row in cells:
            out = Text(" " * indent)
            if len(row) < len(columns):
                self._put(out, row[0], Text(" " * (indent + 2)))
                continue
            for i in shown:
                out.append_text(self._cell(row[i], columns[i], widths[i]))
                out.append("  ")
            out.rstrip()
            self._lines.append(out)

    def _fitting(
        self, columns: Sequence[Column], rows: Sequence[Sequence[Text]], indent: int
    ) -> list[int]:
        shown = list(range(len(columns)))
        if self.screen.width is None:
            return shown
        least = [
            min(_longest(rows, i), c.least) if c.shorten else _longest(rows, i)
            for i, c in enumerate(columns)
        ]
        while len(shown) > 1 and indent + sum(least[i] + 2 for i in shown) - 2 > self.screen.width:
            shown.remove(min(shown, key=lambda i: columns[i].keep))
        return shown

    def _widths(
        self,
        columns: Sequence[Column],
        shown: Sequence[int],
        rows: Sequence[Sequence[Text]],
        indent: int,
    ) -> dict[int, int]:
        widths = {i: _longest(rows, i) for i in shown}
        if self.screen.width is None:
            return widths
        excess = indent + sum(w + 2 for w in widths.values()) - 2 - self.screen.width
        for i in sorted((i for i in shown if columns[i].shorten), key=lambda i: columns[i].keep):
            cut = max(0, min(excess, widths[i] - columns[i].least))
            widths[i] -= cut
            excess -= cut
        return widths

    def _cell(self, cell: Text, column: Column, width: int) -> Text:
        missing = width - cell.cell_len
        if missing < 0 and column.shorten:
            dots = "…" if self.screen.unicode else "..."
            cut = cell.plain
            while cell_len(cut) > width - len(dots):
                cut = cut[1:]
            cell = Text(dots + cut, style=cell.style)
            missing = width - cell.cell_len
        padding = " " * max(0, missing)
        return (
            Text(padding).append_text(cell)
            if column.align == "right"
            else Text.assemble(cell, padding)
        )

    def _put(self, head: Text, body: Text, margin: Text) -> None:
        if self.screen.width is None:
            self._lines.append(Text.assemble(head, body))
            return
        room = max(min(self.screen.width, _WIDEST) - max(head.cell_len, margin.cell_len), 10)
        for number, part in enumerate(body.wrap(self._console, room, overflow="fold")):
            part.rstrip()
            self._lines.append(Text.assemble(margin if number else head, part))

    def render(self) -> str:
        """The whole page as one string, with colours if the screen wants them."""
        if not self.screen.color:
            return "".join(f"{line.plain.rstrip()}\n" for line in self._lines)
        with self._console.capture() as capture:
            for line in self._lines:
                self._console.print(line, soft_wrap=True)
        return capture.get()


def _titled(columns: Sequence[Column], row: Sequence[Text]) -> Iterator[Text]:
    """The cells that say something; a number with its heading, which tells what it counts."""
    for column, cell in zip(columns, row, strict=True):
        if cell.plain:
            named = column.title and (column.named or column.align == "right")
            yield Text.assemble(f"{column.title} ", cell) if named else cell


def _longest(rows: Sequence[Sequence[Text]], column: int) -> int:
    return max((row[column].cell_len for row in rows), default=0)
