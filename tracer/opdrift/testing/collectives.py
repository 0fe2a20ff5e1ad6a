"""Collectives of hand-built ranks: build one trace a rank, and let them meet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from opdrift.testing.builder import Builder
from opdrift.testing.contents import Array

_OPS: Final = {
    "all_reduce": "c10d.allreduce_.default",
    "broadcast": "c10d.broadcast_.default",
    "all_gather": "c10d._allgather_base_.default",
    "reduce_scatter": "c10d._reduce_scatter_base_.default",
}


def collective(
    build: Builder,
    what: str,
    value: int,
    *,
    result: Array,
    ranks: Sequence[int] = (0, 1),
    group: str = "0",
    reduction: str | None = None,
    factor: float | None = None,
    root: int | None = None,
    source: str | None = None,
) -> int:
    """One rank's part in a collective, as a recording holds it.

    Args:
        build: The rank's trace.
        what: `all_reduce`, `broadcast` (both write into `value`), `all_gather` or `reduce_scatter`.
        value: What the rank gives.
        result: The content that it gets.
        ranks: Ranks of the group.
        group: Its name.
        reduction: `SUM`, ...; None as for DDP.
        factor: That the reduction multiplies with.
        root: Of a broadcast.
        source: Where the program asked for it.

    Returns:
        The value with the result.
    """
    given = build.content(value)
    inputs = [value]
    if what in ("all_gather", "reduce_scatter"):
        inputs.insert(0, build.op("empty", shape=result.shape))
    name = _OPS[what]
    made = build.op(name, *inputs, content=result)
    tensors = [["float32", given.size]]
    build.mark(
        "collective", op=name, what=what, group=group, ranks=list(ranks), given=tensors,
        got=tensors, reduction=reduction, factor=factor, root=root, waited=True, source=source,
    )  # fmt: skip
    return made
