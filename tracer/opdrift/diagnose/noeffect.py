"""Origins that differ by much and make no difference: nothing that is returned is made of what differs in them."""

from __future__ import annotations

from dataclasses import replace

from opdrift.case import Case
from opdrift.causes.keyless import keyless
from opdrift.causes.splitproducts import is_split_otherwise
from opdrift.diagnose.one_sample import rounding_at_results
from opdrift.origins.effects import Effects
from opdrift.origins.model import Origin
from opdrift.origins.search import Found
from opdrift.sizes import Size


def without_effect(case: Case, found: Found, origin: Origin, size: Size) -> Size:
    """The size of an origin; rounding where all results agree although partial sums, or rows of padding, do not.

    Other differences are material even where the results of this run do not show them.
    """
    if not size.material or not (is_split_otherwise(case, origin) or keyless(case, origin)):
        return size
    sinks = [s for s in found.sinks if s.differs]
    known = all(s.left is not None and s.right is not None for s in sinks)
    if not sinks or not known:
        return size
    limit = rounding_at_results(case)
    differs = Effects(case, sinks, limit).result_differs(1)
    return size if differs else replace(size, bound=None, limit=None, material=False)
