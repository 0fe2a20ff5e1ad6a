"""Weights that one run holds in another order and uses accordingly: no difference of the models."""

from __future__ import annotations

from dataclasses import replace

from opdrift.case import Case
from opdrift.causes.likeness import likeness
from opdrift.origins.model import Origin
from opdrift.sizes import Size, at_reader


def settled(case: Case, origin: Origin, size: Size) -> Size:
    """The size of an origin; that of a parameter held transposed is rounding if its reader's results agree.

    GPT-2's `Conv1D` holds the transposed weight of a `Linear`: the numbers are the same, their order is not.
    """
    leaf, values = origin.leaf.left, origin.values
    if origin.kind != "leaf" or origin.row < 0 or leaf is None or leaf.kind != "parameter":
        return size
    if values.left is None or values.right is None or origin.members:
        return size
    a, b = case.left.fingerprint(values.left), case.right.fingerprint(values.right)
    like = likeness(a, b) if a is not None and b is not None else None
    if like is None or like.kind != "rearranged":
        return size
    found, limit = at_reader(case, origin.row)
    if found is None or found.relative is None or found.nonfinite_changed or found.relative > limit:
        return size
    return replace(size, limit=limit, difference=found, material=False)
