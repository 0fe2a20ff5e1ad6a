"""Why two logs may differ: a log says little, so most answers are "possible"."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from opdrift.compare import number
from opdrift.foreign.comparison import Origin, summed_otherwise
from opdrift.foreign.model import Log, LoggedOp, LoggedTensor, words
from opdrift.records import ArgumentDifference, Cause

#: Ops that draw: two runs agree in them only from the same state of the generator.
_RANDOM: Final = words(
    "native_dropout dropout bernoulli bernoulli_ rand randn rand_like randn_like randint randperm uniform_ normal_"
    " random_ exponential_ multinomial rrelu_with_noise"
)
_RECORD: Final = (
    "Record both runs with `opdrift.record(path, model=model)`: it names weights and inputs, compares them bit for bit,"
    " and says which kernel ran"
)
_BLIND: Final = "equal norms do not prove equal tensors: a tensor whose rows were permuted, or whose signs were flipped, has the same"


@dataclass(frozen=True, slots=True)
class Judged:
    """An origin, its cause, and whether rounding may be all that it is."""

    origin: Origin
    cause: Cause
    material: bool


def judge(origin: Origin, logs: Sequence[Log], explained: float | None) -> Judged:
    """The cause of an origin.

    Args:
        origin: What to explain.
        logs: Both logs.
        explained: How far apart rounding brings norms here; None where the dtype is not known.
    """
    if origin.story == "lone":
        return Judged(origin, _lone(origin), material=True)
    if origin.story == "other-source":
        return Judged(origin, _other_source(origin), material=True)
    if origin.story == "input":
        return Judged(origin, _input(origin, logs), material=True)
    for rule in (_arguments, _dtype, _nonfinite, _random):
        if (found := rule(origin)) is not None:
            return Judged(origin, found, material=True)
    distance = origin.distance
    if distance is not None and explained is not None and distance <= explained:
        return Judged(origin, _rounding(origin, logs, distance, explained), material=False)
    return Judged(origin, _kernel(origin, logs), material=True)


def arguments_of(origin: Origin) -> tuple[ArgumentDifference, ...]:
    """Non-tensor arguments that differ."""
    a, b = origin.left, origin.right
    if a is None or b is None:
        return ()
    names = dict.fromkeys([*a.arguments, *b.arguments])
    return tuple(
        ArgumentDifference(name, a.arguments.get(name), b.arguments.get(name))
        for name in names
        if a.arguments.get(name) != b.arguments.get(name)
    )


def random(op: LoggedOp) -> bool:
    """Whether the op draws random numbers."""
    return op.base_name in _RANDOM


def _lone(origin: Origin) -> Cause:
    side = "left" if origin.right is None else "right"
    return Cause(
        "structure",
        "likely",
        f"only the {side} run has {origin.op.name}",
        (_where(origin.op),),
        "Look in both programs at what leads to this op: a branch, a setting, another version of a library",
    )


def _other_source(origin: Origin) -> Cause:
    assert origin.source is not None
    if origin.source.base_name == "_to_copy":
        return Cause(
            "dtype",
            "likely",
            f"only one run converts what {origin.op.name} reads: {origin.source.name}",
            (_where(origin.source),),
            "Use the same precision in both runs: autocast, model.to(dtype) and the checkpoint's dtype decide",
        )
    return Cause(
        "structure",
        "likely",
        f"{origin.op.name} reads what {origin.source.name} made, an op that only one run has",
        (_where(origin.source), *_blind(origin)),
        "Look in both programs at what leads to this op: a branch, a setting, another version of a library",
    )


def _input(origin: Origin, logs: Sequence[Log]) -> Cause:
    unseen = "no op of the log made it: it is an input, a weight or a buffer"
    if logs[0].format == "torchtitan":
        unseen = "no op of the log made it: it is an input, a weight, a buffer, or comes from an op that the log leaves out"
    if not all(log.hashes_inputs for log in logs):
        unseen = "a view differs only where what it looks at does; what that is the log does not say, as inputs were not hashed"
    same = "the ops before this one gave equal hashes" if origin.op.seq > 1 else ""
    return Cause(
        "input",
        "possible",
        f"input {origin.slot} of {origin.op.name} differs already when the op reads it; the log does not name it",
        tuple(e for e in (unseen, same) if e),
        f"Compare the weights and the inputs of both runs first. {_RECORD}",
    )


def _arguments(origin: Origin) -> Cause | None:
    differing = arguments_of(origin)
    if not differing:
        return None
    said = [f"{a.name}: left {a.left or '(none)'}, right {a.right or '(none)'}" for a in differing]
    return Cause(
        "op-args",
        "likely",
        f"{origin.op.name} was called with other arguments: {said[0]}",
        tuple(said[1:]),
        "Make the argument equal in both programs, and compare again",
    )


def _dtype(origin: Origin) -> Cause | None:
    a, b = _tensors(origin)
    if a is None or b is None or not a.dtype or not b.dtype or a.dtype == b.dtype:
        return None
    return Cause(
        "dtype",
        "likely",
        f"{origin.op.name} computes in {a.dtype} on the left and in {b.dtype} on the right",
        (),
        "Use the same precision in both runs: autocast, model.to(dtype) and the checkpoint's dtype decide",
    )


def _nonfinite(origin: Origin) -> Cause | None:
    a, b = _tensors(origin)
    bad = [any(h.nonfinite for h in t.hashes or ()) if t is not None else False for t in (a, b)]
    if bad[0] == bad[1]:
        return None
    side = "left" if bad[0] else "right"
    return Cause(
        "nan",
        "likely",
        f"the norm of what {origin.op.name} returns is NaN or infinite in the {side} run alone",
        tuple(_blind(origin)),
        f"Look for an overflow, a division by zero or a fully masked row in the {side} run at this op",
    )


def _random(origin: Origin) -> Cause | None:
    if not random(origin.op):
        return None
    return Cause(
        "rng",
        "likely",
        f"{origin.op.name} drew other numbers",
        ("the log does not hold the state of the random number generator",),
        "Set the same seed in both runs before the first draw, or call model.eval() if this is dropout in inference",
    )


def _rounding(origin: Origin, logs: Sequence[Log], distance: float, explained: float) -> Cause:
    size = (
        f"the norms are {number(distance)} apart; rounding explains up to {number(explained)} here"
    )
    text = (origin.values[0] or LoggedTensor("", None)).text
    if summed_otherwise(distance, text):
        size = f"the norms are {number(distance)} apart: the same numbers, added in another order, give as much"
    return Cause(
        "rounding",
        "possible",
        f"{origin.op.name} differs by no more than rounding would make it, as far as a norm can tell",
        (size, *_blind(origin), *_no_inputs(logs)),
        f"{_RECORD}: only then is it certain that nothing hides behind the norm",
    )


def _kernel(origin: Origin, logs: Sequence[Log]) -> Cause:
    equal = origin.inputs_match is True
    begins = (
        "inputs with equal hashes give another output: another kernel, other settings, or inputs that differ unseen"
        if equal
        else "it is the first op whose output differs; whether its inputs were equal is not known"
    )
    return Cause(
        "kernel",
        "possible",
        f"{origin.op.name} returned something else; the log does not say which kernel ran or with which settings",
        (begins, *_blind(origin), *_no_inputs(logs)),
        _RECORD,
    )


def _tensors(origin: Origin) -> tuple[LoggedTensor | None, LoggedTensor | None]:
    return origin.values


def _where(op: LoggedOp) -> str:
    return f"{op.name} is op {op.seq}" + (f", in {op.module}" if op.module else "")


def _blind(origin: Origin) -> Iterator[str]:
    if origin.inputs_match is True:
        yield _BLIND


def _no_inputs(logs: Sequence[Log]) -> Iterator[str]:
    if not all(log.hashes_inputs for log in logs):
        yield "inputs were not hashed; DebugMode.log_tensor_hashes(hash_inputs=True) does it"


def known_distance(distance: float | None) -> float | None:
    """A distance as the diagnosis holds it."""
    return None if distance is None or math.isnan(distance) else distance
