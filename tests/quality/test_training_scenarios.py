"""Training runs whose steps are taken in other ways: what agrees is no divergence, what does not is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from scenarios import Book, Of, Pair, Scenario, X, check, infer, mlp, train, twins
from torch import nn

import opdrift
from opdrift.records import Divergence

BOOK = Book()
agrees, diverges, rounds = BOOK.agrees, BOOK.diverges, BOOK.rounds


# ---- an optimizer's kernel ---------------------------------------------------------------------------------


def steps(left: dict[str, object], right: dict[str, object]) -> Pair:
    """Three steps of AdamW with these options."""
    models = twins(lambda: mlp(1))

    def run(model: nn.Module, options: dict[str, object]) -> None:
        train(model, torch.optim.AdamW(model.parameters(), **{"lr": 1e-3, **options}), steps=3)  # type: ignore[arg-type]

    return Pair(lambda: run(models[0], left), lambda: run(models[1], right), models)


@rounds
def one_optimizer_is_fused() -> Pair:
    """`_fused_adamw_` says that it writes the gradients, which it only reads."""
    return steps({"foreach": True}, {"fused": True})


@rounds
def the_other_optimizer_is_fused() -> Pair:
    return steps({"fused": True}, {"foreach": False})


@diverges(cause=("structure", "op-args"))
def one_optimizer_is_fused_and_steps_further() -> Pair:
    return steps({"foreach": True}, {"fused": True, "lr": 2e-3})


@diverges("aten.mul_.Tensor", cause="inplace")
def one_run_scales_a_gradient_that_the_other_keeps_as_it_is() -> Pair:
    models = twins(lambda: mlp(1))
    kept = []

    def run(model: nn.Module, *, scale: bool) -> None:
        model(X).pow(2).mean().backward()
        grad = model[0].weight.grad  # type: ignore[index]
        model.zero_grad(set_to_none=True)
        if scale:
            grad.mul_(0.5)
        kept.append(grad)

    return Pair(lambda: run(models[0], scale=False), lambda: run(models[1], scale=True), models)


# ---- an optimizer's settings -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"weight_decay": 0.1}, "other: 0.99999 against 0.9999"),
        ({"eps": 1e-6}, "other: 1e-08 against 1e-06"),
        ({"lr": 2e-3}, "other: 0.99999 against 0.99998"),
    ],
)
@pytest.mark.parametrize("lists", [False, True])
def test_a_number_of_an_update_is_told_as_one_of_the_optimizer(
    tmp_path: Path, options: dict[str, object], word: str, lists: bool
):
    """No module is named, and the optimizers' settings are to be compared."""
    pair = steps({"foreach": lists}, {"foreach": lists, **options})
    first = first_of(pair, tmp_path)

    assert first.outside
    assert "in an optimizer step was called with other arguments" in first.cause.summary
    assert lists or word in first.cause.summary
    assert "optimizer.param_groups" in first.cause.try_


def test_a_number_of_the_loss_is_none_of_the_optimizer(tmp_path: Path):
    """What the program computes outside every module before the backward pass is not an update."""
    models = twins(lambda: mlp(1))

    def run(model: nn.Module, scale: float) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            model(X).mul(scale).pow(2).mean().backward()
            optimizer.step()

    pair = Pair(lambda: run(models[0], 1.0), lambda: run(models[1], 1.5), models)
    first = first_of(pair, tmp_path)

    assert first.outside
    assert "the program outside every module" in first.cause.summary
    assert "optimizer" not in first.cause.summary + first.cause.try_


def test_what_the_model_itself_does_is_not_outside(tmp_path: Path):
    """The forward of the outermost module is in the root module."""
    models = twins(
        *(lambda k=k: Of(lambda m, x: m.a(x) * k, a=nn.Linear(8, 3)) for k in (1.0, 2.0))
    )
    first = first_of(infer(models, X), tmp_path)

    assert not first.outside
    assert "the root module" in first.cause.summary


def first_of(pair: Pair, folder: Path) -> Divergence:
    """The first divergence of a pair."""
    assert pair.models is not None
    for name, model, body in zip("lr", pair.models, (pair.left, pair.right), strict=True):
        with opdrift.record(folder / name, model=model):
            body()
    found = opdrift.diff(folder / "l", folder / "r")
    assert found.verdict == "diverged"
    assert found.first is not None
    return found.first


@pytest.mark.parametrize("scenario", BOOK.scenarios, ids=lambda s: s.make.__name__)
def test_training_is_judged_by_its_results(scenario: Scenario, tmp_path: Path):
    """The verdict, the place and the cause are those that the scenario names."""
    check(scenario, tmp_path)
