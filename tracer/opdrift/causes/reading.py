"""What a value is read as: the mask of an attention, or keys and values kept from earlier steps."""

from __future__ import annotations

from typing import Final

import numpy as np

from opdrift.case import Side
from opdrift.tokens import base

MASK_ARGUMENTS: Final = frozenset(
    ["attn_mask", "attn_bias", "mask", "is_causal", "src_mask", "key_padding_mask", "mask_type"]
)
MASKING_OPS: Final = frozenset(
    ["masked_fill", "masked_fill_", "_masked_softmax", "where", "tril", "triu", "tril_", "triu_"]
)
#: Ops by which programs put masks together, or bring them into shape.
AROUND_MASKS: Final = frozenset(
    ["scalar_tensor", "full", "full_like", "zeros", "ones", "add", "add_", "mul", "unsqueeze", "expand", "slice", "view",
     "logical_not", "bitwise_not", "bitwise_and", "logical_and", "bitwise_or", "eq", "ne", "le", "lt", "ge", "gt", "arange",
     "_to_copy", "clone", "rsub", "sub"]
)  # fmt: skip
#: Ops that write a number into their first input where a mask says so.
_FILLED: Final = frozenset(["masked_fill", "masked_fill_"])
_ADDED: Final = frozenset(["add", "add_"])
_SOFTMAX: Final = frozenset(["_softmax", "_safe_softmax"])
#: Added to scores, a number below this leaves nothing of a softmax. Masks that are no infinity hold -1e4, -1e9 or the
#: smallest number of their type.
HIDES: Final = -1e3
#: Between the op that makes a mask and the attention that reads it.
_HOPS: Final = 8
_READERS: Final = 32


def reads_as_mask(side: Side, value: int) -> bool:
    """Whether attention reads a value as its mask, through the ops that bring a mask into shape.

    It does where the value arrives at an argument for masks, or is added to scores that a softmax reads and hides some.
    """
    contents, trace = side.contents, side.trace
    front, seen = {int(contents.states.of[value])}, set[int]()
    hides, reaches = _hides(side, value), False
    for _ in range(_HOPS):
        seen |= front
        ops, slots = _readers(side, front)
        front = set()
        for op, slot in zip(ops, slots, strict=True):
            names = contents.tokens.table[int(trace.ops.signature[op])].slots
            if slot < len(names) and names[slot].partition("[")[0] in MASK_ARGUMENTS:
                return True
            name = base(side.name(op))
            if name in _FILLED and slot == 0 and not _is_constant(side, op):
                continue  # scores, some of which are hidden
            others = np.delete(trace.ops.inputs[op], slot).tolist()
            if name in _ADDED and not hides and any(_hides(side, v) for v in others):
                continue  # scores, to which a mask is added
            if name in _SOFTMAX and hides and reaches:
                return True  # not so what goes there by itself: scores that are masked already
            reaches |= name in _ADDED or (name == "where" and slot == 0)
            if name in AROUND_MASKS or name in MASKING_OPS or contents.tokens.view[op]:
                outputs = trace.ops.outputs[op].tolist()
                hides = hides or any(_hides(side, v) for v in outputs)
                front |= {int(contents.states.of[v]) for v in outputs}
        front -= seen
        if not front:
            return False
    return False


def _readers(side: Side, states: set[int]) -> tuple[list[int], list[int]]:
    """The first ops that read one of some states, and at which of their inputs."""
    inputs = side.trace.ops.inputs
    hits = np.isin(side.contents.states.of[inputs.values], np.array(sorted(states)))
    places = np.flatnonzero(hits & side.contents.counted)[:_READERS]
    ops = inputs.rows()[places]
    return ops.tolist(), (places - inputs.offsets[ops]).tolist()


def _is_constant(side: Side, op: int) -> bool:
    """Whether all elements of an op's first input are one number, as before a mask is filled in."""
    print_ = side.nearest_fingerprint(int(side.trace.ops.inputs[op][0]))
    return print_ is not None and print_.min == print_.max


def _hides(side: Side, value: int) -> bool:
    print_ = side.nearest_fingerprint(value)
    return print_ is not None and bool(print_.ninf or print_.min <= HIDES)


def is_kept(side: Side, value: int, reader: int) -> bool:
    """Whether a value is kept from step to step: written piece by piece, or made in an earlier forward than the reader's."""
    contents = side.contents
    state = int(contents.states.of[value])
    writer, before = int(contents.states.writer[state]), int(contents.states.before[state])
    if writer >= 0 and before >= 0:
        written = [
            v for v in side.trace.ops.outputs[writer].tolist() if contents.states.of[v] == state
        ]
        return any(not contents.whole[v] for v in written)
    return writer >= 0 and _is_of_forward_before(side, writer, reader)


def _is_of_forward_before(side: Side, writer: int, reader: int) -> bool:
    """Whether an op ran in an earlier forward than a reader, or puts together what one did: the program's data is of none."""
    here = _root(side, reader)
    maker = side.contents.maker
    made = [int(maker[v]) for v in side.trace.ops.inputs[writer].tolist()]
    return any(0 < _root(side, op) < here for op in (writer, *made) if op >= 0)


def _root(side: Side, op: int) -> int:
    """The outermost module call an op ran in."""
    call = side.call(op)
    while call.id and side.trace.calls[call.parent].id:
        call = side.trace.calls[call.parent]
    return call.id
