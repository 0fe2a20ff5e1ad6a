"""Inputs that differ before any op."""

from __future__ import annotations

from typing import Final

from opdrift.case import Side
from opdrift.causes.evidence import Evidence, cause, counted, some
from opdrift.compare import Difference, describe, difference
from opdrift.records import Cause

_MASKS: Final = ("mask",)


def input_(e: Evidence) -> Cause | None:
    """An input, or a constant that the program brought along, differs before any op."""
    leaf = e.origin.leaf.left or e.origin.leaf.right
    if e.origin.kind != "leaf" or leaf is None or leaf.kind not in ("input", "constant"):
        return None
    name = leaf.name or "a tensor without a name, made before it was first used,"
    values = e.origin.values
    found = _difference(e.case.left, e.case.right, values.left, values.right)
    metas = [
        str(side.trace.meta(v)) if v is not None else "absent"
        for side, v in ((e.case.left, values.left), (e.case.right, values.right))
    ]
    evidence = [
        f"left {metas[0]}, right {metas[1]}",
        describe(found) if found is not None and found.comparable else "",
        _shifted(e),
        f"further inputs that differ: {some(e.origin.names[1:])}" if e.origin.names[1:] else "",
    ]
    shapes = " in shape" if metas[0] != metas[1] else ""
    return cause(
        "input",
        "certain",
        f"{name} differs{shapes} before the first op that reads it",
        evidence,
        "Feed both runs the same tensors: compare tokenizer, preprocessing and padding, or save the inputs of one"
        " run with torch.save and load them in the other.",
    )


def mask_input(e: Evidence) -> Cause | None:
    """The input that differs is an attention or padding mask."""
    found = input_(e)
    names = e.origin.names
    if found is None or not names or not any(m in names[0].rpartition(".")[2] for m in _MASKS):
        return None
    return cause(
        "mask",
        "certain",
        f"the mask {names[0]} differs before the first op that reads it",
        found.evidence,
        "Build the mask in the same way in both runs: the same lengths, the same padding side, and the same"
        " meaning of True.",
    )


def _shifted(e: Evidence) -> str:
    """Whether one small input is the other with elements added or dropped at an end."""
    values = e.origin.values
    if values.left is None or values.right is None:
        return ""
    a, b = e.case.left.fingerprint(values.left), e.case.right.fingerprint(values.right)
    if a is None or b is None or a.code != b.code or max(a.n, b.n) > len(a.sample) + len(b.sample):
        return ""
    x, y = a.sample.tolist(), b.sample.tolist()
    if len(x) != a.n or len(y) != b.n or len(x) == len(y):
        return ""
    longer, shorter, side = (x, y, "left") if len(x) > len(y) else (y, x, "right")
    extra = len(longer) - len(shorter)
    if longer[extra:] == shorter:
        return f"the {side} one is the other with {counted(extra, 'element')} more at its start: {longer[:extra]}"
    if longer[: len(shorter)] == shorter:
        return f"the {side} one is the other with {counted(extra, 'element')} more at its end: {longer[len(shorter) :]}"
    return ""


def _difference(left: Side, right: Side, a: int | None, b: int | None) -> Difference | None:
    if a is None or b is None:
        return None
    x, y = left.fingerprint(a), right.fingerprint(b)
    return None if x is None or y is None else difference(x, y)
