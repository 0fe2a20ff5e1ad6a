"""Say which values of a trace have the same content as values of another, without comparing bytes.

A value that was fingerprinted is known by its digest. A view is not fingerprinted: it is known by the
digest of a value in the same storage at the same write, together with where it lies in it or with the
view ops that led to it. What was written piece by piece is known by its pieces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from opdrift.deliveries import deliveries
from opdrift.layouts import Layouts
from opdrift.records import PENDING, TensorMeta
from opdrift.regions import Regions
from opdrift.tokens import WORKSPACES, OpTokens, Words, base, counted_inputs, mix, word
from opdrift.tracefile.columns import Ints
from opdrift.tracefile.fingerprints import Fingerprint
from opdrift.tracefile.reader import Trace

Flags = npt.NDArray[np.bool_]

#: Views of views of views: deeper chains than this are left unknown.
_DEEPEST_VIEW = 64
_UNWRITTEN = word("memory that nothing has written")


@dataclass(frozen=True, slots=True)
class States:
    """The storages of a trace at each write count, numbered; a state is what an op can read.

    Attributes:
        of: State of each value.
        writer: Op index that brought the storage to this state; -1 for leaves. Memory of a communication library was
            filled by the collective whose result is copied out of it.
        before: The state of the same storage before it, -1 for the first one seen.
        first_read: Op index that first took a value of this state as input; the number of ops if none.
        base: The largest fingerprinted value in this state, -1 if none.
        delivered: States of memory of a communication library, by the index of the collective that filled it.
    """

    of: Ints
    writer: Ints
    before: Ints
    first_read: Ints
    base: Ints
    delivered: Mapping[int, Sequence[int]]


class Contents:
    """Columns over the values of one trace; `trace` and `tokens` are those they were made of."""

    #: Whether only one sample of the run's batch is looked at.
    by_sample = False

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.tokens: OpTokens = OpTokens(trace)
        self.states = _states(trace)
        self.layouts = Layouts(trace)

    @cached_property
    def regions(self) -> Regions:
        """What of the run was compiled."""
        return Regions(self.trace)

    @cached_property
    def name_of_leaf(self) -> dict[int, str]:
        """The name that each value was given first; those without one are left out."""
        return {leaf.value: leaf.name for leaf in reversed(self.trace.leaves) if leaf.name}

    @cached_property
    def counted(self) -> Flags:
        """Per element of the ops' inputs, whether its op looks at the content."""
        return counted_inputs(self.trace, self.tokens)

    @cached_property
    def producer(self) -> Ints:
        """Op index that first returned or wrote each value; -1 for leaves and for values known before."""
        ops, states = self.trace.ops, self.states
        first_read = np.full(len(states.of), len(ops), np.int64)
        values = ops.inputs.values
        first_read[values[::-1]] = ops.inputs.rows()[::-1]
        # A value that was read before an op returned it is an alias that this op passed on.
        made = self.trace.producer
        return np.where((made >= 0) & (first_read <= made), -1, made)

    @cached_property
    def output_slot(self) -> Ints:
        """Which output of its producer each value is; -1 for leaves."""
        outputs = self.trace.ops.outputs
        found = np.full(len(self.states.of), -1, np.int64)
        within = np.arange(len(outputs.values)) - outputs.offsets[outputs.rows()]
        found[outputs.values[::-1]] = within[::-1]
        return np.where(self.producer >= 0, found, -1)

    @cached_property
    def maker(self) -> Ints:
        """The op that returned each value, or wrote its storage last; -1 for leaves."""
        written = self.states.writer[self.states.of]
        return np.where(self.producer >= 0, self.producer, written)

    def same_order(self, base: int, value: int) -> bool:
        """Whether a value of the same state holds the elements of `base`, all of them, in the same order."""
        return bool(self._same_order(np.array([base]), np.array([value]))[0])

    def _same_order(self, base: Ints, value: Ints) -> Flags:
        offset, layouts = self.trace.values.offset, self.layouts
        same: Flags = (
            (offset[base] == offset[value])
            & (layouts.size[base] == layouts.size[value])
            & (layouts.dtype[base] == layouts.dtype[value])
            & layouts.row_major[base]
            & layouts.row_major[value]
        )
        return same

    # ---- one value -------------------------------------------------------------------------------------

    def meta(self, value: int) -> TensorMeta:
        """The layout of what is compared of a value."""
        return self.trace.meta(value)

    def fingerprint(self, value: int) -> Fingerprint | None:
        """Of a value, or of one in the same state with the same content in the same order."""
        own = self.trace.fingerprint(value)
        if own is not None:
            return own
        base = int(self.states.base[self.states.of[value]])
        if base < 0 or not self.same_order(base, value):
            return None
        return self.trace.fingerprint(base)

    def key(self, value: int) -> tuple[int, int, int] | None:
        """The key of `fingerprint(value)`, for which no sketch is read from disk."""
        rows = self.trace.values.fingerprint
        if rows[value] >= 0:
            return self.trace.fingerprints.key(int(rows[value]))
        base = int(self.states.base[self.states.of[value]])
        known = base >= 0 and rows[base] >= 0 and self.same_order(base, value)
        return self.trace.fingerprints.key(int(rows[base])) if known else None

    def nearest_fingerprint(self, value: int) -> Fingerprint | None:
        """Of a value, or of the largest one in the same state."""
        own = self.trace.fingerprint(value)
        base = int(self.states.base[self.states.of[value]])
        return own if own is not None or base < 0 else self.trace.fingerprint(base)

    def lies(self, value: int) -> object:
        """Where a value lies in what `nearest_fingerprint` gives for it; equal for values that lie alike."""
        offset = self.trace.values.offset
        known = self.trace.fingerprint(value) is not None
        whole = value if known else int(self.states.base[self.states.of[value]])
        metas = self.trace.meta(value), self.trace.meta(whole)
        return int(offset[value] - offset[whole]), *((m.shape, m.stride) for m in metas)

    @cached_property
    def nonfinite(self) -> Ints:
        """Non-finite elements of each value, or of the largest one in its state."""
        prints = self.trace.fingerprints
        total = prints.number("nan") + prints.number("pinf") + prints.number("ninf")
        row = self.trace.values.fingerprint
        base = self.states.base[self.states.of]
        source = np.where(row >= 0, row, np.where(base >= 0, row[base], -1))
        padded = np.concatenate([total.astype(np.int64), np.zeros(1, np.int64)])
        found: Ints = padded[source]
        return found

    def tells_nothing(self, other: Contents, mine: Ints, theirs: Ints) -> Flags:
        """For values whose words are not equal: whether that leaves open if their contents are."""
        return np.zeros(len(mine), np.bool_)

    # ---- states ----------------------------------------------------------------------------------------

    def value_of_state(self, state: int) -> int:
        """The first value seen of a state."""
        return int(self._first_of_state[state])

    @cached_property
    def _first_of_state(self) -> Ints:
        found = np.zeros(len(self.states.writer), np.int64)
        found[self.states.of[::-1]] = np.arange(len(self.states.of))[::-1]
        return found

    @cached_property
    def root(self) -> Ints:
        """The value by which the maker of each value is known for pairing: itself."""
        return np.arange(len(self.states.of))

    @cached_property
    def root_slot(self) -> Ints:
        """Which output of its writer each value's storage is; -1 for leaves."""
        first = np.full(len(self.states.writer), -1, np.int64)
        made = np.flatnonzero(
            (self.producer >= 0) & (self.producer == self.states.writer[self.states.of])
        )
        first[self.states.of[made][::-1]] = self.output_slot[made][::-1]
        return first[self.states.of]

    @cached_property
    def view_parent(self) -> Ints:
        """The value that a view was taken of; -1 for values that are no views of an op's input."""
        ops, state = self.trace.ops, self.states.of
        found = np.full(len(state), -1, np.int64)
        made = np.flatnonzero(self.producer >= 0)
        op = self.producer[made]
        has_input = np.diff(ops.inputs.offsets)[op] > 0
        made, op = made[has_input], op[has_input]
        source = ops.inputs.values[ops.inputs.offsets[op]]
        alias = (state[source] == state[made]) & (source != made)
        found[made[alias]] = source[alias]
        return found

    @cached_property
    def by_place(self) -> Words:
        """Content words from digests and places in memory; 0 where nothing is known.

        Shapes, strides and devices are no part of a content: a digest is that of the elements in row-major
        order, and an op to which the shape matters shows it in its own result.
        """
        values, layouts = self.trace.values, self.layouts
        found = np.zeros(len(values.storage), np.uint64)
        known = np.flatnonzero(values.fingerprint >= 0)
        found[known] = mix(self._digest(known), layouts.dtype[known])
        rest, base = self._without_digest
        same = self._same_order(base, rest)
        found[rest[same]] = mix(self._digest(base[same]), layouts.dtype[rest[same]])
        covered, whole = self._covered
        found[covered] = self._placed(whole, covered)
        self._piecewise(found)
        found[self._workspaces()] = 0
        found[self._unseen_arrivals()] = 0
        return found

    def _placed(self, base: Ints, inside: Ints) -> Words:
        """Words for parts: the content of the whole, and where a part lies in it."""
        geometry, offset = self.layouts.geometry, self.trace.values.offset
        shift = (offset[inside] - offset[base]).astype(np.uint64)
        where = mix(mix(geometry[base], geometry[inside]), shift)
        return mix(self._digest(base), where)

    @cached_property
    def _without_digest(self) -> tuple[Ints, Ints]:
        """Values without a fingerprint in states that have one, and the largest value there that has."""
        base = np.where(self.states.of >= 0, self.states.base[self.states.of], -1)
        rest = np.flatnonzero((self.trace.values.fingerprint < 0) & (base >= 0))
        return rest, base[rest]

    @cached_property
    def _covered(self) -> tuple[Ints, Ints]:
        """Of those the ones that are a part of that value, in whatever order, and that value."""
        rest, base = self._without_digest
        chosen = ~self._same_order(base, rest) & self._covers(base, rest)
        return rest[chosen], base[chosen]

    @cached_property
    def _seen_alone(self) -> tuple[Ints, Ints]:
        """Of these the ones of which the same part of the same content has a fingerprint elsewhere, and that value.

        A parameter that is gathered with its padding is named, and so read by itself, where its content is new.
        """
        known = np.flatnonzero((self.trace.values.fingerprint >= 0) & (self.states.of >= 0))
        base = self.states.base[self.states.of[known]]
        inside = (base != known) & self._covers(base, known)
        known, base = known[inside], base[inside]
        covered, whole = self._covered
        if not len(known) or not len(covered):
            return covered[:0], known[:0]
        words, first = np.unique(self._placed(base, known), return_index=True)
        wanted = self._placed(whole, covered)
        place = np.minimum(np.searchsorted(words, wanted), len(words) - 1)
        same = words[place] == wanted
        return covered[same], known[first[place[same]]]

    @cached_property
    def by_whole(self) -> Words:
        """Content words of parts, by the largest value of their state and where they lie in it; 0 for all others.

        A part that one run names, and so reads by itself, the other may know by this alone.
        """
        found = np.zeros(len(self.states.of), np.uint64)
        parts = np.flatnonzero(self.states.of >= 0)
        base = self.states.base[self.states.of[parts]]
        inside = (base >= 0) & (base != parts)
        parts, base = parts[inside], base[inside]
        inside = ~self._same_order(base, parts) & self._covers(base, parts)
        found[parts[inside]] = self._placed(base[inside], parts[inside])
        return found

    def _unseen_arrivals(self) -> Ints:
        """Results that came after their op had returned, and of which only parts were read since, if anything."""
        outputs = self.trace.ops.outputs
        late = (self.trace.ops.flags & PENDING) != 0
        values = np.unique(outputs.values[late[outputs.rows()]])
        found: Ints = values[self.trace.values.fingerprint[values] < 0]
        return found

    def _workspaces(self) -> Ints:
        """Values of which some bytes were never written: the workspaces that recurrent layers return."""
        outputs = self.trace.ops.outputs
        found: list[int] = []
        for signature in self.tokens.table:
            slot = WORKSPACES.get(base(self.trace.op_info(signature).name))
            if slot is None:
                continue
            for op in np.flatnonzero(self.trace.ops.signature == signature).tolist():
                found += outputs[op].tolist()[int(self.trace.ops.mutated[op]) + slot :][:1]
        return np.array(found, np.int64)

    @cached_property
    def by_lineage(self) -> Words:
        """Content words from digests and the view ops that followed; 0 where nothing is known."""
        return self._followed(self.by_place, self.trace.values.fingerprint < 0)

    @cached_property
    def by_part(self) -> Words:
        """As `by_lineage` where it says more: parts that were seen by themselves elsewhere, views that have a digest.

        The other run may know the same view by the op that made it alone.
        """
        parts, alike = self._seen_alone
        parent, printed = self.view_parent, self.trace.values.fingerprint >= 0
        views = np.flatnonzero(printed & (parent >= 0))
        if not len(parts) and not len(views):
            return self.by_lineage
        words, open_ = self.by_place.copy(), ~printed
        words[parts] = mix(self._digest(alike), self.layouts.dtype[parts])
        open_[parts] = False
        found = self._followed(words, open_)
        views = views[self.by_lineage[parent[views]] != 0]
        found[views] = mix(self.by_lineage[parent[views]], self._view(views))
        return found

    def _followed(self, words: Words, open_: Flags) -> Words:
        """Words of open values that are views: those of what they were taken of, and how."""
        parent = self.view_parent
        found = words.copy()
        open_ = open_ & (parent >= 0)
        found[open_] = 0
        rest = np.flatnonzero(open_)
        for _ in range(_DEEPEST_VIEW):
            ready = rest[found[parent[rest]] != 0]
            if not len(ready):
                break
            found[ready] = mix(found[parent[ready]], self._view(ready))
            rest = rest[found[rest] == 0]
        return found

    def _view(self, values: Ints) -> Words:
        """Which view of what it was taken of each value is."""
        slot = self.output_slot[values].astype(np.uint64)
        return mix(self.tokens.full[self.producer[values]], slot)

    @cached_property
    def whole(self) -> Flags:
        """Whether each value takes up all of its storage that was ever seen."""
        offset = self.trace.values.offset
        _, storage = np.unique(self.trace.values.storage, return_inverse=True)
        end = np.zeros(int(storage.max(initial=0)) + 1, np.int64)
        everything = np.arange(len(offset))
        span = self.layouts.span[everything]
        np.maximum.at(end, storage, offset + span)
        found: Flags = self.layouts.dense[everything] & (offset == 0) & (span == end[storage])
        return found

    def _covers(self, outer: Ints, inner: Ints) -> Flags:
        """Whether the memory of `outer` surely includes that of `inner` (values of one storage)."""
        offset, layouts = self.trace.values.offset, self.layouts
        inside = (offset[outer] <= offset[inner]) & (
            offset[inner] + layouts.span[inner] <= offset[outer] + layouts.span[outer]
        )
        found: Flags = (
            inside & layouts.dense[outer] & (layouts.dtype[outer] == layouts.dtype[inner])
        )
        return found

    def _digest(self, values: Ints) -> Words:
        """The digests of fingerprinted values as words."""
        row = self.trace.values.fingerprint[values]
        prints = self.trace.fingerprints
        size = prints.n[row].astype(np.uint64) << np.uint64(8)
        return mix(prints.raw[row], size | prints.code[row].astype(np.uint64))

    # ---- memory that was written in pieces -------------------------------------------------------------

    def _piecewise(self, found: Words) -> None:
        """Fill in values whose storage was written in parts: each part's content and place counts."""
        parents = self.view_parent
        open_ = np.flatnonzero((found == 0) & (self.trace.values.fingerprint < 0) & (parents < 0))
        open_ = open_[open_ > 0]
        if not len(open_):
            return
        chains = _Chains(self, found, open_)
        for value in open_.tolist():
            chain = chains.word(int(self.states.of[value]))
            if chain:
                place = np.array([self.trace.values.offset[value]], np.uint64)
                what = mix(self.layouts.geometry[np.array([value])], place)
                found[value] = mix(np.array([chain], np.uint64), what)[0]


class _Chains:
    """The content of a storage as the sequence of what was written into it."""

    def __init__(self, contents: Contents, found: Words, wanted: Ints) -> None:
        self._contents = contents
        self._found = found
        storage = contents.trace.values.storage
        self._words: dict[int, int] = {-1: _UNWRITTEN}
        concerned = np.isin(storage, storage[wanted])
        known = np.flatnonzero((contents.trace.values.fingerprint >= 0) & concerned)
        self._pieces: dict[int, list[int]] = {}
        for value, state in zip(known.tolist(), contents.states.of[known].tolist(), strict=True):
            self._pieces.setdefault(state, []).append(value)

    def word(self, state: int) -> int:
        """A word for the content of a state; 0 where a piece of its history is not known."""
        trail: list[int] = []
        while state not in self._words:
            trail.append(state)
            state = int(self._contents.states.before[state])
        found = self._words[state]
        for each in reversed(trail):
            found = self._words[each] = self._step(each, found)
        return found

    def _step(self, state: int, before: int) -> int:
        """The content after the write that led to `state`."""
        contents = self._contents
        pieces = self._pieces.get(state, [])
        writer = int(contents.states.writer[state])
        if not pieces:
            fresh = writer >= 0 and bool(contents.tokens.uninitialised[writer])
            return _UNWRITTEN if fresh else 0
        offsets = contents.trace.values.offset
        for piece in sorted(pieces, key=lambda v: (int(offsets[v]), int(self._found[v]))):
            if contents.whole[piece]:
                before = _UNWRITTEN  # what was there before is gone
            if before:
                what = np.array([self._found[piece]]) ^ np.uint64(int(offsets[piece]) << 1)
                before = int(mix(np.array([before], np.uint64), what)[0])
        return before


def _states(trace: Trace) -> States:
    """Number the (storage, write count) pairs and find out who wrote them."""
    values, ops = trace.values, trace.ops
    key = (values.storage << 32) | values.write
    unique, of = np.unique(key, return_inverse=True)
    count = len(unique)
    storage = unique >> 32
    before = np.full(count, -1, np.int64)
    same = np.flatnonzero(storage[1:] == storage[:-1]) + 1
    before[same] = same - 1

    first_read = np.full(count, len(ops), np.int64)
    first_read[of[ops.inputs.values][::-1]] = ops.inputs.rows()[::-1]
    first_made = np.full(count, -1, np.int64)
    first_made[of[ops.outputs.values][::-1]] = ops.outputs.rows()[::-1]
    # An op that reads a state cannot have made it: it returned a view or passed its input on.
    writer = np.where((first_made >= 0) & (first_made < first_read), first_made, -1)
    writer[of[0]] = -1
    delivered: dict[int, list[int]] = {}
    for state, collective in list(deliveries(trace, of, writer, before)):
        writer[state] = collective
        delivered.setdefault(collective, []).append(state)

    base = np.full(count, -1, np.int64)
    known = np.flatnonzero(values.fingerprint >= 0)
    order = known[np.argsort(trace.fingerprints.n[values.fingerprint[known]], kind="stable")]
    base[of[order]] = order
    return States(of, writer, before, first_read, base, delivered)
