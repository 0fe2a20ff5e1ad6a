"""Parameters that one run keeps in parts: what is gathered is not what the other run computes with."""

from __future__ import annotations

from typing import Final

from opdrift.case import Side
from opdrift.causes.evidence import Evidence, cause, scope
from opdrift.origins.kinds import computes
from opdrift.records import Cause
from opdrift.shards import sharding

_STEP: Final = (
    "Look at what wrote the parameter on each side: the same optimizer and settings, the same data on all ranks, gradients"
    " divided by the same number. Compare two sharded runs, or `opdrift show TRACE --leaf NAME`, to see each step."
)


def gathered_otherwise(e: Evidence) -> Cause | None:
    """A parameter is gathered with other contents than it has in the other run, and nothing before it explains that."""
    if e.origin.story != "gathered":
        return None
    name = e.origin.names[0]
    reader = e.consumer()
    evidence = []
    for number, (label, side, _) in enumerate(e.sides):
        ops = [op for op in e.ops_of(number) if computes(side, op)]
        at = (reader.left, reader.right)[number]
        if at is not None:
            evidence.append(f"{label}: {side.place(at)} reads it")
        evidence += [f"{label}: {line}" for line in _written(side, name, ops)]
    return cause(
        "structure",
        "likely",
        f"{name} is another one in the two runs from its use in {scope(_module(e))} on, and one of them gathers it from shards",
        [*evidence, "no op that both runs have, and that it is made of, is known to differ"],
        _STEP,
    )


def _module(e: Evidence) -> str:
    at = e.consumer()
    return "" if at.left is None else e.case.left.module(at.left)


def _written(side: Side, name: str, ops: list[int]) -> list[str]:
    """What became of a parameter since both runs had the same: ops outside of modules update it."""
    how = sharding(side.trace).get(name)
    steps = [op for op in ops if not int(side.trace.ops.call[op])]
    parts = f" (this rank's part of {len(how.ranks)})" if how is not None else ""
    return [f"written since by {side.place(steps[-1])}{parts}"] if steps else []
