"""Which step an op belongs to, where the program marked none."""

from __future__ import annotations

import pytest
import torch
from recordings import recording
from torch import nn

from opdrift.diagnose.answer import diagnose
from opdrift.steps import Steps
from opdrift.testing import Builder
from opdrift.tracefile.reader import Trace

ENTER = "profiler._record_function_enter_new.default"
EXIT = "profiler._record_function_exit._RecordFunction"


def test_steps_of_an_optimizer_are_counted_by_its_ops():
    """The ops of a step belong to it; what comes after them to the next one."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    with recording() as run:
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    steps = Steps(run.trace)
    products = [op.seq for op in run.ops if op.name == "aten.addmm.default"]
    updates = [op.seq for op in run.ops if op.name == "aten.addcdiv_.default"]

    assert [steps.known_at(seq) for seq in products] == [0, 1, 2]
    assert [steps.known_at(seq) for seq in updates[:: len(updates) // 3]] == [0, 1, 2]
    assert steps.at(products[2]) is None


def test_what_else_tells_a_profiler_of_itself_is_no_step():
    build = Builder()
    x = build.leaf("x", kind="input")
    for name in ("Optimizer.zero_grad#SGD.zero_grad", "DistributedDataParallel.forward"):
        build.op(ENTER, settings={"name": name})
        x = build.op("relu", x)
        build.op(EXIT)
    trace = build.build()

    assert Steps(trace).known_at(int(trace.ops.seq[-1])) is None


def test_a_program_s_own_marks_go_before_what_is_counted():
    build = Builder()
    x = build.leaf("x", kind="input")
    build.op(ENTER, settings={"name": "Optimizer.step#SGD.step"})
    build.op(EXIT)
    build.mark("step", step=7)
    build.op("relu", x)
    trace = build.build()

    assert Steps(trace).known_at(int(trace.ops.seq[-1])) == 7


# ---- steps that one run leaves out -------------------------------------------------------------------------


def trained(steps: int = 3, *, without: int | None = None, optimizer: str = "AdamW") -> Trace:
    """So many backward passes, each followed by a step of the optimizer, but for one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    made = getattr(torch.optim, optimizer)(model.parameters(), lr=0.05)
    inputs = torch.randn(steps, 4, 8)
    with recording(model=model) as run:
        for number in range(steps):
            made.zero_grad()
            model(inputs[number]).square().mean().backward()
            if number != without:
                made.step()
    return run.trace


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
@pytest.mark.parametrize("without", [0, 1, 2])
def test_a_step_of_the_optimizer_that_one_run_leaves_out_is_the_cause(without, optimizer, swapped):
    """Whatever the later steps, which are then paired with others, look like; the last one shows in the weights alone."""
    runs = trained(optimizer=optimizer), trained(without=without, optimizer=optimizer)
    found = diagnose(*(runs[::-1] if swapped else runs))
    one, other = ("right", "left") if swapped else ("left", "right")

    first = found.first
    assert first is not None
    assert (first.cause.slug, first.cause.confidence) == ("structure", "certain")
    assert first.cause.summary.startswith(
        f"in the {other} run, the program makes no optimizer step where {optimizer}.step number {without + 1} is in the {one}"
    )
    assert [c.slug for c in found.causes if c.confidence == "certain"] == ["structure"]


def test_a_run_that_makes_one_backward_pass_less_leaves_no_step_out():
    """It has other calls of the model, and what follows from them."""
    found = diagnose(trained(3), trained(2))

    assert found.first is not None
    assert "optimizer step" not in found.first.cause.summary


def test_other_numbers_of_each_step_are_no_step_left_out():
    found = diagnose(trained(optimizer="AdamW"), trained(optimizer="Adam"))

    assert found.first is not None
    assert "no optimizer step" not in found.first.cause.summary
