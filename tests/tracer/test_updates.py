"""Parameters that one run keeps whole and the other in parts: what each did to update them, and how much that explains."""

from __future__ import annotations

import numpy as np
import pytest

from opdrift.case import build_case
from opdrift.diagnose.answer import diagnose
from opdrift.origins.updates import Update, unlike_updates
from opdrift.records import Diagnosis, Sides
from opdrift.testing import Builder, collective
from opdrift.tracefile.reader import Trace

WHOLE = np.linspace(1, 2, 16, dtype=np.float32)
GRADIENT = np.linspace(3, 4, 16, dtype=np.float32)


def trained(
    *,
    sharded: bool,
    rate: float = 0.01,
    scaled: float | None = None,
    added: float = 0.0,
    other: float | None = None,
    divided: float | None = None,
    reduction: str = "SUM",
) -> Trace:
    """A step of SGD between two uses of `a.weight`; sharded, this rank updates its half of it and gathers all.

    Args:
        sharded: In two parts, of which this rank holds the first.
        rate: The learning rate.
        scaled: Multiplies the gradient, and is told apart from the rate.
        added: To the first element of the result, with no op that says so.
        other: Multiplies another parameter whose part lies in the same tensor.
        divided: Divides what the ranks' gradients were reduced to, by `reduction`.
    """
    build = Builder(rank=0) if sharded else Builder()
    x = build.leaf("x", kind="input", shape=(16,))
    result = (WHOLE - np.float32(rate * (scaled or 1)) * GRADIENT).astype(np.float32)
    result[0] += np.float32(added)
    if sharded:
        build.mark(
            "gather", library="torch_fsdp", unit="a", buffer="a", layout="each", ranks=[0, 1], rank=0,
            parameters=[["a.weight", 0, [16]]],
        )  # fmt: skip
        flat = build.leaf("flat", kind="shard", when="gather", content=np.zeros(12, "<f4"))
        held = build.op("view", flat, shape=(8,), content=WHOLE[:8])
        build.name(held, "a.weight", kind="shard", when="gather")
        used = collective(build, "all_gather", held, result=WHOLE)
        build.name(used, "a.weight", when="gather")
    else:
        held = used = build.leaf("a.weight", content=WHOLE)
    with build.scope("a"):
        y = build.op("mul", x, used)
    size = 8 if sharded else 16
    gradient = build.op("neg", y, phase="backward", content=GRADIENT)
    if sharded:
        gradient = collective(
            build, "reduce_scatter", gradient, result=GRADIENT[:8], reduction=reduction
        )
    if divided is not None:
        gradient = build.op("div_", gradient, settings={"other": divided}, content=GRADIENT[:size])
    if scaled is not None:
        gradient = build.op("mul_", gradient, settings={"other": scaled}, content=GRADIENT[:size])
    if other is not None:
        build.op(
            "mul_",
            build.op("view", flat, shape=(4,), offset=8, content=np.zeros(4, "<f4")),
            settings={"other": other},
            content=np.zeros(4, "<f4"),
        )
    held = build.op("add_", held, gradient, settings={"alpha": -rate}, content=result[:size])
    if sharded:
        held = collective(build, "all_gather", held, result=result)
        build.name(held, "a.weight", when="gather")
    with build.scope("a"):
        build.output(build.op("mul", y, held))
    return build.build()


def told(**right: float) -> Diagnosis:
    return diagnose(trained(sharded=False), trained(sharded=True, **right))


def first(found: Diagnosis) -> tuple[str | None, str, str]:
    assert found.first is not None
    return found.first.name, found.first.cause.slug, found.first.cause.summary


def test_the_same_update_of_a_part_is_no_difference():
    assert told().verdict == "identical"


def test_another_number_of_an_update_is_named():
    assert first(told(rate=0.02)) == (
        "a.weight",
        "op-args",
        "aten.add_.default in an optimizer step of a.weight was called with other arguments: alpha: -0.01 against -0.02",
    )


def test_another_number_is_no_rounding_however_small_the_update():
    """Two steps of 1e-9 leave float32 weights all but as they were."""
    found = diagnose(
        trained(sharded=False, rate=1e-7), trained(sharded=True, rate=1.5e-7, added=2e-7)
    )

    assert (found.verdict, first(found)[1]) == ("diverged", "op-args")


def test_an_op_that_only_one_update_has_is_named():
    assert first(told(scaled=2.0)) == (
        "a.weight",
        "structure",
        "the right run's update of a.weight has aten.mul_.default (other: 2.0) more",
    )


@pytest.mark.parametrize(
    ("divided", "reduction", "named"), [(2.0, "SUM", False), (2.0, "AVG", True), (3.0, "SUM", True)]
)
def test_a_mean_that_is_taken_in_two_steps_is_no_op_more(divided, reduction, named):
    """FSDP divides a sum over ranks before and after it is reduced; a mean that is divided again is another gradient."""
    _, _, summary = first(told(divided=divided, reduction=reduction, added=0.1))

    assert ("aten.div_.default" in summary) == named


def test_what_is_done_to_another_parameter_in_the_same_tensor_is_not_told_of_this_one():
    name, slug, summary = first(told(other=3.0, added=0.1))

    assert (name, slug) == ("a.weight", "structure")
    assert "mul_" not in summary


@pytest.mark.parametrize(("added", "verdict"), [(2e-7, "rounding"), (1e-4, "diverged")])
def test_rounding_explains_a_part_of_the_update_and_not_of_the_weight(added, verdict):
    """An update of a thousandth, and a change of the weight that is a tenth of it: rounding of a weight's size says nothing."""
    found = diagnose(
        trained(sharded=False, rate=1e-4), trained(sharded=True, rate=1e-4, added=added)
    )

    assert found.verdict == verdict


# ---- more than one step ------------------------------------------------------------------------------------


def trained_twice(
    *, sharded: bool, kept: bool = False, rates: tuple[float, float] = (0.01, 0.02)
) -> Trace:
    """Two steps of SGD, each with a rate of its own, as Adam's numbers are; the third use shows what came of the second.

    Args:
        sharded: In two parts, of which this rank holds the first.
        kept: The second backward pass adds to the gradient of the first.
        rates: Of both steps.
    """
    build = Builder(rank=0) if sharded else Builder()
    x = build.leaf("x", kind="input", shape=(16,))
    size = 8 if sharded else 16
    weight, gradient = WHOLE, None
    if sharded:
        build.mark(
            "gather", library="torch_fsdp", unit="a", buffer="a", layout="each", ranks=[0, 1], rank=0,
            parameters=[["a.weight", 0, [16]]],
        )  # fmt: skip
        held = build.leaf("a.weight", kind="shard", when="gather", content=weight[:8])
    else:
        held = build.leaf("a.weight", content=weight)

    def used(held: int) -> int:
        if not sharded:
            return held
        whole = collective(build, "all_gather", held, result=weight)
        build.name(whole, "a.weight", when="gather")
        return whole

    for step, rate in enumerate(rates):
        with build.scope("a"):
            y = build.op("mul", x, used(held))
        made = build.op("neg", y, phase="backward", content=GRADIENT)
        if sharded:
            made = collective(build, "reduce_scatter", made, result=GRADIENT[:8], reduction="SUM")
        total = GRADIENT * (2 if kept and step else 1)
        if gradient is not None and kept:
            gradient = build.op("add_", gradient, made, phase="backward", content=total[:size])
        else:
            gradient = made
        weight = (weight - np.float32(rate) * total).astype(np.float32)
        held = build.op("add_", held, gradient, settings={"alpha": -rate}, content=weight[:size])
    with build.scope("a"):
        build.output(build.op("mul", y, used(held)))
    return build.build()


def test_steps_that_both_runs_did_alike_are_no_part_of_what_one_does_otherwise():
    """A part is followed back to the start of the run, a whole one to its last use; the numbers of the first step are no fault."""
    found = diagnose(trained_twice(sharded=False), trained_twice(sharded=True, rates=(0.01, 0.03)))

    assert first(found)[1:] == (
        "op-args",
        "aten.add_.default in an optimizer step of a.weight was called with other arguments: alpha: -0.02 against -0.03",
    )


@pytest.mark.parametrize("swapped", [False, True])
def test_gradients_that_one_run_does_not_zero_are_told_of_a_sharded_parameter(swapped):
    runs = trained_twice(sharded=False), trained_twice(sharded=True, kept=True)
    found = diagnose(*(runs[::-1] if swapped else runs))
    one, other = ("left", "right") if swapped else ("right", "left")

    assert found.first is not None
    assert found.first.cause.confidence == "certain"
    assert first(found) == (
        "a.weight",
        "structure",
        f"in the {one} run, a backward pass adds to the gradient of a.weight what an earlier one left there; in the {other}"
        " run it starts from nothing",
    )


def test_a_run_that_took_more_steps_since_both_were_equal_has_no_op_of_its_own():
    """Each step calls the same; only what is called at other rates than the steps is one run's alone."""

    def steps(number: int, *, clamped: bool = False) -> Trace:
        build = Builder()
        held, gradient = build.leaf("w", content=WHOLE), build.leaf("g", content=GRADIENT)
        for _ in range(number):
            held = build.op("add_", held, gradient, settings={"alpha": -0.5})
            held = build.op("clamp_", held) if clamped else held
        build.output(held)
        return build.build()

    def only(left: Trace, right: Trace) -> list[set[str]]:
        case = build_case(left, right, [])
        ops = (Update(tuple(range(len(trace.ops))), alone=True) for trace in (left, right))
        found = unlike_updates(case, Sides(*ops)).only
        return [{step.name for step in side} for side in (found.left, found.right)]

    assert only(steps(4), steps(2)) == [set(), set()]
    assert only(steps(2), steps(4, clamped=True)) == [set(), {"clamp"}]


def test_a_gradient_that_both_runs_keep_is_no_difference():
    found = diagnose(
        trained_twice(sharded=False, kept=True), trained_twice(sharded=True, kept=True)
    )

    assert found.verdict == "identical"
