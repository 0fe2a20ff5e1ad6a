"""Pair the ops of two traces: scopes first, then the ops of a scope in order, then what moved between scopes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from opdrift.align.calls import Maps, match_calls, rename, wrapper_prefix
from opdrift.align.ops import Pairs, across_scopes, within_scopes
from opdrift.align.tree import CallTree
from opdrift.align.unrelated import drop_unrelated
from opdrift.contents import Contents
from opdrift.shards import differently_sharded, ops_on_parts
from opdrift.tokens import mix
from opdrift.tracefile.columns import Ints

__all__ = ["Maps", "Pairing", "align"]


@dataclass(frozen=True, slots=True)
class Pairing:
    """Which left op corresponds to which right op.

    Attributes:
        left: Op indexes of the pairs in the left trace, ascending.
        right: Op indexes of the pairs in the right trace.
        right_of: Per left op the right one, -1 if it has none.
        left_of: Per right op the left one, -1 if it has none.
        calls: Per call its counterpart in the other run, -1 if it has none; per side.
        home: The call of each op, per side; a backward op counts to its forward op's.
        repeats: Per op the op of the same run that it repeats in the backward pass, -1 for others; per side.
        method: How the pairs were found, for people.
        fallback_reason: Why a part could only be paired by occurrence; None if all was paired by rule.
    """

    left: Ints
    right: Ints
    right_of: Ints
    left_of: Ints
    calls: tuple[Ints, Ints]
    home: tuple[Ints, Ints]
    repeats: tuple[Ints, Ints]
    method: str
    fallback_reason: str | None


def align(left: Contents, right: Contents, *, maps: Maps = ()) -> Pairing:
    """Pair the ops of two traces.

    Ops inserted or removed on one side shift nothing; modules that were renamed, moved or reordered
    are found by their structure and by the values they return.

    Args:
        left: The left trace.
        right: The right trace.
        maps: Pairs of a path on the left and its name on the right.
    """
    # The search breaks ties by the side it starts from: always start from the same one, so that
    # exchanging the traces exchanges the answer and nothing else.
    swapped = _rank(right) < _rank(left)
    if swapped:
        found = _align(right, left, [(b, a) for a, b in maps])
    else:
        found = _align(left, right, list(maps))
    i, j = (found.right, found.left) if swapped else (found.left, found.right)
    order = np.argsort(i, kind="stable")
    right_of, left_of = (
        (found.left_of, found.right_of) if swapped else (found.right_of, found.left_of)
    )
    calls, home, repeats = found.calls, found.home, found.repeats
    return Pairing(
        i[order],
        j[order],
        right_of,
        left_of,
        (calls[1], calls[0]) if swapped else calls,
        (home[1], home[0]) if swapped else home,
        (repeats[1], repeats[0]) if swapped else repeats,
        found.method,
        found.fallback_reason,
    )


def _rank(contents: Contents) -> tuple[int, int, int]:
    """A number of what a trace does and what came out, so that two different ones have an order."""
    ops = np.arange(len(contents.trace.ops), dtype=np.uint64)
    done = mix(contents.tokens.full.all, ops).sum() if len(ops) else 0
    return len(ops), int(done), int(contents.by_place.sum())


def _align(left: Contents, right: Contents, maps: list[tuple[str, str]]) -> Pairing:
    method = ["scopes by path, then ops by signature and occurrence"]
    if not maps and (prefix := wrapper_prefix(left.trace, right.trace)):
        maps = [prefix]
        side = "right" if prefix[1] else "left"
        method.append(f"{side} paths carry the prefix {prefix[1] or prefix[0]!r}")
    trees = CallTree(left, rename(maps)), CallTree(right, lambda path: path)
    calls = match_calls(*trees)
    both = np.flatnonzero(calls >= 0)
    renamed = int(np.count_nonzero(trees[0].path[both] != trees[1].path[calls[both]]))
    if renamed:
        method.append(f"{renamed} renamed scopes by structure")
    pairs = Pairs(left, right)
    within_scopes(pairs, (trees[0].home, trees[1].home), calls)
    across_scopes(pairs)
    drop_unrelated(pairs)
    _apart(pairs)
    reason = None
    if pairs.cut_short:
        rows, columns = pairs.cut_short
        reason = f"a stretch of {rows} against {columns} ops has no op that occurs once in both; it was paired by occurrence"
    i = np.flatnonzero(pairs.right_of >= 0)
    back = np.full(len(trees[1]), -1, np.int64)
    back[calls[both]] = both
    return Pairing(
        i,
        pairs.right_of[i],
        pairs.right_of,
        pairs.left_of,
        (calls, back),
        (trees[0].home, trees[1].home),
        (trees[0].repeated_ops(), trees[1].repeated_ops()),
        "; ".join(method),
        reason,
    )


def _apart(pairs: Pairs) -> None:
    """Drop the pairs of ops on parts of parameters, where the runs are sharded in different ways.

    A part may have the shape of another parameter, or of another part; what comes of it is compared once it is gathered.
    """
    if not differently_sharded(pairs.left.trace, pairs.right.trace):
        return
    left, right = ops_on_parts(pairs.left.trace), ops_on_parts(pairs.right.trace)
    paired = np.flatnonzero(pairs.right_of >= 0)
    for op in paired[left[paired] | right[pairs.right_of[paired]]].tolist():
        pairs.drop(op)
