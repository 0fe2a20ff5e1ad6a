"""One sample alone against the same sample in a batch: padding, positions that count it, ops that mix samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from opdrift import tfp1
from opdrift.case import Side
from opdrift.causes.evidence import Evidence, cause, scope, setting
from opdrift.causes.reading import reads_as_mask
from opdrift.causes.spans import attends, combines
from opdrift.origins.kinds import TRAINING, draws, mixes
from opdrift.records import ArgumentDifference, Cause
from opdrift.tokens import base
from opdrift.tracefile.axes import Position

#: Ops by which attention weighs positions.
_SOFTMAX: Final = frozenset(["_softmax", "_safe_softmax", "_masked_softmax", "softmax"])
_MASKS: Final = ("attn_mask", "attn_bias", "mask", "key_padding_mask")
#: Ops that count positions.
_COUNTING: Final = frozenset(["arange", "cumsum", "linspace", "range"])
#: Ops on the way from counted positions to where a sample meets them.
_WALK: Final = 60


@dataclass(frozen=True, slots=True)
class _Padded:
    """An operand with padding beside the sample's valid part.

    Attributes:
        name: The side, in words.
        side: The side.
        op: The op that reads it.
        position: Where the padded length lies in it.
        valid: (start, length) of the sample's valid part.
    """

    name: str
    side: Side
    op: int
    slot: int
    position: Position
    valid: tuple[int, int] | None

    @property
    def words(self) -> str:
        """What stands where."""
        size = self.position.size
        if self.valid is None:
            return f"{self.name}: the sample is padded to {size} positions"
        start, length = self.valid
        return f"{self.name}: positions {start} to {start + length - 1} of {size} are the sample's, the others padding"


def padded_mask(e: Evidence) -> Cause | None:
    """Attention weighs padding beside the sample: no mask arrives, or one that does not hide it."""
    found = e.any_op
    if not e.case.by_sample or found is None or e.origin.kind == "leaf":
        return None
    _, side, op = found
    name = base(side.name(op))
    if name in _SOFTMAX:
        given = _along(e, _operands(e))
    elif attends(name) and "backward" not in name:
        given = [p for p in _operands(e) if p.position.dim >= 1]
    else:
        return _mask_made(e)
    if not given or _mixes(e):
        return None
    return cause(
        "mask",
        "likely",
        f"{side.name(op)} in {scope(side.module(op))} lets the sample attend to padding",
        [
            _inputs(e),
            *(p.words for p in given[:2]),
            *_mask_given(e),
            *(f"{label}: {s.place(i)}" for label, s, i in e.sides if i is not None),
        ],
        "Print the mask where this module receives it: it must be there, on the side of the padding (pad_side), and of"
        " the polarity that the op takes (True keeps for scaled_dot_product_attention, and hides in key_padding_mask).",
    )


def _mask_made(e: Evidence) -> Cause | None:
    """What attention reads as its mask is another one for the sample's own positions."""
    if e.origin.story not in ("op", "factory", "padding", "amplified"):
        return None
    values = (e.origin.values.left, e.origin.values.right)
    read = [
        name
        for value, (name, side, _) in zip(values, e.sides, strict=True)
        if value is not None and reads_as_mask(side, value)
    ]
    found = e.any_op
    if not read or found is None:
        return None
    _, side, op = found
    return cause(
        "mask",
        "likely",
        f"the mask that {side.name(op)} in {scope(side.module(op))} makes hides other positions of the sample",
        [
            *(f"{label}: {s.place(i)}" for label, s, i in e.sides if i is not None),
            *map(setting, _raw_settings(e)),
            "attention reads what comes of it as its mask",
            *_pad_sides(e),
        ],
        "Compare the mask with the input: padding stands on the side that pad_side names. Build it from the token ids or"
        " from the tokenizer's attention_mask, not from the lengths alone.",
    )


def padded_positions(e: Evidence) -> Cause | None:
    """Positions count padding: the sample's first token is not at position 0."""
    found = e.any_op
    if not e.case.by_sample or found is None or e.origin.kind == "leaf":
        return None
    if e.origin.story not in ("op", "factory", "amplified"):
        return None
    counting = [
        (name, side, made)
        for name, side, op in e.sides
        if op is not None
        for made in [_counts_positions(side, op, floats=e.origin.story == "amplified")]
        if made is not None
    ]
    if not counting:
        return None
    _, side, op = found
    starts = [_begin(s) for _, s, _ in e.sides]
    return cause(
        "position-ids",
        "certain" if starts[0] != starts[1] else "likely",
        f"{side.name(op)} in {scope(side.module(op))} reads positions that count padding",
        [
            *_pad_sides(e),
            *(f"{label}: {made} counts the positions" for label, _, made in counting),
            *(f"{label}: {s.place(i)}" for label, s, i in e.sides if i is not None),
            _inputs(e),
        ],
        "Compute positions from the attention mask in both runs, (attention_mask.cumsum(-1) - 1).clamp(min=0), and pass"
        " them as position_ids; or pad on the right.",
    )


def padding(e: Evidence) -> Cause | None:
    """An op that works along the padded length takes padding in, or a length that counts it."""
    found = e.any_op
    if not e.case.by_sample or found is None or e.origin.kind == "leaf" or _said_better(e):
        return None
    _, side, op = found
    where = f"{side.name(op)} in {scope(side.module(op))}"
    places = [f"{label}: {s.place(i)}" for label, s, i in e.sides if i is not None]
    operands = _operands(e)
    if e.origin.story == "padding":
        return cause(
            "padding",
            "certain",
            f"{where} takes a position that is padding for the sample",
            [*map(setting, _raw_settings(e)), *(p.words for p in operands[:2]), *places],
            _other_position(operands),
        )
    if (counts := _padded_counts(e)) is not None:
        return cause(
            "padding",
            "likely",
            f"{where} uses the padded length, which is not the sample's",
            [setting(counts), *places, *_lengths(e)],
            "Divide by the number of valid positions of each sample (mask.sum(1)), not by the size of the padded dim.",
        )
    along = _along(e, operands)
    attention = attends(base(side.name(op))) or base(side.name(op)) in _SOFTMAX
    if not along or attention or _mixes(e):
        return None
    return cause(
        "padding",
        "likely",
        f"{where} takes padding into what it computes of the sample",
        [_inputs(e), *(p.words for p in along[:2]), *places],
        "Leave padding out: zero it before a convolution (x * mask), divide masked sums by the number of valid positions,"
        " take the maximum over masked_fill(~mask, -inf), norm over features instead of time, pack sequences for"
        " recurrent layers (torch.nn.utils.rnn.pack_padded_sequence).",
    )


def batch_mixing(e: Evidence) -> Cause | None:
    """An op makes a sample's part of all samples, or uses how many there are."""
    found = e.any_op
    if not e.case.by_sample or found is None or e.origin.kind == "leaf" or _said_better(e):
        return None
    _, side, op = found
    where = f"{side.name(op)} in {scope(side.module(op))}"
    places = [f"{label}: {s.place(i)}" for label, s, i in e.sides if i is not None]
    sizes = [f"{name}: a batch of {s.one.size}" for name, s, _ in e.sides if s.one is not None]
    mixing = [p for p in e.sides if p[2] is not None and mixes(p[1], p[2])]
    if mixing:
        label, s, i = mixing[0]
        assert i is not None
        return cause(
            "batch-mixing",
            "certain" if e.origin.inputs_match else "likely",
            f"{where} computes the sample's result from all samples of the batch",
            [_inputs(e), *sizes, f"{label}: {_mixed_dim(s, i)}", *places],
            "Work on each sample by itself: reduce over its own dims (dim=-1, keepdim=True), check batch_first and the dim"
            " of softmax, and use statistics that do not depend on the batch.",
        )
    counts = _batch_counts(e)
    if counts is None:
        if not _lost(e):
            return None
        return cause(
            "batch-mixing",
            "possible",
            f"from {where} on the sample could not be followed, and comes out different",
            [*sizes, *places, "its rows may be put together with those of other samples there"],
            "Look whether what is computed there depends on other samples: capacities and sorting of experts, gathers,"
            " ranks. Record both runs with a batch of one to see if they agree.",
        )
    return cause(
        "batch-mixing",
        "likely",
        f"{where} uses the size of the batch",
        [setting(counts), *sizes, *places],
        "Use a number that does not depend on how many samples are computed together.",
    )


# ---- facts -------------------------------------------------------------------------------------------


def _said_better(e: Evidence) -> bool:
    """Whether an op draws random numbers, or is a norm that trains: that is the cause, whatever the batch."""
    for _, side, op in e.sides:
        if op is None:
            continue
        given = dict(side.op(op).signature.arguments)
        trains = any(given.get(name) is True for name in TRAINING) and mixes(side, op)
        if draws(side, op) or trains:
            return True
    return False


def _mixes(e: Evidence) -> bool:
    return any(op is not None and mixes(side, op) for _, side, op in e.sides)


def _inputs(e: Evidence) -> str:
    if e.origin.inputs_match:
        return "the sample's part of every input is equal in both runs"
    if e.origin.story == "amplified":
        return "what is known of the sample's part of its inputs agrees up to rounding"
    return "the sample's part of its inputs is equal in both runs, as far as it is known"


def _operands(e: Evidence) -> list[_Padded]:
    """Operands of the origin's ops in which the sample has padding, that of a batch of other length first."""
    found = []
    for name, side, op in e.sides:
        if op is None or side.one is None:
            continue
        for slot, value in enumerate(side.trace.ops.inputs[op].tolist()):
            followed = side.trace.batch_of(int(value))
            for position in followed.lengths if followed is not None else ():
                extents = side.trace.extents(position.axis)
                if extents.is_padded(side.one.sample):
                    valid = extents.valid[side.one.sample]
                    found.append(_Padded(name, side, op, slot, position, valid))
    return found


def _other_position(operands: list[_Padded]) -> str:
    """What to type instead of taking a position that is padding; to pad on the other side helps, on the same it does not."""
    if {p.valid[0] > 0 for p in operands if p.valid is not None} == {True}:
        return (
            "Take the first valid position of each sample, x[torch.arange(len(x)), mask.long().argmax(1)], or pad on"
            " the right."
        )
    return (
        "Take the last valid position of each sample, x[torch.arange(len(x)), lengths - 1], or pad on the left; pack"
        " sequences for recurrent layers (torch.nn.utils.rnn.pack_padded_sequence)."
    )


def _along(e: Evidence, operands: list[_Padded]) -> list[_Padded]:
    """Those along whose padded length the op combines elements."""
    return [p for p in operands if combines(p.side, p.op, p.slot, p.position)]


def _mask_given(e: Evidence) -> list[str]:
    """What the op is given as a mask, in words."""
    found = []
    for name, side, op in e.sides:
        if op is None:
            continue
        given = dict(side.op(op).signature.arguments)
        if not attends(side.name(op)):
            continue
        if any(given.get(argument) is not None for argument in _MASKS):
            found.append(f"{name}: it is given a mask")
        elif given.get("is_causal") is True:
            found.append(f"{name}: no mask, is_causal=True")
        else:
            found.append(f"{name}: it is given no mask")
    return found


def _pad_sides(e: Evidence) -> list[str]:
    found = []
    for name, side, _ in e.sides:
        batch, one = side.trace.batch, side.one
        extents = side.trace.samples.first_extents
        if batch is None or one is None or extents is None:
            continue
        valid = extents.valid[one.sample]
        if valid is not None and valid != (0, extents.size):
            found.append(
                f"{name}: padded on the {batch.pad_side}, sample {one.sample} is at positions {valid[0]} to"
                f" {sum(valid) - 1} of {extents.size}"
            )
    return found


def _begin(side: Side) -> int:
    extents = side.trace.samples.first_extents
    valid = None if extents is None or side.one is None else extents.valid[side.one.sample]
    return 0 if valid is None else valid[0]


def _counts_positions(side: Side, op: int, *, floats: bool) -> str | None:
    """What counts the positions that an op reads, in words, if one of its inputs is made of nothing else.

    Args:
        side: The side of the op.
        op: Its index.
        floats: Look only at what is made of positions to compute with, angles say: not at masks.
    """
    trace = side.trace
    return next(
        (
            made
            for value in map(int, trace.ops.inputs[op].tolist())
            if not floats or "float" in trace.meta(value).dtype
            if (made := _counter(side, value)) is not None
        ),
        None,
    )


def _counter(side: Side, value: int) -> str | None:
    """What counted positions, in words, for a value that is made of such and of tables, and of no sample.

    It is an op, or a buffer that holds 0, 1, 2, ... (`position_ids` of a model).
    """
    contents, trace = side.contents, side.trace
    stack, seen, found, table = [value], {value}, None, None
    while stack and len(seen) < _WALK:
        current = stack.pop()
        followed = trace.samples.own.get(current)
        if followed is not None and (followed.unknown or followed.unsure or followed.mixed):
            return None
        if followed is not None and followed.batch and current != value:
            return None
        op = int(contents.maker[current])
        if op < 0:
            # in a run of one sample nothing tells its values from others but that they are made of an input
            if any(leaf.kind == "input" for leaf in side.leaves.of(current)):
                return None
            table = table or _counted_buffer(side, current)
            continue
        if base(side.name(op)) in _COUNTING:
            found = op if found is None else min(op, found)
            continue
        start, stop = trace.ops.inputs.offsets[op : op + 2].tolist()
        counted = contents.counted[start:stop].tolist()
        read = zip(trace.ops.inputs[op].tolist(), counted, strict=True)
        fresh = [v for v, counts in read if counts and v not in seen]
        seen.update(fresh)
        stack += fresh
    if stack:
        return None
    return side.place(found) if found is not None else table


def _counted_buffer(side: Side, value: int) -> str | None:
    """The name of the buffer that a value is, or is a part of, if it counts up by one from 0."""
    leaf = next((each for each in side.leaves.of(value) if each.kind == "buffer"), None)
    print_ = None if leaf is None else side.trace.fingerprint(leaf.value)
    if leaf is None or print_ is None or not tfp1.Code.I8 <= print_.code <= tfp1.Code.U64:
        return None
    positions = tfp1.sample_positions(print_.n)
    counts = print_.n > 1 and print_.sample.tolist() == list(positions)
    return f"the buffer {leaf.name}" if counts else None


def _raw_settings(e: Evidence) -> tuple[ArgumentDifference, ...]:
    """Arguments that differ, sizes included."""
    op = e.origin.op
    if op.left is None or op.right is None:
        return ()
    return e.case.settings(op.left, op.right)


def _numbers(text: str | None) -> list[float]:
    if text is None:
        return []
    try:
        return [float(part) for part in text.strip("[]").split(",")]
    except ValueError:
        return []


def _scalars(e: Evidence) -> list[tuple[ArgumentDifference, float, float]]:
    """Arguments that are one number on each side, and differ, of ops that compute with them."""
    found = []
    for s in _raw_settings(e):
        a, b = _numbers(s.left), _numbers(s.right)
        if len(a) == len(b) == 1 and s.name in ("other", "value", "alpha", "self", "scalar"):
            found.append((s, a[0], b[0]))
    return found


def _extent(side: Side) -> set[float]:
    """Sizes of the padded length anywhere in the run."""
    table, found = side.trace.samples, set[float]()
    for axis in {p.axis for f in table.own.values() for p in f.lengths}:
        found.add(float(table.extents(axis).size))
    return found


def _padded_counts(e: Evidence) -> ArgumentDifference | None:
    """A number that is the padded length of each run."""
    left, right = _extent(e.case.left), _extent(e.case.right)
    for s, a, b in _scalars(e):
        if a in left or b in right:
            return s
    return None


def _batch_counts(e: Evidence) -> ArgumentDifference | None:
    """A number that grows with the batch."""
    left, right = e.case.left.one, e.case.right.one
    if left is None or right is None or left.size == right.size:
        return None
    for s, a, b in _scalars(e):
        if a * right.size == b * left.size or 1 / left.size in (a, b) or 1 / right.size in (a, b):
            return s
    return None


def _lengths(e: Evidence) -> list[str]:
    found = []
    for name, side, _ in e.sides:
        extents = side.trace.samples.first_extents
        if extents is not None:
            found.append(f"{name}: the inputs are padded to {extents.size}")
    return found


def _mixed_dim(side: Side, op: int) -> str:
    """Along which dim of its input an op sees the samples."""
    trace = side.trace
    for value in trace.ops.inputs[op].tolist():
        followed = trace.batch_of(int(value))
        if followed is not None and len(followed.batch) == 1:
            (place,) = followed.batch
            meta = trace.meta(int(value))
            return f"the samples lie along dim {place.dim} of its input {meta}, and it works along that dim"
    return "its inputs are each a sample's own, and its result is not"


def _lost(e: Evidence) -> bool:
    """Whether the sample could not be followed through the origin's op."""
    return any(
        (followed := side.trace.batch_of(int(v))) is not None and followed.unknown
        for _, side, op in e.sides
        if op is not None
        for v in side.trace.ops.outputs[op].tolist()
    )
