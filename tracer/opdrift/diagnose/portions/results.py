"""What the model returned for each batch: of a batch as a whole, against that of its parts, put end to end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from opdrift import tfp1
from opdrift.case import Case
from opdrift.diagnose.portions.split import Split, results_of
from opdrift.records import Sides
from opdrift.tracefile.fingerprints import Fingerprint
from opdrift.tracefile.reader import Trace


@dataclass(frozen=True, slots=True)
class Results:
    """All that the model returned.

    Attributes:
        equal: Bit for bit, with the parts of a batch in the order of the ranks and of the calls.
        norms: Of all of it, in each run.
    """

    equal: bool
    norms: Sides[float]


def put_together(case: Case, split: Split, fellows: Sides[Sequence[Trace]]) -> Results | None:
    """What the model returned in both runs; None where not all of it is known, or not all of it has a row for each sample."""
    worlds = (case.left.trace, *fellows.left), (case.right.trace, *fellows.right)
    told = [[results_of(trace) for trace in sorted(w, key=_rank)] for w in worlds]
    if not told[0][0] or told[0][0].keys() != told[1][0].keys():
        return None
    equal = True
    squares = [0.0, 0.0]
    for name in told[0][0]:
        for batch in split.batches:
            sides = [
                _parts(ranks if batch.divided else ranks[:1], name, calls)
                for ranks, calls in zip(told, (batch.left, batch.right), strict=True)
            ]
            left, right = sides
            if left is None or right is None or sum(f.n for f in left) != sum(f.n for f in right):
                return None
            equal = equal and _joined(left) == _joined(right)
            squares[0] += sum(f.ssq for f in left)
            squares[1] += sum(f.ssq for f in right)
    return Results(equal, Sides(math.sqrt(squares[0]), math.sqrt(squares[1])))


def _rank(trace: Trace) -> int:
    return trace.header.rank or 0


def _parts(
    ranks: Sequence[dict[str, list[Fingerprint | None]]], name: str, calls: range
) -> list[Fingerprint] | None:
    """What was returned for a batch under a name, part by part; None where some of it is not known."""
    found = []
    for rank in ranks:
        for call in calls:
            part = rank[name][call] if call < len(rank.get(name, ())) else None
            if part is None:
                return None
            found.append(part)
    return found


def _joined(parts: Sequence[Fingerprint]) -> tuple[int, set[int]]:
    """The digest of contents put end to end, and their types."""
    laid = [(f.raw, tfp1.digits(f.n, tfp1.Code(f.code).bytes)) for f in parts]
    return tfp1.concat(laid), {f.code for f in parts}
