"""How each run came to the parameters that it starts from: loaded, drawn, or there when its recording began."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from opdrift.case import Case, Side
from opdrift.causes.evidence import SIDES, Evidence, counted, some, tally
from opdrift.fetched import Fetched
from opdrift.pairs import EQUAL
from opdrift.provenance import Provenance
from opdrift.records import Leaf, Sides

#: "loaded": copied or brought in from elsewhere during the recording. "fresh": drawn or filled during it, and not loaded since. "kept":
#: what it was when the recording began, whatever it was then. "other": computed, changed with no op, or held by another rank.
Way = Literal["loaded", "fresh", "kept", "other"]

_FRESH: Final = frozenset({"drawn", "filled", "uninitialised"})
#: So large a part of the tensors must have come to be in one way before it is told of all.
_MOST: Final = 0.5


@dataclass(frozen=True, slots=True)
class Held:
    """What one run starts from under a name.

    Attributes:
        way: How it came to that.
        made: The same as the trace has it.
        leaf: The row.
        fetched: How a library brought it in; None where none did.
    """

    way: Way
    made: Provenance
    leaf: Leaf
    fetched: Fetched | None = None


def held(side: Side, leaf: Leaf) -> Held | None:
    """How a run came to what it starts from under a name; None where that is another rank's to say."""
    start, value = side.starts.of(leaf.name), leaf.value
    if start is not None and start.leaf.value == value and start.source is not None:
        value = start.source.leaf.value
    elif leaf.when == "gather":
        # what is gathered is made of the parts of all ranks: of its own each knows how it was made
        part = side.leaves.shards.get(leaf.name)
        if part is not None:
            value = part.value
        elif (side.trace.header.world_size or 1) > 1:
            return None
    made = side.lineage.of(value)
    fetched = side.fetched.get(leaf.name)
    if fetched is not None:
        return Held("loaded", made, leaf, fetched)
    settled = start is None or (start.source or start).settled
    return Held(_way(side, leaf.name, value, made) if settled else "other", made, leaf)


def _way(side: Side, name: str, value: int, made: Provenance) -> Way:
    if made.kind in _FRESH:
        return "fresh"
    if made.kind == "leaf":
        return "kept"
    if made.kind != "copied":
        return "other"
    storage = side.trace.values.storage
    own = side.leaves.by_name.get(name, [])
    if int(storage[made.root]) not in {int(storage[each.value]) for each in own}:
        return "loaded"
    # a copy of itself: a part of it, or through a broadcast, which brings what another rank has
    first, words = own[0].value, side.contents.by_place
    metas = side.trace.meta(first), side.trace.meta(value)
    alike = (metas[0].shape, metas[0].dtype) == (metas[1].shape, metas[1].dtype)
    known = alike and words[first] and words[value]
    return "loaded" if known and words[first] != words[value] else "kept"


class Ways:
    """How both runs came to the tensors of an origin.

    Args:
        e: The origin.
        members: Its rows.
    """

    def __init__(self, e: Evidence, members: Sequence[Sides[Leaf | None]]) -> None:
        pairs = [
            (
                None if m.left is None else held(e.case.left, m.left),
                None if m.right is None else held(e.case.right, m.right),
            )
            for m in members
        ]
        #: Of the left and of the right run, those of which it is known.
        self.sides = (
            [left for left, _ in pairs if left is not None],
            [right for _, right in pairs if right is not None],
        )
        self._pairs = [(a, b) for a, b in pairs if a is not None and b is not None]

    def drawn(self, number: int) -> list[Provenance]:
        """How one run drew those that it drew."""
        return [each.made for each in self.sides[number] if each.made.kind == "drawn"]

    def files(self) -> list[str]:
        """The files that a library read them from."""
        every = [each.fetched for side in self.sides for each in side]
        return [f.file for f in every if f is not None and f.file is not None]

    def is_fresh(self, number: int) -> bool:
        """Whether one run drew or filled all of them, and drew some."""
        each = self.sides[number]
        return bool(self.drawn(number)) and all(h.way == "fresh" for h in each)

    def common(self) -> tuple[Way, Way, list[tuple[Held, Held]]] | None:
        """The ways in which most of them came to be, and those that did."""
        counts = Counter((a.way, b.way) for a, b in self._pairs)
        if not counts:
            return None
        (left, right), count = counts.most_common(1)[0]
        if count <= _MOST * len(self._pairs):
            return None
        return left, right, [(a, b) for a, b in self._pairs if (a.way, b.way) == (left, right)]


def one_run_wrote(e: Evidence, ways: Ways) -> tuple[str, tuple[str, ...], int] | None:
    """In words how the runs came to have others where one of them loaded or drew them, evidence, and that run (0 or 1).

    What a run held when its recording began may have been loaded before: only what is recorded is told.
    """
    found = ways.common()
    if found is None or (found[0] == "kept") == (found[1] == "kept"):
        return None
    number = 0 if found[1] == "kept" else 1
    way = found[number]
    if way not in ("loaded", "fresh"):
        return None
    name, other = SIDES[number], SIDES[1 - number]
    pairs = found[2]
    wrote = f"{name}: {_writer(e, number, [pair[number] for pair in pairs])}"
    if _had_the_same(e.case, pairs[0], number):
        verb = "loaded them" if way == "loaded" else "drew or filled them again"
        if way == "fresh" and all(pair[number].made.kind == "drawn" for pair in pairs):
            verb = "drew them at random again"
        words = f"the {name} run {verb}, the {other} run kept what both had before"
        return words, (wrote, f"{other}: no op wrote into them before they were first read"), number
    if way == "fresh":
        return None
    return (
        f"the {name} run loaded them in its recording, the {other} run did not",
        (
            wrote,
            f"{other}: no recorded op wrote into them: they were loaded before the recording began, or without an op, or never",
        ),
        number,
    )


def both_wrote(e: Evidence, ways: Ways) -> tuple[str, tuple[str, ...]] | None:
    """In words how the runs came to have others where both loaded them, or one did and the other drew them; and evidence."""
    found = ways.common()
    if found is None or {found[0], found[1]} - {"loaded", "fresh"} or "loaded" not in found[:2]:
        return None
    evidence = tuple(
        f"{SIDES[n]}: {_writer(e, n, [pair[n] for pair in found[2]])}"
        for n in (0, 1)
        if found[n] == "loaded"
    )
    if found[0] == found[1]:
        parts = [n for n in (0, 1) if any(_in_parts(e, n, pair[n]) for pair in found[2])]
        if not parts:
            return "both runs loaded them, each from something else", evidence
        where = SIDES[parts[0]] if len(parts) == 1 else "either"
        return (
            "both runs loaded them: from something else, or not on every rank",
            (
                *evidence,
                f"what a rank of the {where} run gathers comes from other ranks, too: `opdrift show TRACE --findings` names one"
                " that loaded something else, or nothing",
            ),
        )
    number = 0 if found[0] == "loaded" else 1
    return f"the {SIDES[number]} run loaded them, the {SIDES[1 - number]} run never did", evidence


def _in_parts(e: Evidence, number: int, which: Held) -> bool:
    """Whether several ranks of a run hold parts of a tensor: how this rank came to its own says nothing of the others'."""
    side = (e.case.left, e.case.right)[number]
    return (side.trace.header.world_size or 1) > 1 and which.leaf.name in side.leaves.shards


def _writer(e: Evidence, number: int, all_: Sequence[Held]) -> str:
    """The op that loaded or drew the first of several tensors, in words."""
    side, first = (e.case.left, e.case.right)[number], all_[0]
    more = f", and {counted(len(all_) - 1, 'other')} likewise" if len(all_) > 1 else ""
    if first.fetched is not None:
        what = f"from {first.fetched.file}" if first.fetched.file else "as it loaded a checkpoint"
        return f"{first.fetched.library} brought {first.leaf.name} in {what}{more}"
    op = None if first.made.first_seq is None else side.trace.index_of(first.made.first_seq)
    if op is None:
        return f"{first.leaf.name} was copied in by an op that is not recorded"
    did = "copied" if first.way == "loaded" else "wrote"
    return f"{side.place(op)} {did} {first.leaf.name}{more}"


def _had_the_same(case: Case, pair: tuple[Held, Held], number: int) -> bool:
    """Whether the run that wrote a tensor held before what the other run kept."""
    side, other = (case.left, case.right)[number], (case.right, case.left)[number]
    start, kept = side.starts.of(pair[number].leaf.name), pair[1 - number].leaf
    if start is None:
        return False
    rows = side.leaves.by_name[pair[number].leaf.name]
    values = [rows[0].value, kept.value]
    if number == 1:
        values.reverse()
    status = case.compared.status(*(np.array([value]) for value in values))
    return (
        int(status[0]) == EQUAL
        and other.trace.meta(kept.value).shape == side.trace.meta(rows[0].value).shape
    )


def how_drawn(ways: Ways) -> list[str]:
    """How the tensors came to be, where a run drew some of them, a sentence a run."""
    found: list[str] = []
    for number, name in enumerate(SIDES):
        every, drawn = ways.sides[number], ways.drawn(number)
        if not drawn:
            continue
        ops = ", ".join(f"{op} ({n})" for op, n in tally(p.first_op for p in drawn))
        rest = {way: sum(h.way == way for h in every) for way in ("loaded", "kept")}
        said = [
            f"{rest['loaded']} were copied"
            if rest["loaded"]
            else "none was copied from a checkpoint"
        ]
        said += [f"{rest['kept']} were there when the recording began"] if rest["kept"] else []
        found.append(
            f"{name}: {len(drawn)} of these {len(every)} were last written by {ops}{_seeding(drawn)}; {', '.join(said)}"
        )
    return found


def _seeding(drawn: Sequence[Provenance]) -> str:
    """What is known of the seed that numbers were drawn with."""
    seeded, seeds = {p.seeded for p in drawn}, sorted({p.seed for p in drawn if p.seed is not None})
    if seeded == {False}:
        return " from a generator that nobody seeded"
    if seeded == {True}:
        return f" from a generator seeded with {some([str(seed) for seed in seeds])}"
    return ""
