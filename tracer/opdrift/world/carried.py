"""What a collective of a sharded model carries: the parameters that it gathers, or whose gradients it reduces."""

from __future__ import annotations

import math
from typing import Final

from opdrift.shards import names_of
from opdrift.tracefile.reader import Trace
from opdrift.wording import some
from opdrift.world.collectives import Collective

_LISTED: Final = 2


def parameters_of(trace: Trace, part: Collective) -> tuple[str, ...]:
    """Names of those parameters, in the order of their buffer; none where no integration tells.

    A gather is marked once what it brings is there. The gradients of a unit are reduced once its backward is done and
    its parameters are given back.
    """
    if part.what == "all_gather":
        sent = sum(n for _, n in part.given or ())
        for mark in trace.marks:
            shard = mark.fields.get("shard")
            if mark.kind == "gather" and mark.seq >= part.seq and shard and shard["n"] == sent:
                return tuple(names_of(mark.fields))
    if part.what == "reduce_scatter":
        brought = sum(n for _, n in part.got or ()) * len(part.ranks)
        for mark in reversed(trace.marks):
            if (
                mark.kind == "reshard"
                and mark.seq <= part.seq
                and mark.fields.get("phase") == "backward"
                and sum(math.prod(p[2]) for p in mark.fields["parameters"]) <= brought
            ):
                return tuple(names_of(mark.fields))
    return ()


def in_words(part: Collective, names: tuple[str, ...]) -> str:
    """`gradients of a.weight, a.bias and 4 more`; empty where nothing is known."""
    if not names:
        return ""
    what = "gradients" if part.what == "reduce_scatter" else "parameters"
    return f"{what} {'of ' if what == 'gradients' else ''}{some(names, _LISTED)}"
