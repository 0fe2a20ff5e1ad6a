"""What sort of op an op is, as far as the search for origins cares."""

from __future__ import annotations

from typing import Final

from opdrift.case import Side
from opdrift.tokens import base

#: Ops that move elements and compute nothing, besides views.
_MOVING: Final = frozenset(
    [
        "clone",
        "copy_",
        "contiguous",
        "_unsafe_view",
        "lift_fresh",
        "lift_fresh_copy",
        "alias",
        "detach",
        "detach_",
    ]
)
#: Ops by which programs write -inf on purpose.
_MASKING: Final = frozenset(["masked_fill", "masked_fill_", "where", "add", "add_", "copy_"])
#: Argument that says with which probability elements are dropped.
_PROBABILITIES: Final = ("dropout_p", "p")
#: Arguments that say whether a layer trains.
TRAINING: Final = ("training", "train")


def draws(side: Side, op: int) -> bool:
    """Whether an op takes numbers from a generator: attention without dropout carries the tag too."""
    if not side.contents.tokens.seeded[op]:
        return False
    signature = side.op(op).signature
    given = {**signature.op.defaults, **dict(signature.arguments)}
    for name in TRAINING:
        if given.get(name) is False:
            return False
    if "dropout_p" in given:
        return _positive(given["dropout_p"])
    if "attention" in signature.op.name:
        return False  # no dropout_p given: the default is 0
    if base(signature.op.name) in ("native_dropout", "dropout", "dropout_"):
        return any(_positive(given[name]) for name in _PROBABILITIES if name in given)
    return True


def _positive(value: object) -> bool:
    return isinstance(value, int | float) and value > 0


def computes(side: Side, op: int) -> bool:
    """Whether an op makes new numbers: no view, no fill, no fresh memory, no mere copy."""
    tokens = side.contents.tokens
    if tokens.view[op] or tokens.factory[op] or tokens.uninitialised[op]:
        return False
    return base(side.name(op)) not in _MOVING


def mixes(side: Side, op: int) -> bool:
    """Whether an op makes values of all samples, of values that were each a sample's own."""
    trace = side.trace
    outputs = [trace.samples.own.get(int(v)) for v in trace.ops.outputs[op].tolist()]
    if not any(f is not None and f.mixed for f in outputs):
        return False
    inputs = [trace.batch_of(int(v)) for v in trace.ops.inputs[op].tolist()]
    return not any(f is not None and f.mixed for f in inputs)


def makes_nan(side: Side, op: int) -> bool:
    """Whether NaN comes out of an op although none went in."""
    return _makes(side, op, nan_only=True)


def makes_infinite(side: Side, op: int) -> bool:
    """Whether infinite values, or NaN, come out of an op although neither went in; masking is no such op."""
    name = base(side.name(op))
    if name in _MASKING or side.contents.tokens.factory[op]:
        return False
    return _makes(side, op, nan_only=False)


def _makes(side: Side, op: int, *, nan_only: bool) -> bool:
    ops = side.trace.ops
    if not any(_bad(side, v, nan_only) for v in ops.outputs[op].tolist()):
        return False
    return not any(_bad(side, v, nan_only) for v in ops.inputs[op].tolist())


def _bad(side: Side, value: int, nan_only: bool) -> int:
    found = side.nearest_fingerprint(value)
    if found is None:
        return 0
    return found.nan if nan_only else found.nonfinite
