"""Types that are too narrow, and numbers that are none."""

from __future__ import annotations

from typing import Final

import numpy as np

from opdrift.case import Side
from opdrift.causes.compiled import region_gap, stands_for
from opdrift.causes.evidence import Evidence, cause, scope, some
from opdrift.compare import difference, number
from opdrift.origins.kinds import makes_infinite, makes_nan
from opdrift.records import Cause, Mark
from opdrift.sizes import NARROW
from opdrift.tokens import base

_LARGEST: Final = {"float16": 65504.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
#: Ops that cast.
_CASTS: Final = frozenset(["_to_copy", "to"])
#: Casts of a side that are quoted.
_TOLD: Final = 4
_FRACTIONS: Final = ("float", "bfloat", "complex")


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
        and not e.shared.are_casts(e.origin.leaf)
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
    if e.origin.story not in ("region", "op", "factory", "settings", "compiled"):
        return None
    gap, ops = region_gap(e), stands_for(e)
    if gap is not None and not gap.narrowed:
        return None  # generated kernels may compute in a type that shows nowhere
    narrow = [
        sorted(_types(side, ops[number]) & NARROW) for number, (_, side, _) in enumerate(e.sides)
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
    for number_, (name, _, _) in enumerate(e.sides):
        if narrow[number_]:
            evidence.append(f"{name}: computes in {', '.join(narrow[number_])} here")
        evidence += casts_at(e, number_)
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
            f" after op {mark.seq}"
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


def casts_at(e: Evidence, number: int) -> list[str]:
    """The first casts of one side here, in words."""
    name, side, _ = e.sides[number]
    casts = [op for op in e.ops_of(number) if base(side.name(op)) in _CASTS]
    return [f"{name}: cast by {side.place(op)} to {_result_type(side, op)}" for op in casts[:_TOLD]]


def cast_on_one_side(e: Evidence) -> tuple[int, str] | None:
    """Which side, 0 or 1, casts here to a type of fractions that the other does not compute in, and the type.

    None where neither does, or both.
    """
    if e.origin.story != "region":
        return None
    ops = e.ops_of(0), e.ops_of(1)
    found = []
    for n, (_, side, _) in enumerate(e.sides):
        casts = {_result_type(side, op) for op in ops[n] if base(side.name(op)) in _CASTS}
        others = casts - _types(e.sides[1 - n][1], ops[1 - n])
        found += [(n, each) for each in sorted(others) if each.startswith(_FRACTIONS)]
    return found[0] if found and len({n for n, _ in found}) == 1 else None


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
