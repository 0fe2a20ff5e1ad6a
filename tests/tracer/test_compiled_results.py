"""What a compiled function returned is compared, also where no module returned it and nobody kept it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from generated_code import Compiled, unseen
from torch import Tensor, nn

import opdrift
from opdrift.records import Diagnosis

#: What another order of arithmetic makes of a factor of 2.
ROUNDED = 2.0 * (1 + 2e-7)
Function = Callable[[nn.Linear, Tensor], Tensor]


def eager(model: nn.Linear, x: Tensor) -> Tensor:
    """A function that wraps the model, so that its result is no module's."""
    y: Tensor = model(x)
    return torch.tanh(y) * 2.0


def compiled(factor: float = 2.0, *, rows: int = 5) -> Function:
    """The same without a call of the model, whose results may be fewer rows."""
    kernel = unseen(lambda y: torch.tanh(y[:rows]) * factor)
    graph = Compiled(lambda inputs: [kernel(torch.addmm(inputs[1], inputs[0], inputs[2].t()))])
    return lambda model, x: graph(x, model.bias, model.weight)


def with_number(factor: float) -> Function:
    """A number of the program is an argument of the generated code, of zero dimensions."""
    kernel = unseen(lambda y, by: torch.tanh(y) * by)
    graph = Compiled(
        lambda inputs: [kernel(torch.addmm(inputs[1], inputs[0], inputs[2].t()), inputs[3])]
    )
    return lambda model, x: graph(
        x, model.bias, model.weight, torch.tensor(factor, dtype=torch.float64)
    )


@pytest.fixture
def diff(tmp_path: Path) -> Callable[..., Diagnosis]:
    """Compare two runs, each given by the function that it calls."""

    def record(name: str, function: Function, *, grads: bool, keep: bool, warm: int) -> Path:
        torch.manual_seed(0)
        model, x = nn.Linear(8, 6), torch.randn(5, 8)
        if grads:
            model(x).sum().backward()
        with torch.no_grad(), opdrift.record(tmp_path / name, model=model):
            for _ in range(warm):
                function(model, x + 1)
            kept = function(model, x)
            if not keep:
                del kept
        return tmp_path / name

    def compare(
        left: Function, right: Function, *, grads: bool = False, keep: bool = True, warm: int = 0
    ) -> Diagnosis:
        return opdrift.diff(
            record("left", left, grads=grads, keep=keep, warm=0),
            record("right", right, grads=grads, keep=keep, warm=warm),
        )

    return compare


@pytest.mark.parametrize("grads", [False, True])
@pytest.mark.parametrize("keep", [False, True])
def test_what_a_compiled_function_returns_is_held_against_what_eager_code_does(
    diff, grads: bool, keep: bool
):
    """Gradients that an earlier step left are no result of the run."""
    found = diff(eager, compiled(2.02), grads=grads, keep=keep)

    assert found.verdict == "diverged"
    assert found.first is not None
    assert (found.first.op, found.first.cause.slug) == ("compiled.region.inference", "compile")
    assert found.first.relative_difference == pytest.approx(0.01, rel=0.1)


@pytest.mark.parametrize("grads", [False, True])
def test_a_compiled_function_that_rounds_otherwise_is_no_divergence(diff, grads: bool):
    found = diff(eager, compiled(ROUNDED), grads=grads)

    assert found.verdict == "rounding"


@pytest.mark.parametrize("grads", [False, True])
def test_a_compiled_function_that_returns_the_same_bits_is_identical(diff, grads: bool):
    assert diff(eager, compiled(), grads=grads).verdict == "identical"


def test_what_a_call_before_returned_and_nobody_kept_is_not_taken_for_the_result(diff):
    assert diff(eager, compiled(), warm=2).verdict == "identical"


def test_results_that_the_other_run_has_nothing_of_the_kind_for_are_not_called_identical(diff):
    """Nor is it said that nothing is wrong."""
    found = diff(eager, compiled(2.02, rows=3), grads=True)

    assert found.verdict != "identical"
    assert found.first is not None
    assert "Nothing is wrong" not in found.first.cause.try_


def test_a_number_that_generated_code_takes_as_an_argument_is_no_input_that_differs(diff):
    found = diff(eager, with_number(2.02))

    assert found.verdict == "diverged"
    assert found.first is not None
    assert (found.first.cause.slug, found.first.cause.confidence) == ("compile", "likely")
    assert "its inputs are equal bit for bit;" in found.first.cause.evidence[0]


def test_the_same_number_as_an_argument_and_in_the_code_is_identical(diff):
    assert diff(eager, with_number(2.0)).verdict == "identical"
