"""Compiled regions in a comparison: where one goes wrong is found at its boundary, and rounding stays rounding."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from generated_code import Compiled, unseen
from torch import Tensor, nn

import opdrift
from opdrift.commands.main import opdrift as command
from opdrift.records import Diagnosis

REGION = "compiled.region.inference"
Step = Callable[[Tensor, Tensor], Tensor]


def eager(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x.mm(w)) * 2.0


def compiled(factor: float = 2.0, *, key: str = "fkey") -> Compiled:
    """The same, with everything behind the product in one kernel."""
    kernel = unseen(lambda h: torch.tanh(h) * factor)
    return Compiled(lambda inputs: [kernel(inputs[0].mm(inputs[1]))], _fx_graph_cache_key=key)


#: What another order of arithmetic makes of a factor of 2.
ROUNDED = 2.0 * (1 + 2e-7)


class Net(nn.Module):
    def __init__(self, *steps: Step) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(8, 8) / 3)
        self.steps = steps

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x, self.weight)
        return x


def record(path: Path, *steps: Step) -> Path:
    model, x = Net(*steps), torch.randn(5, 8)
    with torch.no_grad(), opdrift.record(path, model=model, overwrite=True):
        model(x)
    return path


@pytest.fixture
def diff(tmp_path: Path) -> Callable[..., Diagnosis]:
    """Compare two runs, each given by its steps."""

    def compare(left: tuple[Step, ...], right: tuple[Step, ...]) -> Diagnosis:
        return opdrift.diff(record(tmp_path / "left", *left), record(tmp_path / "right", *right))

    return compare


def seen(diagnosis: Diagnosis) -> tuple[Any, ...]:
    first = diagnosis.first
    assert first is not None
    return diagnosis.verdict, first.op, first.seq.left, first.seq.right, first.cause.slug


def evidence(diagnosis: Diagnosis) -> str:
    assert diagnosis.first is not None
    return "\n".join(diagnosis.first.cause.evidence)


def test_a_region_that_computes_something_else_than_eager_code_is_the_origin(diff):
    """Although the product inside agrees, and nothing in the eager run is the region's counterpart."""
    found = diff((eager,), (compiled(2.02),))

    assert seen(found) == ("diverged", REGION, None, 2, "compile")
    told = evidence(found)
    assert "its inputs are equal bit for bit" in told
    assert "right: op 1 (aten.mm.default)" in told
    assert "still agrees" in told
    assert "left: 3 ops instead: mm, mul, tanh" in told
    assert found.first is not None
    assert "backend='aot_eager'" in found.first.cause.try_


def test_the_compiled_run_may_be_the_left_one(diff):
    found = diff((compiled(2.02),), (eager,))

    assert seen(found) == ("diverged", REGION, 2, None, "compile")


def test_a_region_that_rounds_otherwise_is_no_divergence(diff):
    """The answer says what ran compiled, and how well its results agree."""
    found = diff((eager,), (compiled(ROUNDED),))

    assert found.verdict == "rounding"
    assert "right: Compiled.__call__ of Net (generated_code.py:" in evidence(found)
    assert "ran compiled (inductor, 1 graph, 1 call); its results agree to" in evidence(found)


def test_a_region_that_agrees_bit_for_bit_is_identical(diff):
    assert diff((eager,), (compiled(),)).verdict == "identical"


@pytest.mark.parametrize(
    ("key", "told"), [("fkey", "the same generated code"), ("another", "another one in each run")]
)
def test_of_two_compiled_runs_the_region_that_differs_is_named(diff, key: str, told: str):
    """Equal inputs, other results: no unknown kernel. Of the same code, what changed unseen may still be to blame."""
    found = diff((compiled(), compiled()), (compiled(), compiled(2.02, key=key)))

    assert seen(found) == ("diverged", REGION, 4, 4, "compile")
    assert told in evidence(found)
    assert [cause.slug for cause in found.causes] == [
        "compile",
        *(["race"] if key == "fkey" else []),
    ]


def test_two_compiled_runs_that_round_otherwise_are_no_divergence(diff):
    assert diff((compiled(),) * 3, (compiled(ROUNDED),) * 3).verdict == "rounding"


def test_a_region_behind_one_that_rounds_otherwise_is_found(diff):
    """Its inputs differ by rounding, and its results by far more."""
    found = diff((eager, eager), (compiled(ROUNDED), compiled(2.02)))

    assert seen(found) == ("diverged", REGION, None, 4, "compile")
    assert "its inputs are at most 1.9e-7 apart; its results are" in evidence(found)


def test_regions_behind_regions_only_round(diff):
    assert diff((eager,) * 6, (compiled(ROUNDED),) * 6).verdict == "rounding"


def test_nan_that_a_region_makes_is_found(diff):
    found = diff((eager,), (compiled(float("nan")),))

    assert seen(found)[:2] == ("diverged", REGION)
    assert found.first is not None
    assert found.first.nonfinite.right == 40


def test_what_an_op_inside_does_otherwise_is_told_of_that_op_alone(diff):
    """Another argument of an extern call explains what the region returns."""

    def shifted(by: float) -> Compiled:
        return Compiled(lambda inputs: [unseen(torch.tanh)(inputs[0].mm(inputs[1]).add(by))])

    found = diff((shifted(1.0),), (shifted(1.5),))

    assert seen(found) == ("diverged", "aten.add.Tensor", 2, 2, "op-args")
    assert [d.op for d in found.origins] == ["aten.add.Tensor"]


def test_other_weights_are_not_the_regions_fault(tmp_path: Path):
    """What differs before a region explains what comes out of it."""
    left = record(tmp_path / "left", eager)
    model, x = Net(compiled()), torch.randn(5, 8)
    with torch.no_grad(), opdrift.record(tmp_path / "right", model=model):
        model.weight.mul_(1.01)
        model(x)

    found = opdrift.diff(left, tmp_path / "right")

    assert "compile" not in {d.cause.slug for d in found.origins}


def shown(*arguments: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        command(["show", *arguments])
    return out.getvalue()


def in_one_line(text: str) -> str:
    """Without line breaks, which are elsewhere when the path of a test is longer."""
    return " ".join(text.split())


def test_show_lists_regions_with_their_calls_and_kernels(tmp_path: Path):
    path = str(record(tmp_path / "trace", compiled(), compiled()))

    overview, region = in_one_line(shown(path)), in_one_line(shown(path, "--op", "2"))

    assert "ran compiled (inductor, 1 graph, 2 calls)" in overview
    assert "graph 7, inference: 2 calls, 1 generated kernel (cpp_fused_mul_0)" in overview
    assert "aten.mm.default x2" in overview
    assert "inside: op 1 aten.mm.default" in region


def test_show_json_holds_what_ran_compiled(tmp_path: Path):
    path = str(record(tmp_path / "trace", compiled()))

    found = json.loads(shown(path, "--format", "json"))["compiled"]

    (function,) = found["functions"]
    assert (function["backend"], function["calls"]) == (
        "inductor",
        [{"op": 2, "graph": 0, "inside": [1]}],
    )
    assert found["compilations"] == []


def test_show_says_what_was_compiled_again(tmp_path: Path):
    """A hand-written mark, as dynamo's list gives it."""
    with opdrift.record(tmp_path / "trace") as recorder:
        recorder.mark(
            "compilation",
            id="0/1",
            function="step",
            file="a.py",
            line=3,
            reason="0/0: x",
            failed=None,
        )
        recorder.mark(
            "compilation",
            id="0/2",
            function="step",
            file="a.py",
            line=3,
            reason=None,
            failed="limit",
        )

    told = shown(str(tmp_path / "trace"))

    assert "step was compiled again: 0/0: x" in told
    assert "step stays eager: limit" in told


def extern(x: Tensor, w: Tensor) -> Compiled:
    """A region that returns what a call of torch's own left in a buffer, after a kernel that is rounded otherwise."""

    def code(inputs: list[Tensor]) -> list[Tensor]:
        hidden = unseen(lambda h: torch.tanh(h) * ROUNDED)(inputs[0])
        made = unseen(torch.empty)(5, 8)
        torch.mm(hidden, inputs[1], out=made)
        return [made]

    return Compiled(code)(x, w)


def test_a_buffer_that_a_region_hands_over_was_not_written_in_place(diff):
    """What an extern call put there differs by rounding; the region wrote into nothing that it was given."""
    found = diff((lambda x, w: (torch.tanh(x) * 2.0).mm(w),), (extern,))

    assert found.verdict == "rounding"


def narrow(x: Tensor, w: Tensor) -> Tensor:
    """The product in bfloat16."""
    return torch.tanh(x.bfloat16().mm(w.bfloat16()).float()) * 2.0


def narrow_compiled(factor: float = 2.0) -> Compiled:
    kernel = unseen(lambda h: torch.tanh(h.float()) * factor)
    return Compiled(lambda inputs: [kernel(inputs[0].bfloat16().mm(inputs[1].bfloat16()))])


@pytest.mark.parametrize("left", [eager, compiled()], ids=["eager", "compiled"])
def test_a_region_that_computes_in_fewer_bits_is_dtype(diff, left: Step):
    """The types of its calls of torch's own tell."""
    found = diff((left,), (narrow_compiled(),))

    assert found.verdict == "diverged"
    assert found.first is not None
    assert found.first.cause.slug == "dtype"


def test_a_region_in_the_same_type_as_eager_code_only_rounds(diff):
    """Casts that kernels do for themselves do not show, and are no sign of another type."""
    kernel = unseen(lambda x, w: narrow(x, w) * (1 + 2e-7))
    unseen_product = Compiled(lambda inputs: [kernel(*inputs)])

    assert diff((narrow,), (narrow_compiled(ROUNDED),)).verdict == "rounding"
    assert diff((narrow,), (unseen_product,)).verdict == "rounding"


def in_other_order(factor: float = 2.0, *, key: str = "another") -> Step:
    """The same code with a number among its arguments, and the others in another order."""
    kernel = unseen(lambda h, by: torch.tanh(h) * by)
    graph = Compiled(
        lambda inputs: [kernel(inputs[2].mm(inputs[1]), inputs[0])], _fx_graph_cache_key=key
    )
    return lambda x, w: graph(torch.tensor(factor, dtype=torch.float64), w, x)


def test_arguments_of_other_generated_code_are_told_by_name_and_content(diff):
    """Not by their place: no weight is of another dtype, and none stands in another's."""
    found = diff((compiled(),), (in_other_order(2.02),))

    assert found.verdict == "diverged"
    assert found.first is not None
    assert found.first.cause.slug == "compile"
    assert not {cause.slug for cause in found.causes} & {"dtype", "weights", "input"}


def test_other_generated_code_with_other_arguments_may_be_identical(diff):
    assert diff((compiled(),), (in_other_order(),)).verdict == "identical"


def test_a_weight_that_differs_is_told_of_other_generated_code_too(tmp_path: Path):
    model, x = Net(compiled()), torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), opdrift.record(tmp_path / "left", model=model):
        model(x)
    with torch.no_grad():
        model.weight[0, 0] += 1
    model.steps = (in_other_order(),)
    with torch.no_grad(), opdrift.record(tmp_path / "right", model=model):
        model(x)

    found = opdrift.diff(tmp_path / "left", tmp_path / "right")

    assert found.first is not None
    assert (found.first.name, found.first.cause.slug) == ("weight", "weights")


def rewriting(factor: float, key: str) -> Compiled:
    """A generated kernel writes into what one product made and the next one reads."""

    def code(inputs: list[Tensor]) -> list[Tensor]:
        made = inputs[0].mm(inputs[1])
        unseen(lambda h: h.mul_(factor))(made)
        return [unseen(torch.tanh)(made.mm(inputs[1]))]

    return Compiled(code, _fx_graph_cache_key=key)


@pytest.mark.parametrize(("key", "slug"), [("another", "compile"), ("fkey", "race")])
def test_what_other_generated_code_wrote_unseen_is_no_race(diff, key: str, slug: str):
    """With the same code in both runs something else may have written it."""
    found = diff((rewriting(2.0, "fkey"),), (rewriting(3.0, key),))

    assert seen(found)[1:] == ("aten.mm.default", 2, 2, slug)
    assert ("race" in {cause.slug for cause in found.causes}) is (slug == "race")


def test_rounding_of_other_generated_code_is_no_more_than_possible(diff):
    """Its kernels are not seen, and their bounds are wide: small faults hide in them."""
    found = diff((compiled(),), (compiled(ROUNDED, key="another"),))

    assert found.verdict == "rounding"
    assert found.first is not None
    assert found.first.cause.confidence == "possible"
    assert "the generated code is another one in each run" in evidence(found)
    assert "Nothing is wrong" not in found.first.cause.try_


def test_rounding_of_the_same_generated_code_is_not_doubted(diff):
    found = diff((compiled(),), (compiled(ROUNDED),))

    assert found.first is not None
    assert found.first.cause.confidence != "possible"


@pytest.mark.parametrize(("error", "doubted"), [(2e-7, False), (2.5e-6, True)])
def test_compiled_results_further_apart_than_rounding_usually_gets_are_doubted(
    diff, error: float, doubted: bool
):
    """Within the bounds of kernels that are not seen, so that it is no divergence."""
    found = diff((eager,), (compiled(2.0 * (1 + error)),))

    assert found.verdict == "rounding"
    assert found.first is not None
    assert (found.first.cause.confidence == "possible") is doubted
    assert ("usually grows to" in evidence(found)) is doubted
