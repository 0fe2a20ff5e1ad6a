"""One product computed in parts, of other sizes in each run: partial sums have no counterpart, their sum has."""

from __future__ import annotations

from typing import Final

import numpy as np

from opdrift.bounds.products import PRODUCT_OPS
from opdrift.case import Case, Side
from opdrift.causes.evidence import Evidence, cause, scope, setting
from opdrift.origins.model import Origin
from opdrift.records import Cause
from opdrift.tokens import base
from opdrift.tracefile.columns import Ints

#: Views that take a part of a tensor.
_TAKING: Final = frozenset(["slice", "narrow", "split", "split_with_sizes", "chunk", "unbind"])


def is_split_otherwise(case: Case, origin: Origin) -> bool:
    """Whether an origin is a product of parts of tensors, cut otherwise in the other run, which has more such products."""
    taken = origin.region.left, origin.region.right
    if origin.story != "factory" or origin.row < 0 or case.by_sample or not all(taken):
        return False
    if base(case.left.name(taken[0][0])) not in _TAKING:
        return False
    i, j = int(case.pairing.left[origin.row]), int(case.pairing.right[origin.row])
    if base(case.left.name(i)) not in PRODUCT_OPS:
        return False
    shapes = [
        [side.trace.meta(int(v)).shape for v in side.trace.ops.inputs[op]]
        for side, op in ((case.left, i), (case.right, j))
    ]
    outputs = [
        side.trace.meta(int(side.trace.ops.outputs[op][0])).shape
        for side, op in ((case.left, i), (case.right, j))
    ]
    # what is summed over has another length, what comes of it not
    if shapes[0] == shapes[1] or outputs[0] != outputs[1]:
        return False
    return any(
        _has_more(side, op, partner)
        for side, op, partner in (
            (case.left, i, case.pairing.right_of),
            (case.right, j, case.pairing.left_of),
        )
    )


def _has_more(side: Side, op: int, partner: Ints) -> bool:
    """Whether a run has a product without counterpart in the module call of another one."""
    alone = np.flatnonzero((partner < 0) & (side.home == side.home[op]))
    return any(base(side.name(int(each))) in PRODUCT_OPS for each in alone)


def split_products(e: Evidence) -> Cause | None:
    """A product that each run computes in parts of its own."""
    if not is_split_otherwise(e.case, e.origin):
        return None
    found = e.any_op
    assert found is not None
    _, side, op = found
    evidence = [
        *(setting(s) for s in e.origin.settings),
        *(f"{name}: {s.place(i)}" for name, s, i in e.sides if i is not None),
        "one run has more of these products in this place: partial sums of one run are none of the other's",
    ]
    where = f"{side.name(op)} in {scope(side.module(op))}"
    if not e.size.material:
        return cause(
            "rounding",
            "likely",
            f"{where} is computed in parts of other sizes, and what is made of them agrees up to rounding",
            evidence,
            "Nothing is wrong. For equal bits cut the sum into the same parts in both runs.",
        )
    return cause(
        "structure",
        "likely",
        f"{where} is computed in parts of other sizes, and what is made of them differs by more than rounding",
        evidence,
        "Compare the sums of the parts in both programs: a part that is missing, taken twice or scaled, or added in a"
        " narrower type.",
    )
