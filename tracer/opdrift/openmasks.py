"""Arguments that differ and change nothing: a mask of attention that lets all through."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from opdrift.case import Case, Side
from opdrift.records import ArgumentDifference

_ATTENTION: Final = "scaled_dot_product"
_MASKS: Final = ("attn_mask", "attn_bias")


def only_open_masks(
    case: Case, left: int, right: int, settings: Sequence[ArgumentDifference]
) -> bool:
    """Whether two calls of attention differ in nothing but a mask that one is given and that changes no score.

    Args:
        case: Both runs.
        left: Op of the left run.
        right: Its counterpart.
        settings: Their arguments that differ.
    """
    if not settings or any(s.name not in _MASKS for s in settings):
        return False
    given = (case.left, left), (case.right, right)
    if any(_ATTENTION not in side.name(op) for side, op in given):
        return False
    masks = [(side, value) for side, op in given for value in _masks(side, op)]
    return bool(masks) and all(_changes_nothing(side, value) for side, value in masks)


def _masks(side: Side, op: int) -> list[int]:
    names = side.contents.tokens.table[int(side.trace.ops.signature[op])].slots
    inputs = side.trace.ops.inputs[op].tolist()
    return [v for name, v in zip(names, inputs, strict=False) if name in _MASKS]


def _changes_nothing(side: Side, mask: int) -> bool:
    """Whether a mask is known to hold nothing but True, or nothing but zeros that are added."""
    print_ = side.nearest_fingerprint(mask)
    if print_ is None or not print_.n or print_.nonfinite:
        return False
    if side.trace.meta(mask).dtype == "bool":
        return print_.zero == 0
    return print_.zero == print_.n
