"""What a comparison found, on a timeline: where differences begin, and arrows around the first."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Final

import numpy as np

from opdrift.export.opslices import Arrows
from opdrift.export.tracks import Instant, Items, Value
from opdrift.plugins import OP_STATUSES, Comparison, Process
from opdrift.records import Divergence
from opdrift.render.words import name
from opdrift.tracefile.reader import Trace

#: Further origins that are marked; a run that differs everywhere has thousands.
_MARKED: Final = 100
#: Arrows are drawn for so many ops that pass the difference on, breadth first: more cannot be read.
_FOLLOWED: Final = 12
#: And from one op to so many that read its result.
_READERS: Final = 8
_EQUAL: Final = OP_STATUSES.index("equal")


def marked(process: Process, track: int, clock: int) -> Iterator[Instant]:
    """The first divergence and the further ones, each where its op begins.

    Those in weights and inputs stand at the op that uses them first. What is in no op of this run stands at its start.

    Args:
        process: What is exported.
        track: For the instants.
        clock: What is to be added to a recorded time for one since 1970.
    """
    comparison = process.comparison
    if comparison is None:
        return
    diagnosis = comparison.diagnosis
    first = diagnosis.first or diagnosis.first_bitwise
    chosen = [first] if first is not None else []
    chosen += [each for each in diagnosis.origins if each is not first][:_MARKED]
    shown = frozenset(process.ops.tolist()) if not process.whole else None
    for number, each in enumerate(chosen):
        index = place(process.trace, each)
        if shown is not None and (index is None or index not in shown):
            continue
        time = (
            process.trace.header.start_ns if index is None else int(process.trace.ops.start[index])
        )
        words = "first divergence" if number == 0 else "divergence"
        yield Instant(track, f"{words}: {_what(each)}", each.cause.slug, time + clock, _told(each))


def place(trace: Trace, divergence: Divergence) -> int | None:
    """The op at which a divergence stands in the exported run, the right one; None where it has none there."""
    return None if divergence.seq.right is None else trace.index_of(divergence.seq.right)


def arrows(process: Process) -> Arrows:
    """From what the first diverging op read to it, and on to what its difference reached next."""
    out: dict[int, list[int]] = {}
    into: dict[int, list[int]] = {}
    comparison = process.comparison
    if comparison is not None and comparison.first is not None:
        shown = np.zeros(len(process.trace.ops), np.bool_)
        shown[process.ops] = True
        ids = count(1)
        for source, target in _edges(process.trace, comparison, comparison.first):
            if shown[source] and shown[target]:
                ident = next(ids)
                out.setdefault(source, []).append(ident)
                into.setdefault(target, []).append(ident)
    return Arrows(
        {op: tuple(found) for op, found in out.items()},
        {op: tuple(found) for op, found in into.items()},
    )


def _edges(trace: Trace, comparison: Comparison, first: int) -> Iterator[tuple[int, int]]:
    inputs = trace.ops.inputs
    made = {int(m) for m in trace.producer[inputs[first]].tolist() if 0 <= m < first}
    yield from ((source, first) for source in sorted(made))
    producer, reader = trace.producer[inputs.values], inputs.rows()
    waiting, seen = [first], {first}
    while waiting and len(seen) <= _FOLLOWED:
        op = waiting.pop(0)
        readers = np.unique(reader[(producer == op) & (reader > op)])
        reached = readers[comparison.status[readers] != _EQUAL][:_READERS].tolist()
        for each in reached:
            yield op, each
            if each not in seen:
                seen.add(each)
                waiting.append(each)


def _what(divergence: Divergence) -> str:
    return name(divergence.name or divergence.op or divergence.kind)


def _told(divergence: Divergence) -> Items:
    """What the card says of it."""
    told: dict[str, Value] = {
        "cause": f"{divergence.cause.slug} ({divergence.cause.confidence}): {divergence.cause.summary}",
        "evidence": list(divergence.cause.evidence),
        "try": divergence.cause.try_,
        "module": divergence.module or "(root)",
        "source": divergence.source,
        "op here": divergence.seq.right,
        "op in the other run": divergence.seq.left,
        "relative difference": divergence.relative_difference,
        "beyond rounding": divergence.material,
    }
    return tuple((key, value) for key, value in told.items() if value not in (None, "", []))
