"""A module that computes with another parameter than its own."""

from __future__ import annotations

from opdrift.causes.evidence import Evidence, cause, scope
from opdrift.records import Cause


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
