"""Leaves of a trace for a terminal: their content over time, and where it came from."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from opdrift.provenance import Lineage, Provenance
from opdrift.records import Leaf
from opdrift.render.page import Page, Screen
from opdrift.render.timeline_text import timeline
from opdrift.render.trace_text import content
from opdrift.render.words import count, name, plural, readable
from opdrift.timeline import Event, Timelines
from opdrift.tracefile.reader import Trace
from opdrift.wording import listed
from opdrift.world.replicas import sharded

#: Of more ways in which ranks differ about a leaf, so many are shown.
_WAYS: Final = 4


@dataclass(frozen=True, slots=True)
class _Told:
    """What one rank tells of a leaf: where it is seen, how it was made, and what became of it."""

    rank: int
    layout: str
    content: list[str]
    made: list[str]
    events: Sequence[Event]
    gist: object

    @classmethod
    def of(cls, rank: _Rank, seen: Sequence[Leaf]) -> _Told:
        trace = rank.trace
        held = seen[0].kind in HELD
        events = rank.timelines.of(seen[0].name, seen) if held else ()
        keys = tuple(trace.fingerprint(leaf.value) for leaf in seen)
        # ranks number their ops each for itself
        gist = (
            tuple((leaf.when, key and key.key) for leaf, key in zip(seen, keys, strict=True)),
            tuple((event.what, event.by, event.content, event.digest) for event in events),
        )
        content = [_sighting(trace, leaf) for leaf in seen]
        layout = str(trace.meta(seen[0].value))
        made = _origins(rank.lineage, seen)
        return cls(trace.header.rank or 0, layout, content, made, events, gist)


class _Rank:
    """One rank's trace, and its leaves that are asked for, by name and kind."""

    def __init__(self, trace: Trace, leaves: Sequence[Leaf]) -> None:
        self.trace = trace
        self.lineage = Lineage(trace)
        self.timelines = Timelines(trace)
        self.by_name: dict[tuple[str, str], list[Leaf]] = {}
        for leaf in leaves:
            self.by_name.setdefault((leaf.name, leaf.kind), []).append(leaf)


def leaf_report(
    trace: Trace,
    leaves: Sequence[Leaf],
    screen: Screen,
    *,
    others: Sequence[tuple[Trace, Sequence[Leaf]]] = (),
) -> str:
    """Each leaf's contents, where they came from, and what became of it over the run; ranks that tell the same, once.

    Args:
        trace: The trace.
        leaves: The rows of the leaves to show.
        screen: Where it will be read.
        others: The traces of the other ranks of the run, and their rows.
    """
    page = Page(screen)
    ranks = [_Rank(each, rows) for each, rows in ((trace, leaves), *others)]
    keys = dict.fromkeys(key for rank in ranks for key in rank.by_name)
    for number, key in enumerate(keys):
        if number:
            page.line()
        _leaf(page, key, ranks)
    return page.render()


def _leaf(page: Page, key: tuple[str, str], ranks: Sequence[_Rank]) -> None:
    leaf_name, kind = key
    title = name(leaf_name) if leaf_name else "a leaf without a name"
    ways: dict[object, list[_Told]] = {}
    for rank in ranks:
        if key in rank.by_name:
            told = _Told.of(rank, rank.by_name[key])
            ways.setdefault(told.gist, []).append(told)
    for number, alike in enumerate(list(ways.values())[:_WAYS]):
        first = alike[0]
        if number:
            page.line()
        on = f", {listed([told.rank for told in alike])}" if len(ranks) > 1 else ""
        page.line(f"{title}  {kind} {first.layout}{on}", "strong", hang=2)
        page.field("content", _few(first.content))
        page.field("made", _few(first.made))
        if kind in HELD:
            if len(ranks) > 1 and not number:
                traces = [rank.trace for rank in ranks]
                split = any(leaf_name in sharded(each) for each in traces)
                said = "each holds a part" if split else _between_ranks(traces, leaf_name)
                if sum(map(len, ways.values())) == 1:
                    said = "no other rank has it"
                page.field("ranks", [said])
            timeline(page, first.events)
    left_out = [told.rank for alike in list(ways.values())[_WAYS:] for told in alike]
    if left_out:
        where = ranks[[rank.trace.header.rank or 0 for rank in ranks].index(left_out[0])].trace.path
        page.line(
            f"  {listed(left_out)}: other contents again; opdrift show {shlex.quote(str(where))} --leaf {shlex.quote(leaf_name)}"
        )


def _few(lines: list[str]) -> list[str]:
    """The first and the last of many lines; the timeline below, or JSON, has all."""
    if len(lines) <= 2 * _SHOWN:
        return lines
    left_out = f"... {count(len(lines) - 2 * _SHOWN)} more; --format json lists all"
    return [*lines[:_SHOWN], left_out, *lines[-_SHOWN:]]


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
