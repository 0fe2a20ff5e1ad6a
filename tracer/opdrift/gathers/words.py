"""Findings about marks of gathers, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from opdrift.records import Cause, Finding, Mark, Op
from opdrift.steps import Steps
from opdrift.tracefile.reader import Trace

#: So many names, ops or lines are listed.
LISTED: Final = 4


def finding_at(
    kind: str,
    cause: Cause,
    trace: Trace,
    mark: Mark,
    steps: Steps,
    *,
    names: Sequence[str],
    op: Op | None = None,
    since: int | None = None,
) -> Finding:
    """A finding at a mark, or at the op that did it; the module is the unit that the mark is about.

    Args:
        kind: Which sort of finding.
        cause: What it says.
        trace: Where.
        mark: The mark.
        steps: The steps of the trace.
        names: The parameters that it is about, the one that it shows first.
        op: What did it; None where no op did.
        since: Number of the op after which it may have happened, where the mark only shows that it has.
    """
    return Finding(
        kind,
        cause,
        names[0] if names else None,
        None if op is None else op.name,
        str(mark.fields.get("unit") or ""),
        mark.seq if op is None else op.seq,
        steps.of(mark) if op is None else steps.known_at(op.seq),
        trace.header.rank,
        tuple(names),
        since if op is None else None,
    )


def unit_of(mark: Mark) -> tuple[str, ...]:
    """What a mark of a gather is about: the unit, and its buffer."""
    return tuple(str(mark.fields.get(field)) for field in ("unit", "buffer"))
