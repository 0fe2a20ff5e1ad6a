"""Settings that differ where one run does in one op what the other does in several."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Final

from opdrift.case import Side
from opdrift.causes.evidence import Evidence, cause, scope
from opdrift.causes.picked import attention_calls
from opdrift.records import Argument, Cause
from opdrift.tokens import base

#: Arguments that mean the same in every op that has them.
_SAME_MEANING: Final = ("eps", "approximate", "negative_slope", "momentum")
_ATTENTION: Final = (
    "scaled_dot_product",
    "flash_attention",
    "efficient_attention",
    "cudnn_attention",
)
_ACTIVATIONS: Final = frozenset(
    ["relu", "gelu", "silu", "tanh", "sigmoid", "elu", "leaky_relu", "hardswish", "mish"]
)
_SOFTMAX: Final = frozenset(["_softmax", "_safe_softmax", "softmax"])
_ROOTS: Final = frozenset(["sqrt", "rsqrt"])
_VARIANCES: Final = frozenset(["var", "var_mean", "std", "std_mean"])
#: Scales are computed in float64 and written as float32, or taken as a product of two roots.
_SAME: Final = 1e-5
#: On a GPU torch pads heads to a multiple of this before flash attention.
_PADDED: Final = 8


def fused_args(e: Evidence) -> Cause | None:
    """The runs take different paths, and a setting that both paths have differs."""
    if e.origin.story != "region" or not e.size.material or not e.ops_of(0) or not e.ops_of(1):
        return None
    found = [
        *_shared_arguments(e),
        *_added_eps(e),
        *_corrections(e),
        *_scales(e),
        *_head_sizes(e),
        *_activations(e),
    ]
    if not found:
        return None
    op = e.op()
    return cause(
        "op-args",
        "likely",
        f"the runs take different paths in {scope(op.call.path if op else '')}, and {', '.join(found[:3])}",
        [
            *found,
            *(f"{name}: {side.place(e.ops_of(n)[0])}" for n, (name, side, _) in enumerate(e.sides)),
        ],
        "Make this setting the same in both configurations first; the paths alone (fused or not) differ by rounding.",
    )


def _shared_arguments(e: Evidence) -> list[str]:
    """Arguments of one meaning that have no value in common on the two sides."""
    words = []
    for name in _SAME_MEANING:
        left, right = (
            {v for v in _values(side, e.ops_of(n), name) if v is not None}
            for n, (_, side, _) in enumerate(e.sides)
        )
        if left and right and not left & right:
            words.append(f"{name}: {_listed(left)} against {_listed(right)}")
    return words


def _values(side: Side, ops: list[int], name: str) -> Iterator[Argument]:
    for op in ops:
        signature = side.op(op).signature
        given = {**signature.op.defaults, **dict(signature.arguments)}
        if isinstance(given.get(name), int | float | str):
            yield given[name]


def _added_eps(e: Evidence) -> list[str]:
    """The eps of a norm in one op against what the other side adds before its root."""
    for n in (0, 1):
        side, other = e.sides[n][1], e.sides[1 - n][1]
        own = {v for v in _values(side, e.ops_of(n), "eps") if isinstance(v, float)}
        parts = e.ops_of(1 - n)
        added = {v for op in parts if (v := _before_root(other, op, parts)) is not None}
        if len(own) != 1 or len(added) != 1:
            continue
        (eps,), (number,) = own, added
        if not math.isclose(eps, number, rel_tol=_SAME):
            left, right = (eps, number) if n == 0 else (number, eps)
            return [f"eps: {left:.6g} against {right:.6g}"]
    return []


def _before_root(side: Side, op: int, ops: list[int]) -> float | None:
    """The number that an op adds to a tensor of which a later op of the same stretch takes a root."""
    if base(side.name(op)).rstrip("_") != "add":
        return None
    number = dict(side.op(op).signature.arguments).get("other")
    if not isinstance(number, float) or not 0 < number < 1:
        return None
    made = set(side.trace.ops.outputs[op].tolist())
    roots = (i for i in ops if i > op and base(side.name(i)).rstrip("_") in _ROOTS)
    return number if any(made & set(side.trace.ops.inputs[i].tolist()) for i in roots) else None


def _corrections(e: Evidence) -> list[str]:
    """A norm in one op, which divides by n, against a variance that divides by n - 1."""
    for n in (0, 1):
        side, other = e.sides[n][1], e.sides[1 - n][1]
        norms = [op for op in e.ops_of(n) if "norm" in base(side.name(op))]
        given = [
            dict(other.op(op).signature.arguments).get("correction", 1)
            for op in e.ops_of(1 - n)
            if base(other.name(op)) in _VARIANCES
        ]
        if norms and given and all(isinstance(c, int | float) and c == 1 for c in given):
            words = "n", "n - 1 (unbiased=True)"
            left, right = words if n == 0 else words[::-1]
            return [f"divisor of the variance: {left} against {right}"]
    return []


def _scales(e: Evidence) -> list[str]:
    """The scale of a fused attention against the factors by which the other side scales its scores."""
    for n in (0, 1):
        side, other = e.sides[n][1], e.sides[1 - n][1]
        fused = [op for op in e.ops_of(n) if any(word in side.name(op) for word in _ATTENTION)]
        parts = e.ops_of(1 - n)
        if not fused or not any(base(other.name(op)) in _SOFTMAX for op in parts):
            continue
        expected = _scale_of(side, fused[0])
        every = [f for op in parts for f in _factors(other, op)]
        # torch scales query and key by the root of the scale each
        factors = sorted({f * f if every.count(f) == 2 else f for f in every})
        reached = {*every, *factors}
        if (
            expected is None
            or not factors
            or any(math.isclose(f, expected, rel_tol=_SAME) for f in reached)
        ):
            continue
        scales = f"{expected:.6g}", f"factors {_listed(factors)}"
        left, right = scales if n == 0 else scales[::-1]
        return [f"scale of the scores: {left} against {right}"]
    return []


def _scale_of(side: Side, op: int) -> float | None:
    scale = dict(side.op(op).signature.arguments).get("scale")
    if isinstance(scale, int | float):
        return float(scale)
    inputs = side.trace.ops.inputs[op].tolist()
    shape = side.trace.meta(inputs[0]).shape if inputs else ()
    return shape[-1] ** -0.5 if shape and shape[-1] else None


def _factors(side: Side, op: int) -> list[float]:
    """What an op multiplies a tensor by, if it does so by one number."""
    name = base(side.name(op)).rstrip("_")
    given = dict(side.op(op).signature.arguments)
    number = given.get("other", given.get("alpha") if name == "baddbmm" else None)
    if not isinstance(number, int | float) or isinstance(number, bool) or number == 0:
        return []
    if name in ("mul", "baddbmm"):
        return [float(number)]
    return [1.0 / number] if name in ("div", "true_divide") else []


def _head_sizes(e: Evidence) -> list[str]:
    """Head sizes of two calls of attention; heads that torch itself pads are the same."""
    calls = attention_calls(e)
    if calls.left is None or calls.right is None:
        return []
    on_cpu = calls.left.facts.device == calls.right.facts.device == "cpu"
    unit = 1 if on_cpu else _PADDED
    words = []
    for name in ("query", "key", "value"):
        left, right = (getattr(call.facts, name).shape[-1] for call in (calls.left, calls.right))
        if -(-left // unit) != -(-right // unit):
            words.append(f"head size of {name}: {left} against {right}")
    return words


def _activations(e: Evidence) -> list[str]:
    """The activation of a fused layer against the one that the other side runs."""
    for n in (0, 1):
        side, other = e.sides[n][1], e.sides[1 - n][1]
        layers = [op for op in e.ops_of(n) if "encoder_layer_fwd" in side.name(op)]
        parts = {base(other.name(op)).rstrip("_") for op in e.ops_of(1 - n)} & _ACTIVATIONS
        if not layers or not parts:
            continue
        gelu = dict(side.op(layers[0]).signature.arguments).get("use_gelu")
        own = "gelu" if gelu is True else "relu"
        if own not in parts:
            left, right = (own, _listed(parts)) if n == 0 else (_listed(parts), own)
            return [f"activation: {left} against {right}"]
    return []


def _listed(values: object) -> str:
    assert isinstance(values, set | list | frozenset)
    return ", ".join(sorted(f"{v:.6g}" if isinstance(v, float) else str(v) for v in values))
