"""Layers that are left out, that train, or that are quantised or traced."""

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
agrees, diverges = BOOK.agrees, BOOK.diverges

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


@pytest.mark.parametrize("scenario", BOOK.scenarios, ids=lambda s: s.make.__name__)
def test_place_and_cause(scenario: Scenario, tmp_path: Path):
    check(scenario, tmp_path)
