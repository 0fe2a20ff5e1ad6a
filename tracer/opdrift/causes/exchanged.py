"""An op that reads another tensor than in the other run: another module's parameter, a mask that is none."""

from __future__ import annotations

from typing import Final

from opdrift.causes.evidence import SIDES, Evidence, cause, scope
from opdrift.causes.masking import hides_something, is_low
from opdrift.causes.reading import MASK_ARGUMENTS
from opdrift.causes.unseen import maker_of
from opdrift.provenance.words import made_words
from opdrift.records import Cause
from opdrift.replacements import replaced_words
from opdrift.tokens import base

#: Ops that hide elements, by the argument that says which.
_HIDING: Final = {"where": "condition", "masked_fill": "mask", "masked_fill_": "mask"}
#: Ops by which scores get a mask of zeros and very low numbers.
_ADDING: Final = frozenset({"add", "add_"})


def weights_exchanged(e: Evidence) -> Cause | None:
    """The same op of the same module reads another parameter, and both runs have both."""
    left, right = e.origin.leaf.left, e.origin.leaf.right
    if e.origin.story != "other-source" or left is None or right is None:
        return None
    if not left.kind == right.kind == "parameter" or not (left.name and right.name):
        return None
    reader = e.consumer()
    if reader.left is None or reader.right is None:
        return None
    sides = e.case.left, e.case.right
    if sides[0].module(reader.left) != sides[1].module(reader.right):
        return None
    return cause(
        "weights",
        "certain",
        f"{sides[0].name(reader.left)} in {scope(sides[0].module(reader.left))} is given {right.name} in the right run"
        f" instead of {left.name}",
        [
            f"left: {sides[0].place(reader.left)} reads {left.name}",
            f"right: {sides[1].place(reader.right)} reads {right.name}",
            "both runs have both tensors, with equal contents",
        ],
        "Look where these parameters are assigned or handed over: two names are exchanged, or a module is given"
        " another one's parameter (tying, a list that is indexed wrongly, a converted checkpoint).",
    )


def weights_replaced(e: Evidence) -> Cause | None:
    """One run put another tensor in the place of a parameter, past the dispatcher."""
    if e.origin.story != "replaced":
        return None
    number = int(e.origin.on_right)
    name, side, _ = e.sides[number]
    value = (e.origin.values.left, e.origin.values.right)[number]
    assert value is not None
    found = side.replaced[int(side.contents.states.of[value])]
    return cause(
        "weights",
        "certain",
        f"another tensor was put in the place of {found.name} in the {name} run, and not in the other",
        [
            f"{name}: {said}"
            for said in replaced_words(side.trace, found, made_words(side.lineage.of(value)))
        ]
        + [
            f"{name}: {side.place(maker)} made the new one"
            for maker in [maker_of(side, value)]
            if maker is not None
        ],
        "Look for `.data =`, `set_()`, a new Parameter and swap_tensors between these ops: replace it in both runs, or write"
        " into it with parameter.copy_(new), which optimizers, hooks and replicas on other ranks go on to see.",
    )


def mask_exchanged(e: Evidence) -> Cause | None:
    """An op that hides elements is given another mask in one run, made elsewhere or before the run."""
    reader, values = e.consumer(), e.origin.values
    if e.origin.story != "other-source" or e.origin.slot is None:
        return None
    if None in (reader.left, reader.right, values.left, values.right):
        return None
    evidence, added = [], 0
    for name, side, op, value in zip(
        SIDES,
        (e.case.left, e.case.right),
        (reader.left, reader.right),
        (values.left, values.right),
        strict=True,
    ):
        assert op is not None
        assert value is not None
        slots = side.contents.tokens.table[int(side.trace.ops.signature[op])].slots
        slot = slots[e.origin.slot] if e.origin.slot < len(slots) else ""
        hides = hides_something(side, value)
        if base(side.name(op)) in _ADDING:
            added += is_low(side, value)
        elif slot != _HIDING.get(base(side.name(op))) and slot not in MASK_ARGUMENTS:
            return None
        what = {True: "hides some elements", False: "hides all or nothing", None: "is a mask"}[
            hides
        ]
        maker = int(side.contents.maker[value])
        made = f"made by {side.place(maker)}" if maker >= 0 else "that no op of this run made"
        evidence += [f"{name}: {side.place(op)} reads {side.trace.meta(value)} {made}; it {what}"]
    assert reader.left is not None
    if base(e.case.left.name(reader.left)) in _ADDING and not added:
        return None
    return cause(
        "mask",
        "certain",
        f"{e.case.left.name(reader.left)} in {scope(e.case.left.module(reader.left))} is given another mask",
        evidence,
        "Hand the same mask to this op in both runs: print the mask where the module receives it, and follow it from"
        " the caller; check the meaning of True.",
    )
