"""Weights and buffers that differ, each in a way that happens when models are built, converted, loaded and moved."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from scenarios import Book, Of, Pair, Scenario, X, check, infer, residual, train, twins
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

BOOK = Book()
agrees, diverges, rounds = BOOK.agrees, BOOK.diverges, BOOK.rounds

Change = Callable[[Tensor], Tensor]


def deep() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3)
    )


def changed(name: str, change: Change) -> Pair:
    """Twins, one weight of the right one changed."""
    left, right = twins(deep)
    with torch.no_grad():
        weight = right.get_parameter(name)
        weight.copy_(change(weight.clone()))
    return infer((left, right), X)


def everywhere(change: Change) -> Pair:
    """Twins, all matrices of the right one changed."""
    left, right = twins(deep)
    with torch.no_grad():
        for weight in right.parameters():
            if weight.ndim > 1:
                weight.copy_(change(weight.clone()))
    return infer((left, right), X)


# ---- the same numbers, elsewhere ---------------------------------------------------------------------------


@diverges("0.weight", cause="weights", says=("another order",))
def rows_of_a_weight_are_permuted() -> Pair:
    return changed("0.weight", lambda w: w.flip(0))


@diverges("2.weight", cause="weights", says=("another order",))
def a_square_weight_is_transposed() -> Pair:
    return changed("2.weight", lambda w: w.t())


@diverges("2.weight", cause="weights", says=("near each other",))
def a_weight_that_moved_a_little_is_not_in_another_order() -> Pair:
    return changed("2.weight", lambda w: w + 0.01 * w.std() * torch.randn_like(w))


@rounds
def a_weight_is_held_transposed_and_used_so() -> Pair:
    weight, bias = torch.randn(8, 8), torch.zeros(8)
    left = Of(
        lambda m, x: torch.addmm(m.bias, x, m.weight).tanh(),
        weight=nn.Parameter(weight),
        bias=nn.Parameter(bias),
    )
    right = Of(
        lambda m, x: linear(x, m.weight, m.bias).tanh(),
        weight=nn.Parameter(weight.t().contiguous()),
        bias=nn.Parameter(bias.clone()),
    )
    return infer((left, right), X)


@diverges(
    "layers.0.weight", cause="weights", says=("holds in the right run what layers.1.weight holds",)
)
def layers_are_loaded_in_another_order() -> Pair:
    left, right = twins(lambda: residual([0, 1, 2, 3]))
    for i in range(4):
        right.layers[i].load_state_dict(left.layers[(i + 1) % 4].state_dict())
    return infer((left, right), X)


@diverges("q.weight", cause="weights", says=("are exchanged",))
def two_projections_are_exchanged() -> Pair:
    def model() -> nn.Module:
        return Of(
            lambda m, x: (m.q(x) @ m.k(x).t()).softmax(-1) @ x, q=nn.Linear(8, 8), k=nn.Linear(8, 8)
        )

    left, right = twins(model)
    right.q.load_state_dict(left.k.state_dict())
    right.k.load_state_dict(left.q.state_dict())
    return infer((left, right), X)


# ---- changed in one way ------------------------------------------------------------------------------------


@diverges("0.weight", cause="weights", says=("one factor, 0.5",))
def a_scale_is_folded_into_a_weight() -> Pair:
    return changed("0.weight", lambda w: w * 0.5)


@diverges("0.weight", cause="weights", says=("the other sign",))
def a_weight_is_negated() -> Pair:
    return changed("0.weight", lambda w: -w)


@diverges("0.weight", cause="weights", says=("bfloat16 and back",))
def weights_went_through_bfloat16() -> Pair:
    return everywhere(lambda w: w.bfloat16().float())


@diverges("0.weight", cause="weights", says=("float16",))
def weights_went_through_float16() -> Pair:
    return everywhere(lambda w: w.half().float())


@diverges("0.weight", cause="weights", says=("elements are 0 in the right run",))
def a_weight_is_pruned() -> Pair:
    return changed("0.weight", lambda w: w * (w.abs() > 0.1))


@diverges("0.weight", cause="weights", says=("near each other",))
def an_adapter_is_merged_in_one_run() -> Pair:
    return changed("0.weight", lambda w: w + 0.01 * torch.randn(32, 2) @ torch.randn(2, 8))


@diverges("0.weight", cause="weights", says=("near each other",))
def an_older_checkpoint_is_loaded() -> Pair:
    left, right = twins(deep)
    train(left, torch.optim.Adam(left.parameters(), lr=1e-3), steps=5)
    left.zero_grad()
    return infer((left, right), X)


def rounded(weight: Tensor, levels: int, scale: Tensor) -> Tensor:
    return (weight / scale * levels).round() * scale / levels


@diverges("0.weight", cause="quantisation", says=("a scale a row",))
def weights_went_through_eight_bits_by_row() -> Pair:
    return everywhere(lambda w: rounded(w, 127, w.abs().amax(1, keepdim=True)))


@diverges("0.weight", cause="quantisation", says=("whole multiples",))
def weights_went_through_eight_bits_by_tensor() -> Pair:
    return everywhere(lambda w: rounded(w, 127, w.abs().max()))


@diverges("0.weight", cause="quantisation")
def weights_went_through_four_bits() -> Pair:
    return everywhere(lambda w: rounded(w, 7, w.abs().amax(1, keepdim=True)))


# ---- never loaded, tied ------------------------------------------------------------------------------------


def loading(left: dict[str, Tensor], right: dict[str, Tensor]) -> Pair:
    """Two fresh models, each of which loads what it is given inside the recording."""
    models = deep().eval(), deep().eval()

    def run(model: nn.Module, state: dict[str, Tensor]) -> Tensor:
        model.load_state_dict(state, strict=False)
        with torch.no_grad():
            return model(X)

    return Pair(lambda: run(models[0], left), lambda: run(models[1], right), models)


@diverges(
    "0.weight",
    cause="weights",
    says=("the left run loaded them in its recording, the right run did not",),
    origins=1,
)
def the_keys_have_a_prefix_and_nothing_is_loaded() -> Pair:
    state = deep().state_dict()
    return loading(state, {f"module.{key}": value for key, value in state.items()})


@diverges("0.weight", cause="weights", says=("2 of 6 tensors",), origins=1)
def one_layer_is_missing_in_the_checkpoint() -> Pair:
    state = deep().state_dict()
    return loading(state, {key: value for key, value in state.items() if key[0] != "0"})


def language_model(*, tied: bool) -> nn.Module:
    model = Of(
        lambda m, ids: m.head(m.mid(m.embed(ids)).tanh()),
        embed=nn.Embedding(20, 8),
        mid=nn.Linear(8, 8),
        head=nn.Linear(8, 20, bias=False),
    )
    if tied:
        model.head.weight = model.embed.weight
    return model


IDS = torch.tensor([[1, 2, 3]])


@diverges(
    "head.weight",
    cause="weights",
    module="head",
    says=("embed.weight, head.weight are one tensor in the left run",),
)
def a_head_lost_its_tie() -> Pair:
    left, right = language_model(tied=True).eval(), language_model(tied=False).eval()
    right.embed.load_state_dict(left.embed.state_dict())
    right.mid.load_state_dict(left.mid.state_dict())
    return infer((left, right), IDS)


@diverges(cause="weights", says=("are one parameter in the left run and 2 in the other",))
def a_tie_is_broken_in_training() -> Pair:
    left, right = language_model(tied=True), language_model(tied=False)
    right.load_state_dict(left.state_dict())

    def run(model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        cross_entropy(model(IDS)[0], torch.tensor([2, 3, 4])).backward()
        optimizer.step()

    return Pair(lambda: run(left), lambda: run(right), (left, right))


@agrees
def a_head_is_untied_and_equal() -> Pair:
    left, right = language_model(tied=True).eval(), language_model(tied=False).eval()
    right.load_state_dict(left.state_dict())
    return infer((left, right), IDS)


@agrees
def a_row_that_no_token_reads_differs() -> Pair:
    left, right = twins(lambda: language_model(tied=False))
    with torch.no_grad():
        right.embed.weight[15] += 1.0
    return infer((left, right), IDS)


# ---- buffers -----------------------------------------------------------------------------------------------


def normalised() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())


@diverges("1.running_mean", cause="buffer-state", says=("running statistics",))
def running_statistics_are_not_loaded() -> Pair:
    left, right = normalised(), normalised().eval()
    left(torch.randn(4, 3, 8, 8) * 3 + 1)
    state = {k: v for k, v in left.state_dict().items() if "running" not in k}
    right.load_state_dict(state, strict=False)
    return infer((left.eval(), right), torch.randn(2, 3, 8, 8))


@diverges("state", cause="buffer-state", says=("what the left run left in it",))
def a_state_is_carried_over_from_the_run_before() -> Pair:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        m.state.add_(m.a(x).mean(0))
        return m.b(m.state)

    left, right = twins(
        lambda: Of(forward, a=nn.Linear(8, 8), b=nn.Linear(8, 8), state=torch.zeros(8))
    )
    with torch.no_grad():
        right(X)
    return infer((left, right), X)


@pytest.mark.parametrize("scenario", BOOK.scenarios, ids=lambda s: s.make.__name__)
def test_place_and_cause(scenario: Scenario, tmp_path: Path):
    """The leaf is named, and what happened to it."""
    check(scenario, tmp_path)
