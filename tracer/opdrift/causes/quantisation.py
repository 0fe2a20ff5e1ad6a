"""Weights that were rounded to a few levels, on one side or differently on both."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from opdrift import components, tfp1
from opdrift.case import Side
from opdrift.causes.evidence import Evidence, cause, counted, scope, setting
from opdrift.causes.likeness import Kind, likeness
from opdrift.compare import difference, number
from opdrift.records import Cause, Leaf
from opdrift.tokens import base
from opdrift.tracefile.fingerprints import Fingerprint

_QUANTISED_NAMES: Final = (
    "quant",
    "int4pack",
    "int8pack",
    "int8_dyn",
    "dyn_quant",
    "_int_mm",
    "nf4",
    "fp4",
    "gptq",
    "awq",
    "marlin",
)
_QUANTISED_LEAVES: Final = (
    "qweight",
    "qzeros",
    "weight_scale",
    "scales",
    "zero_point",
    "weight_packed",
    "absmax",
)
_QUANTISED_TYPES: Final = (
    "int8",
    "uint8",
    "int4",
    "uint4",
    "qint8",
    "quint8",
    "float8_e4m3fn",
    "float8_e5m2",
    "float4_e2m1fn_x2",
)
#: Steps on each side of zero that 4 bits give; with 8 bits any ratio is close to one of two small numbers.
_STEPS: Final = 8
#: Elements of float32 arithmetic land this close to a multiple of the step.
_ON_GRID: Final = 4e-6
#: Weights of a float model are rarely exactly 0; rounding to few steps makes many so.
_ZEROS: Final = 0.005
#: Contents that come from the same weights are closer than this; independent ones are 1.4 apart.
_RELATED: Final = 0.7
#: Cosine of two codes of the same weights; that of independent ones is below 4 / sqrt(n), 0.25 from 256 elements on.
_ALIKE: Final = 0.3


#: Contents that are related in one of these ways were not rounded to levels.
_NO_ROUNDING: Final[frozenset[Kind]] = frozenset(
    ["zeroed", "rearranged", "negated", "scaled", "constant"]
)


def quantisation(e: Evidence) -> Cause | None:
    """Weights were rounded to a few levels in one run, or in both to different ones."""
    return _quantised_leaf(e) if e.origin.kind == "leaf" else _quantised_op(e)


def _quantised_leaf(e: Evidence) -> Cause | None:
    leaf = e.origin.leaf.left or e.origin.leaf.right
    values = e.origin.values
    if (
        leaf is None
        or leaf.kind not in ("parameter", "buffer")
        or values.left is None
        or values.right is None
    ):
        return None
    signs = []
    for name, side, value in (
        ("left", e.case.left, values.left),
        ("right", e.case.right, values.right),
    ):
        why = _quantised(side, value, leaf.name)
        if why:
            signs.append(f"{name}: {why}")
    a, b = e.case.left.fingerprint(values.left), e.case.right.fingerprint(values.right)
    like = likeness(a, b) if a is not None and b is not None else None
    if like is not None and like.kind in _NO_ROUNDING:
        return None
    if like is not None and like.kind == "levels":
        signs.append(like.words)
    if not signs or a is None or b is None:
        return None
    gap = difference(a, b)
    if gap.comparable and gap.relative is not None:
        if gap.changed_index is not None:
            return None
        codes = all(t in _QUANTISED_TYPES for t in (e.dtypes().left, e.dtypes().right))
        # codes say nothing without their scale: what they share is the direction
        if _cosine(gap.absolute_l2, a, b) < _ALIKE if codes else gap.relative > _RELATED:
            return None
        signs.append(
            f"the codes point the same way and are {number(gap.relative)} apart: the same weights in other steps"
            if codes
            else f"the contents are {number(gap.relative)} apart: the same weights, rounded differently"
        )
    signs += _low_rank(e)
    return cause(
        "quantisation",
        "likely",
        f"{leaf.name or 'a weight'} was rounded to a few levels, and not alike in both runs",
        signs,
        "Compare with the weights before quantisation; merge adapters into the full-precision weights and quantise"
        " once afterwards, with the same bits, group size and scales in both runs.",
    )


def _cosine(distance: float | None, left: Fingerprint, right: Fingerprint) -> float:
    """Cosine of two contents, by ||a - b||^2 = ||a||^2 + ||b||^2 - 2 a.b; 0 where it cannot be told."""
    product = math.sqrt(left.ssq * right.ssq)
    if distance is None or not product > 0:
        return 0.0
    return (left.ssq + right.ssq - distance**2) / (2 * product)


def _quantised(side: Side, value: int, name: str) -> str | None:
    """What says that a content was quantised; None if nothing does."""
    kind = side.trace.meta(value).dtype
    last = name.rpartition(".")[2]
    if kind in _QUANTISED_TYPES:
        return f"it is stored as {kind}"
    if any(word in last for word in _QUANTISED_LEAVES):
        return f"its name, {last}, is that of a part of a quantised weight"
    if side.lineage.of(value).quantised:
        return "an op that rounds to levels made it"
    print_ = side.fingerprint(value)
    if print_ is None or print_.code not in (tfp1.Code.F32, tfp1.Code.F16, tfp1.Code.BF16):
        return None
    steps = _grid(print_, side.trace.meta(value).shape)
    if steps is not None:
        return f"its sampled elements are whole multiples of one step a row, up to {steps}"
    share = print_.zero / max(print_.n, 1)
    if print_.n >= 256 and _ZEROS < share < 0.5 and print_.min < 0 < print_.max:
        return f"{print_.zero} of {print_.n} elements are exactly 0, as rounding to a few levels leaves"
    return None


def _grid(print_: Fingerprint, shape: tuple[int, ...]) -> int | None:
    """Whether the samples of each row are whole multiples of a step of that row; the number of steps then.

    Rows are scaled by their largest element or not at all, so two elements of a row have the ratio of two
    small whole numbers. That is rare by chance: for 8 steps a random ratio is this close to one of 90
    fractions with a probability below 1e-3.
    """
    values = _samples(print_)
    if values is None or len(shape) < 2:
        return None
    columns = math.prod(shape[1:])
    rows: dict[int, list[float]] = {}
    for position, value in zip(tfp1.sample_positions(print_.n), values.tolist(), strict=True):
        rows.setdefault(position // columns, []).append(value)
    pairs = [
        (r[0], other) for r in rows.values() if len(r) > 1 for other in r[1:] if r[0] and other
    ]
    if len(pairs) < 4:
        return None
    return _STEPS if all(_is_ratio(a, b, _STEPS) for a, b in pairs) else None


def _is_ratio(a: float, b: float, steps: int) -> bool:
    whole = np.arange(1, steps + 1)
    multiples = abs(a / b) * whole
    near = np.abs(multiples - np.round(multiples))
    return bool(np.any((near < _ON_GRID * whole) & (np.round(multiples) <= steps)))


def _samples(print_: Fingerprint) -> npt.NDArray[np.float64] | None:
    return components.numbers(print_) if components.is_float(print_) else None


def _low_rank(e: Evidence) -> list[str]:
    """A low-rank path beside the weight that only one run has: an adapter, merged in the other."""
    module = e.calls()
    found = []
    for name, side, partner, call in (
        ("left", e.case.left, e.case.pairing.right_of, module.left),
        ("right", e.case.right, e.case.pairing.left_of, module.right),
    ):
        if call is None:
            continue
        products = [
            int(op)
            for op in np.flatnonzero((partner < 0) & (side.home == call.id))
            if base(side.name(int(op))) in ("mm", "bmm", "addmm", "matmul", "linear")
        ]
        if len(products) >= 2:
            found.append(
                f"{name}: {counted(len(products), 'product')} that the other run does not have run beside it in"
                f" {scope(call.path)}: an adapter that is not merged"
            )
    return found


def quantised_ops(e: Evidence) -> list[tuple[str, Side, int]]:
    """Ops of the origin that compute with quantised numbers."""
    used = [
        (name, side, op)
        for number, (name, side, _) in enumerate(e.sides)
        for op in e.ops_of(number)
        if any(word in side.name(op).lower() for word in _QUANTISED_NAMES)
    ]
    return used + _dequantised(e)


def _quantised_op(e: Evidence) -> Cause | None:
    used = quantised_ops(e)
    if not used or (e.origin.story == "op" and not e.origin.settings):
        return None
    sides = {name for name, _, _ in used}
    which = (
        f"the {next(iter(sides))} run computes"
        if len(sides) == 1
        else "both runs compute, in different ways,"
    )
    _, side, op = used[0]
    if e.origin.settings:
        given = [setting(s) for s in e.origin.settings]
        return cause(
            "quantisation",
            "certain",
            f"{side.name(op)} in {scope(side.module(op))} rounds to other levels: {', '.join(given[:3])}",
            [*given, *(f"{name}: {s.place(o)}" for name, s, o in used[:5])],
            "Quantise both runs with the same bits, group size, scales and zero points.",
        )
    return cause(
        "quantisation",
        "certain" if len(sides) == 1 else "likely",
        f"{which} with quantised numbers in {scope(side.module(op))}",
        [f"{name}: {s.place(o)}" for name, s, o in used[:5]],
        "Compare with the full-precision model, or quantise both runs with the same bits, group size and scales.",
    )


def _dequantised(e: Evidence) -> list[tuple[str, Side, int]]:
    """Ops that start a region from a leaf of a quantised type, or one named like a part of a quantised weight."""
    found = []
    for number_, (name, side, _) in enumerate(e.sides):
        boundary = (e.origin.boundary.left, e.origin.boundary.right)[number_]
        ops = e.ops_of(number_)
        leaves = [leaf for v in boundary for leaf in side.leaves.of(v)]
        if ops and any(_is_quantised_leaf(side, leaf) for leaf in leaves):
            found.append((name, side, ops[0]))
    return found


def _is_quantised_leaf(side: Side, leaf: Leaf) -> bool:
    last = leaf.name.rpartition(".")[2]
    kind = side.trace.meta(leaf.value).dtype
    return leaf.kind != "input" and (
        kind in _QUANTISED_TYPES or any(word in last for word in _QUANTISED_LEAVES)
    )
