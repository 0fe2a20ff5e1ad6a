"""The same op with other settings: masks, positions, epsilon, scale, dtype."""

from __future__ import annotations

from typing import Final

from opdrift.causes.evidence import SIDES, Evidence, cause, scope
from opdrift.causes.optimizers import COMPARE_OPTIMIZERS, scope_of, updates_parameters
from opdrift.causes.reading import (
    AROUND_MASKS,
    MASK_ARGUMENTS,
    MASKING_OPS,
    is_kept,
    reads_as_mask,
)
from opdrift.records import ArgumentDifference, Cause
from opdrift.tokens import base

_POSITION_OPS: Final = frozenset(["embedding", "cos", "sin"])
_ATTENDING: Final = ("bmm", "mm", "attention", "matmul", "baddbmm", "cat")
_CROPPING: Final = frozenset(["slice", "narrow", "select", "index", "index_select"])
_COUNTING: Final = frozenset(["arange", "cumsum"])
#: Settings that other causes say better.
_ELSEWHERE: Final = frozenset(["training", "train", "dtype", "out_dtype"])


def op_args(e: Evidence) -> Cause | None:
    """The op was called with other non-tensor arguments."""
    settings = [s for s in e.origin.settings if s.name not in _ELSEWHERE]
    op = e.op()
    if not settings or op is None:
        return None
    made = _made_here(e)
    words = [
        f"{s.name}: {s.left if s.left is not None else 'absent'} against {s.right if s.right is not None else 'absent'}"
        for s in settings
    ]
    where = "to another place" if e.origin.story == "placed" else "with other arguments"
    found = e.any_op
    assert found is not None
    updates = updates_parameters(*found[1:])
    subject = f"{made or op.name} in {'an optimizer step' if updates else scope_of(*found[1:])}"
    return cause(
        "op-args",
        "certain",
        f"{subject} was called {where}: {', '.join(words[:3])}",
        [
            *words,
            *(f"{name}: {side.place(i)}" for name, side, i in e.sides if i is not None),
            "its tensor inputs are equal in both runs" if e.origin.inputs_match else "",
            "it changes parameters after a backward pass: an argument of an optimizer's update"
            if updates
            else "",
        ],
        COMPARE_OPTIMIZERS
        if updates
        else f"Make {settings[0].name} the same in both configurations; look where the module is built, and at defaults that changed between versions.",
    )


def mask(e: Evidence) -> Cause | None:
    """What attention may see differs: a mask is there or not, causal or not, or built otherwise."""
    settings = [s for s in e.origin.settings if s.name in MASK_ARGUMENTS]
    ops = [
        (name, side, i) for number, (name, side, _) in enumerate(e.sides) for i in e.ops_of(number)
    ]
    masking = [(name, side, i) for name, side, i in ops if base(side.name(i)) in MASKING_OPS]
    built = e.origin.story == "factory" and bool(masking or _reads_mask(e))
    # tril and triu make masks: with another diagonal they make another one
    built = built or (e.origin.story == "op" and bool(e.origin.settings) and _makes_mask(e))
    only_one = e.origin.story == "region" and _hides_in_one_run(e)
    made = not (settings or built or only_one) and _makes_other_mask(e)
    if not settings and not built and not only_one and not made:
        return None
    op = e.op()
    where = scope(op.call.path) if op else "the model"
    evidence = [_setting(s) for s in settings or e.origin.settings]
    evidence += [f"{name}: {side.place(i)}" for name, side, i in (ops if made else masking)[:4]]
    evidence += [f"{name}: {side.place(i)}" for name, side, i in e.sides if i is not None]
    if made:
        evidence.append("attention reads what comes of it as its mask")
    return cause(
        "mask",
        "certain" if settings else "likely",
        f"what attention may see differs in {where}",
        dict.fromkeys(evidence),
        "Hand the same mask to the attention in both runs: print the mask where the module receives it, and follow it"
        " from the caller; check is_causal and the meaning of True.",
    )


def position_ids(e: Evidence) -> Cause | None:
    """Positions differ: other rows of a position table, or other angles of a rotary embedding."""
    leaf = e.origin.leaf.left or e.origin.leaf.right
    if leaf is not None and "position" in leaf.name.rpartition(".")[2] and leaf.kind == "input":
        return cause(
            "position-ids",
            "certain",
            f"the positions {leaf.name} differ before the first op that reads them",
            [f"{leaf.name} is an input of both runs"],
            "Compute positions from the attention mask in both runs (cumsum(mask) - 1), not from the padded length.",
        )
    if e.origin.story not in ("factory", "region"):
        return None
    reader = e.consumer().left
    counting = [
        (name, side, i)
        for number, (name, side, _) in enumerate(e.sides)
        for i in e.ops_of(number)
        if base(side.name(i)) in _COUNTING
    ]
    if reader is None or not counting or base(e.case.left.name(reader)) not in _POSITION_OPS:
        return None
    return cause(
        "position-ids",
        "likely",
        f"{e.case.left.name(reader)} in {scope(e.case.left.module(reader))} reads other positions",
        [
            *(_setting(s) for s in e.origin.settings),
            *(f"{name}: {side.place(i)}" for name, side, i in counting[:3]),
        ],
        "Compute positions from the attention mask in both runs (cumsum(mask) - 1), and continue them with a cache.",
    )


def kv_cache(e: Evidence) -> Cause | None:
    """What was appended to a cache went to another place."""
    found = e.any_op
    if e.origin.story == "factory":
        return _cropped_cache(e)
    if e.origin.story != "placed" or found is None:
        return None
    reader = e.consumer()
    evidence = [_setting(s) for s in e.origin.settings]
    evidence += [
        f"{name}: {side.place(i)} writes into a part of a larger tensor"
        for name, side, i in e.sides
        if i is not None
    ]
    evidence += [
        f"{name}: {side.place(i)} reads it"
        for name, side, i in (
            ("left", e.case.left, reader.left),
            ("right", e.case.right, reader.right),
        )
        if i is not None
    ]
    evidence.append("what was written is equal in both runs, where it was written is not")
    reads = e.case.left.name(reader.left) if reader.left is not None else ""
    if not any(word in reads for word in _ATTENDING):
        return None
    return cause(
        "kv-cache",
        "likely",
        f"{found[1].name(found[2])} in {scope(found[1].module(found[2]))} writes the same values to another place of a cache",
        evidence,
        "Compare the cache positions of both runs: cache_position, the offset that each step writes at, and what is cropped.",
    )


def _cropped_cache(e: Evidence) -> Cause | None:
    """Attention reads another part of the keys and values that are kept from earlier steps."""
    reader = e.consumer()
    region = e.origin.region
    if reader.left is None or reader.right is None or not region.left or not region.right:
        return None
    left, right = e.case.left, e.case.right
    pairs = ((left, region.left[0], reader.left), (right, region.right[0], reader.right))
    if base(left.name(region.left[0])) not in _CROPPING:
        return None
    if not any(word in left.name(reader.left) for word in _ATTENDING):
        return None
    if not all(is_kept(side, int(side.trace.ops.inputs[op][0]), to) for side, op, to in pairs):
        return None
    return cause(
        "kv-cache",
        "likely",
        f"{left.name(reader.left)} in {scope(left.module(reader.left))} reads another part of what earlier steps left:"
        f" {', '.join(map(_setting, e.origin.settings))}",
        [
            *map(_setting, e.origin.settings),
            *(
                f"{name}: {side.place(op)} takes it"
                for name, (side, op, _) in zip(SIDES, pairs, strict=True)
            ),
            *(
                f"{name}: {side.place(to)} reads it"
                for name, (side, _, to) in zip(SIDES, pairs, strict=True)
            ),
            "what it is taken from is equal in both runs",
        ],
        "Compare the lengths that both runs keep: how many positions are cached at each step, and what is cropped"
        " before attention reads them.",
    )


def _setting(s: ArgumentDifference) -> str:
    return f"{s.name}: {s.left if s.left is not None else 'absent'} against {s.right if s.right is not None else 'absent'}"


def _made_here(e: Evidence) -> str | None:
    """The constant or view whose arguments differ, where they are not the op's own."""
    if e.origin.story != "factory" or not e.origin.region.left:
        return None
    return e.case.left.name(e.origin.region.left[0])


def _hides_in_one_run(e: Evidence) -> bool:
    """Whether all that stands in this place in one run only is a mask being made or used."""
    regions = e.origin.region.left, e.origin.region.right
    ops = [(n, side.name(i)) for n, (_, side, _) in enumerate(e.sides) for i in regions[n]]
    hiding = {n for n, name in ops if base(name) in MASKING_OPS}
    return len(hiding) == 1 and all(_is_mask_op(name) for _, name in ops)


def _makes_mask(e: Evidence) -> bool:
    """Whether the op of the origin makes a mask: tril or triu of truth values, or of one constant."""
    found = e.any_op
    if found is None or base(found[1].name(found[2])).rstrip("_") not in ("tril", "triu"):
        return False
    print_ = found[1].nearest_fingerprint(int(found[1].trace.ops.inputs[found[2]][0]))
    return print_ is not None and (print_.min == print_.max or print_.nonfinite == print_.n)


def _makes_other_mask(e: Evidence) -> bool:
    """Whether the runs made a value in different ways that attention reads as its mask."""
    values = (e.origin.values.left, e.origin.values.right)
    return e.origin.story == "region" and any(
        value is not None and reads_as_mask(side, value)
        for value, (_, side, _) in zip(values, e.sides, strict=True)
    )


def _reads_mask(e: Evidence) -> bool:
    """Whether the differing value is read as a mask."""
    row, slot = e.origin.row, e.origin.slot
    if row < 0 or slot is None:
        return False
    side = e.case.left
    op = int(e.case.pairing.left[row])
    names = side.contents.tokens.table[int(side.trace.ops.signature[op])].slots
    return slot < len(names) and names[slot].partition("[")[0] in MASK_ARGUMENTS


def _is_mask_op(name: str) -> bool:
    return base(name) in MASKING_OPS or base(name) in AROUND_MASKS
