"""Where a run's results are: what its modules returned, gradients, changed parameters, what outlived it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from opdrift.contents import Contents, Flags
from opdrift.extracalls import held, kept_of_extra_calls
from opdrift.flow import steering_ops, unread
from opdrift.leaves import LeafTable, match_rows
from opdrift.matches import alike, by_content, by_maker, made
from opdrift.neighbours import Neighbours
from opdrift.pairs import DIFFERENT, EQUAL, Compared
from opdrift.records import Leaf, LeafKind
from opdrift.regionresults import results_of_regions
from opdrift.samples import SampleContents
from opdrift.shards import differently_sharded, sharding
from opdrift.tracefile.columns import Ints
from opdrift.tracefile.reader import Trace

#: How many writes of a storage are passed over on the way back to one that both runs made.
_LOOK_BACK: Final = 64


@dataclass(frozen=True, slots=True)
class Sink:
    """One result of the runs.

    Attributes:
        name: As its leaf row says; "" for values without one.
        kind: `output`, `gradient`, `parameter`, `buffer`, `alive`, `more` for what one run kept of calls
            that the other does not make, `compiled` for what a compiled function returned, or `steering` for a
            tensor whose content went into the program.
        left: Left value id, None where the left run has no such result.
        right: Right value id.
        differs: Known to differ, or missing on one side.
        row: Row of the pair of ops that took it to the program or to another process; -1 for others.
        slot: Its position among their inputs.
    """

    name: str
    kind: str
    left: int | None
    right: int | None
    differs: bool
    row: int = -1
    slot: int | None = None


def find_sinks(compared: Compared, left: LeafTable, right: LeafTable) -> list[Sink]:
    """All results of two runs, matched."""
    found = _named(compared, left, right)
    compiled = _compiled(compared, left, right, found)
    found += compiled
    known = {(s.left, s.right) for s in found}
    # what both held before and nothing wrote, such as gradients of an earlier step, is no result of the run
    nothing = not any(_is_made(compared, s) for s in found)
    alive = _alive(compared, left, right, only_one=nothing)
    found += [s for s in alive if (s.left, s.right) not in known]
    found += _written_since(compared, left, right, found)
    found += _more(compared, left, right, found)
    found += _steering(compared)
    if not any(_is_made(compared, s) for s in found):
        found += _unread(compared)
    return found


def _compiled(
    compared: Compared, left: LeafTable, right: LeafTable, named: Sequence[Sink]
) -> list[Sink]:
    """What compiled functions returned."""
    known = (
        {s.left for s in named if s.left is not None},
        {s.right for s in named if s.right is not None},
    )
    results = results_of_regions(compared, (left, right), known)
    found = [_sink(compared, "compiled", "", a, b) for a, b in results.pairs]
    for number, value in results.alone:
        own: tuple[int | None, int | None] = (value, None) if number == 0 else (None, value)
        found.append(Sink("", "compiled", own[0], own[1], differs=True))
    return found


def _is_made(compared: Compared, sink: Sink) -> bool:
    """Whether a run made a result, or may have: what differs is not what both held before."""
    return sink.differs or any(
        value is not None and made(contents, value)[0] >= 0
        for contents, value in ((compared.left, sink.left), (compared.right, sink.right))
    )


def sample_sinks(compared: Compared, left: LeafTable, right: LeafTable) -> list[Sink]:
    """The results of one sample of each batch: what the modules returned, as far as it is the sample's own.

    Parameters, gradients and losses are of all samples. Where no result is the sample's own, everything is
    that is known to differ.
    """
    mine = _owned(compared.left), _owned(compared.right)
    found = [
        s
        for s in _named(compared, left, right)
        if s.kind == "output"
        and s.left is not None
        and s.right is not None
        and mine[0][s.left]
        and mine[1][s.right]
    ]
    if any(_known(compared, s) for s in found):
        return found
    outputs = compared.outputs
    ours = (outputs.status == DIFFERENT) & mine[0][outputs.left] & mine[1][outputs.right]
    return [
        Sink("", "unread", int(outputs.left[k]), int(outputs.right[k]), differs=True)
        for k in np.flatnonzero(ours).tolist()
    ]


@dataclass(frozen=True, slots=True)
class Uncompared:
    """Results of the modules of which one sample's part is not compared, by name.

    Attributes:
        common: They are made of all samples of a batch.
        unknown: The sample could not be followed to them.
    """

    common: tuple[str, ...]
    unknown: tuple[str, ...]


def results_of_all(compared: Compared, left: LeafTable, right: LeafTable) -> Uncompared:
    """The results that `sample_sinks` leaves out or knows nothing of."""
    mine = _owned(compared.left), _owned(compared.right)
    common, unknown = [], []
    for s in _named(compared, left, right):
        if s.kind != "output" or s.left is None or s.right is None:
            continue
        if not (mine[0][s.left] and mine[1][s.right]):
            common.append(s.name)
        elif not _known(compared, s) and not s.differs:
            unknown.append(s.name)
    return Uncompared(tuple(dict.fromkeys(common)), tuple(dict.fromkeys(unknown)))


def _owned(contents: Contents) -> Flags:
    """Values that are not made of all samples, or are of a batch of one."""
    assert isinstance(contents, SampleContents)
    return contents.one.is_own


def _known(compared: Compared, sink: Sink) -> bool:
    assert sink.left is not None
    assert sink.right is not None
    return bool(compared.status(np.array([sink.left]), np.array([sink.right]))[0])


def _named(compared: Compared, left: LeafTable, right: LeafTable) -> list[Sink]:
    found: list[Sink] = []
    kinds: tuple[LeafKind, ...] = ("output", "gradient", "parameter", "buffer")
    words = compared.left.by_place, compared.right.by_place
    raised = _raised(compared.left) or _raised(compared.right)
    kept = (
        _kept(compared.left, left, everything=raised),
        _kept(compared.right, right, everything=raised),
    )
    # a part of a parameter is not to be held against all of it
    apart = differently_sharded(compared.left.trace, compared.right.trace)
    # per side, what need not be had once more
    known = held(compared.right, right), held(compared.left, left)
    parts = _held_by_others(compared, left, right)
    gone = _has_no_model_left(compared.left, left), _has_no_model_left(compared.right, right)
    for kind in kinds:
        a, b = _by_name(left.outputs, kind, apart), _by_name(right.outputs, kind, apart)
        rest: tuple[list[Leaf], list[Leaf]] = ([], [])
        for name in dict.fromkeys([*a, *b]):
            mine, theirs = a.get(name, []), b.get(name, [])
            pairs: list[tuple[Leaf, Leaf]] = []
            if len(mine) != len(theirs):  # of two results, the one that the same op made
                pairs, mine, theirs = alike(by_maker(compared, mine, theirs), mine, theirs)
            more, *over = match_rows(mine, theirs, words)
            found += [_sink(compared, kind, name, x.value, y.value) for x, y in (*pairs, *more)]
            rest[0].extend(over[0])
            rest[1].extend(over[1])
        if kind == "gradient":
            rest = _without_models(rest, gone)
        if kind in ("parameter", "gradient"):
            rest = _without_parts(rest, parts)
        if kind in ("parameter", "buffer"):
            rest = _with_entries(compared, kind, rest, (left, right), found)
        for side in (0, 1):
            known[side].update(_told(compared, found, side))
        # of a run that raised, a call that was to be made once more is missing, too
        found += _renamed(compared, kind, rest, kept, (set(), set()) if raised else known)
    return found


def _by_name(rows: Sequence[Leaf], kind: LeafKind, apart: frozenset[str]) -> dict[str, list[Leaf]]:
    found: dict[str, list[Leaf]] = defaultdict(list)
    for leaf in rows:
        if leaf.kind == kind and (leaf.name not in apart or kind == "output"):
            found[leaf.name].append(leaf)
    return found


def _sink(compared: Compared, kind: str, name: str, left: int, right: int) -> Sink:
    return Sink(name, kind, left, right, _differ(compared, left, right))


def _differ(compared: Compared, left: int, right: int) -> bool:
    status = int(compared.status(np.array([left]), np.array([right]))[0])
    if status == DIFFERENT:
        return True
    row = compared.made_by_one_pair(left, right)
    # unknown content: as its maker
    return status == 0 and row >= 0 and bool(compared.tainted[row])


def _has_no_model_left(contents: Contents, table: LeafTable) -> bool:
    """Whether parameters were written, and none is there when the run ends: its modules did not live that long.

    A wrapper that the program makes for a while, such as DistributedDataParallel, takes the names with it.
    """
    if any(leaf.kind in ("parameter", "buffer", "gradient") for leaf in table.outputs):
        return False
    last = _Last(contents.trace)
    starts = (leaf for leaf in table.starts if leaf.kind == "parameter" and leaf.name)
    write = contents.trace.values.write
    return any(write[last.of(leaf.value)] > write[leaf.value] for leaf in starts)


def _without_models(
    rest: tuple[list[Leaf], list[Leaf]], gone: tuple[bool, bool]
) -> tuple[list[Leaf], list[Leaf]]:
    """Gradients that one run alone has, but for those that the other run could no longer name."""
    return [] if gone[1] else rest[0], [] if gone[0] else rest[1]


def _held_by_others(compared: Compared, left: LeafTable, right: LeafTable) -> frozenset[str]:
    """Names of what holds parts when the runs end, where that is another tensor in each of them.

    FSDP1 keeps a flat parameter, and with `use_orig_params` its parts under the names of the parameters.
    """
    known = {*sharding(compared.left.trace), *sharding(compared.right.trace)}
    held = [
        {leaf.name for leaf in table.outputs if leaf.kind in ("parameter", "gradient")} & known
        for table in (left, right)
    ]
    return frozenset(held[0] ^ held[1]) if all(held) else frozenset()


def _without_parts(
    rest: tuple[list[Leaf], list[Leaf]], parts: frozenset[str]
) -> tuple[list[Leaf], list[Leaf]]:
    """Results without a namesake, but for parts that the other run holds in other tensors."""
    left, right = ([leaf for leaf in leaves if leaf.name not in parts] for leaves in rest)
    return left, right


def _with_entries(
    compared: Compared,
    kind: LeafKind,
    rest: tuple[list[Leaf], list[Leaf]],
    tables: tuple[LeafTable, LeafTable],
    found: list[Sink],
) -> tuple[list[Leaf], list[Leaf]]:
    """A parameter that only one run had at its end is held against what it held last in the other.

    It was not changed there, or its module did not live that long.
    """
    open_: tuple[list[Leaf], list[Leaf]] = ([], [])
    last = _Last(compared.left.trace), _Last(compared.right.trace)
    for leaf in rest[0]:
        entry = tables[1].by_name.get(leaf.name)
        if entry:
            found.append(_sink(compared, kind, leaf.name, leaf.value, last[1].of_name(entry)))
        else:
            open_[0].append(leaf)
    for leaf in rest[1]:
        entry = tables[0].by_name.get(leaf.name)
        if entry:
            found.append(_sink(compared, kind, leaf.name, last[0].of_name(entry), leaf.value))
        else:
            open_[1].append(leaf)
    return open_


class _Last:
    """What the places of one run's values held last, as far as their contents are known."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    def of_name(self, rows: Sequence[Leaf]) -> int:
        """Of the rows of one name: what the tensor held last that is in its place last, if it is one of the same kind."""
        trace, first = self._trace, rows[0].value
        alike = [
            leaf.value
            for leaf in rows
            if leaf.when != "gather" and trace.meta(leaf.value) == trace.meta(first)
        ]
        return self.of(alike[-1] if alike else first)

    def of(self, value: int) -> int:
        versions = self._neighbours.versions(value)
        return int(versions[-1]) if len(versions) else value

    @cached_property
    def _neighbours(self) -> Neighbours:
        return Neighbours(self._trace)


def _renamed(
    compared: Compared,
    kind: LeafKind,
    rest: tuple[list[Leaf], list[Leaf]],
    kept: tuple[set[int], set[int]],
    known: tuple[set[int], set[int]],
) -> list[Sink]:
    """Results without a namesake: matched by the pair that made them, then by content, then in order.

    Another result that only one run has counts if the run kept it to its end: the other run lacks it. What
    was thrown away, such as the result of a warm-up, before the others or after them, is no difference, nor
    is one that the other run holds as well (`known`): the same call made twice. A
    gradient that is not zero always counts, and everything does where a run raised.
    """
    found: list[Sink] = []
    left, right = rest
    for key_of in (by_maker, by_content):
        pairs, left, right = alike(key_of(compared, left, right), left, right)
        found += [_sink(compared, kind, a.name, a.value, b.value) for a, b in pairs]
    both = min(len(left), len(right))
    found += [
        Sink(a.name, kind, a.value, b.value, differs=True)
        for a, b in zip(left[:both], right[:both], strict=True)
    ]
    for side, leaves in enumerate((left[both:], right[both:])):
        for leaf in leaves:
            storage = (compared.left, compared.right)[side].trace.values.storage
            word = int((compared.left, compared.right)[side].by_place[leaf.value])
            if kind == "output" and word and word in known[side]:
                continue
            if kind == "gradient" and _is_zero((compared.left, compared.right)[side], leaf.value):
                continue  # no gradient, or one of zeros: it is cleared either way
            if kind == "gradient" or int(storage[leaf.value]) in kept[side]:
                own: tuple[int | None, int | None] = (
                    (leaf.value, None) if side == 0 else (None, leaf.value)
                )
                found.append(Sink(leaf.name, kind, own[0], own[1], differs=True))
    return found


def _told(compared: Compared, sinks: Sequence[Sink], number: int) -> set[int]:
    """Content words of one run's results that both runs have."""
    word = (compared.left, compared.right)[number].by_place
    pairs = [(s.left, s.right) for s in sinks]
    return {int(word[p[number] or 0]) for p in pairs if None not in p}


def _is_zero(contents: Contents, value: int) -> bool:
    """Whether a value is known to be all zeros."""
    found = contents.trace.fingerprint(value)
    return found is not None and found.n > 0 and found.zero == found.n


def _kept(contents: Contents, table: LeafTable, *, everything: bool) -> set[int]:
    """Storages of results that still lived when the run ended, or of all results."""
    storage = contents.trace.values.storage
    rows = [*table.alive, *table.outputs] if everything else table.alive
    return {int(storage[leaf.value]) for leaf in rows}


def _raised(contents: Contents) -> bool:
    """Whether a run ended with an exception: what it did not come to is missing."""
    footer = contents.trace.footer
    return footer is not None and footer.ended == "raised"


def _alive(compared: Compared, left: LeafTable, right: LeafTable, *, only_one: bool) -> list[Sink]:
    """Values that outlived both runs and that one pair made.

    What only one run kept counts with `only_one`, where the runs have no other results.
    """
    found = []
    by_maker: dict[tuple[int, int], int] = {}
    parts = _held_by_others(compared, left, right)
    for value in _outliving(compared.right, right, parts):
        by_maker.setdefault(made(compared.right, value), value)
    for value in _outliving(compared.left, left, parts):
        op, slot = made(compared.left, value)
        partner = int(compared.pairing.right_of[op]) if op >= 0 else -1
        match = by_maker.pop((partner, slot), None) if partner >= 0 else None
        if match is not None:
            found.append(_sink(compared, "alive", "", value, match))
        elif only_one and op >= 0:
            found.append(Sink("", "alive", value, None, differs=True))
    if only_one:
        found += [
            Sink("", "alive", None, value, differs=True)
            for (op, _), value in by_maker.items()
            if op >= 0
        ]
    return found


def _outliving(contents: Contents, table: LeafTable, parts: frozenset[str]) -> Iterator[int]:
    """Values that outlived a run, but for what is held under these names."""
    storage = contents.trace.values.storage
    held = {int(storage[leaf.value]) for leaf in table.outputs if leaf.name in parts}
    return (leaf.value for leaf in table.alive if int(storage[leaf.value]) not in held)


def _more(
    compared: Compared,
    left: LeafTable,
    right: LeafTable,
    known: Sequence[Sink],
) -> list[Sink]:
    """What one run kept of what it made of calls that the other does not make: the tokens of further steps."""
    tables = left, right
    found = []
    for number in (0, 1):
        told = _told(compared, known, number)
        told |= held((compared.left, compared.right)[1 - number], tables[1 - number])
        seen = {(s.left, s.right)[number] for s in known}
        for value in kept_of_extra_calls(compared, number, tables[number], told):
            if value not in seen:
                own: tuple[int | None, int | None] = (value, None) if number == 0 else (None, value)
                found.append(Sink("", "more", own[0], own[1], differs=True))
    return found


def _written_since(
    compared: Compared, left: LeafTable, right: LeafTable, known: list[Sink]
) -> list[Sink]:
    """What one pair made and both runs kept, and one run alone wrote into once more.

    Not what is held against its namesake already, and not what was left as it was: `_fused_adamw_` says of
    gradients, which it only reads, that it writes them.
    """
    pairing = compared.pairing
    of = compared.left.states.of, compared.right.states.of
    named = {
        (int(of[0][s.left]), int(of[1][s.right]))
        for s in known
        if s.left is not None and s.right is not None
    }
    before: dict[tuple[int, int], tuple[int, bool]] = {}
    for leaf in right.alive:
        op, slot, again = _made_in_both(compared.right, leaf.value, pairing.left_of)
        if op >= 0:
            before.setdefault((op, slot), (leaf.value, again))
    found = []
    for leaf in left.alive:
        op, slot, again = _made_in_both(compared.left, leaf.value, pairing.right_of)
        value, too = (
            before.get((int(pairing.right_of[op]), slot), (None, False))
            if op >= 0
            else (None, False)
        )
        if value is None or again == too:
            continue
        if (int(of[0][leaf.value]), int(of[1][value])) in named:
            continue
        ends = _last_of(compared.left, leaf.value), _last_of(compared.right, value)
        if int(compared.status(np.array(ends[:1]), np.array(ends[1:]))[0]) != EQUAL:
            found.append(Sink("", "alive", *ends, differs=True))
    return found


def _last_of(contents: Contents, value: int) -> int:
    """What stands for all of a value's storage, as it was last: views of it may lie otherwise in the other run."""
    state = int(contents.states.of[value])
    first = contents.value_of_state(state)
    return first if contents.whole[first] or int(contents.states.before[state]) < 0 else value


def _made_in_both(contents: Contents, value: int, partner: Ints) -> tuple[int, int, bool]:
    """The last op with a counterpart that wrote a value's storage, which of its outputs, and whether something wrote since."""
    states, state = contents.states, int(contents.states.of[value])
    first = state
    for _ in range(_LOOK_BACK):
        op, earlier = int(states.writer[state]), int(states.before[state])
        # who hands out memory makes no content
        if op >= 0 and partner[op] >= 0 and not contents.tokens.uninitialised[op]:
            return op, int(contents.root_slot[contents.value_of_state(state)]), state != first
        if earlier < 0:
            break
        state = earlier
    return -1, -1, False


def _steering(compared: Compared) -> list[Sink]:
    """Tensors whose content went into the program: the same op read them on both sides."""
    found = []
    for op in steering_ops(compared.left):
        row = int(compared.row_of_left[op])
        if row < 0:
            continue
        a = compared.left.trace.ops.inputs[op].tolist()
        b = compared.right.trace.ops.inputs[int(compared.pairing.right[row])].tolist()
        found += [
            Sink("", "steering", x, y, differs=True, row=row, slot=slot)
            for slot, (x, y) in enumerate(zip(a, b, strict=False))
            if _differ(compared, x, y)
        ]
    return found


def _unread(compared: Compared) -> list[Sink]:
    """Where nothing is named and nothing was kept: what no op read."""
    found = []
    right = set(unread(compared.right))
    others = {made(compared.right, v): v for v in right}
    for value in unread(compared.left):
        op, slot = made(compared.left, value)
        partner = int(compared.pairing.right_of[op]) if op >= 0 else -1
        match = others.get((partner, slot)) if partner >= 0 else None
        if match is not None:
            right.discard(match)
            found.append(_sink(compared, "unread", "", value, match))
        else:
            found.append(Sink("", "unread", value, None, differs=True))
    found += [Sink("", "unread", None, v, differs=True) for v in sorted(right)]
    return found
