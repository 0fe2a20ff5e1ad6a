"""What one run does to a gradient on its way to the optimizer, or in the optimizer's step, and the other does not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from opdrift.case import Case, Side
from opdrift.causes.evidence import SIDES, Evidence, cause, setting, some
from opdrift.causes.optimizers import in_words
from opdrift.causes.sharded import reductions
from opdrift.flow import is_collective
from opdrift.gradients import ADDING, Updated
from opdrift.origins.kinds import computes
from opdrift.origins.model import Origin
from opdrift.origins.updates import since_equal, step_of
from opdrift.provenance.ops import operator
from opdrift.records import Cause, Confidence
from opdrift.sizes import narrowed_to

#: What is asked of a collective beside its tensors.
_ASKED: Final = frozenset({"reduce_op", "factor", "ranks", "root"})
_REDUCE_ALIKE: Final = (
    "Reduce by one operation, over the same ranks, in both runs: look at op= and group= at these lines, at communication"
    " hooks, at set_gradient_divide_factor and set_force_sum_reduction_for_comms of FSDP2, and at what divides by the number"
    " of ranks."
)
_ONE_TYPE: Final = (
    "Reduce gradients in one type in both runs: look at reduce_dtype of MixedPrecision or MixedPrecisionPolicy, and at"
    " communication hooks that compress."
)
NOT_ZERO: Final = (
    "Call optimizer.zero_grad() before each step's first backward pass, in both runs and on all ranks alike, and go backward"
    " as often: look for a branch around it, and for gradients that are accumulated on purpose."
)
BEFORE_THE_STEP: Final = (
    "Look at what stands between backward() and optimizer.step() at these lines: clipping, scaling, a loop that divides by the"
    " number of ranks, a branch on the rank. Do the same in both runs."
)


def told(updated: Updated) -> str:
    """What is updated, in words: `the gradient of a.weight`."""
    names = updated.names
    if updated.role == "parameter":
        return some(names)
    return f"the gradient{'s' * (len(names) > 1)} of {some(names)}"


def updated_at(case: Case, origin: Origin) -> Updated | None:
    """Which parameters are updated with what the ops of an origin make, and of all that it stands for."""
    found = [one for each in (origin, *origin.also) if (one := _updated(case, each)) is not None]
    if not found:
        return None
    names = tuple(dict.fromkeys(name for each in found for name in each.names))
    return Updated(names, found[0].role)


def _updated(case: Case, origin: Origin) -> Updated | None:
    for side, op, region in (
        (case.left, origin.op.left, origin.region.left),
        (case.right, origin.op.right, origin.region.right),
    ):
        last = region[-1] if region else op
        if last is None or not (side.trace.ops.phase[: last + 1] == 1).any():
            continue
        if int(side.trace.ops.call[last]) and not side.trace.ops.phase[last]:
            continue  # in a forward pass
        outputs = side.trace.ops.outputs[last].tolist()
        found = side.gradients.of(outputs)
        if found is not None:
            return found
    return None


def reduced_otherwise(e: Evidence) -> Cause | None:
    """A collective was asked for another reduction, another root or other ranks."""
    asked = [s for s in e.origin.settings if s.name in _ASKED]
    found = e.any_op
    if not asked or found is None or not is_collective(found[1].name(found[2])):
        return None
    updated = updated_at(e.case, e.origin)
    carried = f" of {told(updated)}" if updated is not None else ""
    return cause(
        "op-args",
        "certain",
        f"{found[1].name(found[2])}{carried} was asked for otherwise: {', '.join(map(setting, asked))}",
        [
            *map(setting, asked),
            *(f"{name}: {side.place(op)}" for name, side, op in e.sides if op is not None),
            "what this rank gives is equal in both runs" if e.origin.inputs_match else "",
        ],
        _REDUCE_ALIKE,
    )


def gradient_narrowed(e: Evidence) -> Cause | None:
    """One run takes a gradient through a narrower type on its way to the optimizer."""
    if e.origin.story not in ("region", "op"):
        return None
    types = narrowed_to(e.case, e.origin) if e.origin.story == "region" else _output_types(e)
    updated = updated_at(e.case, e.origin) if types else None
    if updated is None or updated.role != "gradient":
        return None
    n = next(i for i in (0, 1) if _narrow(e, i, types))
    name, side, _ = e.sides[n]
    casts = _narrow(e, n, types)
    return cause(
        "dtype",
        "certain",
        f"the {name} run takes {told(updated)} through {some(types)}, the other does not",
        [f"{name}: first by {side.place(casts[0])}", *reductions(e)],
        _ONE_TYPE,
    )


def _output_types(e: Evidence) -> list[str]:
    """The narrower type of what only one run's op of a pair returns."""
    types = e.dtypes()
    both = [t for t in (types.left, types.right) if t is not None]
    narrow = [t for t in both if t in ("float16", "bfloat16")]
    return narrow if len(both) == 2 and len(narrow) == 1 else []


def _narrow(e: Evidence, n: int, types: Sequence[str]) -> list[int]:
    side = e.sides[n][1]
    return [
        op
        for op in e.ops_of(n)
        if any(side.trace.meta(int(v)).dtype in types for v in side.trace.ops.outputs[op])
    ]


def gradient_changed(e: Evidence) -> Cause | None:
    """One run does something to a gradient before the optimizer reads it, or leaves out what the other does."""
    if e.origin.story not in ("region", "written") or not e.size.material:
        return None
    if narrowed_to(e.case, e.origin):
        return None  # the type says more
    own = [_changing(e, 0), _changing(e, 1)]
    for n in (0, 1):
        if (e.sides[1 - n][1].trace.header.world_size or 1) == 1:  # it has nothing to reduce over
            own[n] = [op for op in own[n] if not is_collective(e.sides[n][1].name(op))]
    sides = [n for n in (0, 1) if own[n]]
    if not sides or any(_is_forward(e.sides[n][1], op) for n in sides for op in own[n]):
        return None
    updated = updated_at(e.case, e.origin)
    if updated is None or updated.role != "gradient":
        return None
    what = told(updated)
    evidence = [
        f"{SIDES[n]} only: {_steps(e.sides[n][1], own[n])}, first {e.sides[n][1].place(own[n][0])}"
        for n in sides
    ]
    evidence += _read_by(e)
    evidence += reductions(e)
    if len(sides) == 2:
        return _cause(f"the runs make {what} by other ops", evidence, BEFORE_THE_STEP)
    n = sides[0]
    name, other = SIDES[n], SIDES[1 - n]
    side, ops = e.sides[n][1], own[n]
    if all(is_collective(side.name(op)) for op in ops):
        return _cause(
            f"{side.name(ops[0])} reduces {what} in the {name} run, and in the {other} run nothing does",
            evidence,
            "Reduce the gradients of all parameters in every step, on all ranks: look for no_sync(),"
            " set_requires_gradient_sync(False), parameters that a loop leaves out, and a branch on the rank.",
        )
    if all(_adds_to_earlier(side, op) for op in ops):
        what = told(Updated(_all_names(e, n) or updated.names, "gradient"))
        return _accumulated(name, other, what, evidence)
    return _cause(
        f"the {name} run changes {what} by {_steps(side, ops)} before it is used, the {other} run does not",
        evidence,
        BEFORE_THE_STEP,
        slug="inplace"
        if e.origin.story == "written" and not _reads_more(side, ops)
        else "structure",
    )


def accumulated_otherwise(e: Evidence) -> Cause | None:
    """The gradient of a sharded parameter has more in it in one run: what an earlier backward pass left there."""
    if e.origin.story != "gathered":
        return None
    behind = since_equal(e.case, e.origin)
    adding = [
        {op: it for op in ops if (it := side.gradients.added_to_earlier(op)) is not None}
        for (_, side, _), ops in zip(e.sides, (behind.left, behind.right), strict=True)
    ]
    sides = [n for n in (0, 1) if adding[n]]
    if len(sides) != 1:
        return None
    n = sides[0]
    name, side, _ = e.sides[n]
    names = dict.fromkeys(name for updated in adding[n].values() for name in updated.names)
    # another rank may hold all of the parameter, and do to its part what this one does to what lies beside it
    own = e.origin.names[0] in names
    what = told(Updated((e.origin.names[0],) if own else tuple(names), "gradient"))
    ops = list(adding[n])
    evidence = [
        f"{name} only: {_steps(side, ops)}, first {side.place(ops[0])}",
        *_read_by(e),
        *reductions(e),
    ]
    return _accumulated(name, e.sides[1 - n][0], what, evidence, sure="certain" if own else "likely")  # fmt: skip


def _all_names(e: Evidence, n: int) -> tuple[str, ...]:
    """The parameters whose gradients a run writes here: one op may stand for those of a whole bucket."""
    side = e.sides[n][1]
    found: dict[str, None] = {}
    for origin in (e.origin, *e.origin.also):
        for op in (origin.region.left, origin.region.right)[n]:
            updated = side.gradients.of(side.trace.ops.outputs[op].tolist())
            found.update(dict.fromkeys(updated.names if updated is not None else ()))
    return tuple(found)


def _adds_to_earlier(side: Side, op: int) -> bool:
    """Whether an op of a backward pass, or behind one, adds to a gradient that is there."""
    if operator(side.name(op)) not in ADDING:
        return False
    return bool(side.trace.ops.phase[op]) or side.gradients.added_to_earlier(op) is not None


def _accumulated(
    name: str, other: str, what: str, evidence: list[str], *, sure: Confidence = "certain"
) -> Cause:
    return cause(
        "structure",
        sure,
        f"in the {name} run, a backward pass adds to {what} what an earlier one left there; in the {other} run it starts"
        " from nothing",
        [*evidence, "a backward pass adds to a gradient that is there already"],
        NOT_ZERO,
    )


def _reads_more(side: Side, ops: Sequence[int]) -> bool:
    """Whether one of them reads what else was computed, as a clipping reads a norm: more than a write in place is done then."""
    columns = side.trace.ops
    return any(len(columns.inputs[op]) > int(columns.mutated[op]) for op in ops)


def _cause(summary: str, evidence: list[str], remedy: str, *, slug: str = "structure") -> Cause:
    return cause(slug, "certain", summary, evidence, remedy)


def _changing(e: Evidence, n: int) -> list[int]:
    """Ops that only one run has here and that make new numbers, or whose result it copies; of a write, the one that wrote."""
    region = (e.origin.region.left, e.origin.region.right)[n]
    side = e.sides[n][1]
    if region:
        return [op for op in region if computes(side, op)] or _copied_from(side, region)
    op = (e.origin.op.left, e.origin.op.right)[n]
    found = e.any_op
    mine = found is not None and e.origin.story == "written" and found[0] == SIDES[n]
    return [op] if mine and op is not None else []


def _copied_from(side: Side, copies: Sequence[int]) -> list[int]:
    """The collectives whose results are copied into a gradient, as DDP does with its buckets."""
    states = side.contents.states
    given = [inputs[-1] for op in copies if len(inputs := side.trace.ops.inputs[op])]
    made = [int(states.writer[states.of[value]]) for value in given]
    return sorted({op for op in made if op >= 0 and is_collective(side.name(op))})


def _is_forward(side: Side, op: int) -> bool:
    """Whether an op ran in a module's forward pass: what differs there is no matter of gradients alone."""
    return bool(int(side.trace.ops.call[op])) and not side.trace.ops.phase[op]


def _steps(side: Side, ops: Sequence[int]) -> str:
    told = dict.fromkeys(in_words(side, op, step_of(side, op)) for op in ops)
    return some(list(told), 4)


def _read_by(e: Evidence) -> list[str]:
    at = e.consumer()
    return [
        f"{name}: first read by {side.place(op)}"
        for name, side, op in (("left", e.case.left, at.left), ("right", e.case.right, at.right))
        if op is not None
    ]


def is_gradient(case: Case, origin: Origin) -> bool:
    """Whether what the ops of an origin make is a gradient."""
    found = _updated(case, origin)
    return found is not None and found.role == "gradient"
