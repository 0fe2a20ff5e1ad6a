"""Say whether two traces are of runs that can be held against each other at all."""

from __future__ import annotations

from typing import Final

import numpy as np

from opdrift.align import Pairing
from opdrift.contents import Contents
from opdrift.tokens import Words
from opdrift.tracefile.reader import Trace

#: Where fewer ops than this part of the longer run are paired, they are paired by chance.
_PAIRED_SHARE: Final = 0.1
_WEIGHTS: Final = frozenset({"parameter", "buffer"})


def nothing_in_common(left: Contents, right: Contents, pairing: Pairing) -> bool:
    """Whether two runs share no module, no name of a weight, no content, and hardly an op."""
    longer = max(len(left.trace.ops), len(right.trace.ops))
    if not len(left.trace.ops) or not len(right.trace.ops):
        return False
    if len(pairing.left) >= _PAIRED_SHARE * longer:
        return False
    if _modules(left.trace) & _modules(right.trace) or _weights(left.trace) & _weights(right.trace):
        return False
    return not len(np.intersect1d(_contents(left), _contents(right)))


def _modules(trace: Trace) -> set[tuple[str, str]]:
    """Paths with the types of their modules: in many models something is called 0."""
    return {(path, type_) for path, type_ in trace.module_types.items() if path}


def _weights(trace: Trace) -> set[str]:
    return {leaf.name for leaf in trace.leaves if leaf.kind in _WEIGHTS} - {""}


def _contents(contents: Contents) -> Words:
    """The contents of values; all zeros, all ones and the like are in every program."""
    prints = contents.trace.fingerprints
    values = prints.value[prints.number("min") < prints.number("max")]
    found: Words = np.unique(contents.by_place[values])
    return found
