"""Findings about marks of gathers, in words."""

from __future__ import annotations

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
    name: str | None,
    op: Op | None = None,
) -> Finding:
    """A finding at a mark, or at the op that did it; the module is the unit that the mark is about."""
    return Finding(
        kind,
        cause,
        name,
        None if op is None else op.name,
        str(mark.fields.get("unit") or ""),
        mark.seq if op is None else op.seq,
        step_of(mark, steps),
        trace.header.rank,
    )


def unit_of(mark: Mark) -> tuple[str, ...]:
    """What a mark of a gather is about: the unit, and its buffer."""
    return tuple(str(mark.fields.get(field)) for field in ("unit", "buffer"))


def step_of(mark: Mark, steps: Steps) -> int | None:
    """The program's own step, or else how many steps of an optimizer were done."""
    named = steps.at(mark.seq)
    done = mark.fields.get("step")
    return named if named is not None else done if isinstance(done, int) else None
