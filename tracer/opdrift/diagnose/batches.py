"""What is to be said of batches: which samples differ, and which cannot be the same."""

from __future__ import annotations

from collections.abc import Sequence

from opdrift.case import Case
from opdrift.errors import IncomparableTracesError
from opdrift.records import DifferingSamples
from opdrift.samples import SampleContents
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


def check_lengths(left: Trace, right: Trace, samples: tuple[int, int]) -> None:
    """Refuse two samples that are not the same one.

    Raises:
        IncomparableTracesError: Both runs say how long their sample is, and one is longer.
    """
    found = []
    for trace, number in ((left, samples[0]), (right, samples[1])):
        lengths = trace.batch.lengths if trace.batch is not None else None
        if lengths is None or not 0 <= number < len(lengths):
            return
        found.append(lengths[number])
    if found[0] != found[1]:
        raise IncomparableTracesError(
            f"Sample {samples[0]} of {left.path} is {found[0]} positions long, sample {samples[1]} of {right.path}"
            f" {found[1]}: they are not the same sample. Name the same sample on both sides."
        )


def uneven_inputs(case: Case) -> list[str]:
    """Inputs of which the sample's part is larger in one run: padding that the recorder was not told of."""
    left, right = case.left.contents, case.right.contents
    assert isinstance(left, SampleContents)
    assert isinstance(right, SampleContents)
    found = []
    for name, rows in case.left.leaves.by_name.items():
        others = case.right.leaves.by_name.get(name)
        if not others or rows[0].kind != "input":
            continue
        sizes = left.one.places.size[rows[0].value], right.one.places.size[others[0].value]
        if min(sizes) >= 0 and sizes[0] != sizes[1]:
            found.append(
                f"{name} holds {sizes[0]} elements of the sample on the left and {sizes[1]} on the right"
            )
    return [*found[:3], *_told_lengths(case)] if found else []


def _told_lengths(case: Case) -> list[str]:
    """What the recorder was told of padding, and what to look at, where the parts of a sample are uneven."""
    found = []
    for side in (case.left, case.right):
        trace, one = side.trace, side.one
        lengths = trace.batch.lengths if trace.batch is not None else None
        if lengths is None or one is None:
            continue
        if trace.samples.first_extents is None:
            found.append(
                f"{trace.path} was recorded with lengths=, the longest {max(lengths)}, and which dim of its inputs is the padded"
                " one is not clear: record a batch whose longest sample is as long as one dim of them, and only one"
            )
        else:
            found.append(
                f"{trace.path} was recorded with {lengths[one.sample]} as the length of sample {one.sample}: look whether"
                " lengths= is in the order of the batch"
            )
    return found


def unplaced(trace: Trace) -> list[str]:
    """What the recorder noted of a batch that it did not find."""
    notes = trace.footer.notes if trace.footer is not None else ()
    return [f"{trace.path}: {note}" for note in notes if "sample" in note]
