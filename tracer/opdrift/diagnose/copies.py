"""Say where one run copies what the other only views, because of its sizes or of another kernel's layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from opdrift.records import Sides, UnpairedGroup

_VIEW: Final = "aten.view.default"
_COPY: Final = ("aten.clone.default", "aten._unsafe_view.default")
_NAMES: Final = ("left", "right")


def copies_of_one_run(unpaired: Sides[tuple[UnpairedGroup, ...]]) -> tuple[str, ...]:
    """A sentence about ops that only one run has where they are `reshape` of a tensor that is contiguous in the other.

    Of one sample, or one token, a transposed tensor is contiguous, so that `reshape` returns a view of it; of several
    it copies. Kernels of attention lay out their results differently as well. The numbers are the same either way.
    """
    for viewing, copying in ((0, 1), (1, 0)):
        groups = (unpaired.left, unpaired.right)
        views, copies = _counts(groups[viewing], [_VIEW]), _counts(groups[copying], _COPY[:1])
        known = _counts(groups[copying], _COPY[1:])
        modules = [m for m in views if views[m] == copies[m] == known[m]]
        if modules:
            places = sum(views[m] for m in modules)
            return (
                f"{places} times the {_NAMES[viewing]} run views what the {_NAMES[copying]} one copies (view against clone and"
                " _unsafe_view): the tensor is contiguous in that run only, by its sizes (one sample, one token) or by the kernel"
                " that made it; the numbers are the same",
            )
    return ()


def _counts(groups: Sequence[UnpairedGroup], ops: Sequence[str]) -> Counter[str]:
    """Module -> how many unpaired ops of these names it has."""
    found: Counter[str] = Counter()
    for group in groups:
        if group.op in ops:
            found[group.module] += group.count
    return found
