"""The answer on the page: verdict, card, other origins and causes, ranks; in the words of the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from opdrift.records import Diagnosis, Divergence, Sides
from opdrift.render import card
from opdrift.render.html.markup import (
    Element,
    Heading,
    Node,
    element,
    folded,
    prose,
    section,
    table,
)
from opdrift.render.text import further
from opdrift.render.words import cell, count, name, plural, ratio, scope, size

#: Origins that have a card of their own besides the first; the table has all of them, grouped.
_CARDS: Final = 40

_NUMBER: Final = "number"
_CODE: Final = "code"


def answer(
    diagnosis: Diagnosis, *, module_types: Mapping[str, str], options: Sequence[str], linked: bool
) -> Element:
    """The verdict and everything known of the first divergence.

    Args:
        diagnosis: What to say.
        module_types: Class names of module paths.
        options: What chose what was compared, for the commands.
        linked: The page has a list of the ops, so that they can be linked to.
    """
    found = card.focus(diagnosis)
    parts: list[Node | None] = [
        element(
            "p",
            element("strong", diagnosis.verdict, class_=f"verdict {diagnosis.verdict}"),
            element("span", _compared(diagnosis), class_="quiet"),
        ),
        element("h1", card.headline(diagnosis), id="answer-title"),
    ]
    if found is not None and diagnosis.verdict != "identical":
        parts.append(_card(found, module_types.get(found.module)))
        if linked:
            parts.append(_links(diagnosis, found))
        sooner = card.earlier(diagnosis)
        if sooner is not None:
            parts.append(element("p", element("b", "earlier: "), *prose(sooner)))
    parts += [element("p", *prose(f"note: {text}"), class_="note") for text in _notes(diagnosis)]
    if diagnosis.verdict != "identical" and diagnosis.exact:
        commands = further(diagnosis, found, options)
        parts.append(
            element(
                "div",
                element("span", "next, in a terminal", class_="quiet"),
                *(command(c) for c in commands),
                class_="commands",
            )
        )
    return element("section", *parts, id="answer", aria_labelledby="answer-title")


def _compared(diagnosis: Diagnosis) -> str:
    left, right = (
        f'{name(one.path)} "{name(one.label)}"' if one.label else name(one.path)
        for one in (diagnosis.left, diagnosis.right)
    )
    return f"{left} (left) against {right} (right)"


def command(text: str) -> Element:
    """A command to type, whole on one line; a script adds a button that copies it."""
    return element("pre", element("code", text), class_="command", tabindex="0")


def _card(found: Divergence, module_type: str | None) -> Element:
    pairs: list[Node] = []
    for field in card.card(found, module_type=module_type):
        pairs.append(element("dt", field.label))
        pairs.append(element("dd", *_lines(field.label, field.lines), class_=field.tone))
    return element("dl", *pairs, class_="card")


def _lines(label: str, lines: Sequence[str]) -> list[Node]:
    """The first line of a field, and what follows it: evidence as a list."""
    listed = [line[2:] for line in lines if line.startswith("- ")]
    plain = [line for line in lines if not line.startswith("- ")]
    kind = _CODE if label == "where" else None
    parts: list[Node] = [
        element("p", *prose(line.lstrip()), class_="nested" if line.startswith("  ") else kind)
        for line in plain
    ]
    if listed:
        parts.append(element("ul", *(element("li", *prose(line)) for line in listed)))
    return parts


def op_link(seq: Sides[int | None], text: str) -> Node:
    """A link to an op in the list; plain text where no run has it."""
    if seq.left is not None:
        return element("a", text, href=f"#op-{seq.left}")
    if seq.right is not None:
        return element("a", text, href=f"#right-op-{seq.right}")
    return text


def _links(diagnosis: Diagnosis, found: Divergence) -> Element | None:
    links: list[Node] = []
    harmless = diagnosis.first_bitwise
    for words, one in (("first divergence", found), ("first bitwise difference", harmless)):
        if (
            one is None
            or (one is found and links)
            or (one.seq.left is None and one.seq.right is None)
        ):
            continue
        number = one.seq.left if one.seq.left is not None else one.seq.right
        links.append(op_link(one.seq, f"{words}: op {count(number or 0)} in the list of ops"))
    return element("p", *_between(links), class_="links") if links else None


def _between(nodes: Sequence[Node]) -> list[Node]:
    found: list[Node] = []
    for node in nodes:
        found += [" | ", node] if found else [node]
    return found


def _notes(diagnosis: Diagnosis) -> list[str]:
    found = list(diagnosis.notes)
    if diagnosis.alignment.fallback_reason:
        found.append(
            f"aligned by {diagnosis.alignment.method}: {diagnosis.alignment.fallback_reason}"
        )
    return found


def causes(diagnosis: Diagnosis) -> Element | None:
    """Further causes, each with what speaks for it and what to try."""
    others = card.other_causes(diagnosis) if diagnosis.verdict != "identical" else []
    if not others:
        return None
    folds = [
        folded(
            element("span", element("b", c.slug), f" ({c.confidence}): ", *prose(c.summary)),
            element("ul", *(element("li", *prose(e)) for e in c.evidence)) if c.evidence else None,
            element("p", element("b", "try "), *prose(c.try_)) if c.try_ else None,
        )
        for c in others
    ]
    return section("causes", "Besides", *folds)


def origins(diagnosis: Diagnosis, *, module_types: Mapping[str, str]) -> Element | None:
    """Every other independent origin: grouped in a table, and card by card."""
    groups = card.other_origins(diagnosis) if diagnosis.verdict != "identical" else []
    if not groups:
        return None
    rows = [
        (
            g.place,
            g.op,
            f"x{count(g.number)}" if g.number > 1 else "",
            size(g.largest) if g.largest is not None else "?",
            g.slug,
            "beyond rounding" if g.material else "rounding",
            count(g.first_seq) if g.first_seq is not None else "",
        )
        for g in groups
    ]
    headings = (
        Heading("where", _CODE), Heading("op", _CODE), Heading("times", _NUMBER), Heading("difference", _NUMBER),
        Heading("cause"), Heading("size"), Heading("first op", _NUMBER),
    )  # fmt: skip
    total = sum(g.number for g in groups)
    said = (card.focus(diagnosis), diagnosis.first_bitwise)
    others = [o for o in diagnosis.origins if o not in said]
    cards = [
        folded(_title(o), _card(o, module_types.get(o.module)), _op(o)) for o in others[:_CARDS]
    ]
    rest = len(others) - len(cards)
    return section(
        "origins",
        plural(total, "other independent origin").capitalize(),
        table("other independent origins", headings, rows),
        folded(
            "each with its card",
            *cards,
            element("p", f"and {count(rest)} more; --format json lists all") if rest else None,
        ),
    )


def _title(origin: Divergence) -> str:
    place = name(origin.name) if origin.name is not None else scope(origin.module)
    op = f", {name(origin.op)}" if origin.op else ""
    return f"{place}{op}: {origin.cause.slug}"


def _op(origin: Divergence) -> Element | None:
    number = origin.seq.left if origin.seq.left is not None else origin.seq.right
    if number is None:
        return None
    return element("p", op_link(origin.seq, f"op {count(number)} in the list of ops"))


def amplifiers(diagnosis: Diagnosis, *, linked: bool) -> Element | None:
    """Ops at which a small difference became a large one, the strongest first."""
    if not diagnosis.amplifiers or diagnosis.verdict == "identical":
        return None
    headings = (
        Heading("module", _CODE), Heading("op", _CODE), Heading("number", _NUMBER), Heading("in", _NUMBER),
        Heading("out", _NUMBER), Heading("gain", _NUMBER),
    )  # fmt: skip
    rows: list[tuple[Node, ...]] = []
    for a in sorted(diagnosis.amplifiers, key=lambda a: -a.gain):
        number = count(a.seq.left) if a.seq.left is not None else ""
        rows.append(
            (
                cell(a.module),
                name(a.op),
                op_link(a.seq, number) if linked else number,
                size(a.input_difference),
                size(a.output_difference),
                ratio(a.gain),
            )
        )
    return section(
        "amplifiers", "Ops that amplify the difference", table("amplifiers", headings, rows)
    )


def ranks(diagnosis: Diagnosis, *, linked: bool) -> Element | None:
    """What was found on each rank, with its card; the rest of the page is about one of them."""
    if not diagnosis.ranks:
        return None
    folds = []
    for rank, one in sorted(diagnosis.ranks.items()):
        found = card.focus(one)
        folds.append(
            folded(
                element("span", element("b", f"rank {rank}"), f": {card.headline(one)}"),
                _card(found, None) if found is not None and one.verdict != "identical" else None,
            )
        )
    # a run of one process has no rank, and was compared with that of the other run
    sides = (diagnosis.left.rank, diagnosis.right.rank)
    shown = next((rank for rank in sides if rank is not None), 0)
    of = f"What stands below is of rank {shown}; --rank N makes the page of another."
    return section("ranks", "Rank by rank", *folds, note=of if linked else "")
