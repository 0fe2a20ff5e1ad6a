"""An origin with what was found out about it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from opdrift.case import Case
from opdrift.origins.model import Origin
from opdrift.records import Cause, Sides
from opdrift.sizes import Size


@dataclass(frozen=True, slots=True)
class Judged:
    """An origin with its size and causes."""

    origin: Origin
    size: Size
    causes: tuple[Cause, ...]


def where_taken(case: Case, origin: Origin, cause: Cause) -> Origin:
    """An origin at the view that takes another part of equal tensors, if its arguments are the cause.

    It was judged at its first use: views are not compared. That may be in another module, which has no part in it.
    """
    if origin.story != "factory" or cause.slug != "op-args" or case.by_sample:
        return origin
    taken = origin.region.left[0], origin.region.right[0]
    if not case.left.contents.tokens.view[taken[0]]:
        return origin
    return replace(origin, story="op", op=Sides(*taken), slot=0, inputs_match=True)
