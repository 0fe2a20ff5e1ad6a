"""One process against the ranks of a distributed run: it is compared with each of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from opdrift.records import Diagnosis, Sides
from opdrift.tracefile.reader import Trace
from opdrift.wording import listed

#: Causes by which a rank has other data: a share of its own, or draws of its own.
_OTHER_DATA: Final = frozenset({"input", "rng"})


def with_each(one: Mapping[int, Trace], other: Mapping[int, Trace]) -> Mapping[int, Trace]:
    """A run of one process as what each rank of the other run is compared with; any other run as it is."""
    if is_alone(one) and not is_alone(other):
        return dict.fromkeys(sorted(other), next(iter(one.values())))
    return one


def is_alone(traces: Mapping[int, Trace]) -> bool:
    """Whether a run had one process."""
    return all((trace.header.world_size or 1) == 1 for trace in traces.values())


def side_of(left: Mapping[int, Trace], right: Mapping[int, Trace]) -> str | None:
    """The side that one process stands on, as `with_each` gives it; None if both are as they were recorded."""
    sides = Sides(left, right)
    for name in ("left", "right"):
        traces = getattr(sides, name)
        if len(traces) > 1 and len({id(trace) for trace in traces.values()}) == 1:
            return name
    return None


def with_other_data(found: Mapping[int, Diagnosis]) -> frozenset[int]:
    """Ranks whose data were other ones than the process had, where another rank had the same: a share of the batch."""
    other = {
        rank
        for rank, one in found.items()
        if one.first is not None
        and one.first.cause.slug in _OTHER_DATA
        and one.first.inputs_match is not False
    }
    return frozenset(other if len(other) < len(found) else ())


def said_of(side: str, compared: tuple[int, ...], apart: frozenset[int], best: int) -> list[str]:
    """In words, what was held against what, and what was not."""
    notes = [
        f"the one process of the {side} run was compared with {listed(compared) if len(compared) == 1 else f'each of {listed(compared)}'}"
        f"; this is rank {best}"
    ]
    if apart:
        ranks = tuple(sorted(apart))
        notes.append(
            f"{listed(ranks)} had other data than the one process, and {'is' if len(ranks) == 1 else 'are'} not compared;"
            " to compare all ranks, run the program that is not sharded on as many ranks"
        )
    return notes
