"""Runs that differ in nothing that counts: no false alarm."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from scenarios import Book, Of, Pair, Scenario, X, check, infer, mlp, twins
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

BOOK = Book()
agrees, rounds = BOOK.agrees, BOOK.rounds

IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(4))


# ---- memory ------------------------------------------------------------------------------------------------


@rounds
def a_convolution_runs_channels_last() -> Pair:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).eval()
    right = copy.deepcopy(model).to(memory_format=torch.channels_last)
    return infer((model, right), IMAGE, right=(IMAGE.to(memory_format=torch.channels_last),))


@agrees
def elementwise_ops_run_channels_last() -> Pair:
    model = Of(lambda m, x: (x.relu() * m.w).amax((2, 3)), w=torch.randn(3, 1, 1))
    return infer((model, model), IMAGE, right=(IMAGE.to(memory_format=torch.channels_last),))


@rounds
def an_input_is_stored_transposed() -> Pair:
    model = mlp().eval()
    return infer((model, model), X, right=(X.t().contiguous().t(),))


@rounds
def a_weight_is_stored_transposed() -> Pair:
    left, right = twins(mlp)
    right[0].weight = nn.Parameter(right[0].weight.detach().t().contiguous().t())  # type: ignore[index, union-attr]
    return infer((left, right), X)


@agrees
def fresh_memory_is_overwritten_in_parts() -> Pair:
    model, rows = nn.Linear(8, 8).eval(), torch.randn(64, 8)
    kept: list[Tensor] = []

    def run(litter: float) -> None:
        old = [torch.full((64, 8), litter) for _ in range(20)]
        del old
        out = torch.empty(64, 8)
        with torch.no_grad():
            for i in range(0, 64, 16):
                out[i : i + 16] = model(rows[i : i + 16])
        kept.append(out.sum())

    return Pair(lambda: run(1.0), lambda: run(7.0), (model, model))


@agrees
def an_activation_is_in_place_where_nobody_sees() -> Pair:
    return infer(
        twins(mlp, lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 3))),
        X,
    )


@agrees
def a_bias_is_expanded_or_repeated() -> Pair:
    def model(expand: bool) -> nn.Module:
        return Of(
            lambda m, x: m.a(x) + (m.p.expand(4, 8) if expand else m.p.repeat(4, 1)),
            a=nn.Linear(8, 8),
            p=nn.Parameter(torch.randn(1, 8)),
        )

    return infer(twins(lambda: model(True), lambda: model(False)), X)


@agrees
def a_clone_and_a_reshape_more() -> Pair:
    def model(more: bool) -> nn.Module:
        def forward(m: nn.Module, x: Tensor) -> Tensor:
            h = m.a(x)
            return m.b((h.clone().reshape(2, 16).view(4, 8) if more else h).relu())

        return Of(forward, a=nn.Linear(8, 8), b=nn.Linear(8, 3))

    return infer(twins(lambda: model(False), lambda: model(True)), X)


# ---- modules -----------------------------------------------------------------------------------------------


@agrees
def modules_are_registered_in_another_order() -> Pair:
    def model(order: str) -> nn.Module:
        parts = {"a": nn.Linear(8, 8), "b": nn.Linear(8, 8), "c": nn.Linear(8, 3)}
        return Of(lambda m, x: m.c(m.b(m.a(x).tanh()).relu()), **{k: parts[k] for k in order})

    return infer(twins(lambda: model("abc"), lambda: model("cba")), X)


@agrees
def the_model_is_a_copy() -> Pair:
    model = mlp().eval()
    return infer((model, copy.deepcopy(model)), X)


def with_aside(*, runs: bool) -> nn.Module:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        if runs:
            m.aside(x).relu().sum()
        return m.a(x)

    return Of(forward, a=nn.Linear(8, 3), aside=nn.Linear(8, 8))


@agrees
def what_nobody_uses_is_computed_in_one_run() -> Pair:
    return infer(twins(lambda: with_aside(runs=False), lambda: with_aside(runs=True)), X)


@agrees
def what_nobody_uses_has_other_weights() -> Pair:
    left, right = twins(lambda: with_aside(runs=True))
    with torch.no_grad():
        right.aside.weight.add_(1)
    return infer((left, right), X)


# ---- random numbers, modes, training -----------------------------------------------------------------------


@agrees
def a_draw_that_nobody_uses() -> Pair:
    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).eval()

    def run(seed: int, draws: int) -> Tensor:
        torch.manual_seed(seed)
        torch.rand(draws)
        with torch.no_grad():
            return model(X)

    return Pair(lambda: run(1, 1), lambda: run(2, 5), (model, model))


@agrees
def gradients_are_recorded_in_one_run() -> Pair:
    model = mlp().eval()
    return Pair(lambda: model(X).detach(), torch.no_grad()(lambda: model(X)), (model, model))


@agrees
def inference_mode_instead_of_no_grad() -> Pair:
    model = mlp().eval()
    return Pair(
        torch.no_grad()(lambda: model(X)), torch.inference_mode()(lambda: model(X)), (model, model)
    )


@agrees
def reentrant_checkpointing_repeats_ops() -> Pair:
    models, x = twins(lambda: mlp(1)), X.clone().requires_grad_()

    def run(model: nn.Module, *, again: bool) -> None:
        y = checkpoint(model[0], x, use_reentrant=True) if again else model[0](x)  # type: ignore[index]
        model[2](model[1](y)).sum().backward()  # type: ignore[index]

    return Pair(lambda: run(models[0], again=False), lambda: run(models[1], again=True), models)


@agrees
def gradients_are_set_to_zero_instead_of_none() -> Pair:
    models = twins(lambda: mlp(1))

    def run(model: nn.Module, *, none: bool) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(X).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=none)

    return Pair(lambda: run(models[0], none=True), lambda: run(models[1], none=False), models)


@agrees
def the_optimizer_works_on_lists() -> Pair:
    models = twins(lambda: mlp(1))

    def run(model: nn.Module, *, lists: bool) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=lists)
        for _ in range(2):
            optimizer.zero_grad()
            model(X).pow(2).mean().backward()
            optimizer.step()

    return Pair(lambda: run(models[0], lists=False), lambda: run(models[1], lists=True), models)


@agrees
def one_run_logs_its_loss() -> Pair:
    models = twins(lambda: mlp(1))
    log: list[float] = []

    def run(model: nn.Module, *, logs: bool) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(X).pow(2).mean()
            if logs:
                log.extend([loss.item(), model[0].weight.norm().item()])  # type: ignore[index, union-attr, operator]
            loss.backward()
            optimizer.step()

    return Pair(lambda: run(models[0], logs=False), lambda: run(models[1], logs=True), models)


@agrees
def another_number_of_threads_without_effect() -> Pair:
    model = mlp().eval()

    def run(count: int) -> Tensor:
        torch.set_num_threads(count)
        try:
            with torch.no_grad():
                return model(X)
        finally:
            torch.set_num_threads(1)

    return Pair(lambda: run(1), lambda: run(2), (model, model))


@agrees
def a_run_generates_one_token_more() -> Pair:
    model = mlp(8).eval()

    def run(steps: int) -> None:
        x = X
        with torch.no_grad():
            for _ in range(steps):
                x = model(x)

    return Pair(lambda: run(3), lambda: run(4), (model, model))


@pytest.mark.parametrize("scenario", BOOK.scenarios, ids=lambda s: s.make.__name__)
def test_nothing_is_blamed(scenario: Scenario, tmp_path: Path):
    """Identical, or rounding where other kernels run."""
    check(scenario, tmp_path)
