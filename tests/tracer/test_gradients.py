"""Gradients on their way to the optimizer: whose they are, and what one run does to them otherwise."""

from __future__ import annotations

import numpy as np
import pytest
from ranks import START, together

import opdrift
from opdrift.contents import Contents
from opdrift.diagnose.answer import diagnose
from opdrift.gradients import Gradients, Updated
from opdrift.records import Cause
from opdrift.testing import Builder, collective
from opdrift.tracefile.reader import Trace

WEIGHTS = {
    name: np.linspace(n + 1, n + 2, 16, dtype="<f4")
    for n, name in enumerate(("a.weight", "b.bias"))
}
GRADIENT = np.linspace(3, 4, 16, dtype="<f4")


def trained(
    *,
    reduction: str | None = "SUM",
    factor: float | None = None,
    ranks: tuple[int, ...] = (0, 1),
    scaled: float | None = None,
    divided: float = 2.0,
    rate: float = 0.1,
    twice: bool = False,
    unreduced: str = "",
    narrow: bool = False,
) -> Trace:
    """One rank's step of SGD on two parameters, whose gradients are reduced and divided.

    Args:
        reduction: Of both gradients.
        factor: That it multiplies with.
        ranks: Over which it reduces.
        scaled: Multiplies the gradients before the step.
        divided: Divides them after the reduction.
        rate: The learning rate.
        twice: The backward pass adds to what is there.
        unreduced: A parameter whose gradient is not reduced.
        narrow: Reduced in bfloat16.
    """
    build = Builder(rank=0)
    x = build.leaf("x", kind="input", shape=(16,))
    held = {name: build.leaf(name, content=content) for name, content in WEIGHTS.items()}
    with build.scope("a"):
        y = build.op("mul", x, *held.values())
    for name, weight in held.items():
        grad = build.op("neg", y, phase="backward", content=GRADIENT)
        value = GRADIENT
        if twice:
            value = value * 2
            grad = build.op("add_", grad, y, phase="backward", content=value)
        if narrow:
            grad = build.op("_to_copy", grad, dtype="bfloat16", content=value)
        if name != unreduced:
            value = value * (3 if reduction == "SUM" else 1) * len(ranks) * (factor or 1)
            grad = collective(
                build,
                "all_reduce",
                grad,
                result=value,
                reduction=reduction,
                factor=factor,
                ranks=ranks,
            )
        if narrow:
            value = (value * (1 + 2.0**-8)).astype("<f4")
            grad = build.op("_to_copy", grad, content=value)
        value = (value / divided).astype("<f4")
        grad = build.op("div_", grad, settings={"other": divided}, content=value)
        if scaled is not None:
            value = (value * scaled).astype("<f4")
            grad = build.op("mul_", grad, settings={"other": scaled}, content=value)
        value = (WEIGHTS[name] - rate * value).astype("<f4")
        new = build.op("add_", weight, grad, settings={"alpha": -rate}, content=value)
        build.name(new, name, when="exit")
    return build.build()


def cause(left: Trace, right: Trace) -> Cause:
    first = diagnose(left, right).first
    assert first is not None
    return first.cause


def test_a_value_is_followed_to_the_parameter_that_it_updates():
    """Through its reduction, what divides it, and the optimizer; the parameter itself is told as such."""
    trace = trained()
    by_name = {name: [] for name in ("neg", "allreduce_", "div_", "add_")}
    for index in range(len(trace.ops)):
        op = trace.op(index)
        by_name.get(op.name.split(".")[1], []).append(op.outputs[0])
    found = Gradients(Contents(trace))

    for name in ("neg", "allreduce_", "div_"):
        assert [found.of([value]) for value in by_name[name]] == [
            Updated(("a.weight",), "gradient"),
            Updated(("b.bias",), "gradient"),
        ]
    assert found.of(by_name["add_"]) == Updated(("a.weight", "b.bias"), "parameter")


def test_the_same_step_is_no_difference():
    assert diagnose(trained(), trained()).verdict == "identical"


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"reduction": "MAX"}, "reduce_op: SUM against MAX"),
        ({"ranks": (0,)}, "ranks: [0, 1] against [0]"),
        ({"reduction": "PREMUL_SUM", "factor": 0.25}, "reduce_op: SUM against PREMUL_SUM"),
    ],
)
def test_another_reduction_is_told_with_both_values_and_the_parameters(other, told):
    """The dispatcher is handed it in a box that cannot be read; the announcement of the collective holds it."""
    found = cause(trained(), trained(**other))

    assert (found.slug, found.confidence) == ("op-args", "certain")
    assert found.summary == (
        f"c10d.allreduce_.default of the gradients of a.weight, b.bias was asked for otherwise: {told}"
    )


def test_a_reduction_that_nothing_told_is_no_other_one():
    """DDP asks for its reductions in C++: that a hook asks for the same in Python is no difference."""
    found = cause(trained(reduction=None), trained(reduction="MAX", divided=3.0))

    assert "reduce_op" not in found.summary


def test_a_gradient_that_is_changed_in_one_run_names_the_parameters_and_the_number():
    found = cause(trained(), trained(scaled=1.5))

    assert (found.slug, found.confidence) == ("inplace", "certain")
    assert found.summary == (
        "the right run changes the gradients of a.weight, b.bias by aten.mul_.default (other: 1.5) before it is used,"
        " the left run does not"
    )


def test_another_number_on_a_gradient_is_told_of_the_gradient():
    found = cause(trained(), trained(divided=4.0))

    assert found.summary == (
        "aten.div_.default on the gradients of a.weight, b.bias was called with other arguments: other: 2.0 against 4.0"
    )


def test_another_number_of_the_optimizer_names_its_parameters():
    found = cause(trained(), trained(rate=0.2))

    assert found.summary == (
        "aten.add_.default in an optimizer step of a.weight, b.bias was called with other arguments: alpha: -0.1 against -0.2"
    )


def test_a_backward_pass_that_adds_to_what_is_there_asks_for_zero_grad():
    found = cause(trained(), trained(twice=True))

    assert (
        "adds to the gradients of a.weight, b.bias what an earlier one left there" in found.summary
    )
    assert "zero_grad" in found.try_


def test_a_gradient_that_one_run_does_not_reduce_is_told_as_such():
    found = cause(trained(), trained(unreduced="b.bias"))

    assert found.summary == (
        "c10d.allreduce_.default reduces the gradient of b.bias in the left run, and in the right run nothing does"
    )


def test_a_gradient_that_is_reduced_in_a_narrower_type_names_type_and_parameters():
    found = cause(trained(), trained(narrow=True))

    assert (found.slug, found.confidence) == ("dtype", "certain")
    assert found.summary == (
        "the right run takes the gradients of a.weight, b.bias through bfloat16, the other does not"
    )


def test_a_reduction_with_a_factor_is_recorded_with_it(tmp_path):
    """gloo refuses PREMUL_SUM, and what was asked is on disk by then."""
    program = (
        START
        + """
    rec = opdrift.record(Path(sys.argv[2]).parent / "run.trace")
    with rec:
        try:
            dist.all_reduce(torch.ones(4), op=dist._make_nccl_premul_sum(0.25))
        except RuntimeError as error:
            print(error)
    """
    )
    (done,) = together(program, tmp_path, ranks=1)
    (mark,) = (m for m in opdrift.load(tmp_path / "run.trace").marks if m.kind == "collective")

    assert done.returncode == 0, done.stderr
    assert (mark.fields["reduction"], mark.fields["factor"]) == ("PREMUL_SUM", 0.25)


def test_parameters_in_one_tensor_that_was_found_changed_are_updated_each_by_its_own_op():
    """A flat tensor that no op changed is told as a whole, under each name: an op on one part updates that one."""
    build = Builder()
    flat = build.leaf("flat", kind="input", content=np.zeros(12, "<f4"))
    part = build.op("view", flat, shape=(8,), content=np.zeros(8, "<f4"))
    build.name(part, "a.weight", kind="shard", when="gather")
    changed = build.hidden_write(
        flat, "a.weight", kind="shard", content=np.full(12, 7, dtype="<f4")
    )
    build.name(changed, "b.bias", kind="shard", when="changed")
    part = build.op("view", changed, shape=(8,), content=np.full(8, 7, dtype="<f4"))
    updated = build.op("add_", part, content=np.full(8, 6, dtype="<f4"))

    assert Gradients(Contents(build.build())).of([updated]) == Updated(("a.weight",), "parameter")
