"""Calls of a model that only one run makes: what is said of their results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

import opdrift
from opdrift.records import Diagnosis

X, Y = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
WORDS = "not compared: call 2 of 2 of the model in the right run"


def called(folder: Path, right: Sequence[Tensor], *, keep: bool = False) -> Diagnosis:
    """One call on the left against several on the right, whose results may outlive the recording."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).requires_grad_(requires_grad=False)
    torch.nn.init.eye_(model[0].weight)
    kept = []
    for name, inputs in (("left", [X]), ("right", right)):
        with opdrift.record(folder / name, model=model, kernels="off"):
            for x in inputs:
                y = model(x)
                if keep:
                    kept.append(y)
            del y
    return opdrift.diff(folder / "left", folder / "right")


def test_a_second_call_whose_result_was_thrown_away_is_named(tmp_path: Path) -> None:
    """It is no difference, and nothing of it was compared."""
    found = called(tmp_path, [X, Y])

    assert found.verdict == "identical"
    assert any(note.startswith(WORDS) for note in found.notes)


def test_the_same_call_made_twice_is_not(tmp_path: Path) -> None:
    """The other run has its result as well."""
    found = called(tmp_path, [X, X])

    assert found.verdict == "identical"
    assert found.notes == ()


def test_a_second_call_whose_result_was_kept_is_a_difference(tmp_path: Path) -> None:
    """What the report opens with needs no note."""
    found = called(tmp_path, [X, Y], keep=True)

    assert found.verdict == "diverged"
    assert not any("not compared" in note for note in found.notes)
