"""What each run lets attention see, whatever form its masks have: how large a share of the pairs of query and key.

Truth values that keep and ones that hide, zeros beside very low numbers, causal flags: all say which pairs take part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from opdrift.case import Side
from opdrift.causes.reading import HIDES, MASK_ARGUMENTS
from opdrift.records import TensorArgument
from opdrift.tokens import base
from opdrift.tracefile.fingerprints import Fingerprint

_NEGATIONS: Final = frozenset(["bitwise_not", "logical_not"])
_COPIES: Final = frozenset(["clone", "_to_copy", "contiguous", "_unsafe_view", "lift_fresh_copy"])
_FILLS: Final = frozenset(["masked_fill", "masked_fill_"])
_SUMS: Final = frozenset(["add", "add_", "baddbmm"])
#: Ops between a mask and the truth values that it was made of.
_STEPS: Final = 12
#: A sum of so many equal numbers, as float64 adds them.
_SUMMED: Final = 1e-6


@dataclass(frozen=True, slots=True)
class Keeping:
    """One mask of an attention.

    Attributes:
        op: Index of the op that applies it.
        how: In words.
        kept: The share of its elements that lets through; None where that is not known.
        truths: The key of the content of the truth values behind it; None where it is not made of any.
        keeps: Whether True lets through.
    """

    op: int
    how: str
    kept: Fraction | None
    truths: tuple[int, int, int] | None = None
    keeps: bool = True

    @property
    def same_as(self) -> object:
        """Equal for masks that are known to be the same."""
        return (self.truths, self.keeps) if self.truths is not None else (self.op, self.how)


@dataclass(frozen=True, slots=True)
class Shown:
    """What the masks of an attention leave together.

    Attributes:
        masks: Those masks; one that is applied twice, once.
        least: The smallest share of pairs that they can leave.
        most: The largest.
    """

    masks: tuple[Keeping, ...]
    least: Fraction
    most: Fraction


def shown(side: Side, ops: Sequence[int]) -> Shown | None:
    """What the masks among ops let through; None if there is none, or one of which the share is not known."""
    found: dict[object, Keeping] = {}
    for op in ops:
        for each in _keepings(side, op):
            found.setdefault(each.same_as, each)
    kept = [each.kept for each in found.values() if each.kept is not None]
    if not kept or len(kept) < len(found):
        return None
    least = max(Fraction(0), 1 - sum((1 - share for share in kept), Fraction(0)))
    return Shown(tuple(found.values()), least, min(kept))


def inverted(left: Shown, right: Shown) -> bool:
    """Whether one run keeps what the other hides, by the same truth values."""
    if len(left.masks) != 1 or len(right.masks) != 1:
        return False
    a, b = left.masks[0], right.masks[0]
    return a.truths is not None and a.truths == b.truths and a.keeps != b.keeps


def same(left: Shown, right: Shown) -> bool:
    """Whether both runs are known to keep the same, by the same truth values."""
    return {m.same_as for m in left.masks} == {m.same_as for m in right.masks} and all(
        m.truths is not None for m in left.masks
    )


def keys_of(side: Side, ops: Sequence[int]) -> set[int]:
    """Over how many keys the softmaxes and attentions among ops go."""
    found: set[int] = set()
    for op in ops:
        name = side.name(op)
        inputs = side.trace.ops.inputs[op].tolist()
        if "backward" in name or not inputs:
            continue
        if "scaled_dot_product" in name and len(inputs) > 1:
            found.add(side.trace.meta(inputs[1]).shape[-2])
        elif "softmax" in name and side.trace.meta(inputs[0]).shape:
            found.add(side.trace.meta(inputs[0]).shape[-1])
    return found


# ---- one op --------------------------------------------------------------------------------------------


def _keepings(side: Side, op: int) -> Iterator[Keeping]:
    name = base(side.name(op))
    inputs = side.trace.ops.inputs[op].tolist()
    if "backward" in name:
        return
    if name in _FILLS and len(inputs) > 1:
        value = dict(side.op(op).signature.arguments).get("value")
        if len(inputs) > 2:
            value = _constant(side, inputs[2])
        if isinstance(value, int | float) and value < HIDES and not _is_constant(side, inputs[0]):
            yield _by_truths(side, op, f"{name} by a mask", inputs[1], keeps=False)
    elif name == "where" and len(inputs) > 2:
        low = [_is_low(side, v) for v in inputs[1:]]
        if low[0] != low[1]:
            scores = inputs[2 if low[0] else 1]
            if not _is_constant(side, scores):
                yield _by_truths(side, op, "where by a mask", inputs[0], keeps=low[1])
    elif name in _SUMS:
        for value in inputs:
            if _zeros_and_low(side.nearest_fingerprint(value)) is not None:
                yield _added(side, op, "a mask that is added to the scores", value)
    elif "scaled_dot_product" in name:
        yield from _of_attention(side, op, inputs)


def _of_attention(side: Side, op: int, inputs: Sequence[int]) -> Iterator[Keeping]:
    given = dict(side.op(op).signature.arguments)
    if given.get("is_causal") is True and len(inputs) > 1:
        queries, keys = (side.trace.meta(v).shape[-2] for v in inputs[:2])
        pairs = sum(min(row + 1, keys) for row in range(queries))
        yield Keeping(op, "is_causal=True", Fraction(pairs, max(queries * keys, 1)))
    names = side.contents.tokens.table[int(side.trace.ops.signature[op])].slots
    for slot, value in zip(names, inputs, strict=False):
        if slot in MASK_ARGUMENTS and isinstance(given.get(slot), TensorArgument):
            how = f"{slot}={side.trace.meta(value)}"
            if side.trace.meta(value).dtype == "bool":
                yield _by_truths(side, op, how, value, keeps=True)
            else:
                yield _added(side, op, how, value)


def _added(side: Side, op: int, how: str, value: int) -> Keeping:
    """A mask of zeros and low numbers: by the truth values that it was made of, else by its zeros."""
    truths = _made_of(side, value)
    if truths is not None:
        return _by_truths(side, op, how, truths[0], keeps=truths[1])
    print_ = _whole(side, value)
    return Keeping(op, how, _zeros_and_low(print_))


def _by_truths(side: Side, op: int, how: str, value: int, *, keeps: bool) -> Keeping:
    value, keeps = _unnegated(side, value, keeps)
    print_ = _whole(side, value)
    if print_ is None or not print_.n:
        return Keeping(op, how, None)
    true = Fraction(print_.n - print_.zero, print_.n)
    key = print_.raw, print_.n, print_.code
    return Keeping(op, how, true if keeps else 1 - true, key, keeps)


def _unnegated(side: Side, value: int, keeps: bool) -> tuple[int, bool]:
    """The truth values that others are the opposite of, through views and copies."""
    for _ in range(_STEPS):
        op = int(side.contents.maker[value])
        if op < 0:
            break
        name = base(side.name(op))
        bool_before = len(side.trace.ops.inputs[op]) and (
            side.trace.meta(int(side.trace.ops.inputs[op][0])).dtype == "bool"
        )
        if not bool_before or not (
            name in _NEGATIONS or name in _COPIES or _is_whole_view(side, op, value)
        ):
            break
        keeps ^= name in _NEGATIONS
        value = int(side.trace.ops.inputs[op][0])
    return value, keeps


def _made_of(side: Side, value: int) -> tuple[int, bool] | None:
    """The truth values that a mask of numbers was chosen by, and whether True stands for zero."""
    for _ in range(_STEPS):
        op = int(side.contents.maker[value])
        if op < 0:
            return None
        name = base(side.name(op))
        inputs = side.trace.ops.inputs[op].tolist()
        if name == "where" and len(inputs) > 2:
            low = [_is_low(side, v) for v in inputs[1:]]
            known = all(_is_constant(side, v) for v in inputs[1:])
            return (inputs[0], low[1]) if known and low[0] != low[1] else None
        if name in _FILLS and len(inputs) > 1:
            return (inputs[1], False) if _is_constant(side, inputs[0]) else None
        if not inputs or not (name in _COPIES or _is_whole_view(side, op, value)):
            return None
        value = inputs[0]
    return None


def _is_whole_view(side: Side, op: int, value: int) -> bool:
    """Whether an op returns all elements of what it is given, perhaps some of them again and again."""
    if not side.contents.tokens.view[op]:
        return False
    source = int(side.trace.ops.inputs[op][0])
    return _distinct(side, source) == _distinct(side, value)


def _distinct(side: Side, value: int) -> int:
    """How many elements a value has in memory: those of expanded dims count once."""
    meta = side.trace.meta(value)
    return math.prod(size for size, step in zip(meta.shape, meta.stride, strict=False) if step)


def _whole(side: Side, value: int) -> Fingerprint | None:
    """The fingerprint of all elements of a value, in any order; None where only more are known."""
    print_ = side.nearest_fingerprint(value)
    if print_ is None:
        return None
    whole = print_.n in (math.prod(side.trace.meta(value).shape), _distinct(side, value))
    return print_ if whole else None


def _is_constant(side: Side, value: int) -> bool:
    return _constant(side, value) is not None


def _constant(side: Side, value: int) -> float | None:
    """The number that all elements of a value are."""
    print_ = side.nearest_fingerprint(value)
    if print_ is None or not print_.n or print_.nan:
        return None
    if print_.ninf == print_.n:
        return -math.inf
    return print_.min if print_.min == print_.max and not print_.nonfinite else None


def _is_low(side: Side, value: int) -> bool:
    number = _constant(side, value)
    return number is not None and number < HIDES


def _zeros_and_low(print_: Fingerprint | None) -> Fraction | None:
    """The share of zeros in what holds nothing else but one very low number, or -inf; None for other contents."""
    if print_ is None or not print_.n or print_.nan or print_.pinf or not print_.zero:
        return None
    low = print_.n - print_.zero
    if not low or (print_.ninf not in (0, low)):
        return None
    if not print_.ninf and (
        print_.max != 0
        or print_.min >= HIDES
        or not math.isclose(print_.sum, print_.min * low, rel_tol=_SUMMED)
    ):
        return None
    return Fraction(print_.zero, print_.n)
