"""The gradients of recurrent layers stay inside their bound, and faults are outside."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import opdrift
from opdrift.bounds import OpViews, explained

OP = "aten.mkldnn_rnn_layer_backward.default"


def gradients(model: nn.LSTM, x: Tensor, upstream: Tensor) -> list[Tensor]:
    """Those of the input and of the weights, in the order in which the op returns them."""
    x = x.detach().requires_grad_()
    model.zero_grad()
    model(x)[0].backward(upstream)
    parameters = dict(model.named_parameters())
    names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
    found = [x.grad, *(parameters[name].grad for name in names)]
    return [each for each in found if each is not None]


@pytest.mark.parametrize(("hidden", "steps", "scale"), list(product((5, 64), (3, 40), (0.3, 3.0))))
def test_single_precision_is_as_far_from_double_as_the_bound_allows(
    tmp_path: Path, hidden: int, steps: int, scale: float
):
    """With small and large weights, short and long; and a gradient of another sign is further off."""
    torch.manual_seed(hidden + steps)
    model = nn.LSTM(16, hidden)
    for weight in model.parameters():
        weight.data.mul_(scale)
    x, upstream = torch.randn(steps, 2, 16), torch.randn(steps, 2, hidden)
    with opdrift.record(tmp_path / "trace", model=model):
        single = gradients(model, x, upstream)
    double = gradients(model.double(), x.double(), upstream.double())
    trace = opdrift.load(tmp_path / "trace")
    op = next(i for i in range(len(trace.ops)) if trace.op(i).name == OP)

    limits = [explained(OpViews(trace)[op], output).tight for output in range(len(single))]

    apart = [float((a.double() - b).norm() / b.norm()) for a, b in zip(single, double, strict=True)]
    assert all(gap <= limit for gap, limit in zip(apart, limits, strict=True))
    assert max(limits) < 1e-4
