"""Whether the traces in one folder are of one run: a rank that did not record leaves that of the run before."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from opdrift.tracefile.reader import Trace
from opdrift.wording import counted


def of_another_run(traces: Sequence[Trace]) -> tuple[Trace, str] | None:
    """The first trace that cannot be of the same run as the one before it, and why, in words; None if all can."""
    for first, other in pairwise(traces):
        a, b = first.header, other.header
        said = f"ranks {a.rank or 0} and {b.rank or 0} are not of one run: "
        if a.world_size != b.world_size:
            return (
                other,
                f"{said}the one had {counted(a.world_size or 1, 'rank')}, the other {b.world_size or 1}",
            )
        if None not in (a.launch, b.launch) and a.launch != b.launch:
            began = ", the other at ".join(h.created[:19].replace("T", " ") for h in (a, b))
            return other, f"{said}they were launched apart, the one began at {began} UTC"
    return None
