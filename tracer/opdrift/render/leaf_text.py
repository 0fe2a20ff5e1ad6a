"""Leaves of a trace for a terminal: their content over time, and where it came from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from opdrift.provenance import Lineage, Provenance
from opdrift.records import Leaf
from opdrift.render.page import Page, Screen
from opdrift.render.trace_text import content
from opdrift.render.words import count, name, plural, readable
from opdrift.tracefile.reader import Trace


def leaf_report(trace: Trace, leaves: Sequence[Leaf], screen: Screen) -> str:
    """Each leaf's content over time, and where it came from."""
    page = Page(screen)
    lineage = Lineage(trace)
    by_name: dict[tuple[str, str], list[Leaf]] = {}
    for leaf in leaves:
        by_name.setdefault((leaf.name, leaf.kind), []).append(leaf)
    for number, ((leaf_name, kind), seen) in enumerate(by_name.items()):
        if number:
            page.line()
        title = name(leaf_name) if leaf_name else "a leaf without a name"
        page.line(f"{title}  {kind} {trace.meta(seen[0].value)}", "strong", hang=2)
        page.field("content", [_sighting(trace, leaf) for leaf in seen])
        page.field("made", _origins(lineage, seen))
    return page.render()


def _origins(lineage: Lineage, seen: Sequence[Leaf]) -> list[str]:
    """How each content of a leaf came to be; a content that came the same way is said once."""
    lines: list[str] = []
    for leaf in seen:
        line = came_from(lineage.of(leaf.value))
        if line not in lines:
            lines.append(line)
    return lines


_UNWRITTEN: Final = {
    "leaf": "was there before the recording, and no recorded op wrote it",
    "hidden": "changed, and no recorded op wrote it",
    "uninitialised": "memory that nothing had written",
}


def came_from(found: Provenance) -> str:
    """How a content came to be, in a line."""
    if found.op is None:
        return _UNWRITTEN.get(found.kind, found.kind)
    said = [
        f"{_verb(found)} by {name(found.first_op or found.op)} (op {count(found.first_seq or found.seq or 0)})"
    ]
    if found.seq != found.first_seq:
        said.append(
            f"last written by {name(found.op)} (op {count(found.seq or 0)}), {plural(len(found.chain), 'op')} in all"
        )
    if len(found.casts) > 1:
        said.append(f"cast from {' to '.join(map(name, reversed(found.casts)))}")
    if found.partial:
        said.append(f"a part of it by {', '.join(map(name, found.partial))}")
    if found.source:
        said.append(readable(found.source))
    return ", ".join(said)


def _verb(found: Provenance) -> str:
    if found.kind == "drawn":
        seed = {True: ", from a chosen seed,", False: ", from a seed that nobody chose,"}
        return "drawn at random" + (seed[found.seeded] if found.seeded is not None else "")
    if found.kind == "copied":
        return (
            f"copied from {name(found.root_name) if found.root_name else 'a leaf without a name'}"
        )
    return found.kind


#: Moments at which a leaf is seen, in words.
WHEN: Final = {
    "entry": "on entry",
    "use": "at first use",
    "changed": "changed with no recorded op",
    "gather": "gathered",
    "return": "returned",
    "exit": "at exit",
}


def _sighting(trace: Trace, leaf: Leaf) -> str:
    when = WHEN.get(leaf.when, leaf.when)
    after = f" after op {count(leaf.seq)}" if leaf.seq else ""
    return f"{when}{after}: {content(trace, leaf.value)}"
