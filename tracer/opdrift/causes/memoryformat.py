"""In which order the elements of an op's operands lie in memory: kernels are chosen by it, and add by it."""

from __future__ import annotations

from typing import Final

from opdrift.causes.evidence import SIDES, Evidence
from opdrift.records import TensorMeta

_NAMES: Final = {4: "channels_last", 5: "channels_last_3d"}


def other_memory_format(e: Evidence) -> str:
    """What is said of an op that reads operands of one shape in two memory formats; empty where it does not."""
    op = e.origin.op
    if e.origin.story != "op" or op.left is None or op.right is None:
        return ""
    read = [
        [side.trace.meta(int(v)) for v in side.trace.ops.inputs[i]]
        for side, i in ((e.case.left, op.left), (e.case.right, op.right))
    ]
    for left, right in zip(*read, strict=False):
        order = _order(left), _order(right)
        if left.shape == right.shape and order[0] != order[1]:
            shown = [f"{label} {_format(m)}" for label, m in zip(SIDES, (left, right), strict=True)]
            return (
                f"an operand {left.dtype}{list(left.shape)} lies in memory in another order: {', '.join(shown)}; kernels for"
                " one format add in another order than those for the other"
            )
    return ""


def _order(meta: TensorMeta) -> tuple[int, ...]:
    """The dims by falling stride, those of one element left out."""
    dims = [d for d, size in enumerate(meta.shape) if size > 1]
    return tuple(sorted(dims, key=lambda d: (-meta.stride[d], d)))


def _format(meta: TensorMeta) -> str:
    order = _order(meta)
    if order == tuple(sorted(order)):
        return "contiguous"
    last = tuple(d for d in (0, *range(2, len(meta.shape)), 1) if meta.shape[d] > 1)
    name = _NAMES.get(len(meta.shape))
    return name if name is not None and order == last else f"strides {list(meta.stride)}"
