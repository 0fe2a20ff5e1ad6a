"""Training runs whose steps are taken in other ways: what agrees is no divergence, what does not is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from scenarios import Book, Of, Pair, Scenario, X, check, infer, mlp, train, twins
from torch import Tensor, nn

import opdrift
from opdrift.errors import IncomparableTracesError
from opdrift.records import Diagnosis, Divergence

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
    assert "in an optimizer step of 0.weight" in first.cause.summary
    assert "was called with other arguments" in first.cause.summary
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


# ---- a batch in parts ----------------------------------------------------------------------------------------

BATCHES = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(5))


def accumulated(
    *,
    parts: int = 2,
    scale: Callable[[Tensor], Tensor] = lambda loss: loss / 2,
    lr: float = 0.1,
    after: Callable[[nn.Module], object] = id,
    stepwise: bool = False,
    swapped: bool = False,
) -> Pair:
    """Two steps: with whole batches on the left, in parts on the right."""
    models = twins(lambda: mlp(1))

    def whole(model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x in BATCHES:
            optimizer.zero_grad()
            model(x).pow(2).mean().backward()
            optimizer.step()

    def pieces(model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        for x in BATCHES:
            optimizer.zero_grad()
            for part in x.chunk(parts):
                scale(model(part).pow(2).mean()).backward()
                if stepwise:
                    optimizer.step()
                    optimizer.zero_grad()
            if not stepwise:
                optimizer.step()
            after(model)

    bodies = [lambda: whole(models[0]), lambda: pieces(models[1])]
    return Pair(*(bodies[::-1] if swapped else bodies), models[:: -1 if swapped else 1])  # type: ignore[arg-type]


@pytest.mark.parametrize("swapped", [False, True])
def test_parts_whose_gradients_add_up_differ_by_rounding(tmp_path: Path, swapped: bool):
    """The verdict follows from the gradients and from what the runs end with."""
    found = compared(accumulated(swapped=swapped), tmp_path)

    assert found.verdict == "rounding"
    assert found.first is not None
    assert found.first.cause.slug == "rounding"
    assert "in 2 parts in the" in found.first.cause.summary
    assert "the gradients agree to" in found.first.cause.summary


def test_parts_in_bfloat16_are_held_against_its_rounding(tmp_path: Path):
    """The gradients are float32 and computed in bfloat16."""
    pair = accumulated()

    def narrowly(body: Callable[[], object]) -> Callable[[], object]:
        def run() -> None:
            with torch.autocast("cpu", torch.bfloat16):
                body()

        return run

    found = compared(Pair(narrowly(pair.left), narrowly(pair.right), pair.models), tmp_path)

    assert found.verdict == "rounding"


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("parts", [2, 4])
def test_a_loss_that_is_not_divided_is_told_by_its_factor(
    tmp_path: Path, parts: int, swapped: bool
):
    """The gradients are as many times as large as there are parts."""
    first = first_of(accumulated(parts=parts, scale=lambda loss: loss, swapped=swapped), tmp_path)

    assert first.cause.slug == "structure"
    assert f"are {parts} times as large" in first.cause.summary
    assert f"Divide the loss of each part by {parts}" in first.cause.try_


def test_another_factor_is_no_missing_division(tmp_path: Path):
    first = first_of(accumulated(scale=lambda loss: loss * 1.5), tmp_path)

    assert "are 3 times as large" in first.cause.summary
    assert "divided" not in first.cause.summary


def test_a_factor_that_is_nearly_one_is_told_with_its_digits(tmp_path: Path):
    first = first_of(accumulated(scale=lambda loss: loss / 2 * 1.0003), tmp_path)

    assert "are 1.0003 times as large" in first.cause.summary


def test_a_small_difference_that_no_factor_explains_is_not_called_one(tmp_path: Path):
    """Nothing is "1 times as large"."""
    first = first_of(accumulated(scale=lambda loss: (loss + 1e-3 * loss**2) / 2), tmp_path)

    assert "times as large" not in first.cause.summary


def test_parts_with_another_loss_have_no_factor(tmp_path: Path):
    """What is not a multiple is not called one."""
    first = first_of(accumulated(scale=lambda loss: loss.sqrt() / 2), tmp_path)

    assert "by no single factor" in first.cause.summary


@pytest.mark.parametrize("evaluated", [False, True])
def test_what_an_optimizer_makes_of_noise_is_rounding(tmp_path: Path, evaluated: bool):
    """Keys' biases have no gradient but rounding's, and Adam steps them as far as any; also with whole batches in between."""
    models = twins(lambda: nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True))

    def train(model: nn.Module, parts: int) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for x in torch.randn(3, 8, 5, 16, generator=torch.Generator().manual_seed(2)):
            for part in x.chunk(parts):
                (model(part).sin().mean() / parts).backward()
            optimizer.step()
            optimizer.zero_grad()
            if evaluated:
                with torch.no_grad():
                    model(x)

    pair = Pair(lambda: train(models[0], 1), lambda: train(models[1], 2), models)
    found = compared(pair, tmp_path)

    assert found.verdict == "rounding"
    assert found.first is not None
    assert "it steps at random" in "".join(found.first.cause.evidence)


def test_a_wrong_factor_shows_beside_the_noise_of_an_optimizer(tmp_path: Path):
    """What an optimizer makes of rounding explains nothing of a weight that is changed after its step."""
    models = twins(lambda: mlp(1))

    def train(model: nn.Module, parts: int) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for x in BATCHES:
            for part in x.chunk(parts):
                (model(part).sin().mean() / parts).backward()
            optimizer.step()
            optimizer.zero_grad()
            if parts > 1:
                with torch.no_grad():
                    next(model.parameters()).mul_(1.01)

    first = first_of(
        Pair(lambda: train(models[0], 1), lambda: train(models[1], 2), models), tmp_path
    )

    assert "what the runs end with does not" in first.cause.summary


def test_gradients_that_agree_do_not_hide_another_step(tmp_path: Path):
    """The first step's gradients agree, the parameters that come of them do not."""

    def decay(model: nn.Module) -> None:
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.9)

    first = first_of(accumulated(after=decay), tmp_path)

    assert "what the runs end with does not" in first.cause.summary


def test_another_learning_rate_is_told_beside_parts_that_agree(tmp_path: Path):
    """Its numbers say more than that the runs end with other parameters."""
    first = first_of(accumulated(lr=0.2), tmp_path)

    assert first.cause.slug == "op-args"
    assert "alpha: -0.1 against -0.2" in first.cause.summary


def test_smaller_batches_are_not_parts_of_one(tmp_path: Path):
    """A step for each part is another training: nothing is said of its gradients."""
    with pytest.raises(IncomparableTracesError, match="gives them in 2 parts"):
        compared(accumulated(scale=lambda loss: loss, stepwise=True), tmp_path)


def first_of(pair: Pair, folder: Path) -> Divergence:
    """The first divergence of a pair that diverges."""
    found = compared(pair, folder)
    assert found.verdict == "diverged"
    assert found.first is not None
    return found.first


def compared(pair: Pair, folder: Path) -> Diagnosis:
    """Both runs recorded and compared."""
    assert pair.models is not None
    for name, model, body in zip("lr", pair.models, (pair.left, pair.right), strict=True):
        with opdrift.record(folder / name, model=model):
            body()
    return opdrift.diff(folder / "l", folder / "r")


@pytest.mark.parametrize("scenario", BOOK.scenarios, ids=lambda s: s.make.__name__)
def test_training_is_judged_by_its_results(scenario: Scenario, tmp_path: Path):
    """The verdict, the place and the cause are those that the scenario names."""
    check(scenario, tmp_path)
