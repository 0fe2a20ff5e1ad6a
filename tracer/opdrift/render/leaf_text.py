"""Leaves of a trace for a terminal: their content over time, and where it came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from opdrift.provenance import Lineage, Provenance
from opdrift.records import Leaf
from opdrift.render.page import Page, Screen
from opdrift.render.timeline_text import timeline
from opdrift.render.trace_text import content
from opdrift.render.words import count, name, plural, readable
from opdrift.timeline import Timelines
from opdrift.tracefile.reader import Trace
from opdrift.world.replicas import sharded


def leaf_report(
    trace: Trace, leaves: Sequence[Leaf], screen: Screen, *, others: Sequence[Trace] = ()
) -> str:
    """Each leaf's contents, where they came from, and what became of it over the run.

    Args:
        trace: The trace.
        leaves: The rows of the leaves to show.
        screen: Where it will be read.
        others: The traces of the other ranks of the run.
    """
    page = Page(screen)
    lineage = Lineage(trace)
    lines = Timelines(trace)
    by_name: dict[tuple[str, str], list[Leaf]] = {}
    for leaf in leaves:
        by_name.setdefault((leaf.name, leaf.kind), []).append(leaf)
    for number, ((leaf_name, kind), seen) in enumerate(by_name.items()):
        if number:
            page.line()
        title = name(leaf_name) if leaf_name else "a leaf without a name"
        page.line(f"{title}  {kind} {trace.meta(seen[0].value)}", "strong", hang=2)
        page.field("content", _few([_sighting(trace, leaf) for leaf in seen]))
        page.field("made", _few(_origins(lineage, seen)))
        if kind in ("parameter", "buffer"):
            if others:
                traces = [trace, *others]
                split = any(leaf_name in sharded(each) for each in traces)
                said = "each holds a part" if split else _between_ranks(traces, leaf_name)
                page.field("ranks", [said])
            timeline(page, lines.of(leaf_name, seen))
    return page.render()


def _few(lines: list[str]) -> list[str]:
    """The first and the last of many lines; the timeline below, or JSON, has all."""
    if len(lines) <= 2 * _SHOWN:
        return lines
    return [*lines[:_SHOWN], f"... {count(len(lines) - 2 * _SHOWN)} more", *lines[-_SHOWN:]]


def _between_ranks(traces: Sequence[Trace], leaf_name: str) -> str:
    """Whether all ranks hold the same, when they first and when they last see it."""
    ends: list[dict[int, tuple[int, int, int]]] = [{}, {}]
    for trace in traces:
        rows = [leaf for leaf in trace.leaves if leaf.name == leaf_name and leaf.kind in HELD]
        for found, leaf in zip(ends, (rows[:1], rows[-1:]), strict=True):
            fingerprint = trace.fingerprint(leaf[0].value) if leaf else None
            if fingerprint is not None:
                found[trace.header.rank or 0] = fingerprint.key
    said = [
        f"{when} {_same_on(keys)}"
        for when, keys in zip(("at first", "at last"), ends, strict=True)
        if len(keys) > 1
    ]
    return "; ".join(said) or "not known on two of them"


def _same_on(keys: Mapping[int, tuple[int, int, int]]) -> str:
    if len(set(keys.values())) == 1:
        return f"equal on {', '.join(map(str, keys))}"
    groups: dict[tuple[int, int, int], list[str]] = {}
    for rank, key in keys.items():
        groups.setdefault(key, []).append(str(rank))
    return f"different: {' | '.join(', '.join(group) for group in groups.values())}"


def _origins(lineage: Lineage, seen: Sequence[Leaf]) -> list[str]:
    """How each content of a leaf came to be; a content that came the same way is said once."""
    lines: list[str] = []
    for leaf in seen:
        line = came_from(lineage.of(leaf.value))
        if line not in lines:
            lines.append(line)
    return lines


#: Of more contents than twice this, so many at each end are shown.
_SHOWN: Final = 4
#: Leaves that a model holds, whose timelines are shown.
HELD: Final = ("parameter", "buffer")
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
