"""A tree of HTML elements, and the one place where it becomes text: nothing is escaped anywhere else."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from opdrift.render.words import readable, relative

#: Elements that have no end tag.
_VOID: Final = frozenset({"br", "hr", "input", "meta", "link"})


@dataclass(frozen=True, slots=True)
class Element:
    """An element with its attributes and what is in it, texts as they are."""

    name: str
    attributes: tuple[tuple[str, str | bool], ...]
    children: tuple[Node, ...]


#: What a page is made of.
Node = Element | str


def element(name: str, *children: Node | None, **attributes: str | bool | None) -> Element:
    """An element.

    Args:
        name: Its tag.
        children: Texts and elements; None is left out.
        attributes: `class_` is written as class, `aria_label` as aria-label; None and False are left out, True has
            no value.
    """
    kept = tuple(
        (key.rstrip("_").replace("_", "-"), value)
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    return Element(name, kept, tuple(child for child in children if child is not None))


def written(node: Node, folder: str = "") -> str:
    """The HTML of a tree: texts and attributes escaped, control and bidi characters shown as escapes.

    Args:
        node: An element, or a text.
        folder: Where the reader is; paths below it are shown relative to it.
    """
    parts: list[str] = []
    _write(node, folder, parts)
    return "".join(parts)


def shown(text: str, folder: str = "") -> str:
    """A text as a page shows it, before HTML's own escapes."""
    return readable(relative(text, folder))


def _write(node: Node, folder: str, parts: list[str]) -> None:
    if isinstance(node, str):
        parts.append(html.escape(shown(node, folder), quote=False))
        return
    parts.append(f"<{node.name}")
    for key, value in node.attributes:
        if value is True:
            parts.append(f" {key}")
        else:
            parts.append(f' {key}="{html.escape(shown(str(value), folder))}"')
    parts.append(">")
    if node.name in _VOID:
        return
    for child in node.children:
        _write(child, folder, parts)
    parts.append(f"</{node.name}>")


def section(identifier: str, title: str, *children: Node | None, note: str = "") -> Element:
    """A part of the page with a heading that links and screen readers find."""
    return element(
        "section",
        element("h2", title, id=f"{identifier}-title"),
        element("p", note, class_="note") if note else None,
        *children,
        id=identifier,
        aria_labelledby=f"{identifier}-title",
    )


@dataclass(frozen=True, slots=True)
class Heading:
    """A column's title; numbers stand to the right, names are set in the font of code."""

    title: str
    kind: str = ""


def table(
    label: str, headings: Sequence[Heading], rows: Iterable[Sequence[Node]], *, class_: str = ""
) -> Element:
    """A table that scrolls by itself where the page is narrow, and can be scrolled by keyboard."""
    head = element(
        "tr", *(element("th", h.title, scope="col", class_=h.kind or None) for h in headings)
    )
    body = [
        element(
            "tr",
            *(
                element("td", cell, class_=h.kind or None)
                for h, cell in zip(headings, row, strict=True)
            ),
        )
        for row in rows
    ]
    return element(
        "div",
        element("table", element("thead", head), element("tbody", *body), class_=class_ or None),
        class_="scroll",
        tabindex="0",
        role="region",
        aria_label=label,
    )


def folded(summary: Node, *children: Node | None, open_: bool = False) -> Element:
    """What unfolds when it is asked for."""
    return element("details", element("summary", summary), *children, open=open_)


def prose(text: str) -> list[Node]:
    """A sentence whose parts in backticks are set as code."""
    pieces = text.split("`")
    if len(pieces) % 2 == 0:  # an odd one out quotes nothing
        return [text]
    return [element("code", p) if i % 2 else p for i, p in enumerate(pieces) if p]
