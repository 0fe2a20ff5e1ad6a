"""Parameters that ranks share out: which ranks' own parts differ between two runs, and who only gathers them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from opdrift.records import Divergence
from opdrift.shards import names_of
from opdrift.tracefile.reader import Trace

#: (hash, elements, type) of a part.
Key = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Gathered:
    """A gather that handed a rank what differs on others.

    Attributes:
        place: In words: `gather 1 of layers.0 (torch_fsdp)`.
        seq: After which op of the rank it was, in the left run.
        givers: Ranks whose own parts differ between the runs.
    """

    place: str
    seq: int
    givers: tuple[int, ...]


class Parts:
    """The first contents of all ranks' own parts, of two runs."""

    def __init__(self, left: Mapping[int, Trace], right: Mapping[int, Trace]) -> None:
        self._left = left
        self._differ = {
            rank: _differing(_parts(left[rank]), _parts(right[rank]))
            for rank in sorted(left.keys() & right.keys())
        }

    def gathered(self, rank: int, origin: Divergence) -> Gathered | None:
        """The gather that handed a rank a parameter that differs, if its own parts are equal and others' are not."""
        if origin.kind != "leaf" or origin.name is None or rank not in self._differ:
            return None
        names = (origin.name, *origin.members)
        if any(name in self._differ[rank] for name in names):
            return None
        givers: set[int] = set()
        for name in names:
            found = {other for other, differing in self._differ.items() if name in differing}
            if not found:
                return None
            givers |= found
        for mark in self._left[rank].marks:
            if mark.kind == "gather" and origin.name in names_of(mark.fields):
                unit = mark.fields.get("unit") or "the root module"
                place = (
                    f"gather {mark.fields.get('nth', 1)} of {unit} ({mark.fields.get('library')})"
                )
                return Gathered(place, mark.seq, tuple(sorted(givers)))
        return None


def _parts(trace: Trace) -> dict[str, Key | None]:
    """Name -> what this rank's part of a parameter was when it was first gathered; None where that is not known."""
    found: dict[str, Key | None] = {}
    for leaf in trace.leaves:
        if leaf.kind == "shard" and leaf.name not in found:
            content = trace.fingerprint(leaf.value)
            found[leaf.name] = content.key if content is not None else None
    return found


def _differing(left: Mapping[str, Key | None], right: Mapping[str, Key | None]) -> frozenset[str]:
    """Names whose parts are not known to be equal; a rank may have no part of a small parameter."""
    return frozenset(
        name
        for name in left.keys() | right.keys()
        if left.get(name) != right.get(name) or (name in left and left[name] is None)
    )
