"""What a trace says of sharding: which names are of parts that this rank holds, and where the parts belong.

Integrations write it into the marks of gathers (docs/sharding.md): the parameters of a buffer, where they lie in
it, and which of the ranks that share it this one is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from opdrift.tracefile.reader import Trace

#: Marks that say how parameters are sharded.
GATHERS: Final = frozenset({"gather", "use"})


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a name's tensor is kept between gathers.

    Attributes:
        layout: "each" by itself, or "flat": as a stretch of a tensor that holds many.
        ranks: The ranks that hold a part.
        rank: This one's number among them.
        library: Who shards it.
    """

    layout: str
    ranks: tuple[int, ...]
    rank: int
    library: str


def sharding(trace: Trace) -> dict[str, Sharding]:
    """Name of each parameter that is kept in parts, and of each tensor that holds such parts, and how."""
    found: dict[str, Sharding] = {}
    for mark in trace.marks:
        fields = mark.fields
        ranks = fields.get("ranks")
        if mark.kind not in GATHERS or not isinstance(ranks, list) or len(ranks) < 2:
            continue
        how = Sharding(
            str(fields.get("layout", "flat")),
            tuple(ranks),
            int(fields.get("rank", 0)),
            str(fields.get("library", "")),
        )
        for name in (str(fields.get("buffer")), *names_of(fields)):
            found.setdefault(name, how)
    return found


def differently_sharded(left: Trace, right: Trace) -> frozenset[str]:
    """Names whose tensors are parts in one run, and whole or other parts in the other."""
    a, b = sharding(left), sharding(right)
    return frozenset(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))


def names_of(fields: Mapping[str, Any]) -> list[str]:
    """The names of all parameters that a mark is about, tied ones included."""
    names = [
        part if isinstance(part, str) else str(part[0]) for part in fields.get("parameters") or ()
    ]
    return names + [str(pair[0]) for pair in fields.get("tied") or ()]
