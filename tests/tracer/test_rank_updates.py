"""What ranks call to update the parameters that they share out: the same, with the same numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from opdrift.diagnose.across_ranks import diagnose_world
from opdrift.findings import findings
from opdrift.records import Diagnosis, Sides
from opdrift.testing import Builder, collective
from opdrift.tracefile.reader import Trace

#: By which every optimizer of torch tells a profiler of its steps.
ENTER = "profiler._record_function_enter_new.default"
EXIT = "profiler._record_function_exit._RecordFunction"
NAMES = ("a.weight", "b.bias")
WHOLE = np.linspace(1, 2, 16, dtype="<f4")
GRADIENT = np.linspace(3, 4, 16, dtype="<f4")


def rank(
    number: int,
    *,
    rate: float = 0.1,
    only: str = "",
    scaled: float | None = None,
    left_out: bool = False,
    evaluates: bool = False,
    early: bool = False,
    told: bool = False,
    probes: bool = False,
    idle: bool = False,
    keeps: str = "",
) -> Trace:
    """A rank that holds half of two parameters, and two steps of SGD on its half.

    Args:
        number: Which of two.
        rate: The learning rate of the second step.
        only: Of this parameter alone.
        scaled: Multiplies the gradients of the second step.
        left_out: The second step is left out.
        evaluates: It computes a metric of its own, outside of modules.
        early: Its trace was not closed.
        told: The optimizer tells a profiler of its steps, as those of torch do.
        probes: A third step updates a model of its own.
        keeps: "gradients": the second backward pass adds to what the first one left. "zeros": to that, zeroed in place.
        idle: It has no data for the second step, and only answers the other's collectives.
    """
    build = Builder(rank=number, complete=not early)
    half = slice(8 * number, 8 * number + 8)
    x = build.leaf("x", kind="input", shape=(16,))
    content = {name: WHOLE[half].copy() for name in NAMES}
    held = {}
    for name in NAMES:
        build.mark(
            "gather", library="torch_fsdp", unit=name[0], buffer=name[0], layout="each", ranks=[0, 1], rank=number,
            parameters=[[name, 0, [16]]],
        )  # fmt: skip
        held[name] = build.leaf(name, kind="shard", when="gather", content=content[name])

    @contextmanager
    def optimizing(really: bool) -> Iterator[None]:
        if really:
            build.op(ENTER, settings={"name": "Optimizer.step#SGD.step"})
        yield
        if really:
            build.op(EXIT)

    kept: dict[str, int] = {}
    for step in range(2):
        grads = {}
        for name in NAMES:
            used = collective(build, "all_gather", held[name], result=WHOLE)
            with build.scope(name[0]):
                y = build.op("mul", x, used)
            resting = idle and step
            phase = "forward" if resting else "backward"
            grad = build.op("neg", y, phase=phase, content=GRADIENT)
            grads[name] = collective(
                build, "reduce_scatter", grad, result=2 * GRADIENT[half], reduction="SUM"
            )
            if keeps and step:
                grads[name] = build.op("add_", kept[name], grads[name], phase="backward", content=3 * GRADIENT[half])  # fmt: skip
        leaves_out = bool(step) and (left_out or idle)
        with optimizing(told and not leaves_out):
            for name, grad in grads.items():
                mine = bool(step) and only in ("", name)
                if leaves_out and only in ("", name):
                    continue
                if mine and scaled is not None:
                    settings = {"other": scaled}
                    grad = build.op(
                        "mul_", grad, settings=settings, content=scaled * GRADIENT[half]
                    )
                settings = {"alpha": -(rate if mine else 0.1)}
                held[name] = build.op(
                    "add_", held[name], grad, settings=settings, content=content[name]
                )
        kept = grads
        if keeps == "zeros":
            kept = {name: build.op("zero_", g, content=0 * GRADIENT[half]) for name, g in grads.items()}  # fmt: skip
        if evaluates:
            build.op("mul", y, settings={"other": 3.0})
    if probes:
        weight = build.leaf("probe.weight", content=WHOLE)
        slope = build.op("neg", weight, phase="backward", content=GRADIENT)
        with optimizing(told):
            build.op("add_", weight, slope, settings={"alpha": -0.1}, content=WHOLE)
    build.output(build.op("relu", y))
    return build.build(f"run.trace/rank-{number:05d}")


def across(one: Trace, other: Trace) -> Diagnosis:
    return diagnose_world([one, other])


def test_ranks_that_update_their_parts_alike_have_no_findings():
    """What a rank computes beside that, a metric, is its own affair."""
    found = [rank(0, evaluates=True), rank(1)]

    assert diagnose_world(found).verdict == "identical"
    assert not [each for each in findings(found) if each.kind == "update"]


@pytest.mark.parametrize(("only", "names"), [("", "a.weight, b.bias"), ("b.bias", "b.bias")])
def test_another_number_on_one_rank_is_told_with_both_and_the_parameters(only, names):
    first = across(rank(0), rank(1, rate=0.2, only=only)).first

    assert first is not None
    assert (first.cause.slug, first.ranks) == ("op-args", Sides((0,), (1,)))
    assert first.cause.summary == (
        f"aten.add_.default in an optimizer step of {names} was called with other arguments: alpha: -0.1 on rank 0 and"
        " alpha: -0.2 on rank 1"
    )


def test_what_one_rank_alone_does_to_a_gradient_is_told():
    first = across(rank(0), rank(1, scaled=1.5, only="a.weight")).first

    assert first is not None
    assert (first.name, first.cause.slug, first.cause.confidence) == (
        "a.weight",
        "structure",
        "likely",
    )
    assert first.cause.summary == (
        "rank 1 changes the gradient of a.weight by aten.mul_.default (other: 1.5), rank 0 does not"
    )


def test_a_step_that_one_rank_leaves_out_is_told():
    first = across(rank(0), rank(1, left_out=True)).first

    assert first is not None
    assert first.cause.summary == (
        "rank 1 leaves out aten.add_.default (alpha: -0.1), by which rank 0 changes a.weight, b.bias"
    )


@pytest.mark.parametrize("lacking", [0, 1])
def test_a_step_of_an_optimizer_that_one_rank_leaves_out_is_told_as_such(lacking):
    """Once, and not as what each op of it would have changed."""
    ranks = [rank(number, told=True, left_out=number == lacking) for number in (0, 1)]
    found = diagnose_world(ranks)
    told = [each for each in findings(ranks) if each.kind == "update"]

    assert [cause.summary for cause in found.causes] == [
        f"rank {lacking} makes no optimizer step where rank {1 - lacking} makes SGD.step number 2"
    ]
    assert "it updates a.weight, b.bias" in found.causes[0].evidence
    assert [each.cause for each in told] == list(found.causes)


@pytest.mark.parametrize("keeping", [0, 1])
def test_a_rank_that_does_not_zero_its_gradients_is_told_once(keeping):
    ranks = [
        rank(number, told=True, keeps="gradients" if number == keeping else "") for number in (0, 1)
    ]
    found = diagnose_world(ranks)
    told = [each for each in findings(ranks) if each.kind == "update"]

    assert [cause.summary for cause in found.causes] == [
        f"on rank {keeping}, a backward pass adds to the gradients of a.weight, b.bias what an earlier one left there; on rank"
        f" {1 - keeping} it starts from nothing"
    ]
    assert [(each.cause, each.step) for each in told] == [(found.causes[0], 1)]


@pytest.mark.parametrize("keeps", [("gradients", "gradients"), ("zeros", "")])
def test_gradients_that_all_ranks_keep_or_one_zeroes_in_place_are_right(keeps):
    found = findings([rank(0, told=True, keeps=keeps[0]), rank(1, told=True, keeps=keeps[1])])

    assert not [each for each in found if "starts from nothing" in each.cause.summary]


@pytest.mark.parametrize("other", ["probes", "idle"])
def test_a_rank_with_a_model_of_its_own_or_with_no_more_data_leaves_no_step_out(other):
    found = findings([rank(0, told=True), rank(1, told=True, **{other: True})])

    assert not [each for each in found if "optimizer step" in each.cause.summary]


def test_it_is_a_finding_of_the_run_on_the_rank_that_does_otherwise():
    (found,) = (each for each in findings([rank(0), rank(1, rate=0.2)]) if each.kind == "update")

    assert (found.name, found.rank, found.op) == ("a.weight", 1, "aten.add_.default")


def test_a_rank_that_ended_early_leaves_nothing_out():
    """What it did not come to is told as its end."""
    found = findings([rank(0), rank(1, left_out=True, early=True)])

    assert not [each for each in found if each.kind == "update"]
