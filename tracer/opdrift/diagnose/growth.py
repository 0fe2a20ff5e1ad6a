"""How a difference grows along the run, stretch by stretch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from opdrift.case import Case
from opdrift.receivers import receive
from opdrift.records import GrowthPoint

#: More stretches than this are merged, for people.
_POINTS: Final = 48


def growth_of(case: Case, origins: Mapping[int, float]) -> tuple[GrowthPoint, ...]:
    """One point for each stretch of the left run that lies in one top-level part of the model.

    Args:
        case: The comparison.
        origins: Left op index -> relative difference of an origin there.
    """
    trace = case.left.trace
    if not len(trace.ops):
        return ()
    paths, path_of = np.unique(trace.call_columns.path, return_inverse=True)
    parts = np.array([_part(trace.call_name(path)[0]) for path in paths.tolist()], object)[path_of]
    of_op = parts[case.left.home]
    starts = [0, *(np.flatnonzero(of_op[1:] != of_op[:-1]) + 1).tolist(), len(of_op)]
    differing = np.zeros(len(of_op) + 1, np.int64)
    # a view computes nothing: what it looks at counts where it was made
    rows = np.flatnonzero(
        case.compared.outputs_differ & ~case.left.contents.tokens.view[case.pairing.left]
    )
    differing[1:][case.pairing.left[rows]] = 1
    largest = np.full(len(of_op), -1.0)
    for op, size in origins.items():
        largest[op] = size
        differing[op + 1] = 1
    total = np.cumsum(differing)
    alone = np.cumsum(np.concatenate([[0], case.pairing.right_of < 0]))
    for received in receive(case, rows):
        at = int(case.pairing.left[received.row])
        # an origin has the size that is told of it, which may be that of one output among others
        if received.after is not None and at not in origins:
            largest[at] = received.after
    stretches = _merged([(starts[i], starts[i + 1]) for i in range(len(starts) - 1)])
    points = []
    for start, end in stretches:
        worst = float(largest[start:end].max(initial=-1.0))
        names = list(dict.fromkeys(str(p) for p in of_op[start:end]))
        points.append(
            GrowthPoint(
                module=names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]}",
                ops=end - start,
                differing=int(total[end] - total[start]),
                relative_difference=worst if worst >= 0 else None,
                unpaired=int(alone[end] - alone[start]),
            )
        )
    return tuple(points)


def _part(path: str) -> str:
    """The part of a model that a path lies in: up to the first number, else the first name."""
    names = path.split(".")
    for i, name in enumerate(names):
        if name.isdecimal():
            return ".".join(names[: i + 1])
    return names[0]


def _merged(stretches: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Neighbours put together until there are few enough."""
    size = -(-len(stretches) // _POINTS)
    return [
        (stretches[i][0], stretches[min(i + size, len(stretches)) - 1][1])
        for i in range(0, len(stretches), size)
    ]
