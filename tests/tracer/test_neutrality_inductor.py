"""Code that inductor generated runs as it did: bits, gradients, versions, counters; and its regions are recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from recordings import recording
from torch import Tensor, nn

import opdrift
from opdrift.regions import Regions

pytestmark = [
    pytest.mark.slow,
    # torch's own: dynamo looks at `.grad` of tensors that are no leaves
    pytest.mark.filterwarnings("ignore"),
]


class Net(nn.Module):
    """A norm whose statistics generated code writes, and a product, which it leaves to torch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.linear = nn.Linear(4, 4)

    def forward(self, a: Tensor) -> Tensor:
        return torch.tanh(self.linear(self.norm(a)))


@pytest.fixture(scope="module")
def step() -> Iterator[tuple[Net, Callable[[], Any]]]:
    """A training step that was compiled before; 2 graphs."""
    torch._dynamo.reset()
    model = Net()
    run = torch.compile(model)

    def once() -> Any:
        model.zero_grad()
        model.norm.reset_running_stats()
        result = run(torch.linspace(-1, 1, 12).reshape(3, 4))
        result.square().sum().backward()
        buffers = [(b.clone(), b._version) for b in model.buffers()]
        return result, buffers, [p.grad.clone() for p in model.parameters() if p.grad is not None]

    once()
    yield model, once
    torch._dynamo.reset()


def test_a_training_step_keeps_bits_gradients_and_running_statistics(
    step: tuple[Net, Callable[[], Any]], unchanged: Callable[..., opdrift.Trace]
):
    """And no graph is compiled again, inside the trace or after it."""
    model, once = step

    def run() -> Any:
        result, buffers, gradients = once()
        return result, [content for content, _ in buffers], gradients

    unchanged(run, model=model)


def test_no_counter_of_torch_moves_otherwise(step: tuple[Net, Callable[[], Any]]):
    """Graphs, cache misses and versions count on as they do without a recorder."""
    model, once = step

    def moved() -> tuple[Any, Any]:
        torch._dynamo.utils.counters.clear()
        before = [b._version for b in model.buffers()]
        once()
        counters = {name: dict(counts) for name, counts in torch._dynamo.utils.counters.items()}
        return counters, [b._version - a for a, b in zip(before, model.buffers(), strict=True)]

    plain = moved()
    with recording(model=model):
        recorded = moved()

    assert recorded == plain


def test_both_passes_are_regions_of_the_compiled_function(step: tuple[Net, Callable[[], Any]]):
    """The gradients are what the backward pass returned; the statistics are what the forward pass wrote."""
    model, once = step

    with recording(model=model) as made:
        once()

    forward, backward = Regions(made.trace).calls
    assert [c.graph.direction for c in (forward, backward)] == ["forward", "backward"]
    assert forward.graph.function == "Net.forward"
    assert forward.graph.graph == backward.graph.graph
    assert forward.inside
    region = made.trace.op(forward.op)
    assert region.mutated > 0
    made_by_backward = set(made.trace.op(backward.op).outputs)
    gradients = {leaf.value for leaf in made.trace.leaves if leaf.kind == "gradient"}
    assert gradients
    assert gradients <= made_by_backward


def test_a_compilation_inside_the_trace_is_recorded_as_one_before_it(
    step: tuple[Net, Callable[[], Any]],
):
    """Another function of the same code, which inductor takes from its cache."""
    model, _ = step
    x = torch.linspace(-1, 1, 12).reshape(3, 4)
    torch._dynamo.reset()

    with recording(model=model) as made:
        torch.compile(model)(x).sum().backward()

    regions = Regions(made.trace)
    assert [c.graph.direction for c in regions.calls] == ["forward", "backward"]
    assert [c.reason for c in regions.compilations] == [None]
