"""What the search for origins does otherwise where one sample of each batch is compared."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

import numpy as np

from opdrift.bounds import explained
from opdrift.case import Case, Side
from opdrift.contents import Flags
from opdrift.origins.kinds import mixes
from opdrift.origins.model import Origin
from opdrift.pairs import DIFFERENT, UNKNOWN
from opdrift.records import ArgumentDifference, Sides
from opdrift.samples import SampleContents
from opdrift.sizes import measure
from opdrift.tokens import base
from opdrift.tracefile.columns import Ints

_SIZES: Final = re.compile(r"\[?-?\d+(, -?\d+)*\]?")
_DEEPEST: Final = 400
_FILLS: Final = frozenset(["zeros", "ones", "full"])


def own_settings(settings: tuple[ArgumentDifference, ...]) -> tuple[ArgumentDifference, ...]:
    """Arguments that differ without being sizes, which follow from the batch and its padding."""
    return tuple(
        s
        for s in settings
        if not all(text is None or _SIZES.fullmatch(text) for text in (s.left, s.right))
        or None in (s.left, s.right)
    )


def used_states(case: Case, live: bytearray | None, results: Iterable[int]) -> Flags | None:
    """Which states of the left run's storages have a part in a result; None if all may.

    Args:
        case: One sample of each batch.
        live: The left ops that have a part in one.
        results: Left values that are results.
    """
    if live is None:
        return None
    contents = case.left.contents
    found = np.zeros(len(contents.states.writer), np.bool_)
    inputs = contents.trace.ops.inputs
    read = np.frombuffer(live, np.uint8)[inputs.rows()] != 0
    found[contents.states.of[inputs.values[read]]] = True
    found[contents.states.of[np.array([*results], np.int64)]] = True
    return found


def at_used_output(case: Case, origin: Origin, used: Flags | None) -> Origin | None:
    """An origin at the output that differs by most, of those that have a part in a result; None if none has.

    Of a recurrent layer the last state may hold padding, and nobody read it.
    """
    outputs = case.compared.outputs
    of = case.left.contents.states.of
    places = [
        k
        for k in case.compared.outputs_of(origin.row)
        if outputs.status[k] == DIFFERENT and (used is None or used[of[outputs.left[k]]])
    ]
    if not places:
        return None
    if len(places) > 1:
        gaps = [measure(case, int(outputs.left[k]), int(outputs.right[k])) for k in places]
        sizes = [0.0 if gap is None or gap.relative is None else gap.relative for gap in gaps]
        places = [places[int(np.argmax(sizes))]]
    (place,) = places
    values: Sides[int | None] = Sides(int(outputs.left[place]), int(outputs.right[place]))
    return replace(
        origin,
        slot=int(outputs.position[place]),
        values=values,
        settings=own_settings(origin.settings),
    )


# ---- views of padding ------------------------------------------------------------------------------------


def padding_views(case: Case, rows: Ints) -> Iterator[Origin]:
    """Views by which one run takes of the sample what is valid, and the other nothing but padding."""
    left, right = case.left.contents, case.right.contents
    assert isinstance(left, SampleContents)
    assert isinstance(right, SampleContents)
    a, b = left.one.places.padding, right.one.places.padding
    outputs, inputs = case.compared.outputs, case.compared.inputs
    apart = np.flatnonzero(
        (outputs.status == DIFFERENT)
        & (a[outputs.left] != b[outputs.right])
        & np.isin(outputs.pair, rows)
    )
    came = set(inputs.pair[a[inputs.left] | b[inputs.right]].tolist())
    for place in apart.tolist():
        row = int(outputs.pair[place])
        i, j = int(case.pairing.left[row]), int(case.pairing.right[row])
        if row not in came and left.tokens.view[i]:
            yield Origin(
                kind="op",
                story="padding",
                op=Sides(i, j),
                row=row,
                values=Sides(int(outputs.left[place]), int(outputs.right[place])),
                slot=int(outputs.position[place]),
                order=float(i),
                settings=case.settings(i, j),
                inputs_match=_match(case, row),
            )


def _match(case: Case, row: int) -> bool | None:
    """Whether all inputs of a pair are known equal; None where not all are known."""
    status = {int(case.compared.inputs.status[k]) for k in case.compared.inputs_of(row)}
    return False if DIFFERENT in status else None if UNKNOWN in status else True


# ---- what lies in the dark -------------------------------------------------------------------------------


def entry(case: Case, row: int) -> int | None:
    """The pair at which the sample was lost from sight, of a pair that reads what could not be followed.

    Returns:
        The first of those pairs in the left run; None if the pair itself may be at fault, as it reads something
        of the sample that is known and can make something else of it.
    """
    compared = case.compared
    slots = compared.inputs_of(row)
    blank = [k for k in slots if compared.inputs.status[k] == UNKNOWN]
    known = [k for k in slots if compared.inputs.status[k] != UNKNOWN and _is_sample(case, k)]
    if not blank or (known and not _is_exact(case, row)):
        return None
    found: set[int] = set()
    stack, seen = list(blank), set(blank)
    while stack and len(seen) < _DEEPEST:
        for maker in compared.behind(stack.pop()):
            slots = compared.inputs_of(maker)
            if any(compared.inputs.status[k] != UNKNOWN and _is_sample(case, k) for k in slots):
                found.add(maker)
            further = [k for k in slots if compared.inputs.status[k] == UNKNOWN and k not in seen]
            stack += further
            seen.update(further)
    # an op that mixes the samples loses them for that; else it is rather one on contents than on lengths and places
    return min(
        found,
        key=lambda r: (not _mixes(case, r), not _is_float(case, r), int(case.pairing.left[r])),
        default=None,
    )


def _mixes(case: Case, row: int) -> bool:
    """Whether a pair makes, in one of the runs, values of all samples, of values that were each a sample's own."""
    return mixes(case.left, int(case.pairing.left[row])) or mixes(
        case.right, int(case.pairing.right[row])
    )


def _is_sample(case: Case, slot: int) -> bool:
    """Whether an input carries the batch in one of the runs."""
    inputs = case.compared.inputs
    return any(
        side.trace.batch_of(int(value)) is not None
        for side, value in ((case.left, inputs.left[slot]), (case.right, inputs.right[slot]))
    )


def _is_float(case: Case, row: int) -> bool:
    outputs = case.compared.outputs
    dtypes = [
        case.left.trace.meta(int(outputs.left[k])).dtype for k in case.compared.outputs_of(row)
    ]
    return any("float" in dtype for dtype in dtypes)


def _is_exact(case: Case, row: int) -> bool:
    return explained(case.left.views[int(case.pairing.left[row])], 0).exact


def _rounds(case: Case, origin: Origin) -> bool:
    """Whether rounding at its own op explains what differs."""
    left, right = origin.values.left, origin.values.right
    if left is None or right is None or origin.op.left is None:
        return False
    gap = measure(case, left, right)
    bound = explained(case.left.views[origin.op.left], origin.slot or 0)
    return gap is not None and gap.relative is not None and gap.relative <= bound.loose


def at_maker(case: Case, origin: Origin) -> Origin:
    """An origin at the pair that made both values, where only what reads them tells that they differ.

    A table of positions has other rows in runs of other lengths; which of them are the sample's is known from
    where they meet it.
    """
    left, right = origin.values.left, origin.values.right
    if origin.story != "other-source" or left is None or right is None:
        return origin
    if origin.row >= 0 and _is_padding(case.left, left) != _is_padding(case.right, right):
        i, j = int(case.pairing.left[origin.row]), int(case.pairing.right[origin.row])
        return replace(origin, kind="op", story="padding", op=Sides(i, j), order=float(i))
    roots = int(case.left.contents.root[left]), int(case.right.contents.root[right])
    row = case.compared.made_by_one_pair(*roots)
    if row < 0:
        return origin
    i, j = int(case.pairing.left[row]), int(case.pairing.right[row])
    return replace(
        origin,
        kind="op",
        story="op",
        op=Sides(i, j),
        row=row,
        slot=0,
        order=float(i),
        inputs_match=None,
    )


def _is_padding(side: Side, value: int) -> bool:
    """Whether a value holds, of the sample, nothing but padding."""
    return side.one is not None and bool(side.one.places.padding[value])


def taking_padding(case: Case, origin: Origin) -> Origin:
    """An origin that differs by more than its inputs, as one that takes padding, if in one run alone it does.

    Behind an op that rounds otherwise for other numbers of rows, what it takes differs anyway.
    """
    inputs = case.compared.inputs
    for k in case.compared.inputs_of(origin.row):
        values = int(inputs.left[k]), int(inputs.right[k])
        if _is_padding(case.left, values[0]) != _is_padding(case.right, values[1]):
            return replace(origin, story="padding")
    return origin


def is_longer_fill(case: Case, origin: Origin) -> bool:
    """Whether an origin is a constant of one number all over, made for another batch or another padded length."""
    made = origin.region.left
    if origin.story != "factory" or not made:
        return False
    return base(case.left.name(made[0])).removeprefix("new_").removesuffix(
        "_like"
    ) in _FILLS and all(s.name == "size" for s in origin.settings)


def moved(case: Case, origin: Origin) -> Origin:
    """An origin at the pair where the sample was lost from sight, if it lies behind that."""
    sides = ((case.left, origin.op.left), (case.right, origin.op.right))
    if any(op is not None and mixes(side, op) for side, op in sides):
        return origin
    row = entry(case, origin.row) if origin.row >= 0 else None
    if row is None or _rounds(case, origin):
        return origin
    i, j = int(case.pairing.left[row]), int(case.pairing.right[row])
    return replace(origin, op=Sides(i, j), row=row, slot=0, order=float(i), inputs_match=None)
