"""Two distributed runs of which one ended early: why it did, as its ranks show together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from opdrift.causes.structure import end_of
from opdrift.records import Cause, Diagnosis
from opdrift.tracefile.reader import Trace
from opdrift.world.collectives import World
from opdrift.world.findings import end_findings
from opdrift.world.one_run import of_another_run


def explained_end(
    rank: int, one: Diagnosis, left: Mapping[int, Trace], right: Mapping[int, Trace]
) -> Diagnosis:
    """A rank's diagnosis; where its first difference is that one run ended, the reason comes first.

    What a rank raises as another one is gone tells nothing of that one.

    Args:
        rank: The rank.
        one: Its diagnosis.
        left: All traces of the left run.
        right: Those of the right run.
    """
    first = one.first
    if first is None:
        return one
    for name, traces in (("left", left), ("right", right)):
        footer = traces[rank].footer
        if footer is None or not first.cause.summary.startswith(end_of(name, footer)):
            continue
        cause = reason(name, traces)
        if cause is not None:
            changed = replace(first, cause=cause)
            origins = tuple(changed if origin is first else origin for origin in one.origins)
            causes = tuple(dict.fromkeys([cause, *(origin.cause for origin in origins)]))
            return replace(one, first=changed, origins=origins, causes=causes)
    return one


def reason(name: str, traces: Mapping[int, Trace]) -> Cause | None:
    """Which rank of a run ended, or what its ranks did not agree about; None if nothing shows that."""
    ranks = list(traces.values())
    if of_another_run(ranks) is not None:
        return None  # nothing between them means anything
    found = next(iter(end_findings(World(ranks))), None)
    if found is None:
        return None
    return replace(found.cause, summary=f"in the {name} run, {found.cause.summary}")
