"""A call of generated code is one op: what it was given, what came out, and what ran inside."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import generated_code
import pytest
import torch
from generated_code import Compiled, scaling, unseen
from recordings import recording
from torch import Tensor, nn

import opdrift
from opdrift.boundaries import around_generated_code
from opdrift.records import COMPILED, RAISED, CompiledGraph
from opdrift.regions import Regions

ONES = torch.ones(2, 2)
REGION = "compiled.region.inference"


def names(trace: opdrift.Trace) -> list[str]:
    return [trace.op(i).name for i in range(len(trace.ops))]


def failures(trace: opdrift.Trace) -> list[str]:
    assert trace.footer is not None
    return [str(f["where"]) for f in trace.footer.failures]


def test_a_region_is_one_op_with_what_it_was_given_and_what_it_returned():
    """Its kernels are seen by nobody; the values at its boundary are fingerprinted, and joined to the ops around."""
    run = scaling(3.0)

    with recording() as made:
        given = ONES + 1
        given.add(run(given))

    first, region, last = made.ops
    assert region.name == REGION
    assert (region.inputs, last.inputs[1:]) == (first.outputs, region.outputs)
    assert made.elements(region.outputs[0]) == [6.0] * 4
    assert region.flags & COMPILED


def test_the_trace_says_what_was_compiled():
    """The function and its line, inductor's key, the generated kernels, and the calls of torch's own."""
    run = scaling(3.0)

    with recording() as made:
        run(ONES)

    (call,) = Regions(made.trace).calls
    assert call.graph == CompiledGraph(
        direction="inference",
        function="Compiled.__call__",
        file=generated_code.__file__,
        line=Compiled.__call__.__code__.co_firstlineno,
        graph=7,
        key="fkey",
        kernels=("cpp_fused_mul_0",),
        extern=("addmm", "aten.convolution"),
    )
    assert made.ops[0].source is not None
    assert made.ops[0].source.file == generated_code.__file__


def test_ops_inside_of_a_region_come_before_it():
    """An op of the program before it does not count as inside; nor does what another region called."""
    run = Compiled(lambda inputs: [unseen(torch.neg)(inputs[0].mm(inputs[0]))])

    with recording() as made:
        given = ONES + 1
        run(given)
        run(given)

    calls = Regions(made.trace).calls
    assert [o.name for o in made.ops] == ["aten.add.Tensor", *["aten.mm.default", REGION] * 2]
    assert [(c.op, c.inside) for c in calls] == [(2, (1,)), (4, (3,))]


def test_what_an_inner_op_made_and_a_kernel_changed_is_the_regions():
    """Generated code goes on in the memory of an extern call's result: its content is another one now."""

    def code(inputs: list[Tensor]) -> list[Tensor]:
        made = inputs[0].mm(inputs[0])
        unseen(made.mul_)(10.0)
        return [made]

    with recording() as made:
        Compiled(code)(ONES).add(1.0)

    inner, region, reader = made.ops
    assert made.elements(inner.outputs[0]) == [2.0] * 4
    assert made.elements(region.outputs[0]) == [20.0] * 4
    assert reader.inputs == region.outputs


def test_what_a_region_writes_into_its_input_has_it_as_writer():
    """An optimizer's compiled step: the weight's content after it, and nothing hidden."""

    def code(inputs: list[Tensor]) -> list[Tensor]:
        unseen(inputs[0].mul_)(2.0)
        return []

    weight = nn.Parameter(ONES.clone())
    run = Compiled(code, mutated_input_idxs={0})

    with recording(integrity="full") as made:
        weight.detach().add(0.0)
        run(weight)
        weight.detach().add(0.0)

    region = next(op for op in made.ops if op.name == REGION)
    assert (region.mutated, made.elements(region.outputs[0])) == (1, [2.0] * 4)
    assert made.wrote("add.Tensor") == [[2.0] * 4]
    assert made.findings == []


def test_a_region_that_raises_is_recorded_and_the_exception_is_the_programs():
    def code(inputs: list[Tensor]) -> list[Tensor]:
        raise ValueError("from the kernel")

    with recording() as made, pytest.raises(ValueError, match="from the kernel") as caught:
        Compiled(code)(ONES)

    assert caught.value.__context__ is None
    (region,) = made.ops
    assert (region.flags & RAISED, region.outputs) == (RAISED, ())


def test_inputs_are_let_go_of_during_the_call():
    """Inductor empties its list of inputs to free memory as early as it can: nothing else may hold them."""
    alive: list[bool] = []

    def code(inputs: list[Tensor]) -> list[Tensor]:
        watched = weakref.ref(inputs[0])
        result = unseen(torch.neg)(inputs[0])
        inputs.clear()
        alive.append(watched() is not None)
        return [result]

    with recording():
        Compiled(code).graph([ONES + 1])

    assert alive == [False]


@pytest.mark.parametrize("lacking", ["fx_kwargs", "source_code", "mutated_input_idxs"])
def test_internals_that_moved_are_said_in_the_trace_and_the_run_goes_on(
    lacking: str, tmp_path: Path
):
    """Another torch: the region is not recorded, its result is right, and what reads that is recorded."""
    run = scaling(3.0)
    delattr(run.graph, lacking)

    with opdrift.record(tmp_path / "trace"):
        result = run(ONES).add(1.0)

    trace = opdrift.load(tmp_path / "trace")
    assert torch.equal(result, ONES * 3 + 1)
    assert names(trace) == ["aten.add.Tensor"]
    assert failures(trace) == ["a compiled region"]


def test_an_inductor_that_keeps_its_graphs_elsewhere_is_noted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "torch._inductor.compile_fx", ModuleType("loaded"))

    with recording() as made:
        monkeypatch.delitem(sys.modules, "torch._inductor.output_code")

    with recording() as usual:
        monkeypatch.undo()

    assert "this torch has no torch._inductor.output_code" in str(made.trace.footer.notes)
    assert usual.trace.footer.notes == ()


def test_a_call_on_fake_tensors_is_no_region():
    """Torch runs graphs on fake tensors to learn shapes; they hold nothing."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with recording() as made, FakeTensorMode() as fakes:
        Compiled(lambda inputs: [inputs[0].neg()])(fakes.from_tensor(ONES))

    assert REGION not in names(made.trace)
    assert failures(made.trace) == []


def test_two_recorders_see_the_same_region(tmp_path: Path):
    with recording() as outer, opdrift.record(tmp_path / "inner"):
        scaling(2.0)(ONES)

    assert (
        names(outer.trace).count(REGION)
        == names(opdrift.load(tmp_path / "inner")).count(REGION)
        == 1
    )


def test_inductor_is_as_it_was_after_an_exception():
    from torch._inductor.output_code import CompiledFxGraph

    before = CompiledFxGraph.__call__
    with pytest.raises(ValueError, match="of the program"), recording():
        scaling(2.0)(ONES)
        raise ValueError("of the program")

    assert CompiledFxGraph.__call__ is before


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_recorders_that_end_in_any_order_leave_nothing_behind(order: tuple[int, ...]):
    """Those that are still open are told of calls, and the graph is called once."""
    from torch._inductor.output_code import CompiledFxGraph

    before, told, calls = CompiledFxGraph.__call__, [], []
    with pytest.MonkeyPatch.context() as patch:
        plain = lambda graph, inputs: calls.append(inputs)  # noqa: E731
        patch.setattr(CompiledFxGraph, "__call__", plain)
        undo = [around_generated_code(lambda graph, inputs, n=n: told.append(n)) for n in range(3)]
        for ended, number in enumerate(order, 1):
            undo[number]()
            told.clear()
            CompiledFxGraph.__call__(None, [])  # type: ignore[arg-type]
            assert sorted(told) == sorted(order[ended:])
        assert CompiledFxGraph.__call__ is plain
    assert len(calls) == 3
    assert CompiledFxGraph.__call__ is before


def test_a_paused_recorder_does_not_record_regions():
    with recording() as made:
        with made.recorder.pause():
            scaling(2.0)(ONES)
        scaling(4.0)(ONES)

    assert [made.elements(op.outputs[0]) for op in made.ops] == [[4.0] * 4]


def test_the_batch_is_lost_from_sight_in_a_region_and_said_to_be():
    """Where the samples lie in what comes out cannot be followed; it is no constant either."""
    from opdrift.tracefile.axes import UNKNOWN

    model = nn.Identity()
    with recording(batch=opdrift.Batch(3)) as made:
        scaling(2.0)(model(torch.arange(6.0).reshape(3, 2))).add(1.0)

    region = next(op for op in made.ops if op.name == REGION)
    followed = made.trace.samples.own[region.outputs[0]]
    assert followed.flags & UNKNOWN


@pytest.mark.usefixtures("dynamo")
def test_a_recompilation_is_a_mark_with_dynamos_own_reason():
    """The guard that failed, and the frame; the first compilation has no reason."""

    @torch.compile(backend="eager", dynamic=False)
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    with recording() as made:
        doubled(torch.ones(3))
        doubled(torch.ones(4))

    first, again = Regions(made.trace).compilations
    assert (first.reason, first.ident.partition("/")[2]) == (None, "0")
    assert again.reason is not None
    assert again.reason.endswith("tensor 'x' size mismatch at index 0. expected 3, actual 4")
    assert (again.function, again.file) == ("doubled", __file__)
    events = [m.fields for m in made.trace.marks if m.kind == "compile"]
    assert [e["id"] for e in events] == [first.ident] * 2 + [again.ident] * 2


@pytest.mark.usefixtures("dynamo")
def test_what_was_compiled_before_is_not_told():
    @torch.compile(backend="eager")
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    doubled(ONES)
    with recording() as made:
        doubled(ONES)

    assert Regions(made.trace).compilations == ()


@pytest.mark.usefixtures("dynamo")
def test_a_function_that_hits_the_limit_of_recompilations_is_said_to_stay_eager():
    @torch.compile(backend="eager", dynamic=False)
    def doubled(x: Tensor) -> Tensor:
        return x * 2

    with recording() as made, torch._dynamo.config.patch(recompile_limit=1):
        doubled(torch.ones(3))
        doubled(torch.ones(4))

    last = Regions(made.trace).compilations[-1]
    assert (last.function, last.failed) == ("doubled", "Dynamo recompile limit exceeded")


@pytest.mark.usefixtures("dynamo")
def test_backends_that_run_op_by_op_are_listed_by_function():
    """Every op of the region is there; none stands for it."""

    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x + 1) * 2

    run = torch.compile(Net(), backend="aot_eager")
    with recording() as made:
        run(ONES)

    (function,) = Regions(made.trace).functions
    assert (function.backend, len(function.ops)) == (None, 2)
    assert function.function is not None
    assert function.function.endswith("Net.forward")


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_reading_the_list_of_compilations_changes_no_counter_of_dynamo(backend: str):
    """Graphs, guards, cache misses and what dynamo says of itself are the same with and without recording."""

    def run() -> dict[str, Any]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()

        @torch.compile(backend=backend, dynamic=False)
        def stepped(x: Tensor) -> Tensor:
            x = x * 2
            torch._dynamo.graph_break()
            return x + 1

        for rows in (2, 2, 3):
            stepped(torch.ones(rows))
        return {k: dict(v) for k, v in torch._dynamo.utils.counters.items() if k != "unimplemented"}

    plain = run()
    with recording():
        recorded = run()

    assert recorded == plain


@pytest.fixture
def dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_a_buffer_of_generated_code_that_is_handed_over_has_the_region_as_maker():
    """A kernel filled it and torch's own read it; saved for the backward pass it is the region's, no leaf."""
    from opdrift.contents import Contents

    def code(inputs: list[Tensor]) -> list[Tensor]:
        buffer = unseen(torch.neg)(inputs[0])
        return [buffer, buffer.mm(buffer)]

    with recording() as made:
        kept, _ = Compiled(code)(ONES)
        kept.add(1.0)

    reader = made.ops[-1]
    maker = Contents(made.trace).maker[reader.inputs[0]]
    assert made.ops[maker].name == REGION
