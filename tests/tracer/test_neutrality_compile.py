"""torch.compile is left alone: as many graphs, as much compiled, inside the trace and after it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import opdrift

# torch's own dynamo touches `.grad` of non-leaves when it resumes after a graph break
pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(a))


class Broken(Net):
    """Its graph breaks between the two halves."""

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        hidden = self.first(a)
        torch._dynamo.graph_break()
        return self.second(hidden)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain, self.compiled = Net(), Net()

    def forward(self, a: torch.Tensor) -> torch.Tensor:
        return self.compiled(self.plain(a))


@pytest.fixture
def counter() -> Iterator[Any]:
    """A backend that counts the graphs it is given and runs them op by op."""
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    torch.manual_seed(0)
    yield CompileCounter()
    torch._dynamo.reset()


def compiled(model: nn.Module, how: str, backend: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """The model, compiled in one of the ways that programs use."""
    if how == "compile(model)":
        return torch.compile(model, backend=backend)
    if how == "model.compile()":
        model.compile(backend=backend)
        return model
    if how == "function":
        return torch.compile(lambda a: model(a), backend=backend)
    assert isinstance(model, Nested)
    model.compiled.compile(backend=backend)
    return model


WAYS = [
    *(
        (net, how)
        for net in (Net, Broken, Nested)
        for how in ("compile(model)", "model.compile()", "function")
    ),
    (Nested, "a part of it"),
]


@pytest.mark.parametrize("warm", [True, False], ids=["warm", "cold"])
@pytest.mark.parametrize(("net", "how"), WAYS, ids=[f"{net.__name__}-{how}" for net, how in WAYS])
def test_as_many_graphs_are_compiled_as_without_recording(
    net: type[nn.Module], how: str, warm: bool, counter: Any, tmp_path: Path
):
    """Plain: all graphs at the first call, none later. Recorded: the same, and none after the trace closed."""
    a = torch.randn(2, 4)
    plain = compiled(net(), how, counter)
    plain(a)
    plain(a)
    graphs = counter.frame_count
    assert graphs > 0

    torch._dynamo.reset()
    counter.frame_count = 0
    run = compiled(net(), how, counter)
    if warm:
        run(a)
    with opdrift.record(tmp_path / "run.trace"):
        run(a)
        run(a)
    inside = counter.frame_count
    run(a)

    assert (inside, counter.frame_count) == (graphs, graphs)
    footer = opdrift.load(tmp_path / "run.trace").footer
    assert footer is not None
    assert footer.failures == ()


@pytest.mark.parametrize("kernels", ["auto", "full"])
def test_compiled_bits_and_gradients_stay_the_same(
    kernels: str, counter: Any, unchanged: Callable[..., opdrift.Trace]
):
    model = Net()
    step = torch.compile(model, backend="aot_eager")

    def run() -> Any:
        model.zero_grad()
        result = step(torch.randn(3, 4))
        result.square().sum().backward()
        return result, [p.grad.clone() for p in model.parameters()]

    unchanged(run, model=model, kernels=kernels)


@pytest.mark.parametrize("net", [Net, Broken])
def test_watching_kernels_compiles_as_many_graphs(
    net: type[nn.Module], counter: Any, tmp_path: Path
):
    """The libraries are made verbose around each op, which no compiled frame may guard on."""
    a = torch.randn(2, 4)
    run = torch.compile(net(), backend=counter)
    with opdrift.record(tmp_path / "first.trace", kernels="full"):
        run(a)
        graphs = counter.frame_count
        run(a)
    run(a)
    with opdrift.record(tmp_path / "second.trace", kernels="full"):
        run(a)

    assert 0 < counter.frame_count == graphs


def test_fullgraph_compiles_inside_the_trace(counter: Any, tmp_path: Path):
    """Under a plain dispatch mode this raises "found no compiled frames"."""
    model = Net()
    a = torch.randn(2, 4)

    with opdrift.record(tmp_path / "run.trace"):
        result = torch.compile(model, backend=counter, fullgraph=True)(a)

    assert counter.frame_count == 1
    assert torch.equal(result, model(a))


def test_a_function_that_was_compiled_inside_still_runs_compiled_after_the_trace(
    counter: Any, tmp_path: Path
):
    """A plain dispatch mode leaves it eager for the rest of the process: no graph is executed any more."""
    executed = 0

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        def execute(*inputs: Any) -> Any:
            nonlocal executed
            executed += 1
            return graph.forward(*inputs)

        return execute

    run = torch.compile(Net(), backend=backend)
    a = torch.randn(2, 4)
    run(a)
    with opdrift.record(tmp_path / "run.trace"):
        run(a)
        run(a)
    run(a)

    assert executed == 4


def test_a_recompilation_for_new_shapes_happens_as_without_recording(counter: Any, tmp_path: Path):
    def graphs(run: Callable[[torch.Tensor], Any]) -> list[int]:
        found = []
        for rows in (2, 2, 3, 5):
            run(torch.randn(rows, 4))
            found.append(counter.frame_count)
        return found

    plain = graphs(torch.compile(Net(), backend=counter))
    torch._dynamo.reset()
    counter.frame_count = 0
    with opdrift.record(tmp_path / "run.trace"):
        recorded = graphs(torch.compile(Net(), backend=counter))

    assert recorded == plain


@pytest.mark.usefixtures("restored")
def test_a_reset_of_dynamo_inside_the_trace_does_no_harm(counter: Any, tmp_path: Path):
    a = torch.randn(2, 4)

    with opdrift.record(tmp_path / "run.trace"):
        torch.compile(Net(), backend=counter)(a)
        torch._dynamo.reset()
        torch.compile(Net(), backend=counter)(a)

    footer = opdrift.load(tmp_path / "run.trace").footer
    assert footer is not None
    assert footer.failures == ()
    assert counter.frame_count == 2


def test_flex_attention_runs_inside_the_trace(
    counter: Any, unchanged: Callable[..., opdrift.Trace]
):
    """A higher-order op: a mode that does not support them makes every call raise."""
    from torch.nn.attention.flex_attention import flex_attention

    step = torch.compile(flex_attention, backend="eager")

    unchanged(
        lambda: step(torch.randn(1, 1, 4, 8), torch.randn(1, 1, 4, 8), torch.randn(1, 1, 4, 8))
    )


def test_control_flow_ops_run_inside_the_trace(
    counter: Any, unchanged: Callable[..., opdrift.Trace]
):
    def run() -> torch.Tensor:
        return torch.cond(torch.tensor(True), torch.sin, torch.cos, (torch.randn(3),))

    unchanged(torch.compile(run, backend="eager"))


def test_export_and_graph_tracing_give_the_same_graph(
    counter: Any, unchanged: Callable[..., opdrift.Trace]
):
    """They run the model on fake tensors and proxies, which have no content to record."""
    from torch.fx.experimental.proxy_tensor import make_fx

    model, a = Net(), torch.randn(2, 4)

    unchanged(
        lambda: (
            str(torch.export.export(model, (a,)).graph),
            str(make_fx(lambda x: model(x).sin())(a).graph),
            str(torch.fx.symbolic_trace(model).graph),
        )
    )


def test_recording_without_compiling_does_not_import_dynamo(
    python: Callable[..., subprocess.CompletedProcess[str]],
):
    """torch would import it at the first op of an ordinary mode, 0.8 s that the program never asked for."""
    done = python(
        """
        import sys, torch, opdrift
        with opdrift.record("run.trace"):
            torch.nn.Linear(2, 2)(torch.ones(1, 2))
        print("torch._dynamo" in sys.modules)
        """
    )

    assert (done.stdout.strip(), done.stderr) == ("False", "")


def test_dynamo_that_is_imported_during_the_trace_is_left_alone_too(
    python: Callable[..., subprocess.CompletedProcess[str]],
):
    """The program's first compilation of all happens inside the trace."""
    done = python(
        """
        import torch, opdrift
        graphs = []
        def backend(graph, inputs):
            graphs.append(graph)
            return graph.forward
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        with opdrift.record("run.trace"):
            run = torch.compile(model, backend=backend)
            run(torch.ones(1, 2))
            run(torch.ones(1, 2))
        run(torch.ones(1, 2))
        print(len(graphs), opdrift.load("run.trace").footer.failures)
        """
    )

    assert done.stdout.strip() == "1 ()", done.stderr
