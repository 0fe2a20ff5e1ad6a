"""Another tensor in the place of a parameter, past the dispatcher."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import opdrift
from opdrift.findings import findings
from opdrift.records import Diagnosis
from opdrift.replacements import replacements
from opdrift.testing import Builder

Change = Callable[[nn.Linear], object]


def trained(path: Path, change: Change) -> None:
    """Three steps, and a change of the second layer's weight after the second one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    second = model[1]
    assert isinstance(second, nn.Linear)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with opdrift.record(path, model=model) as recorder:
        for step in range(3):
            recorder.mark("step", step=step)
            optimizer.zero_grad()
            model(torch.ones(2, 6)).square().mean().backward()
            optimizer.step()
            if step == 1:
                change(second)


def nothing(_: nn.Linear) -> None:
    pass


def scaled(layer: nn.Linear) -> None:
    layer.weight.data = layer.weight.data * 0.5


def made_before(layer: nn.Linear) -> None:
    layer.weight.data = BEFORE.clone()


def set_to(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight.set_(BEFORE.clone())


def assigned(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(layer.weight.detach() * 0.5)


def equal(layer: nn.Linear) -> None:
    layer.weight.data = layer.weight.data.clone()


def written(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight.mul_(0.5)


BEFORE = torch.full((6, 6), 0.25)


def compared(tmp_path: Path, left: Change, right: Change) -> Diagnosis:
    trained(tmp_path / "left", left)
    trained(tmp_path / "right", right)
    return opdrift.diff(tmp_path / "left", tmp_path / "right")


@pytest.mark.parametrize("change", [scaled, made_before, set_to, assigned])
@pytest.mark.parametrize("on_right", [True, False])
def test_a_parameter_that_one_run_replaces_is_what_differs_first(
    tmp_path: Path, change: Change, on_right: bool
):
    """Whatever made the new tensor; the writes of the old one before that are no part of it."""
    sides = (nothing, change) if on_right else (change, nothing)

    first = compared(tmp_path, *sides).first

    assert first is not None
    assert (first.kind, first.name, first.module) == ("hidden-write", "1.weight", "1")
    assert (first.cause.slug, first.cause.confidence) == ("weights", "certain")
    name = "right" if on_right else "left"
    assert first.cause.summary == (
        f"another tensor was put in the place of 1.weight in the {name} run, and not in the other"
    )
    assert any("(step 1)" in line and "(step 2)" in line for line in first.cause.evidence)


@pytest.mark.parametrize("change", [scaled, equal, assigned])
def test_what_both_runs_replace_alike_is_identical(tmp_path: Path, change: Change):
    assert compared(tmp_path, change, change).verdict == "identical"


def test_an_equal_tensor_in_the_place_of_a_parameter_changes_nothing(tmp_path: Path):
    assert compared(tmp_path, nothing, equal).verdict == "identical"


def test_what_one_run_writes_and_the_other_replaces_is_the_same_where_the_contents_are(
    tmp_path: Path,
):
    assert compared(tmp_path, written, scaled).verdict == "identical"


def test_one_run_alone_may_replace_what_it_likes(tmp_path: Path):
    """It is no finding; the timeline tells it, and what was held until then."""
    trained(tmp_path / "trace", scaled)
    trace = opdrift.load(tmp_path / "trace")

    found = replacements(trace)

    assert findings([trace]) == ()
    assert list(found) == ["1.weight"]
    (only,) = found["1.weight"]
    old, new = trace.fingerprint(only.last), trace.fingerprint(only.after.value)
    assert old is not None
    assert new is not None
    assert new.absmax == old.absmax / 2


def test_a_parameter_that_only_an_optimizer_uses_after_that_keeps_its_name(tmp_path: Path):
    """No module is running then: the Python object tells which parameter it is."""
    layer = nn.Linear(3, 3)
    with opdrift.record(tmp_path / "trace", model=layer):
        layer(torch.ones(1, 3)).sum().backward()
        layer.weight.data = layer.weight.data * 0.5
        torch.optim.SGD(layer.parameters(), lr=0.1).step()

    assert list(replacements(opdrift.load(tmp_path / "trace"))) == ["weight"]


@pytest.mark.parametrize(
    ("library", "back", "told"),
    [("torch", False, ["fc.weight"]), ("torch", True, []), ("accelerate", False, [])],
)
def test_what_was_moved_once_may_be_replaced_later(library: str, back: bool, told: list[str]):
    """Only libraries put tensors in the place of parameters again and again; the program may move it once more itself."""
    build = Builder()
    weight = build.leaf("fc.weight", content="loaded")
    host = build.op("_to_copy", weight)
    build.mark("move", library=library, parameters=[["fc.weight", 0, [4, 8]]])
    if back:
        build.name(build.op("_to_copy", host), "fc.weight", when="use")
        build.mark("move", library=library, parameters=[])
    else:
        build.leaf("fc.weight", when="use", content="another")

    assert list(replacements(build.build())) == told
