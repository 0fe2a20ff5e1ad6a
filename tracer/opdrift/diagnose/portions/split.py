"""How each batch goes through the model: whole, in several calls, or shared out over ranks."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
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


@dataclass(frozen=True, slots=True)
class Split:
    """How two runs go through the same batches in different ways.

    Attributes:
        calls: Calls of the model for a batch, on each rank; one of the runs has 1.
        ranks: Ranks that share a batch.
        returns: Behind which ops, by number, the model returned.
    """

    calls: Sides[int]
    ranks: Sides[int]
    returns: Sides[tuple[int, ...]]

    @property
    def parts(self) -> Sides[int]:
        """Into how many parts each run divides a batch."""
        return Sides(self.calls.left * self.ranks.left, self.calls.right * self.ranks.right)

    def done(self, left: int, right: int) -> int | None:
        """How many batches were done before an op of each run, by their numbers; None if not as many in both."""
        a, b = bisect_right(self.returns.left, left), bisect_right(self.returns.right, right)
        return a // self.calls.left if a * self.calls.right == b * self.calls.left else None


def split_of(case: Case, fellows: Sides[Sequence[Trace]]) -> Split | None:
    """How the runs divide their batches; None where they do it alike, or nothing tells.

    What a call is given or returns has a row for each sample. Those of all parts, on all ranks, add up to the batch.

    Args:
        case: Both runs.
        fellows: The traces of the other ranks of each run.
    """
    worlds = (case.left.trace, *fellows.left), (case.right.trace, *fellows.right)
    ranks = Sides(len(worlds[0]), len(worlds[1]))
    returned = [_of_calls(world[0], "output") for world in worlds]
    for kind in ("output", "input"):
        told = [[_of_calls(trace, kind) for trace in world] for world in worlds]
        for name in told[0][0].keys() & told[1][0].keys():
            calls = _calls(*([rank.get(name, []) for rank in world] for world in told))
            if calls is None or (ranks.left == ranks.right and calls.left == calls.right):
                continue
            returns = _returns(returned, [len(world[0][name]) for world in told])
            if returns is not None:
                return Split(calls, ranks, returns)
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


def _calls(left: list[list[_Given]], right: list[list[_Given]]) -> Sides[int] | None:
    """Calls for a batch in each run, of which one has 1, from the shapes of each rank's calls in order."""
    numbers = {len(rank) for rank in left}, {len(rank) for rank in right}
    if len(numbers[0]) > 1 or len(numbers[1]) > 1:
        return None
    counts = numbers[0].pop(), numbers[1].pop()
    batches = min(counts)
    if not batches or counts[0] % batches or counts[1] % batches:
        return None
    calls = Sides(counts[0] // batches, counts[1] // batches)
    divided = False
    for i in range(batches):
        parts = _of_batch(left, i, calls.left), _of_batch(right, i, calls.right)
        if len({*parts[0], *parts[1]}) == 1:
            continue  # every rank is given all of it, as where a model is evaluated
        whole = _put_together(parts[0])
        if whole is None or whole != _put_together(parts[1]):
            return None
        divided = True
    return calls if divided else None


def _of_batch(ranks: list[list[_Given]], batch: int, calls: int) -> list[Shape]:
    return [given.shape for rank in ranks for given in rank[batch * calls : (batch + 1) * calls]]


def _put_together(parts: list[Shape]) -> Shape | None:
    if not all(parts) or len({part[1:] for part in parts}) > 1:
        return None
    return (sum(part[0] for part in parts), *parts[0][1:])
