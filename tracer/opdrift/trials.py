"""What a pipeline's trial run left behind: it is thrown away, but for the statistics of what ran through it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from opdrift.records import Cause, Finding
from opdrift.tracefile.reader import Trace
from opdrift.wording import some

_KIND = "trial"


def written_by_trials(trace: Trace) -> frozenset[tuple[str, int]]:
    """(name of a buffer, number of the op before) of what trial runs wrote: no recorded op did, and it is known."""
    return frozenset(
        (name, mark.seq)
        for mark in trace.marks
        if mark.kind == _KIND
        for name in mark.fields.get("buffers") or ()
    )


def trials(trace: Trace, step_at: Callable[[int | None], int | None]) -> Iterator[Finding]:
    """One finding for all buffers that a trial run wrote.

    Args:
        trace: The trace of one process.
        step_at: The step of the program that an op belongs to.
    """
    for mark in trace.marks:
        names = mark.fields.get("buffers") if mark.kind == _KIND else None
        if not names:
            continue
        unwritten, stage = mark.fields.get("unwritten"), mark.fields.get("stage")
        content = "memory that nothing has written" if unwritten else "its first micro-batch"
        yield Finding(
            _KIND,
            Cause(
                "uninitialised" if unwritten else "buffer-state",
                "certain",
                f"{some(names)}: written by a trial run of the pipeline's stage {stage} on {content}",
                (
                    "torch.distributed.pipelining runs a stage once before the first step, to learn the shapes that"
                    " it sends and receives; what that returns is thrown away, what it writes into buffers is not",
                ),
                "Give PipelineStage input_args and output_args, so that it does not have to try; or save the buffers"
                " before the first step and put them back after it.",
            ),
            names[0],
            None,
            mark.fields.get("unit") or "",
            mark.seq,
            step_at(mark.seq),
            trace.header.rank,
        )
