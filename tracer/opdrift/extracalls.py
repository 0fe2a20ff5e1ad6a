"""Calls of a model that only one run makes, and what that run kept of what they returned."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from opdrift.align.homes import recomputing
from opdrift.contents import Contents
from opdrift.flow import made_from
from opdrift.leaves import LeafTable
from opdrift.pairs import Compared
from opdrift.tracefile.columns import Ints


@dataclass(frozen=True, slots=True)
class ExtraCalls:
    """Calls of a model that one run makes and the other does not, though it calls that model too.

    Attributes:
        calls: Their ids, in order.
        of_op: Per op the one that it ran in; 0 for others.
    """

    calls: tuple[int, ...]
    of_op: Ints

    def numbers(self, contents: Contents, among: Iterable[int]) -> tuple[str, list[int], int]:
        """The path of the first of some of them, which calls of it they are, from 1, and how many there are."""
        columns = contents.trace.call_columns
        chosen = sorted(among)
        path = columns.path[chosen[0]]
        alike = np.flatnonzero((columns.parent == 0) & (columns.path == path))
        alike = alike[alike > 0]
        found = [
            int(np.searchsorted(alike, call)) + 1 for call in chosen if columns.path[call] == path
        ]
        return contents.trace.call_name(int(path))[0], found, len(alike)


def extra_calls(compared: Compared, number: int) -> ExtraCalls:
    """Those of one side, 0 for the left and 1 for the right."""
    contents = (compared.left, compared.right)[number]
    other = (compared.right, compared.left)[number]
    columns = contents.trace.call_columns
    partner = compared.pairing.calls[number]
    again = np.zeros(len(columns), np.bool_)
    again[contents.trace.ops.call[recomputing(contents.trace.ops)]] = True
    roots = columns.parent == 0
    roots[0] = False
    theirs = {
        other.trace.call_name(int(other.trace.call_columns.path[call]))
        for call in np.flatnonzero(other.trace.call_columns.parent == 0).tolist()
        if call
    }
    calls = tuple(
        call
        for call in np.flatnonzero(roots & (partner < 0) & ~again).tolist()
        if contents.trace.call_name(int(columns.path[call])) in theirs
    )
    extra = np.zeros(len(columns), np.int64)
    extra[list(calls)] = calls
    for call in range(calls[0] if calls else len(columns), len(columns)):
        if columns.parent[call] > 0:  # a call has a higher number than the one that made it
            extra[call] = extra[columns.parent[call]]
    return ExtraCalls(calls, extra[contents.trace.ops.call])


def kept_of_extra_calls(
    compared: Compared, number: int, table: LeafTable, known: set[int]
) -> list[int]:
    """Values that outlived one run and were made of what its extra calls returned.

    Args:
        compared: Both runs.
        number: Which run.
        table: Its leaves.
        known: Content words of values that do not count: the result of the same call made twice.
    """
    contents = (compared.left, compared.right)[number]
    extra = extra_calls(compared, number)
    returned = [
        leaf.value for leaf in table.outputs if leaf.kind == "output" and leaf.call in extra.calls
    ]
    if not returned:
        return []
    values, states = made_from(contents, returned)
    word = contents.by_place
    return [
        leaf.value
        for leaf in table.alive
        if (values[leaf.value] or states[contents.states.of[leaf.value]])
        and not (word[leaf.value] and int(word[leaf.value]) in known)
    ]


def held(contents: Contents, table: LeafTable) -> set[int]:
    """Content words of what a run returned, and of what outlived it; 0 for what is not known."""
    rows = [leaf.value for leaf in (*table.outputs, *table.alive)]
    return {int(w) for w in contents.by_place[np.array(rows, np.int64)]}
