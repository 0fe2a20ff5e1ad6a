"""Whether what differs at an origin makes a difference to a result of the sample.

Some values may differ without doing harm: positions that all count padding, where only their distances matter;
places in a buffer that all samples share. Their effect is followed through the pairs: where what comes out of
them agrees up to rounding, it has ended.
"""

from __future__ import annotations

from collections.abc import Sequence

from opdrift.case import Case, Side
from opdrift.origins.model import Origin, Story
from opdrift.origins.readers import Readers
from opdrift.origins.single import entry, own_settings
from opdrift.pairs import DIFFERENT, EQUAL, UNKNOWN
from opdrift.receivers import Received
from opdrift.records import Sides
from opdrift.sinks import Sink
from opdrift.sizes import measure


class Effects:
    """Follows differences through the pairs of a case.

    Args:
        case: One sample of each batch.
        sinks: The results that differ.
        limit: The largest relative difference that rounding grows to in these runs.
        readers: Of the case.
    """

    def __init__(self, case: Case, sinks: Sequence[Sink], limit: float, readers: Readers) -> None:
        self._case = case
        self._limit = limit
        self._sinks = sinks
        self._readers = readers
        self._large: dict[tuple[int, int], bool] = {}

    def ends(self, origin: Origin) -> list[int] | None:
        """Where the effect of an origin ends.

        Returns:
            The pairs at which only rounding is left; None if a result differs by more, or if that is
            not known.
        """
        if origin.row < 0 or not self._sinks:
            return None
        compared, case = self._case.compared, self._case
        if origin.kind == "op" or self._goes_on(origin.row):
            reached, ended = self._follow(origin.row)
        else:
            reached, ended = set(), {origin.row}
        for sink in self._sinks:
            if sink.left is None or sink.right is None:
                return None
            makers = compared.makers(sink.left, sink.right)
            if (not makers or makers & reached) and self._is_large(sink.left, sink.right):
                return None
        return sorted(ended - reached, key=lambda r: int(case.pairing.left[r]))

    def last_slots(self, start: int) -> list[int]:
        """Inputs at which what differs at a pair has ended, or ends: those agree, or what is made of them does."""
        reached, ended = self._follow(start)
        inputs = self._case.compared.inputs
        return [
            slot
            for row in reached
            for slot in self._readers.of(row)
            if not self._arrives(slot) or int(inputs.pair[slot]) in ended
        ]

    def result_differs(self, times: float) -> bool:
        """Whether a result differs by more than so many times what rounding grows to."""
        gaps = (
            measure(self._case, s.left, s.right)
            for s in self._sinks
            if s.left is not None and s.right is not None
        )
        return any(
            gap is None
            or gap.relative is None
            or gap.nonfinite_changed
            or gap.relative > times * self._limit
            for gap in gaps
        )

    def unmasked(self, origin: Origin) -> Origin | None:
        """Attention whose queries and keys differ by an origin, whose values do not, and that is given no mask.

        Queries and keys that are turned by positions further on attend as before. If the result differs although, it is
        because padding is seen.
        """
        case, compared = self._case, self._case.compared
        reached, _ = self._follow(origin.row)
        for row in sorted(reached, key=lambda r: int(case.pairing.left[r])):
            i, j = int(case.pairing.left[row]), int(case.pairing.right[row])
            if "attention" not in case.left.name(i) or not self._is_turned(row):
                continue
            sides = ((case.left, i), (case.right, j))
            bare = [
                side.one is not None and side.one.is_padded and not _is_masked(side, op)
                for side, op in sides
            ]
            outputs = compared.outputs_of(row)
            if any(bare) and outputs:
                return _at(case, row, outputs[0], "amplified")
            return None
        return None

    def _is_turned(self, row: int) -> bool:
        """Whether the first two tensors of an attention differ, and the third does not."""
        inputs = self._case.compared.inputs
        large = {
            int(inputs.position[k]): inputs.status[k] != EQUAL and self._arrives(k)
            for k in self._case.compared.inputs_of(row)
        }
        return large.get(0, False) and large.get(1, False) and not large.get(2, True)

    def _follow(self, start: int) -> tuple[set[int], set[int]]:
        """Pairs that what differs at a pair reaches, and those at which it ends."""
        reached, ended, front = {start}, set[int](), [start]
        while front:
            for slot in self._readers.of(front.pop()):
                reader = int(self._case.compared.inputs.pair[slot])
                if reader in reached or not self._arrives(slot):
                    continue
                if self._goes_on(reader):
                    reached.add(reader)
                    front.append(reader)
                else:
                    ended.add(reader)
        return reached, ended

    def _arrives(self, slot: int) -> bool:
        inputs = self._case.compared.inputs
        if inputs.status[slot] == UNKNOWN:
            return True
        return self._is_large(int(inputs.left[slot]), int(inputs.right[slot]))

    def _goes_on(self, row: int) -> bool:
        """Whether a pair hands on more than rounding, as far as that is known."""
        compared = self._case.compared
        slots = compared.outputs_of(row)
        return any(
            compared.outputs.status[k] == UNKNOWN
            or (
                compared.outputs.status[k] != EQUAL
                and self._is_large(int(compared.outputs.left[k]), int(compared.outputs.right[k]))
            )
            for k in slots
        )

    def _is_large(self, left: int, right: int) -> bool:
        key = left, right
        if key not in self._large:
            gap = measure(self._case, left, right)
            self._large[key] = (
                gap is None
                or gap.relative is None
                or gap.nonfinite_changed
                or gap.relative > self._limit
            )
        return self._large[key]


def _is_masked(side: Side, op: int) -> bool:
    given = dict(side.op(op).signature.arguments)
    return given.get("attn_mask") is not None or given.get("attn_bias") is not None


def cancelled(case: Case, row: int) -> Origin | None:
    """An origin at a pair whose inputs differ and whose outputs agree up to rounding; None if they are equal."""
    outputs = case.compared.outputs
    place = next((k for k in case.compared.outputs_of(row) if outputs.status[k] == DIFFERENT), None)
    return None if place is None else _at(case, row, place, "cancelled")


def _at(case: Case, row: int, place: int, story: Story) -> Origin:
    """An origin at an output of a pair whose inputs differ already."""
    i, j = int(case.pairing.left[row]), int(case.pairing.right[row])
    outputs = case.compared.outputs
    return Origin(
        kind="op",
        story=story,
        op=Sides(i, j),
        row=row,
        values=Sides(int(outputs.left[place]), int(outputs.right[place])),
        slot=int(outputs.position[place]),
        order=float(i),
        settings=own_settings(case.settings(i, j)),
        inputs_match=False,
    )


def lost_from_sight(case: Case, limit: float, received: Received) -> Origin | None:
    """The pair from which on a sample could not be followed, if what is known again differs by more than before.

    Args:
        case: One sample of each batch.
        limit: The largest relative difference that rounding grows to in these runs.
        received: Sizes at a pair that reads what could not be followed.
    """
    if received.before is not None or received.after is None:
        return None
    row = entry(case, received.row)
    if row is None:
        return None
    compared, outputs = case.compared, case.compared.outputs
    place = next(k for k in compared.outputs_of(received.row) if outputs.status[k] == DIFFERENT)
    values = int(outputs.left[place]), int(outputs.right[place])
    came = [
        measure(case, int(compared.inputs.left[k]), int(compared.inputs.right[k]))
        for k in compared.inputs_of(row)
        if compared.inputs.status[k] == DIFFERENT
    ]
    before = [gap.relative for gap in came if gap is not None and gap.relative is not None]
    if received.after <= limit or max(before, default=0.0) > limit:
        return None
    i, j = int(case.pairing.left[row]), int(case.pairing.right[row])
    return Origin(
        kind="op",
        story="amplified",
        op=Sides(i, j),
        row=row,
        values=Sides(*values),
        slot=0,
        order=float(i),
        settings=own_settings(case.settings(i, j)),
        inputs_match=None,
    )
