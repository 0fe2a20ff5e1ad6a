"""What code that torch.compile generated writes has a writer, although no op shows it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import opdrift
from opdrift.findings import findings
from opdrift.tracefile.reader import Trace

pytestmark = [
    pytest.mark.slow,
    # torch's own: dynamo looks at optimizers' profiler hooks
    pytest.mark.filterwarnings("ignore"),
]


Step = Callable[[Tensor, Tensor, Tensor], None]


def eager_step(weight: Tensor, gradient: Tensor, rate: Tensor) -> None:
    """As an optimizer does it: it writes into the weight."""
    weight.sub_(gradient * rate)


@pytest.fixture(scope="module")
def step() -> Step:
    """The same, compiled."""
    return torch.compile(eager_step)


def train(
    path: Path,
    update: Step,
    *,
    rate: float = 0.5,
    poke: bool = False,
) -> Trace:
    """A step between two forwards; compiled before it is recorded."""
    torch.manual_seed(0)
    model, x, speed = nn.Linear(4, 4), torch.randn(3, 4), torch.tensor(rate)
    update(torch.zeros(4, 4), torch.zeros(4, 4), speed)
    with torch.no_grad(), opdrift.record(path, model=model, integrity="full"):
        model(x)
        update(model.weight, x.t() @ x @ torch.ones(4, 4), speed)
        if poke:
            model.weight.detach().numpy()[0, 0] += 1.0
        model(x)
    return opdrift.load(path)


def test_what_generated_code_writes_is_no_hidden_write(tmp_path: Path, step: Step):
    """Compiled before the recording began, and read by eager code."""
    trace = train(tmp_path / "trace", step)

    ops = [trace.op(i) for i in range(len(trace.ops))]
    (region,) = [op for op in ops if op.name == "compiled.region.inference"]
    assert findings([trace]) == ()
    assert region.mutated == 1


def test_a_hidden_write_after_generated_code_still_is_one(tmp_path: Path, step: Step):
    """That generated code wrote a weight explains what it wrote, and no later content."""
    trace = train(tmp_path / "trace", step, poke=True)

    assert [(f.kind, f.name) for f in findings([trace])] == [("hidden-write", "weight")]


def test_a_weight_that_generated_code_wrote_otherwise_is_compile(tmp_path: Path, step: Step):
    """The other run's op wrote another number; nothing hidden is said of either."""
    left = train(tmp_path / "left", eager_step)
    right = train(tmp_path / "right", step, rate=0.25)

    first = opdrift.diff(left, right).first

    assert first is not None
    assert first.cause.slug == "compile"
    assert "race" not in {cause.slug for cause in opdrift.diff(left, right).causes}


def test_what_generated_code_writes_alike_is_no_difference(tmp_path: Path, step: Step):
    """Up to rounding, as compiled and eager arithmetic differ."""
    left = train(tmp_path / "left", eager_step)
    right = train(tmp_path / "right", step)

    assert opdrift.diff(left, right).verdict in ("identical", "rounding")


def test_inductor_is_left_as_it_was(tmp_path: Path, step: Step):
    """What was put around its calls is gone once the recording is."""
    from torch._inductor.output_code import CompiledFxGraph

    before = CompiledFxGraph.__call__
    train(tmp_path / "trace", step)

    assert CompiledFxGraph.__call__ is before
