"""Hold one sample of a run's batch against one sample of another's.

A run of one sample alone and a run of many, recorded with `batch=`, compute the same thing for that sample. What
can be compared of it is, value by value: the part of a sample where the value carries the batch, and the whole
value where it does not, as for weights.
"""

from __future__ import annotations

from functools import cached_property
from typing import Final, Literal

import numpy as np

from opdrift.contents import Contents
from opdrift.errors import IncomparableTracesError
from opdrift.tokens import Words, mix
from opdrift.tracefile.reader import Fingerprint, FingerprintColumns, Ints, Trace
from opdrift.tracefile.samples import Followed
from opdrift.tracefile.schema import RECORDED_SAMPLES

#: Why a value has nothing to compare: it is made of all samples; where the batch, or the padding, lies in it is not
#: known; or it was not fingerprinted (a view, unwritten memory, a sample beyond those that are recorded).
Missing = Literal["mixed", "unknown", "padding", "unread"]
#: A batch of one carries its sample everywhere, so nothing is recorded apart.
_ALONE: Final = 1


class OneSample:
    """A trace as seen by one sample of its batch.

    Args:
        contents: The contents of the trace.
        sample: Number of the sample, from 0.

    Raises:
        IncomparableTracesError: The run was recorded without `batch=`, its batch has no such sample or no record of
            it, or no input was found to carry a batch of that size.
    """

    def __init__(self, contents: Contents, sample: int) -> None:
        self.contents = contents
        self.trace: Trace = contents.trace
        self.sample = sample
        batch = self.trace.batch
        if batch is None:
            raise IncomparableTracesError(
                f"{self.trace.path} was recorded without batch=, so it has no samples."
                " Record it with batch=opdrift.Batch(size), also a run of one sample."
            )
        if not 0 <= sample < batch.size:
            raise IncomparableTracesError(
                f"{self.trace.path} has samples 0 to {batch.size - 1}; there is no sample {sample}."
            )
        if sample >= RECORDED_SAMPLES:
            raise IncomparableTracesError(
                f"{self.trace.path} has records of samples 0 to {RECORDED_SAMPLES - 1} only, not of {sample}."
                " Record a smaller batch."
            )
        self.size = batch.size
        self._table = self.trace.samples
        if batch.size > _ALONE and not self._table.own:
            raise IncomparableTracesError(
                f"{self.trace.path} has no samples: no input was found to have a leading dim of {batch.size}."
                " Name one that carries the batch with inputs={...}."
            )

    def fingerprint(self, value: int) -> Fingerprint | None:
        """What the sample's part of a value holds; the whole of a value that carries no sample.

        A view that was not fingerprinted is stood for by the largest fingerprinted value of its storage at the same
        write, whose elements include its own: the same ones on both sides if the same views led to it.

        Returns:
            None if `missing` gives a reason. A value without padding in this run, but with padding in the other,
            has a fingerprint here; `pair` tells that they cannot be compared.
        """
        found = self._own(value)
        if found is None and value not in self._table.own:
            base = int(self.contents.states.base[self.contents.states.of[value]])
            if base >= 0 and base != value:
                found = self._own(base)
        return found

    def missing(self, value: int) -> Missing | None:
        """Why `fingerprint` has nothing for a value; None if it has something."""
        if self.fingerprint(value) is not None:
            return None
        followed = self.trace.batch_of(value)
        if followed is None:
            return "unread"
        if followed.unknown:
            return "unknown"
        if self.size > _ALONE and len(followed.batch) != 1 and followed.mixed:
            return "mixed"
        if self._padding_unknown(followed):
            return "padding"
        return "unread"

    @cached_property
    def words(self) -> Words:
        """For each value a word that is equal for equal contents of the sample; 0 where nothing is known.

        As `Contents.by_place`. A view has a word only if it holds all elements of a fingerprinted value in the
        same order.
        """
        contents, values = self.contents, self.trace.values
        found = np.zeros(len(values.storage), np.uint64)
        known = np.flatnonzero(values.fingerprint >= 0)
        whole = known[self._is_whole(known)]
        found[whole] = self._digests(self.trace.fingerprints, values.fingerprint[whole], whole)
        everything = np.arange(len(found))
        rows = self._table.rows(everything, self.sample)
        apart = everything[(rows >= 0) & ~self._in_doubt]
        found[apart] = self._digests(self._table.prints, rows[apart], apart)
        base = contents.states.base[contents.states.of]
        views = np.flatnonzero((values.fingerprint < 0) & (rows < 0) & (base >= 0))
        views = views[[contents.same_order(int(base[v]), int(v)) for v in views]]
        found[views] = found[base[views]]
        return found

    # ---- one value -------------------------------------------------------------------------------------

    def _own(self, value: int) -> Fingerprint | None:
        """What was recorded of the value itself."""
        followed = self.trace.batch_of(value)
        if followed is None:
            return self.trace.fingerprint(value)
        if self._padding_unknown(followed):
            return None
        found = self._table.fingerprint(value, self.sample)
        if found is None and self._is_alone(followed):
            return self.trace.fingerprint(value)
        return found

    def _is_alone(self, followed: Followed) -> bool:
        """Whether the whole value is the sample: a batch of one, without padding."""
        return self.size == _ALONE and not any(
            self.trace.extents(p.axis).is_padded(self.sample) for p in followed.lengths
        )

    def _padding_unknown(self, followed: Followed) -> bool:
        return followed.length_unknown and self.is_padded

    @cached_property
    def is_padded(self) -> bool:
        """Whether the sample is shorter than the padded inputs of its run; True if that is not known."""
        batch = self.trace.batch
        if batch is None or batch.lengths is None:
            return False
        first = self._table.first_extents
        return first is None or first.is_padded(self.sample)

    # ---- all values ------------------------------------------------------------------------------------

    def _is_whole(self, values: Ints) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
        """Which values are compared as a whole: no axis reaches them, or the batch is of one."""
        of = self.contents.states.of
        reached = np.zeros(len(self.contents.states.writer), np.bool_)
        own = self._table.own
        reached[of[np.fromiter(own, np.int64, len(own))]] = True
        found = ~reached[of[values]]
        if self.size == _ALONE:
            alone = [
                v
                for v, each in own.items()
                if self._is_alone(each) and not self._padding_unknown(each)
            ]
            found |= np.isin(values, np.array(alone, np.int64))
        return found

    @cached_property
    def _in_doubt(self) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
        """Values with padding at an unknown place."""
        found = np.zeros(len(self.trace.values.storage), np.bool_)
        for value, followed in self._table.own.items():
            found[value] = self._padding_unknown(followed)
        return found

    def _digests(self, prints: FingerprintColumns, rows: Ints, values: Ints) -> Words:
        size = prints.n[rows].astype(np.uint64) << np.uint64(8)
        digest = mix(prints.raw[rows], size | prints.code[rows].astype(np.uint64))
        return mix(digest, self.contents.layouts.dtype[values])


def pair(
    left: OneSample, right: OneSample, a: int, b: int
) -> tuple[Fingerprint, Fingerprint] | None:
    """The fingerprints to hold against each other for a pair of values.

    Args:
        left: The left run, as seen by its sample.
        right: The right run, as seen by its sample.
        a: Left value id.
        b: Right value id.

    Returns:
        What the sample's part of each value holds, or all of it where it carries no sample. None if
        `OneSample.missing` gives a reason on either side, or if the parts are of different size: then one side
        holds padding, or both are tables as long as the padded axis, to be judged where they are used.
    """
    found = left.fingerprint(a), right.fingerprint(b)
    if found[0] is None or found[1] is None or found[0].n != found[1].n:
        return None
    return found[0], found[1]
