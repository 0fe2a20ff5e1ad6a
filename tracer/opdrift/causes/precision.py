"""Types too narrow, weights on a grid, numbers that are none."""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from opdrift import tfp1
from opdrift.case import Side
from opdrift.causes.evidence import Evidence, cause, counted, number, scope, some
from opdrift.compare import difference
from opdrift.origins.kinds import makes_infinite, makes_nan
from opdrift.records import Cause, Leaf, Mark
from opdrift.sizes import NARROW
from opdrift.tokens import base
from opdrift.tracefile.reader import Fingerprint

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
#: Numbers of steps on each side of zero that 4 and 8 bits give.
_STEPS: Final = (8, 128)
#: Elements of float32 arithmetic land this close to a multiple of the step.
_ON_GRID: Final = 4e-6
#: Weights of a float model are rarely exactly 0; rounding to few steps makes many so.
_ZEROS: Final = 0.005
#: Contents that come from the same weights are closer than this; independent ones are 1.4 apart.
_RELATED: Final = 0.7
_LARGEST: Final = {"float16": 65504.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


def dtype(e: Evidence) -> Cause | None:
    """One run computes here, or holds this, in another type."""
    return _dtype_leaf(e) if e.origin.kind == "leaf" else _dtype_op(e)


def _dtype_leaf(e: Evidence) -> Cause | None:
    types = e.dtypes()
    leaf = e.origin.leaf.left or e.origin.leaf.right
    if leaf is None or types.left == types.right or None in (types.left, types.right):
        return None
    values = e.origin.values
    assert values.left is not None
    assert values.right is not None
    a, b = e.case.left.fingerprint(values.left), e.case.right.fingerprint(values.right)
    gap = difference(a, b) if a is not None and b is not None else None
    if (
        gap is not None
        and gap.relative is not None
        and gap.how != "statistics"
        and gap.relative > 0.05
    ):
        return None  # not the same weights in another type
    names = e.origin.names
    evidence = [f"left {types.left}, right {types.right}: {some(names, 6)}"]
    if gap is not None and gap.relative is not None:
        evidence.append(
            "the numbers are the same"
            if gap.relative == 0
            else f"the numbers are {number(gap.relative)} apart, as the cast leaves them"
        )
    evidence += _casts_of(e)
    evidence += _overflows(e)
    return cause(
        "dtype",
        "certain",
        f"{names[0] if names else 'a leaf'} is {types.left} in the left run and {types.right} in the right one",
        evidence,
        "Use one dtype in both runs: look for .half(), .bfloat16(), .to(dtype), torch_dtype= and mixed-precision"
        " settings that reach this module and not the other; keep buffers of rotary embeddings and norms in float32.",
    )


def _dtype_op(e: Evidence) -> Cause | None:
    if e.origin.story not in ("region", "op", "factory", "settings"):
        return None
    narrow = [
        sorted(_types(side, e.ops_of(number)) & NARROW)
        for number, (_, side, _) in enumerate(e.sides)
    ]
    wanted = [s for s in e.origin.settings if s.name in ("dtype", "out_dtype")]
    types = e.dtypes()
    differ = types.left != types.right and None not in (types.left, types.right)
    if (
        bool(narrow[0]) == bool(narrow[1])
        and not wanted
        and not (differ and e.origin.story == "region")
    ):
        return None
    evidence = []
    for number_, (name, side, _) in enumerate(e.sides):
        casts = [op for op in e.ops_of(number_) if base(side.name(op)) in ("_to_copy", "to")]
        if narrow[number_]:
            evidence.append(f"{name}: computes in {', '.join(narrow[number_])} here")
        evidence += [
            f"{name}: cast by {side.place(op)} to {_result_type(side, op)}" for op in casts[:4]
        ]
    evidence += [f"{s.name}: {s.left} against {s.right}" for s in wanted]
    evidence += [
        f"{d.name}: {d.left} against {d.right}"
        for d in e.shared.environment
        if d.name.startswith("autocast")
    ]
    for name, mark in e.marks(
        lambda m: m.kind == "flags" and any(k.startswith("autocast") for k in m.fields)
    ):
        evidence.append(
            f"{name}: {', '.join(f'{k} changed to {v[1]}' for k, v in mark.fields.items() if k.startswith('autocast'))}"
        )
    evidence += _overflows(e)
    one = (
        "left" if narrow[0] and not narrow[1] else "right" if narrow[1] and not narrow[0] else None
    )
    found = e.op()
    where = scope(found.call.path) if found else "the model"
    summary = (
        f"the {one} run computes in {', '.join(narrow[0] or narrow[1])} in {where}, the other does not"
        if one
        else f"the runs compute in different types in {where}"
    )
    return cause(
        "dtype",
        "certain" if one or wanted else "likely",
        summary,
        dict.fromkeys(evidence),
        "Use one dtype in both runs: look for casts around this module, for autocast on one side only, and for layers"
        " left out of model.to(dtype).",
    )


def _types(side: Side, ops: list[int]) -> set[str]:
    return {
        side.trace.meta(int(v)).dtype
        for op in ops
        if not side.contents.tokens.view[op]
        for v in side.trace.ops.outputs[op]
    }


def _result_type(side: Side, op: int) -> str:
    outputs = side.trace.ops.outputs[op]
    return side.trace.meta(int(outputs[0])).dtype if len(outputs) else "nothing"


def _casts_of(e: Evidence) -> list[str]:
    """Casts of these leaves that a library made for good."""
    names = set(e.origin.names)
    marks: dict[str, tuple[str, Mark]] = {}
    for side, mark in e.marks(lambda m: m.kind == "buffer-cast"):
        if mark.fields.get("name") in names and not mark.fields.get("lossless"):
            marks.setdefault(str(mark.fields["name"]), (side, mark))
    if not marks:
        return []
    side, mark = next(iter(marks.values()))
    fields = mark.fields
    which = some(list(marks), 3)
    return [
        f"{side}: {fields.get('library', 'a library')} cast {which} from {fields.get('source_dtype')} to"
        f" {fields.get('destination_dtype')} for good: the original is not kept, and every later op"
        " reads the rounded numbers"
    ]


def _overflows(e: Evidence) -> list[str]:
    """The first op after the origin that makes infinities on one side only."""
    found = []
    for name, side, _ in e.sides:
        start = e.origin.op.left if name == "left" else e.origin.op.right
        if start is None:
            continue
        prints = side.trace.fingerprints
        bad = prints.number("pinf") + prints.number("ninf")
        outputs = side.trace.ops.outputs
        rows = side.trace.values.fingerprint[outputs.values]
        hits = np.flatnonzero((rows >= 0) & (np.where(rows >= 0, bad[rows], 0) > 0))
        ops = outputs.rows()[hits]
        later = ops[ops >= start]
        if len(later):
            op = int(later[0])
            kind = _result_type(side, op)
            limit = f", whose largest number is {_LARGEST[kind]:.0f}" if kind in _LARGEST else ""
            found.append(f"{name}: infinities appear at {side.place(op)} in {kind}{limit}")
    return found if len(found) == 1 else []


# ---- quantisation --------------------------------------------------------------------------------------


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
    if not signs or a is None or b is None:
        return None
    gap = difference(a, b)
    if (
        gap.comparable
        and gap.relative is not None
        and (gap.relative > _RELATED or gap.changed_index is not None)
    ):
        return None
    if gap.relative is not None:
        signs.append(
            f"the contents are {number(gap.relative)} apart: the same weights, rounded differently"
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
    for steps in _STEPS[:1]:
        if all(_is_ratio(a, b, steps) for a, b in pairs):
            return steps
    return None


def _is_ratio(a: float, b: float, steps: int) -> bool:
    whole = np.arange(1, steps + 1)
    multiples = abs(a / b) * whole
    near = np.abs(multiples - np.round(multiples))
    return bool(np.any((near < _ON_GRID * whole) & (np.round(multiples) <= steps)))


def _samples(print_: Fingerprint) -> npt.NDArray[np.float64] | None:
    bits = print_.sample
    if print_.code == tfp1.Code.F32:
        return bits.astype("<u4").view("<f4").astype(np.float64)
    if print_.code == tfp1.Code.F16:
        return bits.astype("<u2").view("<f2").astype(np.float64)
    return None


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


def _quantised_op(e: Evidence) -> Cause | None:
    used = [
        (name, side, op)
        for number, (name, side, _) in enumerate(e.sides)
        for op in e.ops_of(number)
        if any(word in side.name(op).lower() for word in _QUANTISED_NAMES)
    ]
    used += _dequantised(e)
    if not used or (e.origin.story == "op" and not e.origin.settings):
        return None
    sides = {name for name, _, _ in used}
    which = f"the {next(iter(sides))} run" if len(sides) == 1 else "both runs, in different ways,"
    _, side, op = used[0]
    return cause(
        "quantisation",
        "certain" if len(sides) == 1 else "likely",
        f"{which} computes with quantised numbers in {scope(side.module(op))}",
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


# ---- NaN -----------------------------------------------------------------------------------------------


def nan(e: Evidence) -> Cause | None:
    """NaN or infinite values appear here on one side."""
    if e.origin.kind == "leaf":
        return None
    candidates = [
        (name, side, op)
        for number, (name, side, own) in enumerate(e.sides)
        for op in dict.fromkeys([*([own] if own is not None else []), *e.ops_of(number)])
    ]
    makers = [c for c in candidates if makes_nan(c[1], c[2])]
    makers = makers or [c for c in candidates if makes_infinite(c[1], c[2])]
    gap = e.size.difference
    changed = e.origin.story == "nonfinite" or (gap is not None and gap.nonfinite_changed)
    if not makers or (not changed and len({name for name, _, _ in makers}) != 1):
        return None
    name, side, op = makers[0]
    outputs = [side.fingerprint(v) for v in side.trace.ops.outputs[op].tolist()]
    print_ = next((p for p in outputs if p is not None and p.nonfinite), None)
    inputs = [side.nearest_fingerprint(v) for v in side.trace.ops.inputs[op].tolist()]
    evidence = [f"{name}: {side.place(op)}"]
    if print_ is not None:
        evidence.append(
            f"{name}: {print_.nan} NaN and {print_.pinf + print_.ninf} infinite of {print_.n} elements come out, none went in"
        )
    evidence += [
        f"{name}: an input reaches {number(p.absmax)}"
        for p in inputs[:2]
        if p is not None and p.absmax > 0
    ]
    return cause(
        "nan",
        "certain",
        f"{side.name(op)} in {scope(side.module(op))} makes non-finite values in the {name} run",
        evidence,
        "Guard the op: keep at least one key unmasked a row, add an epsilon before log, division and sqrt, compute in"
        " float32 or bfloat16 what overflows float16.",
    )
