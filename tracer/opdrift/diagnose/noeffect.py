"""Origins that differ by much and make no difference: nothing that is returned is made of what differs in them."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Final

from opdrift.case import Case
from opdrift.causes.keyless import keyless
from opdrift.causes.likeness import likeness
from opdrift.causes.splitproducts import is_split_otherwise
from opdrift.diagnose.one_sample import rounding_at_results
from opdrift.origins.effects import Effects
from opdrift.origins.kinds import computes
from opdrift.origins.model import Origin
from opdrift.origins.readers import Readers
from opdrift.origins.regions import region_of
from opdrift.origins.search import Found
from opdrift.sizes import Size, at_reader

#: What is made of other weights is that much further apart than rounding, where they are made up for later.
_LARGE: Final = 100
#: How an origin shows where the runs compute something in different ways.
_OTHERWISE: Final = frozenset(("region", "other-source"))


class WithoutEffect:
    """Says which origins make no difference to results that agree up to rounding; asks once for what all have in common.

    Args:
        case: Two paired traces.
        found: What the search brought.
    """

    def __init__(self, case: Case, found: Found) -> None:
        self._case = case
        self._sinks = [s for s in found.sinks if s.differs]

    def sized(self, origin: Origin, size: Size) -> Size:
        """The size of an origin; rounding where all results agree although something on the way does not.

        That is so of partial sums, of queries that have no key, of numbers in another order, of weights that one run folds
        something into which the other computes apart, and of what the runs compute in different ways until they come together
        again. Other differences are material even where the results of this run do not show them.
        """
        case = self._case
        if not size.material or case.by_sample or not self._results_agree:
            return size
        if is_split_otherwise(case, origin) or keyless(case, origin):
            return replace(size, bound=None, limit=None, material=False)
        if _is_rearranged(case, origin) or _made_up_for(case, origin, self._effects, self._limit):
            return replace(size, limit=self._limit, material=False)
        return size

    @cached_property
    def _results_agree(self) -> bool:
        """Whether all results that differ are known, and differ by rounding alone."""
        known = all(s.left is not None and s.right is not None for s in self._sinks)
        return bool(self._sinks) and known and not self._effects.result_differs(1)

    @cached_property
    def _effects(self) -> Effects:
        return Effects(self._case, self._sinks, self._limit, Readers(self._case.compared))

    @cached_property
    def _limit(self) -> float:
        return rounding_at_results(self._case)


def _is_rearranged(case: Case, origin: Origin) -> bool:
    """Whether a weight, or what each run computes in its own way, holds the same numbers in another order."""
    left, right = origin.values.left, origin.values.right
    is_weight = origin.leaf.left is not None and origin.leaf.left.kind == "parameter"
    if left is None or right is None or not (origin.story == "region" or is_weight):
        return False
    a, b = case.left.fingerprint(left), case.right.fingerprint(right)
    like = likeness(a, b) if a is not None and b is not None else None
    return like is not None and like.kind == "rearranged"


def _made_up_for(case: Case, origin: Origin, effects: Effects, limit: float) -> bool:
    """Whether a weight or a way to compute differs, much of what is made of it does, and ops of one run alone make up for that.

    A norm that is folded into a convolution, rows in the order of another rotary embedding, weights of experts that are
    scaled to one before or after the best are picked: without ops of its own a run that agrees again only happens to.
    """
    if origin.row < 0 or not (_is_weight(origin) or origin.story in _OTHERWISE):
        return False
    gap, _ = at_reader(case, origin.row)
    if gap is None or gap.relative is None or gap.relative <= _LARGE * limit:
        return False
    slots = effects.last_slots(origin.row)
    return bool(slots) and all(_differ_in_ops(case, slot) for slot in slots)


def _is_weight(origin: Origin) -> bool:
    leaf = origin.leaf.left
    return origin.kind == "leaf" and leaf is not None and leaf.kind == "parameter"


def _differ_in_ops(case: Case, slot: int) -> bool:
    """Whether what a pair reads was computed by ops that only one of the runs has."""
    inputs = case.compared.inputs
    ops = region_of(case, int(inputs.left[slot]), int(inputs.right[slot])).ops
    return any(computes(case.left, op) for op in ops.left) or any(
        computes(case.right, op) for op in ops.right
    )
