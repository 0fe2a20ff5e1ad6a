"""Hold one sample of a run's batch against one sample of another's.

A run of one sample alone and a run of many, recorded with `batch=`, compute the same thing for that sample. What
can be compared of it is, value by value: the part of a sample where the value carries the batch, and the whole
value where it does not, as for weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, Literal

import numpy as np

from opdrift.bounds.view import OpViews, restated
from opdrift.contents import Contents, Flags
from opdrift.errors import IncomparableTracesError
from opdrift.parts import Part, Shown
from opdrift.records import TensorMeta
from opdrift.tokens import Words, base, mix, word
from opdrift.tracefile.axes import BATCH, Extents
from opdrift.tracefile.columns import Ints
from opdrift.tracefile.fingerprints import Fingerprint, FingerprintColumns
from opdrift.tracefile.reader import Trace
from opdrift.tracefile.samples import Followed
from opdrift.tracefile.schema import RECORDED_SAMPLES

#: Why a value has nothing to compare: it is made of all samples; where the batch, or the padding, lies in it is not
#: known; or it was not fingerprinted (a view, unwritten memory, a sample beyond those that are recorded).
Missing = Literal["mixed", "unknown", "padding", "unread"]
#: A batch of one carries its sample everywhere, so nothing is recorded apart.
_ALONE: Final = 1
#: Ops that give their input another layout, and no view of it.
_COPYING: Final = frozenset(["clone", "contiguous", "_unsafe_view", "reshape", "flatten", "alias"])
#: Views and copies that follow each other are looked through up to twice as many, doubled this often.
_LONGEST: Final = 8
_PADDING: Final = np.uint64(word("nothing but padding"))
#: What `Places.place` says of a value that is all of what was recorded, in order.
_WHOLE: Final = np.uint64(1)


def _numbers(size: int) -> str:
    """The samples of a batch in words: `one sample, 0`, `samples 0 to 2`."""
    return "one sample, 0" if size == 1 else f"samples 0 to {size - 1}"


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
                f"{self.trace.path} has {_numbers(batch.size)}; there is no sample {sample}."
            )
        if sample >= RECORDED_SAMPLES:
            raise IncomparableTracesError(
                f"{self.trace.path} has records of samples 0 to {RECORDED_SAMPLES - 1} only, not of {sample}."
                " Record a smaller batch."
            )
        self.size = batch.size
        self.table = self.trace.samples
        if batch.size > _ALONE and not self.table.own:
            if not self.trace.complete:
                raise IncomparableTracesError(
                    f"{self.trace.path} has no records of its samples: it is {self.trace.incomplete}."
                    " Record the run again, and let it end by itself."
                )
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
        if found is None and value not in self.table.own:
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

    @property
    def words(self) -> Words:
        """For each value a word that is equal for equal contents of the sample; 0 where nothing is known."""
        return self.places.words

    @cached_property
    def places(self) -> Places:
        """What is known of the sample's part of each value."""
        return _Placing(self).places()

    def meta(self, value: int) -> TensorMeta:
        """The layout that the sample's part of a value has; strides are those of the value."""
        meta, followed = self.trace.meta(value), self.trace.batch_of(value)
        if followed is None:
            return meta
        shape = list(meta.shape)
        for p in (*followed.batch, *followed.lengths):
            kept: int | None = 1
            if p.axis != BATCH:
                valid = self.trace.extents(p.axis).valid[self.sample]
                kept = None if valid is None else valid[1]
            if kept is not None:
                shape[p.dim] = shape[p.dim] // p.size * kept
        return replace(meta, shape=tuple(shape))

    # ---- one value -------------------------------------------------------------------------------------

    def _own(self, value: int) -> Fingerprint | None:
        """What was recorded of the value itself."""
        followed = self.trace.batch_of(value)
        if followed is None:
            return self.trace.fingerprint(value)
        if self._padding_unknown(followed):
            return None
        found = self.table.fingerprint(value, self.sample)
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
        first = self.table.first_extents
        return first is None or first.is_padded(self.sample)

    def is_whole(self, values: Ints) -> Flags:
        """Which values are compared as a whole.

        They carry no axis, or the batch is of one, or all samples have a part in them.
        """
        own = self.table.own
        apart = [v for v, each in own.items() if not self._is_common(each)]
        return ~np.isin(values, np.array(apart, np.int64))

    def _is_common(self, followed: Followed) -> bool:
        """Whether a value is compared whole although an axis reaches it."""
        if self.size == _ALONE:
            return self._is_alone(followed)
        if followed.unknown:
            return False
        return followed.mixed and not followed.batch

    @cached_property
    def is_own(self) -> Flags:
        """Values that are not made of all samples of a batch of several."""
        found = np.ones(len(self.trace.values.storage), np.bool_)
        if self.size > _ALONE:
            common = [v for v, each in self.table.own.items() if each.mixed and not each.batch]
            states = self.contents.states.of
            found = ~np.isin(states, states[np.array(common, np.int64)])
        return found

    def recorded(self, value: int) -> Fingerprint | None:
        """What was recorded of a value itself: of the sample's part, or of all of it where that is compared.

        Where padding is at an unknown place it is in here; values of equal size on both sides had it summed up.
        """
        found = self.table.fingerprint(value, self.sample)
        if found is not None:
            return found
        followed = self.table.own.get(value)
        whole = followed is None or self._is_common(followed)
        return self.trace.fingerprint(value) if whole else None


@dataclass(frozen=True, slots=True)
class Places:
    """Columns over the values of a trace: what is known of one sample's part of each.

    Attributes:
        digest: A word for what was recorded of the value itself; 0 if nothing was.
        base: The same of the recorded value that it is, or is a view of.
        place: A word for which elements of that it shows; 1 for all of them, in order.
        size: How many elements are compared; -1 where that is not known.
        source: The recorded value behind `base`; -1 if there is none.
    """

    digest: Words
    base: Words
    place: Words
    size: Ints
    source: Ints

    @property
    def padding(self) -> Flags:
        """Values that hold, of the sample, nothing but padding."""
        found: Flags = self.place == _PADDING
        return found

    @property
    def views(self) -> Words:
        """A word for base and place; 0 where nothing is known."""
        placed = np.where(self.place == _WHOLE, self.base, mix(self.base, self.place))
        return np.where(self.base == 0, np.uint64(0), placed)

    @property
    def words(self) -> Words:
        """A word for the content, by the value's own record if there is one."""
        return np.where(self.digest != 0, self.digest, self.views)


class _Placing:
    """Fills in `Places`."""

    def __init__(self, one: OneSample) -> None:
        self._one = one
        self._contents = one.contents
        count = len(one.trace.values.storage)
        self._digest = np.zeros(count, np.uint64)
        self._size = np.full(count, -1, np.int64)
        self._parts: dict[tuple[object, ...], Part] = {}
        self._shown: dict[tuple[object, ...], Shown | None] = {}

    def places(self) -> Places:
        self._recorded()
        digest = self._digest
        source = self._nearest()
        own = (digest != 0) & ((self._contents.trace.values.fingerprint >= 0) | (source < 0))
        source[own] = np.flatnonzero(own)
        base = np.where(source >= 0, digest[source], np.uint64(0))
        place = np.where(source == np.arange(len(source)), _WHOLE, np.uint64(0))
        for value in np.flatnonzero((source >= 0) & (place == 0)).tolist():
            shown = self._seen(int(source[value]), value)
            if shown is None:
                base[value], source[value] = 0, -1
                continue
            place[value] = _word_of(shown, int(self._size[source[value]]))
            if not digest[value]:
                self._size[value] = shown.count
        return Places(digest, base, place, self._size, source)

    def _recorded(self) -> None:
        """Digests of what was recorded: whole values, samples' parts, and what all samples have a part in."""
        one, values = self._one, self._one.trace.values
        table = one.table
        known = np.flatnonzero(values.fingerprint >= 0)
        whole = known[one.is_whole(known)]
        self._put(one.trace.fingerprints, values.fingerprint[whole], whole)
        everything = np.arange(len(self._digest))
        rows = table.rows(everything, one.sample)
        apart = everything[rows >= 0]
        self._put(table.prints, rows[apart], apart)

    def _put(self, prints: FingerprintColumns, rows: Ints, values: Ints) -> None:
        n = prints.n[rows]
        size = n.astype(np.uint64) << np.uint64(8)
        digest = mix(prints.raw[rows], size | prints.code[rows].astype(np.uint64))
        self._digest[values] = mix(digest, self._contents.layouts.dtype[values])
        self._size[values] = n

    def _nearest(self) -> Ints:
        """The recorded value that each value is best placed in: the one it was taken from, else the largest.

        A program may cut its sample out of a larger tensor and hand on the part: that has a record, too.
        """
        contents = self._contents
        largest = np.full(len(contents.states.writer), -1, np.int64)
        known = np.flatnonzero((self._digest != 0) & (contents.trace.values.fingerprint >= 0))
        order = known[np.argsort(contents.layouts.size[known], kind="stable")]
        largest[contents.states.of[order]] = order
        recorded = np.zeros(len(self._digest), np.bool_)
        recorded[known] = True
        parent = contents.view_parent.copy()
        for _ in range(_LONGEST):
            further = (parent >= 0) & ~recorded[parent]
            if not further.any():
                break
            parent[further] = parent[parent[further]]
        taken = (parent >= 0) & recorded[parent]
        return np.where(taken, parent, largest[contents.states.of])

    def _seen(self, base: int, value: int) -> Shown | None:
        """What a value shows of a recorded one of the same state."""
        one, trace = self._one, self._one.trace
        offset, metas = trace.values.offset, trace.values.meta
        shift = int(offset[value] - offset[base])
        mine, known = one.table.own.get(value), one.table.own.get(base)
        key = int(metas[base]), known, int(metas[value]), shift, mine
        if key not in self._shown:
            self._shown[key] = self._show(base, known, value, shift, mine)
        return self._shown[key]

    def _show(
        self, base: int, known: Followed | None, value: int, shift: int, mine: Followed | None
    ) -> Shown | None:
        one, trace = self._one, self._one.trace
        a, b = trace.meta(base), trace.meta(value)
        if a.dtype != b.dtype:
            return None
        if known is not None and known.mixed and not known.batch:
            known = None  # all samples have a part in it: it is compared whole
        followed = known
        extents = {
            p.axis: trace.extents(p.axis)
            for each in (known, mine)
            if each is not None
            for p in each.lengths
        }
        if known is None and mine is not None:
            # an op has said which part of this view is the sample's
            cut = _cut(b, mine, one.sample, extents)
            if cut is None:
                return None
            b, shift = cut[0], shift + cut[1]
        key = a, followed
        if key not in self._parts:
            self._parts[key] = Part(a, followed, one.sample, extents)
        return self._parts[key].shown(b, shift)


def _cut(
    meta: TensorMeta, followed: Followed, sample: int, extents: dict[int, Extents]
) -> tuple[TensorMeta, int] | None:
    """The layout of one sample's valid part of a view, and how much further on it begins."""
    shape, shift = list(meta.shape), 0
    for p in (*followed.batch, *followed.lengths):
        if p.outer != 1 or p.inner != 1:
            return None
        first, kept = sample, 1
        if p.axis != BATCH:
            valid = extents[p.axis].valid[sample]
            if valid is None:
                return None
            first, kept = valid
        shape[p.dim] = kept
        shift += first * meta.stride[p.dim]
    return replace(meta, shape=tuple(shape)), shift


def _word_of(shown: Shown, size: int) -> np.uint64:
    if shown.padding:
        return _PADDING
    whole = shown.walk == ((size, 1),) or (size == 1 and not shown.walk)
    if not shown.start and whole:
        return _WHOLE
    return np.uint64(word(f"{shown.start}{shown.walk}"))


class SampleContents(Contents):
    """The contents of a trace as seen by one sample of its batch.

    Args:
        trace: The trace.
        sample: Number of the sample, from 0.

    Raises:
        IncomparableTracesError: As `OneSample`.
    """

    by_sample = True

    def __init__(self, trace: Trace, sample: int) -> None:
        super().__init__(trace)
        self.one = OneSample(self, sample)

    @cached_property
    def by_place(self) -> Words:
        """Words for what was recorded of the sample, or of what a view shows of it."""
        return self.one.places.words

    @cached_property
    def by_lineage(self) -> Words:
        """Words for what values show of what was recorded in their storages."""
        return self.one.places.views

    @property
    def by_part(self) -> Words:
        """Nothing more than `by_lineage` tells."""
        return self.by_lineage

    @cached_property
    def by_whole(self) -> Words:
        """Nothing: equal batches need not hold the same sample."""
        return np.zeros(len(self.states.of), np.uint64)

    @cached_property
    def root(self) -> Ints:
        """What each value is a view or a copy of: batches of other sizes are laid out by other views and copies."""
        ops, states = self.trace.ops, self.states.of
        found = np.arange(len(states))
        copying = np.array(
            sorted(s for s in self.tokens.table if base(self.trace.op_info(s).name) in _COPYING),
            np.int64,
        )
        made = np.flatnonzero(self.producer >= 0)
        op = self.producer[made]
        moves = self.tokens.view[op] | np.isin(ops.signature[op], copying)
        moves &= np.diff(ops.inputs.offsets)[op] > 0
        made, op = made[moves], op[moves]
        found[made] = ops.inputs.values[ops.inputs.offsets[op]]
        for _ in range(_LONGEST):
            further = found[found]
            if np.array_equal(further, found):
                break
            found = further
        return found

    def meta(self, value: int) -> TensorMeta:
        """The layout of the sample's part of a value."""
        return self.one.meta(value)

    def fingerprint(self, value: int) -> Fingerprint | None:
        """Of the sample's part of a value, or of what a view shows whole and in order."""
        places = self.one.places
        if places.digest[value]:
            return self.one.recorded(value)
        if places.base[value] and places.place[value] == _WHOLE:
            return self.one.recorded(int(places.source[value]))
        return None

    def nearest_fingerprint(self, value: int) -> Fingerprint | None:
        """Of the sample's part of a value, or of what was recorded in its storage."""
        places = self.one.places
        if places.digest[value]:
            return self.one.recorded(value)
        source = int(places.source[value])
        return None if source < 0 else self.one.recorded(source)

    def lies(self, value: int) -> object:
        """Which elements of what `nearest_fingerprint` gives it shows."""
        places = self.one.places
        return int(_WHOLE if places.digest[value] else places.place[value])

    @cached_property
    def nonfinite(self) -> Ints:
        """Non-finite elements of the sample's part of each value."""
        places, one = self.one.places, self.one
        found = np.zeros(len(places.digest), np.int64)
        counts: dict[int, int] = {}
        for value, source in enumerate(places.source.tolist()):
            if source < 0:
                continue
            if source not in counts:
                recorded = one.recorded(source)
                counts[source] = 0 if recorded is None else recorded.nonfinite
            found[value] = counts[source]
        return found

    def tells_nothing(self, other: Contents, mine: Ints, theirs: Ints) -> Flags:
        """Unequal words say something of the same elements of two records, or of as many elements of one.

        What holds nothing but padding differs from what holds anything else.
        """
        assert isinstance(other, SampleContents)
        a, b = self.one.places, other.one.places
        sized = (a.size[mine] == b.size[theirs]) & (a.size[mine] >= 0)
        direct = (a.digest[mine] != 0) & (b.digest[theirs] != 0) & sized
        placed = (a.base[mine] != 0) & (b.base[theirs] != 0)
        alike = (a.place[mine] == b.place[theirs]) | (a.base[mine] == b.base[theirs])
        padding = a.padding[mine] != b.padding[theirs]
        found: Flags = ~(direct | (placed & alike & sized) | (placed & padding))
        return found


class SampleViews(OpViews):
    """Makes the `OpView` of any op with the shapes and statistics that it has for one sample.

    Where nothing is known of the sample, those of the whole batch stand for it.
    """

    def __init__(self, one: OneSample) -> None:
        super().__init__(one.trace)
        self._one = one

    def meta(self, value: int) -> TensorMeta:
        """The layout of the sample's part of a value."""
        return self._one.meta(value)

    def statistics(self, value: int) -> Fingerprint | None:
        """Of the sample's part of a value, or of what was recorded in its storage, restated for it."""
        places = self._one.places
        if places.digest[value]:
            return self._one.recorded(value)
        source = int(places.source[value])
        found = None if source < 0 else self._one.recorded(source)
        if found is not None:
            return restated(found, self._one.meta(value))
        return super().statistics(value)


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
