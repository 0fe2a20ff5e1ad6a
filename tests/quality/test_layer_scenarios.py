"""Layers that are left out, that train, that are quantised or traced, or that compute the same in another way."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path

import pytest
import torch
from scenarios import Book, Of, Pair, Scenario, X, check, infer, mlp, twins
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

BOOK = Book()
agrees, diverges, rounds = BOOK.agrees, BOOK.diverges, BOOK.rounds

TOKENS = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(2))


# ---- layers that one run has ---------------------------------------------------------------------------------


def causal(m: nn.Module, x: Tensor) -> Tensor:
    mask = torch.full((x.shape[1], x.shape[1]), float("-inf")).triu(1)
    scores = m.q(x) @ m.k(x).transpose(-1, -2) + mask
    return x + scores.softmax(-1) @ x


def stack(order: list[int]) -> nn.Module:
    def layer() -> nn.Module:
        return Of(causal, q=nn.Linear(8, 8), k=nn.Linear(8, 8))

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        for i in order:
            x = m.layers[i](x)
        return m.out(x)

    layers = nn.ModuleList(layer() for _ in range(3))
    return Of(forward, layers=layers, out=nn.Linear(8, 3))


@diverges(cause="structure", says=("the left run has",))
def a_layer_of_masked_attention_is_left_out() -> Pair:
    """The run without the layer attends to nothing there: it lacks no mask."""
    return infer(twins(lambda: stack([0, 1, 2]), lambda: stack([0, 2])), TOKENS)


@diverges(cause="structure", says=("the right run has",))
def a_layer_of_masked_attention_runs_twice() -> Pair:
    return infer(twins(lambda: stack([0, 1, 2]), lambda: stack([0, 1, 1, 2])), TOKENS)


def block(*, residual: bool = True, scale: float | None = None) -> nn.Module:
    """Two blocks with two residuals each; the first of the second block may be missing."""

    def inner(m: nn.Module, x: Tensor, *, adds: bool) -> Tensor:
        h = m.mix(m.norm(x))
        x = x + h if adds else h
        return x + m.up(m.last(x))

    def one(*, adds: bool) -> nn.Module:
        return Of(
            lambda m, x: inner(m, x, adds=adds),
            norm=nn.LayerNorm(8),
            mix=nn.Linear(8, 8),
            last=nn.LayerNorm(8),
            up=nn.Linear(8, 8),
        )

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        x = m.stem(x)
        if scale is not None:
            x = x * scale
        return m.out(m.two(m.one(x)))

    parts = {"stem": nn.Linear(8, 8), "one": one(adds=True), "two": one(adds=residual)}
    return Of(forward, **parts, out=nn.Linear(8, 3))


@diverges("aten.add.Tensor", cause="structure", module="two", says=("the left run has 1 op more",))
def a_residual_is_missing_on_the_right() -> Pair:
    """The residual that is left goes with its own counterpart, behind the same call."""
    return infer(twins(block, lambda: block(residual=False)), TOKENS)


@diverges("aten.add.Tensor", cause="structure", module="two", says=("the right run has 1 op more",))
def a_residual_is_missing_on_the_left() -> Pair:
    return infer(twins(lambda: block(residual=False), block), TOKENS)


@diverges("aten.mul.Tensor", cause="structure", module="", says=("mul in the root module",))
def what_goes_into_the_blocks_is_scaled() -> Pair:
    """The place is the line that scales, in the model, and not the norm of the first block that reads what comes of it."""
    return infer(twins(block, lambda: block(scale=2.8)), TOKENS)


def pooled(index: int) -> nn.Module:
    return Of(lambda m, x: m.out(m.stem(x)[:, index]), stem=nn.Linear(8, 8), out=nn.Linear(8, 3))


@diverges(
    "aten.select.int", cause="op-args", module="", says=("in the root module was called", "-1")
)
def the_last_token_is_pooled_for_the_first() -> Pair:
    """The layer that reads it is another module, which has no part in it."""
    return infer(twins(lambda: pooled(0), lambda: pooled(-1)), TOKENS)


def started(value: float) -> nn.Module:
    return Of(lambda m, x: m.out(x + torch.full((8,), value)), out=nn.Linear(8, 3))


@diverges("aten.add.Tensor", cause="op-args", says=("aten.full.default in the root module",))
def a_constant_is_another_one() -> Pair:
    return infer(twins(lambda: started(0.5), lambda: started(0.25)), TOKENS)


# ---- layers that are not what they were ----------------------------------------------------------------------


@diverges(cause="train-mode", says=("ran with training=False", "ran with training=True"))
def a_spectral_norm_goes_on_training() -> Pair:
    """It has no op with a flag: in training mode it iterates once more, and writes what it found into buffers."""
    left = nn.Sequential(spectral_norm(nn.Linear(8, 8)), nn.Linear(8, 3))
    right = copy.deepcopy(left)
    return infer((left.eval(), right.train()), X)


@diverges(cause="quantisation", module="0", says=("the right run computes with quantised numbers",))
def linear_layers_are_quantised_by_torch() -> Pair:
    """What stands in their place is built in training mode, which changes nothing."""
    left = mlp().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao.quantization is deprecated
        right = torch.ao.quantization.quantize_dynamic(copy.deepcopy(left), {nn.Linear})
    return infer((left, right), X)


@diverges(
    "aten.quantize_per_tensor.default",
    cause="quantisation",
    says=("rounds to other levels: zero_point: 128 against 90",),
)
def inputs_are_quantised_with_another_zero_point() -> Pair:
    def run(zero_point: int) -> nn.Module:
        return Of(
            lambda m, x: m.o(
                torch.quantize_per_tensor(x, 0.02, zero_point, torch.quint8).dequantize()
            ),
            o=nn.Linear(8, 3),
        )

    return infer(twins(lambda: run(128), lambda: run(90)), X)


@agrees
def a_model_is_traced_by_torchscript() -> Pair:
    left = mlp().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates TorchScript
        right = torch.jit.trace(left, X)
    return infer((left, right), X)


# ---- other ways to the same results --------------------------------------------------------------------------


def experts(*, softmax_first: bool, scaled: bool = True) -> nn.Module:
    """A mixture of four linear experts, of which the best two are used."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        logits = m.gate(x)
        if softmax_first:
            weights, best = logits.softmax(-1).topk(2)
            weights = weights / weights.sum(-1, keepdim=True) if scaled else weights
        else:
            weights, best = logits.topk(2)
            weights = weights.softmax(-1)
        results = torch.stack([expert(x) for expert in m.experts], 1)
        chosen = results.gather(1, best[..., None].expand(-1, -1, results.shape[-1]))
        return (chosen * weights[..., None]).sum(1)

    parts = nn.ModuleList(nn.Linear(8, 3) for _ in range(4))
    return Of(forward, gate=nn.Linear(8, 4), experts=parts)


@rounds
def weights_of_experts_are_made_before_or_after_the_best_are_picked() -> Pair:
    """What is picked from is far apart, and what comes of it is the same."""
    return infer(
        twins(lambda: experts(softmax_first=True), lambda: experts(softmax_first=False)), X
    )


@diverges(cause="structure", says=("the left run has 2 ops more here: sum, div",))
def weights_of_experts_are_not_scaled_to_one() -> Pair:
    return infer(
        twins(
            lambda: experts(softmax_first=True),
            lambda: experts(softmax_first=True, scaled=False),
        ),
        X,
    )


def recurrence(*, parallel: bool, decay: float = 1.0) -> nn.Module:
    """A gated linear recurrence, step by step or by sums over all steps."""

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        step = nn.functional.softplus(m.step(x))
        if parallel:
            logs = (-step * decay).cumsum(1)
            states = logs.exp() * (x * step * (-logs).exp()).cumsum(1)
            return m.out(states * x.sigmoid())
        state, states = torch.zeros(x.shape[0], 8), []
        for t in range(x.shape[1]):
            state = (-step[:, t] * decay).exp() * state + x[:, t] * step[:, t]
            states.append(state)
        return m.out(torch.stack(states, 1) * x.sigmoid())

    return Of(forward, step=nn.Linear(8, 8), out=nn.Linear(8, 3))


@rounds
def a_recurrence_is_computed_in_parallel() -> Pair:
    return infer(
        twins(lambda: recurrence(parallel=False), lambda: recurrence(parallel=True)), TOKENS
    )


@diverges(cause="structure")
def a_recurrence_in_parallel_forgets_otherwise() -> Pair:
    return infer(
        twins(lambda: recurrence(parallel=False), lambda: recurrence(parallel=True, decay=1.01)),
        TOKENS,
    )


@pytest.mark.parametrize("scenario", BOOK.scenarios, ids=lambda s: s.make.__name__)
def test_place_and_cause(scenario: Scenario, tmp_path: Path):
    check(scenario, tmp_path)
