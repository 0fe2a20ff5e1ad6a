"""What is said of a batch that one run gives as a whole, the other in parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from opdrift.case import Case
from opdrift.causes.evidence import cause, counted, some
from opdrift.compare import number
from opdrift.diagnose.portions.split import Split
from opdrift.diagnose.portions.step import SAME_FACTOR, FirstStep
from opdrift.records import Cause, Sides

_SIDES = ("left", "right")
_WHAT: Final = {
    "gradient": "the gradients",
    "norm": "the norms of the gradients",
    "update": "the updates of the parameters",
}

_OWN_CLIPPING: Final = "not by what torch makes of the parts of one rank; FSDP1 and fairscale have a clip_grad_norm_ of their own"


def given_in(split: Split) -> str:
    """How each run gives a batch to the model, the run that divides it less first."""
    few, many = _order(split)
    ways = {
        "left": _way(split.calls.left, split.ranks.left),
        "right": _way(split.calls.right, split.ranks.right),
    }
    return f"each batch goes through the model {ways[few]} in the {few} run and {ways[many]} in the {many} one"


def _order(split: Split) -> tuple[str, str]:
    left, right = _SIDES
    return (left, right) if split.parts.left <= split.parts.right else (right, left)


@dataclass(frozen=True, slots=True)
class _Words:
    """How the answer calls things.

    Attributes:
        given: How each run gives a batch to the model.
        what: "the gradients", or what an optimizer makes of them.
        few: Which run divides a batch less: "left" or "right".
        many: The other one.
    """

    given: str
    what: str
    few: str
    many: str


@dataclass(frozen=True, slots=True)
class End:
    """All parameters, or all gradients, that both runs ended with.

    Attributes:
        kind: "parameter", "gradient", or what was done to parameters that no run ends with whole, as far as both read them.
        relative: How far they are apart.
        explained: How much of it rounding explains, through the steps of the optimizer.
    """

    kind: str
    relative: float
    explained: float


def cause_of(
    case: Case,
    split: Split,
    step: FirstStep,
    ends: Sequence[End],
    *,
    material: bool,
) -> Cause:
    """Why the runs differ, from what the first step comes to and from what they end with.

    Args:
        case: Both runs.
        split: How they divide batches.
        step: What the first step comes to.
        ends: What the runs end with.
        material: Whether rounding does not explain all of it.
    """
    words = _words(split, step)
    evidence = _evidence(case, step, ends)
    size = number(step.relative)
    if not material:
        return cause(
            "rounding",
            "likely",
            f"{words.given}; {words.what} agree to {size}",
            evidence,
            "Nothing is wrong: sums over parts are rounded in another order. For equal bits give both runs the same parts."
            if ends
            else "In the first step, which alone was compared, nothing is wrong: sums over parts are rounded in another order. To have"
            " later ones compared, keep the model until the recording ends, and end it with a forward pass.",
        )
    if step.agrees:
        return cause(
            "structure",
            "possible",
            f"{words.given}; {words.what} of the first step agree to {size}, and what the runs end with does not",
            evidence,
            "Record one step of each run: what differs lies behind the first optimizer step, or rounding grew in the later ones.",
        )
    if step.factor is not None:
        return _scaled(split, step, words, evidence)
    if all(step.apart) and 0 < len(step.apart) <= step.count // 2:
        return _of_some(split, step, words, evidence)
    return cause(
        "structure",
        "likely",
        f"{words.given}; {words.what} of the first step differ by {size}, and by no single factor",
        evidence,
        _check_the_parts(split, step),
    )


def cause_of_lengths(case: Case, step: FirstStep) -> Cause:
    """Why gradients of the same batch are of another length where ranks hold parts of them."""
    several = "left" if (case.left.trace.header.world_size or 1) > 1 else "right"
    if step.factor is not None:
        how = f"are {step.factor:.6g} times as long in the right run as in the left one"
    else:
        how = f"differ in length by {number(step.relative)}, and by no single factor"
    return cause(
        "structure",
        "likely",
        f"the gradients of the first step, of which the ranks of the {several} run hold parts, {how}",
        [
            each
            for each in _evidence(case, step, ())
            if not each.startswith(("outputs and losses", "what the runs end"))
        ],
        "Check that every gradient is reduced over the ranks, by the same factor as in the other run, and that gradients are"
        f" clipped by the norm of all parts together: {_OWN_CLIPPING}.",
    )


def _words(split: Split, step: FirstStep) -> _Words:
    return _Words(given_in(split), _WHAT[step.what], *_order(split))


def _way(calls: int, ranks: int) -> str:
    if ranks == 1:
        return "whole" if calls == 1 else f"in {counted(calls, 'part')}"
    each = "a part" if calls == 1 else counted(calls, "part")
    return f"in {calls * ranks} parts ({each} on each of {ranks} ranks)"


def _evidence(case: Case, step: FirstStep, ends: Sequence[End]) -> list[str]:
    many = counted(step.count, "parameter" if step.what == "update" else "gradient")
    if step.what != "gradient":
        many = f"the {step.what}{'s' if step.count > 1 else ''} of {many}"
    return [
        f"first step: {many}, relative difference {number(step.relative)}; rounding explains {number(step.limit)}",
        f"the norms of the gradients, of which each rank holds a part, agree to {number(step.lengths)}"
        if step.lengths is not None
        else "",
        f"the updates of the parameters agree to {number(step.updates)}: the optimizer divides gradients by their own size"
        if step.updates is not None
        else "",
        *(
            f"end of the run: {end.kind}s, relative difference {number(end.relative)}; rounding explains {number(end.explained)}"
            for end in ends
        ),
        "the optimizer divides gradients by their own size: where these are rounding's, it steps at random"
        if step.noise
        else "",
        *(
            f"{name}: {side.place(i)} reads them first"
            for name, side, i in zip(
                _SIDES, (case.left, case.right), (step.op.left, step.op.right), strict=True
            )
            if i is not None
        ),
        "outputs and losses of a batch and of its parts have other sizes, so they are not compared",
        "" if ends else "what the runs end with is not known, so later steps were not compared",
    ]


def _of_some(split: Split, step: FirstStep, words: _Words, evidence: list[str]) -> Cause:
    """Most agree, so the parts hold the same samples: something is done to these parameters in one run only."""
    rest = step.count - len(step.apart)
    shared = split.ranks.left != split.ranks.right
    ranks = (
        ", a rank that does not reduce them, or does more to them than the others" if shared else ""
    )
    return cause(
        "structure",
        "likely",
        f"{words.given}; {words.what} of the first step agree for {rest} of {counted(step.count, 'parameter')}, and not for"
        f" {some(step.apart)}",
        evidence,
        f"Look for what only one run does to the gradients of {some(step.apart)}: a scale, a clipping, a frozen parameter"
        f"{ranks}.",
    )


def _check_the_parts(split: Split, step: FirstStep) -> str:
    shared = split.ranks.left != split.ranks.right
    reduced = ", that every gradient is reduced over the ranks" if shared else ""
    if step.what == "norm":
        reduced += (
            f", that gradients are clipped by the norm of all parts together ({_OWN_CLIPPING})"
        )
    return (
        f"Check that the parts hold the same samples as the batch{reduced}, that each part's loss is weighted by its size (a"
        " mean over parts of unequal length is not the mean of the batch), and that no layer looks at the whole batch"
        " (BatchNorm in training, dropout)."
    )


def _scaled(split: Split, step: FirstStep, words: _Words, evidence: list[str]) -> Cause:
    """One factor explains all: what was divided in one run only."""
    assert step.factor is not None
    relation = step.factor if words.few == "left" else 1 / step.factor
    times = f"{relation:.6g}"
    over_ranks = _ratio(split.ranks, words)
    in_calls = _ratio(split.calls, words)
    advice = (
        "Compare how the runs scale the loss before backward(), and the gradients before the step."
    )
    guess = ""
    if in_calls > 1 and math.isclose(relation, in_calls, rel_tol=SAME_FACTOR):
        guess = ", as if the loss of a part were not divided by the number of parts"
        advice = f"Divide the loss of each part by {in_calls:g} before backward() in the {words.many} run, as for a mean over the batch."
    elif over_ranks > 1 and math.isclose(relation, over_ranks, rel_tol=SAME_FACTOR):
        guess = ", as if they were summed over the ranks where the other run takes a mean"
        advice = (
            f"Divide the gradients by {over_ranks:g} after they are reduced in the {words.many} run, or reduce by AVG, as"
            " DistributedDataParallel does; if the loss is a sum over samples, it is the other run that must not average."
        )
    elif over_ranks > 1 and math.isclose(relation * over_ranks, 1, rel_tol=SAME_FACTOR):
        guess = ", as if they were divided by the number of ranks once too often"
        advice = (
            f"Look for a second division by {over_ranks:g} in the {words.many} run (DistributedDataParallel and FSDP take the"
            " mean over ranks by themselves), or for a loss that is a sum over samples: its gradients are to be summed."
        )
    return cause(
        "structure",
        "likely",
        f"{words.given}; {words.what} of the {words.many} run are {times} times as large{guess}",
        [f"one factor explains all of the first step: {times}", *evidence],
        advice,
    )


def _ratio(numbers: Sides[int], words: _Words) -> float:
    few, many = numbers.left, numbers.right
    return many / few if words.few == "left" else few / many
