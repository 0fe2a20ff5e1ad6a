"""Pair the ops of two logs, in order: strictly first, then by less and less."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

import numpy as np

from opdrift.align.calls import Maps, rename
from opdrift.align.sequence import Level, refine
from opdrift.foreign.model import LoggedOp
from opdrift.tokens import Words

#: What ops are paired by, from strict to loose; module and call belong to the left op's renamed path.
_KEYS: Final[tuple[Callable[[LoggedOp, str], object], ...]] = (
    lambda op, module: (module, op.call, op.name, [t.text for t in op.inputs], op.phase),
    lambda op, module: (module, op.name, op.phase),
    lambda op, _module: (op.name, [t.text for t in (*op.inputs, *op.outputs)], op.phase),
    lambda op, _module: op.name,
)


@dataclass(frozen=True, slots=True)
class Matched:
    """Positions of the ops that were paired, by left position.

    Attributes:
        pairs: (left, right) positions.
        left_only: Positions that only the left log has.
        right_only: Positions that only the right log has.
        fallback_reason: Why a part could only be paired by occurrence.
    """

    pairs: tuple[tuple[int, int], ...]
    left_only: tuple[int, ...]
    right_only: tuple[int, ...]
    fallback_reason: str | None


def match_ops(left: Sequence[LoggedOp], right: Sequence[LoggedOp], maps: Maps = ()) -> Matched:
    """Pair the ops of two logs so that the pairs keep their order."""
    renamed = rename(maps)
    levels = [
        Level(
            _words([key(op, renamed(op.module)) for op in left]),
            _words([key(op, op.module) for op in right]),
        )
        for key in _KEYS
    ]
    found = refine(levels)
    pairs = tuple(zip(found.left.tolist(), found.right.tolist(), strict=True))
    lefts, rights = {i for i, _ in pairs}, {j for _, j in pairs}
    reason = None
    if found.cut_short:
        rows, columns = found.cut_short
        reason = f"a stretch of {rows} against {columns} ops has no op that occurs once in both; it was paired by occurrence"
    return Matched(
        pairs,
        tuple(i for i in range(len(left)) if i not in lefts),
        tuple(j for j in range(len(right)) if j not in rights),
        reason,
    )


def _words(keys: Sequence[object]) -> Words:
    known: dict[str, int] = {}
    found = np.zeros(len(keys), np.uint64)
    for place, key in enumerate(keys):
        text = repr(key)
        if text not in known:
            known[text] = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
        found[place] = known[text]
    return found
