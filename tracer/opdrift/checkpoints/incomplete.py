"""Tensors of a checkpoint of which a part reached the model: what one rank loaded and another one did not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from opdrift import tfp1
from opdrift.components import numbers, rounded
from opdrift.shards import GATHERS
from opdrift.tfp1 import Code
from opdrift.tracefile.fingerprints import Fingerprint
from opdrift.tracefile.reader import Trace

#: So many sampled elements must be equal, and differ among each other: a few may be so by accident.
_LEAST: Final = 3


def own_parts(trace: Trace) -> Mapping[str, Sequence[tuple[int, int]]]:
    """Name of each gathered parameter -> where its part that this rank holds begins, and how many elements it has.

    None of one that other ranks hold all of.
    """
    found: dict[str, list[tuple[int, int]]] = {}
    for mark in trace.marks:
        if mark.kind not in GATHERS or "own" not in mark.fields:
            continue
        names = [name for name, _, _ in mark.fields["parameters"]]
        for name in names:
            found.setdefault(name, [])
        for number, offset, elements, _ in mark.fields["own"]:
            if number is not None and (offset, elements) not in found[names[number]]:
                found[names[number]].append((offset, elements))
    return found


def arrived_in_part(
    sample: Sequence[float],
    content: Fingerprint,
    own: Sequence[tuple[int, int]] | None,
    rank: int | None,
) -> str | None:
    """In words, which part of a content is a checkpoint's, as far as the samples show; None if they show none.

    Args:
        sample: Components of the stored tensor, at the same places as the fingerprint's.
        content: What the model holds.
        own: The part of it that this rank holds; None where that is not known.
        rank: This rank.
    """
    held = numbers(content)
    stored = rounded(np.array(sample, np.float64), Code(content.code)) if len(sample) else None
    if held is None or stored is None or len(stored) != len(held):
        return None
    equal = held == stored
    if not _LEAST <= int(equal.sum()) < len(equal) or len(np.unique(held[equal])) < _LEAST:
        return None
    if own is not None and rank is not None:
        places = np.array(tfp1.sample_positions(content.n))
        mine = np.zeros(len(places), bool)
        for start, size in own:
            mine |= (places >= start) & (places < start + size)
        if mine.any() and not mine.all():
            judged = f"(judged by {int(mine.sum())} and {int((~mine).sum())} elements)"
            if equal[mine].all() and not equal[~mine].any():
                return f"rank {rank}'s part is the checkpoint's, that of the other ranks is not {judged}"
            if equal[~mine].all() and not equal[mine].any():
                return f"the other ranks' part is the checkpoint's, that of rank {rank} is not {judged}"
    return f"{int(equal.sum())} of {len(equal)} elements that are known of it are the checkpoint's"
