"""Find, for a value without a fingerprint, one that has the same elements in a known order.

The digest and the sketch go by the place of an element. A transposed view, and what a copy makes of one, hold the
elements of a fingerprinted value in another order: two such values can be held against each other where
both are the same order of what was fingerprinted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from opdrift.contents import Contents
from opdrift.records import TensorMeta
from opdrift.tokens import base
from opdrift.tracefile.fingerprints import Fingerprint

#: (size, step) of loops, the outermost first: element k of the value is the sum of counter * step of its source.
Order = tuple[tuple[int, int], ...]
#: (size, place, target): a counter that moves on by `place` in one numbering, by `target` in the other.
_Digits = Sequence[tuple[int, int, int]]

#: Ops that return the elements of their first input in the same order.
_COPIES: Final = frozenset(
    {"clone", "_to_copy", "_unsafe_view", "view_copy", "_reshape_copy", "lift_fresh_copy"}
)
#: So many copies are passed on the way back.
_LOOK_BACK: Final = 16


def same_order(
    left: Contents, left_value: int, right: Contents, right_value: int
) -> tuple[Fingerprint, Fingerprint] | None:
    """Fingerprints of all elements of two values, in one order for both; None where none are known."""
    mine = _sources(left, left_value)
    theirs = {order: value for value, order in reversed(_sources(right, right_value))}
    for value, order in mine:
        if order in theirs:
            a, b = left.trace.fingerprint(value), right.trace.fingerprint(theirs[order])
            if a is not None and b is not None:
                return a, b
    return None


def _sources(contents: Contents, value: int) -> list[tuple[int, Order]]:
    """Fingerprinted values that hold exactly the elements of a value, nearest first, and in which order it has them."""
    layouts, values = contents.layouts, contents.trace.values
    size = int(layouts.size.at(value))
    order: Order | None = _merged([(size, 1)])
    found: list[tuple[int, Order]] = []
    for _ in range(_LOOK_BACK):
        if order is None:
            break
        if values.fingerprint[value] < 0:
            whole = int(contents.states.base[contents.states.of[value]])
            if whole < 0 or not _permutes(contents, value, whole):
                break
            order = _through(order, contents.trace.meta(value), contents.trace.meta(whole))
            if order is None:
                break
            value = whole
        found.append((value, order))
        op = int(contents.maker[value])
        if op < 0:
            break
        name = base(contents.trace.op_info(int(contents.trace.ops.signature[op])).name)
        sources = contents.trace.ops.inputs[op]
        if name not in _COPIES or not len(sources):
            break
        source = int(sources[0])
        if layouts.size.at(source) != size or layouts.dtype.at(source) != layouts.dtype.at(value):
            break
        value = source
    return found


def _permutes(contents: Contents, value: int, whole: int) -> bool:
    """Whether two values are the same stretch of memory, each element of it once."""
    offset, layouts = contents.trace.values.offset, contents.layouts
    return bool(
        offset[value] == offset[whole]
        and layouts.dtype.at(value) == layouts.dtype.at(whole)
        and layouts.size.at(value) == layouts.size.at(whole)
        and layouts.dense.at(value)
        and layouts.dense.at(whole)
    )


def _through(order: Order, value: TensorMeta, whole: TensorMeta) -> Order | None:
    """An order of `value` as one of `whole`, which lies in the same memory."""
    memory = _digits(_dims(whole))
    number: list[tuple[int, int, int]] = []
    for size, stride, place in reversed(_dims(value)):
        pieces = _converted(size, stride, memory)
        if pieces is None:
            return None
        step = place
        for n, target in pieces:
            number.append((n, step, target))
            step *= n
    found: list[tuple[int, int]] = []
    digits = _digits(number)
    for size, step in order:
        pieces = _converted(size, step, digits)
        if pieces is None:
            return None
        found.extend(reversed(pieces))
    return _merged(found)


def _dims(meta: TensorMeta) -> list[tuple[int, int, int]]:
    """(size, stride in memory, step in row-major order) of the dims of more than one element."""
    found: list[tuple[int, int, int]] = []
    step = 1
    for size, stride in reversed(list(zip(meta.shape, meta.stride, strict=False))):
        if size != 1:
            found.append((size, stride, step))
        step *= size
    return found[::-1]


def _digits(dims: Sequence[tuple[int, int, int]]) -> _Digits:
    return sorted(dims, key=lambda d: d[1])


def _converted(size: int, step: int, digits: _Digits) -> list[tuple[int, int]] | None:
    """A counter of one numbering as counters of the other, the innermost first; None where it is none."""
    found: list[tuple[int, int]] = []
    for count, place, target in digits:
        if size == 1:
            break
        if not place <= step < place * count:
            continue
        skip, rest = divmod(step, place)
        if rest or count % skip:
            return None
        room = count // skip
        taken = min(size, room)
        if size % taken:
            return None
        found.append((taken, target * skip))
        size //= taken
        step *= taken
    return found if size == 1 else None


def _merged(loops: Sequence[tuple[int, int]]) -> Order:
    """Loops that run on in one another as one, those of one turn left out."""
    found: list[tuple[int, int]] = []
    for size, step in loops:
        if size == 1:
            continue
        if found and found[-1][1] == size * step:
            found[-1] = found[-1][0] * size, step
        else:
            found.append((size, step))
    return tuple(found)
