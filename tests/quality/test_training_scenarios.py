"""Training runs whose steps are taken in other ways: what agrees is no divergence, what does not is named."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from scenarios import Book, Pair, Scenario, X, check, mlp, train, twins
from torch import nn

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


@pytest.mark.parametrize("scenario", BOOK.scenarios, ids=lambda s: s.make.__name__)
def test_training_is_judged_by_its_results(scenario: Scenario, tmp_path: Path):
    """The verdict, the place and the cause are those that the scenario names."""
    check(scenario, tmp_path)
