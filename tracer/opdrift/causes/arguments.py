"""The same op with other settings: positions, caches, epsilon, scale, dtype."""

from __future__ import annotations

from typing import Final

from opdrift.case import Side
from opdrift.causes.evidence import SIDES, Evidence, cause, scope, setting, some
from opdrift.causes.gradients import BEFORE_THE_STEP, told, updated_at
from opdrift.causes.optimizers import COMPARE_OPTIMIZERS, outside_modules, scope_of
from opdrift.causes.reading import is_kept
from opdrift.causes.splitproducts import is_split_otherwise
from opdrift.gradients import Updated
from opdrift.records import Cause
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
    if not settings or e.any_op is None or is_split_otherwise(e.case, e.origin):
        return None
    words = [setting(s) for s in settings]
    where = "to another place" if e.origin.story == "placed" else "with other arguments"
    made = _made_here(e)
    found = e.any_op
    assert found is not None
    updated = updated_at(e.case, e.origin) if outside_modules(*found[1:]) else None
    of_gradient = updated is not None and updated.role == "gradient"
    _, side, at = made or found
    subject = f"{side.name(at)} {_place(side, at, updated)}"
    return cause(
        "op-args",
        "certain",
        f"{subject} was called {where}: {', '.join(words[:3])}",
        [
            *words,
            *(
                f"{label}: {side.place(e.ops_of(n)[0])}"
                for n, (label, side, _) in enumerate(e.sides)
                if made is not None
            ),
            *(f"{label}: {side.place(i)}" for label, side, i in e.sides if i is not None),
            "its tensor inputs are equal in both runs" if e.origin.inputs_match else "",
            "it changes parameters after a backward pass: an argument of an optimizer's update"
            if updated is not None and not of_gradient
            else "",
        ],
        BEFORE_THE_STEP
        if of_gradient
        else COMPARE_OPTIMIZERS
        if updated is not None
        else f"Make {settings[0].name} the same in both configurations; look where the module is built, and at defaults that changed between versions.",
    )


def _place(side: Side, op: int, updated: Updated | None) -> str:
    """Where an op was called, in words: on a gradient, in an optimizer's step, or in a module."""
    if updated is None:
        return f"in {scope_of(side, op)}"
    on = updated.role == "gradient"
    return f"on {told(updated)}" if on else f"in an optimizer step of {some(updated.names)}"


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
            *(setting(s) for s in e.origin.settings),
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
    evidence = [setting(s) for s in e.origin.settings]
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
        f" {', '.join(map(setting, e.origin.settings))}",
        [
            *map(setting, e.origin.settings),
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


def _made_here(e: Evidence) -> tuple[str, Side, int] | None:
    """The left run's constant or view whose arguments differ, where they are not the op's own."""
    if e.origin.story != "factory" or not e.origin.region.left:
        return None
    return SIDES[0], e.case.left, e.origin.region.left[0]
