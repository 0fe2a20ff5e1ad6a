"""What integrations could not follow in a run: nothing is known to be right there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from opdrift.tracefile.reader import Trace


def unfollowed(traces: Iterable[Trace]) -> Sequence[str]:
    """A sentence for each thing that an integration did not follow, of one run's ranks or of one trace."""
    found = dict.fromkeys(
        (str(mark.fields.get("library", "an integration")), str(mark.fields.get("error")))
        for trace in traces
        for mark in trace.marks
        if mark.kind == "integration-failed"
    )
    return [
        f"not all that {library} did was followed, and what was not is not checked: {error}"
        for library, error in found
    ]
