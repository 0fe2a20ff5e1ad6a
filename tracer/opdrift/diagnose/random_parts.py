"""Weights of distributed runs that were put together from what each rank drew for itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from opdrift.gathers import random_parts
from opdrift.records import Diagnosis
from opdrift.tracefile.reader import Trace


def with_random_parts(
    found: Diagnosis, left: Mapping[int, Trace], right: Mapping[int, Trace]
) -> Diagnosis:
    """The answer, and where weights differ, what random parts were gathered: one rank's trace cannot tell."""
    if not any(_is_of_weights(one) for one in (found, *found.ranks.values())):
        return found
    sides = random_parts(list(left.values())), random_parts(list(right.values()))
    if sides[0] == sides[1]:
        lines = [f"both: {sides[0]}"] if sides[0] else []
    else:
        named = zip(("left", "right"), sides, strict=True)
        lines = [f"{side}: {said}" for side, said in named if said]
    ranks = {rank: _told(one, lines) for rank, one in found.ranks.items()}
    return replace(_told(found, lines), ranks=ranks)


def _is_of_weights(found: Diagnosis) -> bool:
    return found.first is not None and found.first.cause.slug == "weights"


def _told(found: Diagnosis, lines: list[str]) -> Diagnosis:
    old = found.first
    if old is None or not _is_of_weights(found) or not lines:
        return found
    cause = replace(old.cause, evidence=(*old.cause.evidence, *lines))
    first = replace(old, cause=cause)
    return replace(
        found,
        first=first,
        origins=tuple(first if each == old else each for each in found.origins),
        causes=tuple(cause if each == old.cause else each for each in found.causes),
    )
