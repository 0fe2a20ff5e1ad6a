"""Parameters that one run keeps in parts: what is gathered is not what the other run computes with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from opdrift.asked import REDUCING
from opdrift.case import Case, Side
from opdrift.causes.evidence import Evidence, cause, scope, some
from opdrift.causes.optimizers import COMPARE_OPTIMIZERS, in_words
from opdrift.compare import number
from opdrift.origins.kinds import computes
from opdrift.origins.model import Origin
from opdrift.origins.updates import Step, Unlike, unlike
from opdrift.records import Cause, Confidence
from opdrift.shards import sharding
from opdrift.sizes import narrowed_to

_STEP: Final = (
    "Look at what wrote the parameter on each side: the same optimizer and settings, the same data on all ranks, gradients"
    " divided by the same number. Compare two sharded runs, or `opdrift show TRACE --leaf NAME`, to see each step."
)
_LOADED: Final = (
    "Look at what it is loaded from on that side, and since when: `opdrift show TRACE --leaf NAME`, and what `opdrift show TRACE"
    " --findings` tells of its moves."
)


def updated_alike(e: Evidence) -> Cause | None:
    """Each run updated a parameter in the same way, and what came of it differs by no more than rounding."""
    if e.origin.story != "gathered" or e.size.material:
        return None
    types = narrowed_to(e.case, e.origin)
    why = f" of its gradient to {some(types)} on one side" if types else ""
    gap, limit = e.size.difference, e.size.limit
    sizes = ""
    if gap is not None and limit is not None:
        sizes = f"relative difference {number(gap.relative)}, explained up to {number(limit)}"
    return cause(
        "rounding",
        "certain" if types else "likely",
        f"{e.origin.names[0]} is updated alike in both runs, up to the rounding{why}",
        [sizes, *reductions(e)],
        "Nothing is wrong. For equal bits reduce and update in the same type, over the same ranks, in both runs.",
    )


def updated_with_other_numbers(e: Evidence) -> Cause | None:
    """An optimizer's step of a parameter is called with other numbers: another learning rate, decay or scale."""
    if e.origin.story != "gathered":
        return None
    found = e.shared.once(Updates).of(e).renumbered
    if not found:
        return None
    words = [
        f"{a}: {x!r} against {y!r}"
        for _, steps in found
        for (a, x), (_, y) in zip(steps.left.numbers, steps.right.numbers, strict=True)
        if x != y
    ]
    ops = found[0][0]
    return cause(
        "op-args",
        "certain",
        f"{e.case.left.name(ops.left)} in an optimizer step of {e.origin.names[0]} was called with other arguments: {', '.join(words[:3])}",
        [
            *words,
            f"left: {e.case.left.place(ops.left)}",
            f"right: {e.case.right.place(ops.right)}",
            *_only_one_calls(e),
            *reductions(e),
        ],
        COMPARE_OPTIMIZERS,
    )


def updated_by_other_ops(e: Evidence) -> Cause | None:
    """A run does more, or something else, to a parameter or its gradient before it is used again."""
    if e.origin.story != "gathered" or not e.size.material:
        return None
    more = _only_one_calls(e)
    if not more:
        return None
    found = e.shared.once(Updates).of(e)
    only = found.only
    name = e.origin.names[0] if found.alone else f"what holds {e.origin.names[0]}"
    if only.left and only.right:
        summary = f"the runs update {name} with other ops"
    else:
        one, side, steps = ("left", e.case.left, only.left) if only.left else ("right", e.case.right, only.right)  # fmt: skip
        words = _in_words(side, steps)
        whole = not words.endswith(" more")
        summary = f"{'' if whole else 'only '}the {one} run's update of {name} has {words}{' more' if whole else ''}"
    sure: Confidence = "likely" if found.alone else "possible"
    return cause("structure", sure, summary, [*more, *reductions(e)], _STEP)


def gradient_in_another_type(e: Evidence) -> Cause | None:
    """One run reduces or keeps the gradient of a parameter in a narrower type."""
    if e.origin.story != "gathered":
        return None
    types = narrowed_to(e.case, e.origin)
    if not types or (e.size.material and _only_one_calls(e)):
        return None  # what else a run does to it says more
    one, side, casts = next(
        (name, side, casts)
        for n, (name, side, _) in enumerate(e.sides)
        if (casts := [op for op in e.ops_of(n) if _returns(side, op) & set(types)])
    )
    return cause(
        "dtype",
        "certain",
        f"the {one} run takes the gradient of {e.origin.names[0]} through {some(types)}, the other does not",
        [f"{one}: first by {side.place(casts[0])}", *reductions(e)],
        "Reduce gradients in one type in both runs: look at reduce_dtype of MixedPrecision or MixedPrecisionPolicy, and at"
        " communication hooks that compress.",
    )


class Updates:
    """How the runs updated each parameter, worked out once."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self._known: dict[Origin, Unlike] = {}

    def of(self, e: Evidence) -> Unlike:
        """How the updates differ behind an origin."""
        found = self._known.get(e.origin)
        if found is None:
            found = self._known[e.origin] = unlike(self._case, e.origin)
        return found


def _only_one_calls(e: Evidence) -> list[str]:
    only = e.shared.once(Updates).of(e).only
    return [
        f"{name} only: {_in_words(side, steps)}, first {side.place(next(iter(steps.values())))}"
        for name, side, steps in (
            ("left", e.case.left, only.left),
            ("right", e.case.right, only.right),
        )
        if steps
    ]


def _in_words(side: Side, steps: Mapping[Step, int]) -> str:
    return some([in_words(side, op, step) for step, op in steps.items()], 4)


def _returns(side: Side, op: int) -> set[str]:
    return {side.trace.meta(int(v)).dtype for v in side.trace.ops.outputs[op]}


def reductions(e: Evidence) -> list[str]:
    """How each run reduced the gradient, as far as that is between here and what the runs have in common."""
    found = []
    for n, (name, side, _) in enumerate(e.sides):
        ops = {side.seq(op) for op in e.ops_of(n)}
        asked = dict.fromkeys(
            _asked(mark.fields)
            for mark in side.trace.marks
            if mark.kind == "collective" and mark.seq in ops and mark.fields.get("what") in REDUCING
        )
        if asked:
            found.append(f"{name}: its gradient comes from {some(list(asked), 2)}")
    return found


def _asked(fields: Mapping[str, Any]) -> str:
    types = some(sorted({str(dtype) for dtype, _ in fields.get("given") or ()}))
    by = f" by {fields['reduction']}" if fields.get("reduction") else ""
    ranks = ", ".join(map(str, fields.get("ranks") or ()))
    return f"a {fields['what']} of {types}{by} over ranks {ranks}"


def gathered_otherwise(e: Evidence) -> Cause | None:
    """A parameter is gathered with other contents than it has in the other run, and nothing before it explains that."""
    if e.origin.story != "gathered" or not e.size.material:
        return None
    name = e.origin.names[0]
    reader = e.consumer()
    evidence = []
    for n, (label, side, _) in enumerate(e.sides):
        ops = [op for op in e.ops_of(n) if computes(side, op)]
        at = (reader.left, reader.right)[n]
        if at is not None:
            evidence.append(f"{label}: {side.place(at)} reads it")
        evidence += [f"{label}: {line}" for line in _written(side, name, ops)]
    evidence += reductions(e)
    sharded = any(name in sharding(side.trace) for _, side, _ in e.sides)
    how = "gathers it from shards" if sharded else "loads it from where it was offloaded to"
    return cause(
        "structure",
        # a rank that only gathers what another one did to its part sees the same
        "possible" if sharded else "likely",
        f"{name} is another one in the two runs from its use in {scope(_module(e))} on, and one of them {how}",
        [*evidence, "no op that both runs have, and that it is made of, is known to differ"],
        _STEP if sharded else _LOADED,
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
