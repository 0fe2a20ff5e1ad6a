"""What stands around the parts of the page: header, contents, help; and the empty list of ops that a script fills."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from opdrift.render.html.markup import Element, Node, element, section
from opdrift.render.rows import MARKS, MEANINGS

#: Part of the page -> what the contents call it.
_PARTS: Final = {
    "answer": "Answer",
    "causes": "Besides",
    "ranks": "Ranks",
    "growth": "Growth",
    "ops": "Ops",
    "origins": "Origins",
    "amplifiers": "Amplifiers",
    "kernels": "Kernels",
    "parameters": "Parameters",
    "environment": "Environment",
    "unpaired": "Unpaired",
    "runs": "Runs",
}
_KEYS: Final = (
    ("j / k", "next, previous op in the list"),
    ("n / p", "next, previous op at which a difference begins, or that one run alone has"),
    ("f", "the first divergence"),
    ("Home / End", "first, last op of the list"),
    ("PageUp / PageDown", "a screenful of ops"),
    ("Enter", "to the details of the chosen op"),
    ("/", "filter by module"),
    ("Esc", "empty the filter; once more leaves it"),
    ("?", "this help"),
)


def frame(parts: Sequence[Node]) -> Element:
    """The page's body: header with contents, the parts, and the help that `?` opens."""
    names = [dict(p.attributes)["id"] for p in parts if isinstance(p, Element)]
    links = [
        element("li", element("a", _PARTS[str(n)], href=f"#{n}")) for n in names if n in _PARTS
    ]
    header = element(
        "header",
        element("a", "to the list of ops", href="#ops", class_="skip") if "ops" in names else None,
        element("b", "opdrift", class_="brand"),
        element("nav", element("ul", *links), aria_label="parts of this page"),
        element("button", "theme: system", type="button", id="theme", hidden=True),
        element("button", "?", type="button", id="help-button", hidden=True, aria_label="help: keys"),
    )  # fmt: skip
    return element("body", header, element("main", *parts), _help())


def _help() -> Element:
    rows = [element("div", element("dt", key), element("dd", what)) for key, what in _KEYS]
    return element(
        "dialog",
        element("h2", "Keys", id="help-title"),
        element("dl", *rows, class_="keys"),
        element("form", element("button", "close", type="submit"), method="dialog"),
        id="help", aria_labelledby="help-title",
    )  # fmt: skip


def list_of_ops(*, linked: bool, note: str = "") -> Element:
    """The frame of the list of ops: filter, list, details of the chosen op."""
    if not linked:
        return section(
            "ops", "All ops",
            note="Logs of other tools hold no list of ops that could be shown here: docs/foreign-logs.md tells what they lack.",
        )  # fmt: skip
    return section(
        "ops", "All ops of both runs",
        element("noscript", element("p", "The list of ops needs JavaScript; all else on this page does not.")),
        _filter(),
        element("p", "reading the ops ...", id="count", role="status"),
        element(
            "div",
            element("div", _grid(), class_="listing"),
            element("aside", element("p", "Choose an op to see both sides of it.", class_="quiet"),
                    id="detail", tabindex="-1", aria_label="details of the chosen op"),
            class_="split",
        ),
        note=f"Each line is an op of both runs, or of one of them; ? lists the keys. {note}".rstrip(),
    )  # fmt: skip


def _filter() -> Element:
    marks = [
        element(
            "label",
            element("input", type="checkbox", value=mark, checked=True, class_="mark-filter"),
            element("span", mark, class_="mark"), f" {MEANINGS[mark]}",
        )
        for mark in MARKS
    ]  # fmt: skip
    return element(
        "form",
        element("label", "module ", element("input", type="search", id="scope-filter", placeholder="layers.*.fc1",
                                            autocomplete="off", spellcheck="false")),
        element("label", "op ", element("input", type="search", id="op-filter", placeholder="mm",
                                        autocomplete="off", spellcheck="false")),
        element("label", element("input", type="checkbox", id="kernel-filter"), " other kernel"),
        element("fieldset", element("legend", "status"), *marks),
        element("button", "all ops", type="reset"),
        id="filter", role="search", aria_label="filter the list of ops",
    )  # fmt: skip


def _grid() -> Element:
    titles = ("", "left", "right", "op", "module", "output", "differs by")
    classes = ("mark", "seq", "seq", "op", "module", "output", "size")
    head = [
        element("span", title or "status", role="columnheader", class_=class_)
        for title, class_ in zip(titles, classes, strict=True)
    ]
    return element(
        "div",
        element("div", *head, role="row", class_="row head", id="list-head"),
        element(
            "div", element("div", element("div", id="visible", role="rowgroup"), id="space", role="presentation"),
            id="list", tabindex="-1", role="presentation",
        ),
        id="grid", role="grid", tabindex="0", aria_label="ops of both runs", aria_readonly="true",
    )  # fmt: skip
