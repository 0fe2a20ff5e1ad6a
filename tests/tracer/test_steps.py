"""Which step an op belongs to, where the program marked none."""

from __future__ import annotations

import torch
from recordings import recording
from torch import nn

from opdrift.steps import Steps
from opdrift.testing import Builder

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
