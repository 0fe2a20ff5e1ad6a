"""Calls of a model that only one run makes: what is said of their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


# ---- results of ops that both runs have ------------------------------------------------------------------


class Gate(nn.Module):
    """Returns what it computed on the way too, if it is told to."""

    def __init__(self, *, both: bool) -> None:
        super().__init__()
        self.both = both

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        h = x.sin()
        y = h * 2
        return (y, h) if self.both else y


def kept(folder: Path, left: Callable[[], object], right: Callable[[], object]) -> Diagnosis:
    """Two calls whose results outlive the recordings."""
    results = []
    with torch.no_grad():
        for name, call in (("left", left), ("right", right)):
            with opdrift.record(folder / name, kernels="off"):
                results.append(call())
    return opdrift.diff(folder / "left", folder / "right")


def test_an_op_that_returns_more_is_told_by_its_argument(tmp_path: Path) -> None:
    """The fast path of attention is one op, and hands out its weights if asked; the common output is equal."""
    attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    x = X[None]

    found = kept(
        tmp_path, lambda: attention(x, x, x, need_weights=False), lambda: attention(x, x, x)
    )

    assert found.first is not None
    assert found.first.op == "aten._native_multi_head_attention.default"
    assert found.first.cause.slug == "op-args"
    assert "need_weights: False against True" in found.first.cause.evidence
    assert len(found.origins) == 1


def test_a_result_that_one_program_throws_away_is_told_by_its_op(tmp_path: Path) -> None:
    """Both runs compute it with the same op and arguments, and one returns it as well."""
    found = kept(tmp_path, lambda: Gate(both=False)(X), lambda: Gate(both=True)(X))

    assert found.first is not None
    assert found.first.op == "aten.sin.default"
    assert found.first.cause.slug == "structure"
    assert "neither returned nor kept" in found.first.cause.summary
    assert "other arguments" not in found.first.cause.summary
