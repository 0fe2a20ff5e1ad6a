"""What ranks asked of their collectives beside the tensors: a dispatcher is handed it in boxes that nothing can read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from opdrift.records import Argument
from opdrift.tracefile.reader import Trace

#: What reduces: with other ranks in its group it adds up something else.
REDUCING: Final = frozenset({"all_reduce", "reduce", "reduce_scatter"})

Asked = Mapping[int, Mapping[str, Argument]]


def asked_of(trace: Trace) -> dict[int, dict[str, Argument]]:
    """By the number of a collective's op: its reduction and factor, its root, and over which ranks it reduces.

    What nothing told is left out: DDP asks for its reductions in C++.
    """
    found: dict[int, dict[str, Argument]] = {}
    for mark in trace.marks:
        if mark.kind != "collective":
            continue
        fields = mark.fields
        told: dict[str, Argument] = {
            "reduce_op": fields.get("reduction"),
            "factor": fields.get("factor"),
            "root": fields.get("root"),
        }
        if fields.get("what") in REDUCING:
            told["ranks"] = tuple(fields.get("ranks") or ())
        found[mark.seq] = {name: value for name, value in told.items() if value is not None}
    return found


def otherwise(
    left: Mapping[str, Argument], right: Mapping[str, Argument], *, same_size: bool
) -> tuple[str, ...]:
    """Names of what two ranks, or one rank of two runs, asked for otherwise.

    Args:
        left: What one asked for.
        right: What the other asked for.
        same_size: Both runs have as many ranks: else each reduces over those that it has.
    """
    both = left.keys() & right.keys()
    return tuple(
        name
        for name in left
        if name in both and left[name] != right[name] and (same_size or name not in _OF_SIZE)
    )


#: What follows from the number of ranks.
_OF_SIZE: Final = frozenset({"ranks", "factor"})
