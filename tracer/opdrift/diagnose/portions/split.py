"""How each batch goes through the model: whole, in several calls, or shared out over ranks."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from opdrift.case import Case
from opdrift.leaves import AFTER, BEFORE
from opdrift.records import LeafKind, Sides
from opdrift.tracefile.fingerprints import Fingerprint
from opdrift.tracefile.reader import Trace

Shape = tuple[int, ...]


class _Given(NamedTuple):
    seq: int
    shape: Shape


class Batch(NamedTuple):
    """What goes through the model at once, in each run: calls, by their numbers, and whether the runs divide it in other ways."""

    left: range
    right: range
    divided: bool


@dataclass(frozen=True, slots=True)
class Split:
    """How two runs go through the same batches in different ways.

    Attributes:
        batches: Those that the runs give alike, as where a model is evaluated, included.
        ranks: Ranks that share a batch.
        ends: Behind which op, by its number, the model returned what was last of each batch.
    """

    batches: tuple[Batch, ...]
    ranks: Sides[int]
    ends: Sides[tuple[int, ...]]

    @property
    def calls(self) -> Sides[int]:
        """Calls of the model on each rank for a batch that is divided."""
        batch = next(batch for batch in self.batches if batch.divided)
        return Sides(len(batch.left), len(batch.right))

    @property
    def parts(self) -> Sides[int]:
        """Into how many parts each run divides a batch."""
        calls = self.calls
        return Sides(calls.left * self.ranks.left, calls.right * self.ranks.right)

    def done(self, left: int, right: int) -> int | None:
        """How many batches were done before an op of each run, by their numbers; None if not as many in both."""
        a, b = bisect_right(self.ends.left, left), bisect_right(self.ends.right, right)
        return a if a == b else None


def split_of(case: Case, fellows: Sides[Sequence[Trace]]) -> Split | None:
    """How the runs divide their batches; None where they do it alike, or nothing tells.

    What a call is given or returns has a row for each sample. Those of all parts, on all ranks, add up to the batch.

    Args:
        case: Both runs.
        fellows: The traces of the other ranks of each run.
    """
    worlds = (case.left.trace, *fellows.left), (case.right.trace, *fellows.right)
    returned = [_of_calls(world[0], "output") for world in worlds]
    for kind in ("output", "input"):
        told = [[_of_calls(trace, kind) for trace in world] for world in worlds]
        for name in told[0][0].keys() & told[1][0].keys():
            calls = [[rank.get(name, []) for rank in world] for world in told]
            batches = tuple(_batches(*calls))
            returns = _returns(returned, [len(world[0]) for world in calls])
            if returns is None or not any(batch.divided for batch in batches):
                continue
            ends = Sides(
                tuple(returns.left[batch.left[-1]] for batch in batches),
                tuple(returns.right[batch.right[-1]] for batch in batches),
            )
            return Split(batches, Sides(len(worlds[0]), len(worlds[1])), ends)
    return None


def _of_calls(trace: Trace, kind: LeafKind) -> dict[str, list[_Given]]:
    """By name what the model was given or returned, in order."""
    moments = AFTER if kind == "output" else BEFORE
    found: dict[str, list[_Given]] = defaultdict(list)
    for leaf in trace.leaves:
        if leaf.kind == kind and leaf.when in moments:
            found[leaf.name].append(_Given(leaf.seq, trace.meta(leaf.value).shape))
    return found


def results_of(trace: Trace) -> dict[str, list[Fingerprint | None]]:
    """By name what the model returned, in order."""
    found: dict[str, list[Fingerprint | None]] = defaultdict(list)
    for leaf in trace.leaves:
        if leaf.kind == "output" and leaf.when in AFTER:
            found[leaf.name].append(trace.fingerprint(leaf.value))
    return found


def _returns(
    returned: Sequence[Mapping[str, list[_Given]]], counts: Sequence[int]
) -> Sides[tuple[int, ...]] | None:
    """The moments of something that both models return in each of so many calls."""
    left, right = returned
    for name in left.keys() & right.keys():
        if [len(left[name]), len(right[name])] == counts:
            return Sides(*(tuple(given.seq for given in side[name]) for side in returned))
    return None


def _batches(left: list[list[_Given]], right: list[list[_Given]]) -> Iterator[Batch]:
    """The batches of two runs, from the shapes of each rank's calls in order; none where they do not add up."""
    ends = {len(rank) for rank in left}, {len(rank) for rank in right}
    if len(ends[0]) > 1 or len(ends[1]) > 1:
        return
    end = ends[0].pop(), ends[1].pop()
    found: list[Batch] = []
    i = j = 0
    while i < end[0] and j < end[1]:
        batch = _batch(left, range(i, end[0]), right, range(j, end[1]))
        if batch is None:
            return
        found.append(batch)
        i, j = batch.left.stop, batch.right.stop
    if (i, j) == end:
        yield from found


def _batch(
    left: list[list[_Given]], calls: range, right: list[list[_Given]], others: range
) -> Batch | None:
    """The first batch of what is left: as many calls of each run as have the same rows together."""
    n = m = 1
    shapes = {rank[calls[0]].shape for rank in left} | {rank[others[0]].shape for rank in right}
    if len(shapes) == 1:
        return Batch(calls[:1], others[:1], divided=False)
    while n <= len(calls) and m <= len(others):
        a, b = _put_together(left, calls[:n]), _put_together(right, others[:m])
        if a is None or b is None or a[1:] != b[1:]:
            return None
        if a == b:
            return Batch(calls[:n], others[:m], divided=True)
        n, m = (n + 1, m) if a[0] < b[0] else (n, m + 1)
    return None


def _put_together(ranks: list[list[_Given]], calls: range) -> Shape | None:
    parts = [rank[call].shape for rank in ranks for call in calls]
    if not all(parts) or len({part[1:] for part in parts}) > 1:
        return None
    return (sum(part[0] for part in parts), *parts[0][1:])
