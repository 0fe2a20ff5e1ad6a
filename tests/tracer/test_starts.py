"""What a run starts from: what its parameters hold when they are first computed with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import opdrift

FILE = {"weight": torch.full((3, 3), 0.5), "bias": torch.arange(3.0)}
Load = Callable[[nn.Linear], object]


def run(path: Path, load: Load) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    with opdrift.record(path, model=model), torch.no_grad():
        load(model)
        model(torch.ones(1, 3))


def from_file(model: nn.Linear) -> None:
    model.load_state_dict(FILE)


def twice(model: nn.Linear) -> None:
    model.load_state_dict({name: tensor * 3 for name, tensor in FILE.items()})
    model.load_state_dict(FILE)


def assigned(model: nn.Linear) -> None:
    model.load_state_dict({name: tensor.clone() for name, tensor in FILE.items()}, assign=True)


def by_hand(model: nn.Linear) -> None:
    for name, parameter in model.named_parameters():
        parameter.copy_(FILE[name])


def replaced(model: nn.Linear) -> None:
    for name, parameter in model.named_parameters():
        parameter.data = FILE[name].clone()


def scaled(model: nn.Linear) -> None:
    model.load_state_dict({name: tensor * 3 for name, tensor in FILE.items()})


def prefixed(model: nn.Linear) -> None:
    model.load_state_dict({f"module.{name}": t for name, t in FILE.items()}, strict=False)


@pytest.mark.parametrize("load", [twice, assigned, by_hand, replaced])
def test_how_a_file_comes_into_the_model_makes_no_difference(tmp_path: Path, load: Load):
    run(tmp_path / "left", from_file)
    run(tmp_path / "right", load)

    assert opdrift.diff(tmp_path / "left", tmp_path / "right").verdict == "identical"


@pytest.mark.parametrize(("load", "kept"), [(prefixed, True), (scaled, False)])
def test_a_run_is_said_to_keep_what_it_had_only_if_nothing_wrote_it(
    tmp_path: Path, load: Load, kept: bool
):
    run(tmp_path / "left", from_file)
    run(tmp_path / "right", load)

    first = opdrift.diff(tmp_path / "left", tmp_path / "right").first

    assert first is not None
    assert first.cause.slug == "weights"
    assert ("the right run kept what both had before" in first.cause.summary) is kept
