"""Which samples differ, where whole batches are compared."""

from __future__ import annotations

from collections.abc import Sequence

from opdrift.records import DifferingSamples
from opdrift.sinks import Sink
from opdrift.tracefile.reader import Trace
from opdrift.tracefile.schema import RECORDED_SAMPLES

#: Numbers of samples that a sentence names.
_NAMED = 12


def differing_samples(left: Trace, right: Trace, sinks: Sequence[Sink]) -> DifferingSamples | None:
    """The samples whose part of a result differs; None if that was not recorded.

    Args:
        left: The left run, recorded with `batch=`.
        right: The right run, with a batch of the same size.
        sinks: The results of the runs.
    """
    a, b = left.batch, right.batch
    if a is None or b is None or a.size != b.size or a.size == 1:
        return None
    numbers = range(min(a.size, RECORDED_SAMPLES))
    found: set[int] = set()
    compared = False
    for sink in sinks:
        if sink.kind != "output" or sink.left is None or sink.right is None:
            continue
        pairs = [
            (n, left.samples.fingerprint(sink.left, n), right.samples.fingerprint(sink.right, n))
            for n in numbers
        ]
        if any(one is None or other is None for _, one, other in pairs):
            continue
        compared = True
        found.update(n for n, one, other in pairs if one and other and one.key != other.key)
    return DifferingSamples(a.size, tuple(sorted(found))) if compared else None


def in_words(samples: DifferingSamples | None) -> list[str]:
    """A sentence for the notes; none where no sample, or nothing, is known to differ."""
    if samples is None or not samples.numbers:
        return []
    numbers, size = samples.numbers, samples.size
    if len(numbers) == size:
        return [f"all {size} samples of the batch differ in the results"]
    listed = ", ".join(map(str, numbers[:_NAMED]))
    more = f" and {len(numbers) - _NAMED} more" if len(numbers) > _NAMED else ""
    which = f"sample {listed}" if len(numbers) == 1 else f"samples {listed}{more}"
    verb = "differs" if len(numbers) == 1 else "differ"
    return [f"of the {size} samples of the batch only {which} {verb} in the results"]
