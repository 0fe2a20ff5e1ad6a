"""The modules of two runs as a tree: equal parts folded, the way to the first difference open."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from opdrift.render.page import Page, Screen
from opdrift.render.rows import MEANINGS, TONES, Mark, Rows
from opdrift.render.words import count, name, plural, size

#: Ops that begin a difference, listed in their module; more are counted.
_OPS_SHOWN: Final = 4
_WORST: Final[tuple[Mark, ...]] = ("x", "~")


@dataclass(slots=True)
class _Node:
    """A module, or the run.

    Attributes:
        title: The last part of its path.
        rows: The ops that ran in the module itself.
        children: The modules in it.
        counts: How many ops of it and below have each mark.
        differing: Rows of it and below that differ, in order.
    """

    title: str
    rows: list[int] = field(default_factory=list)
    children: dict[str, _Node] = field(default_factory=dict)
    counts: Counter[Mark] = field(default_factory=Counter)
    differing: list[int] = field(default_factory=list)

    def add_up(self, marks: list[Mark]) -> None:
        """Count what is in it, from the leaves up."""
        self.counts.update(marks[row] for row in self.rows)
        self.differing += [row for row in self.rows if marks[row] in "x~"]
        for child in self.children.values():
            child.add_up(marks)
            self.take(child)
        self.differing.sort()

    def take(self, other: _Node) -> None:
        """Count another module's ops as if they were in this one."""
        self.counts.update(other.counts)
        self.differing += other.differing

    @property
    def mark(self) -> Mark:
        """What stands for the whole: the worst of what is in it."""
        counts = self.counts
        for mark in _WORST:
            if counts[mark]:
                return mark
        lone = counts["-"] + counts["+"]
        if lone and lone == counts.total():
            return "-" if not counts["+"] else "+" if not counts["-"] else "~"
        return "=" if counts["="] else "?"


def tree(rows: Rows, screen: Screen) -> str:
    """Every module that differs, with the ops at which a difference begins."""
    root = _grown(rows)
    page = Page(screen)
    page.heading("modules")
    _draw(page, rows, root, "", "")
    page.pieces((f"{mark} {meaning}" for mark, meaning in MEANINGS.items()), "quiet")
    return page.render()


def _grown(rows: Rows) -> _Node:
    root = _Node("the run")
    paths = [[call.path for call in trace.calls] for trace in rows.traces]
    calls = [trace.ops.call.tolist() for trace in rows.traces]
    nodes: dict[str, _Node] = {"": root}
    for row, (left, right) in enumerate(zip(rows.left.tolist(), rows.right.tolist(), strict=True)):
        path = paths[0][calls[0][left]] if left >= 0 else paths[1][calls[1][right]]
        node = nodes.get(path)
        if node is None:
            node = root
            for part in path.split("."):
                node = node.children.setdefault(part, _Node(part))
            nodes[path] = node
        node.rows.append(row)
    root.add_up(rows.marks())
    return root


def _draw(page: Page, rows: Rows, node: _Node, lead: str, below: str) -> None:
    title = node.title
    while len(node.children) == 1 and not node.rows and node.title != "the run":
        node = next(iter(node.children.values()))  # a container with one module in it: one line
        title = f"{title}.{node.title}"
    _put(page, lead, node.mark, f"{name(title)}  {_told(rows, node)}")
    if node.mark != "x":
        return
    begins = [row for row in node.rows if rows[row].mark == "x"]
    groups = _folded(node)
    for row in begins[:_OPS_SHOWN]:
        _put(page, below + ("├ " if groups or row != begins[-1] else "└ "), "x", _op(rows, row))
    if len(begins) > _OPS_SHOWN:
        page.line(f"{below}│   and {plural(len(begins) - _OPS_SHOWN, 'more op')}", "quiet")
    for group in groups:
        branch, under = ("└ ", "  ") if group is groups[-1] else ("├ ", "│ ")
        if len(group) == 1:
            _draw(page, rows, group[0], below + branch, below + under)
            continue
        together = _Node(
            f"{name(group[0].title)} ... {name(group[-1].title)} ({count(len(group))} modules)"
        )
        for one in group:
            together.take(one)
        _put(page, below + branch, together.mark, f"{together.title}  {_told(rows, together)}")


def _folded(node: _Node) -> list[list[_Node]]:
    """The modules in a module; neighbours of one mark together, unless a difference begins in them."""
    groups: list[list[_Node]] = []
    for child in node.children.values():
        if groups and child.mark != "x" and groups[-1][0].mark == child.mark:
            groups[-1].append(child)
        else:
            groups.append([child])
    return groups


def _put(page: Page, lead: str, mark: Mark, text: str) -> None:
    page.line(f"{lead}{mark} {text}", TONES[mark], hang=len(lead) + 2)


def _told(rows: Rows, node: _Node) -> str:
    said = [plural(node.counts.total(), "op")]
    differing, total = len(node.differing), node.counts.total()
    if differing:
        number = count(differing) if differing < total else "all"
        verb = "differs" if total == 1 else f"{number} differ"
        said.append(f"{verb}{_growth(rows, node.differing)}")
    if node.mark not in "-+":
        lone: tuple[Mark, ...] = ("-", "+")
        said += [f"{count(node.counts[m])} {MEANINGS[m]}" for m in lone if node.counts[m]]
    return ", ".join(said)


def _growth(rows: Rows, differing: list[int]) -> str:
    """The difference where it first and last can be told, such as " (1e-6 -> 3e-2)"."""
    first = next((s for row in differing if (s := rows.size(row)) is not None), None)
    final = next((s for row in reversed(differing) if (s := rows.size(row)) is not None), None)
    if first is None or final is None:
        return ""
    return f" ({size(first)})" if first == final else f" ({size(first)} -> {size(final)})"


def _op(rows: Rows, row: int) -> str:
    found = rows[row]
    side = 0 if found.left is not None else 1
    index = found.left if found.left is not None else found.right
    assert index is not None
    trace = rows.traces[side]
    op = name(trace.op_info(int(trace.ops.signature[index])).name)
    relative = rows.size(row)
    by = f", differs by {size(relative)}" if relative is not None else ""
    first = "   <- first" if row == rows.focus else ""
    return f"op {count(int(trace.ops.seq[index]))} {op}{by}{first}"
