"""Where a run's results are: what its modules returned, gradients, changed parameters, what outlived it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from opdrift.contents import Contents
from opdrift.flow import steering_ops, unread
from opdrift.leaves import LeafTable
from opdrift.pairs import DIFFERENT, Compared
from opdrift.records import Leaf, LeafKind


@dataclass(frozen=True, slots=True)
class Sink:
    """One result of the runs.

    Attributes:
        name: As its leaf row says; "" for values without one.
        kind: `output`, `gradient`, `parameter`, `buffer`, `alive`, or `steering` for a tensor whose
            content went into the program.
        left: Left value id, None where the left run has no such result.
        right: Right value id.
        differs: Known to differ, or missing on one side.
    """

    name: str
    kind: str
    left: int | None
    right: int | None
    differs: bool


def find_sinks(compared: Compared, left: LeafTable, right: LeafTable) -> list[Sink]:
    """All results of two runs, matched."""
    found = _named(compared, left, right)
    known = {(s.left, s.right) for s in found}
    alive = _alive(compared, left, right, only_one=not found)
    found += [s for s in alive if (s.left, s.right) not in known]
    found += _steering(compared)
    if not found:
        found = _unread(compared)
    return found


def _named(compared: Compared, left: LeafTable, right: LeafTable) -> list[Sink]:
    found: list[Sink] = []
    kinds: tuple[LeafKind, ...] = ("output", "gradient", "parameter", "buffer")
    for kind in kinds:
        a, b = _numbered(left.outputs, kind), _numbered(right.outputs, kind)
        found += [_sink(compared, kind, k[0], a[k], b[k]) for k in a if k in b]
        rest = [a[k] for k in a if k not in b], [b[k] for k in b if k not in a]
        if kind in ("parameter", "buffer"):
            rest = _with_entries(compared, kind, rest, (left, right), found)
        found += _renamed(compared, kind, *rest)
    return found


def _numbered(rows: Sequence[Leaf], kind: LeafKind) -> dict[tuple[str, int], int]:
    """(name, occurrence) -> value."""
    counts: dict[str, int] = defaultdict(int)
    found = {}
    for leaf in rows:
        if leaf.kind == kind:
            found[leaf.name, counts[leaf.name]] = leaf.value
            counts[leaf.name] += 1
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


def _with_entries(
    compared: Compared,
    kind: LeafKind,
    rest: tuple[list[int], list[int]],
    tables: tuple[LeafTable, LeafTable],
    found: list[Sink],
) -> tuple[list[int], list[int]]:
    """A parameter that only one run changed is held against what it was in the other."""
    left, right = tables
    open_left, open_right = [], []
    names = {leaf.value: leaf.name for leaf in left.outputs if leaf.kind == kind}
    for value in rest[0]:
        entry = right.by_name.get(names[value])
        if entry:
            found.append(_sink(compared, kind, names[value], value, entry[0].value))
        else:
            open_left.append(value)
    names = {leaf.value: leaf.name for leaf in right.outputs if leaf.kind == kind}
    for value in rest[1]:
        entry = left.by_name.get(names[value])
        if entry:
            found.append(_sink(compared, kind, names[value], entry[0].value, value))
        else:
            open_right.append(value)
    return open_left, open_right


def _renamed(compared: Compared, kind: LeafKind, left: list[int], right: list[int]) -> list[Sink]:
    """Results without a namesake: matched by the pair that made them, then by content, then in order."""
    found: list[Sink] = []
    if not left and not right:
        return found
    by_row: dict[tuple[int, int], int] = {}
    for value in right:
        writer = int(compared.right.states.writer[compared.right.states.of[value]])
        by_row.setdefault((writer, int(compared.right.root_slot[value])), value)
    rest_left = []
    taken: set[int] = set()
    for value in left:
        writer = int(compared.left.states.writer[compared.left.states.of[value]])
        partner = int(compared.pairing.right_of[writer]) if writer >= 0 else -1
        match = by_row.get((partner, int(compared.left.root_slot[value]))) if partner >= 0 else None
        if match is None or match in taken:
            rest_left.append(value)
        else:
            taken.add(match)
            found.append(_sink(compared, kind, "", value, match))
    rest_right = [v for v in right if v not in taken]
    words: dict[int, list[int]] = defaultdict(list)
    for value in rest_right:
        words[int(compared.right.by_place[value])].append(value)
    open_left = []
    for value in rest_left:
        equal = words.get(int(compared.left.by_place[value]) or -1)
        if equal:
            match = equal.pop(0)
            taken.add(match)
            found.append(_sink(compared, kind, "", value, match))
        else:
            open_left.append(value)
    open_right = [v for v in rest_right if v not in taken]
    for i in range(max(len(open_left), len(open_right))):
        a = open_left[i] if i < len(open_left) else None
        b = open_right[i] if i < len(open_right) else None
        found.append(Sink("", kind, a, b, differs=True))
    return found


def _alive(compared: Compared, left: LeafTable, right: LeafTable, *, only_one: bool) -> list[Sink]:
    """Values that outlived both runs and that one pair made.

    What only one run kept counts with `only_one`, where the runs have no other results.
    """
    found = []
    by_maker: dict[tuple[int, int], int] = {}
    for leaf in right.alive:
        by_maker.setdefault(_made(compared.right, leaf.value), leaf.value)
    for leaf in left.alive:
        op, slot = _made(compared.left, leaf.value)
        partner = int(compared.pairing.right_of[op]) if op >= 0 else -1
        match = by_maker.pop((partner, slot), None) if partner >= 0 else None
        if match is not None:
            found.append(_sink(compared, "alive", "", leaf.value, match))
        elif only_one and op >= 0:
            found.append(Sink("", "alive", leaf.value, None, differs=True))
    if only_one:
        found += [
            Sink("", "alive", None, value, differs=True)
            for (op, _), value in by_maker.items()
            if op >= 0
        ]
    return found


def _made(contents: Contents, value: int) -> tuple[int, int]:
    state = int(contents.states.of[value])
    return int(contents.states.writer[state]), int(contents.root_slot[value])


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
            _sink(compared, "steering", "", x, y)
            for x, y in zip(a, b, strict=False)
            if _differ(compared, x, y)
        ]
    return found


def _unread(compared: Compared) -> list[Sink]:
    """Where nothing is named and nothing was kept: what no op read."""
    found = []
    right = set(unread(compared.right))
    others = {_made(compared.right, v): v for v in right}
    for value in unread(compared.left):
        op, slot = _made(compared.left, value)
        partner = int(compared.pairing.right_of[op]) if op >= 0 else -1
        match = others.get((partner, slot)) if partner >= 0 else None
        if match is not None:
            right.discard(match)
            found.append(_sink(compared, "unread", "", value, match))
        else:
            found.append(Sink("", "unread", value, None, differs=True))
    found += [Sink("", "unread", None, v, differs=True) for v in sorted(right)]
    return found
