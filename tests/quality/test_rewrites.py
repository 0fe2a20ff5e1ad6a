"""The same mathematics written otherwise: rounding where nothing is wrong, and the place where something is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from scenarios import Book, Of, Pair, Scenario, check, infer
from torch import Tensor, nn

import opdrift
from opdrift.records import Diagnosis

BOOK = Book()
diverges, rounds = BOOK.diverges, BOOK.rounds

A = torch.randn(64, 512, generator=torch.Generator().manual_seed(4))
B = torch.randn(512, 48, generator=torch.Generator().manual_seed(5))


# ---- one product in parts ------------------------------------------------------------------------------------


def in_parts(parts: int, last: float = 1.0) -> Callable[[], Tensor]:
    """A product outside of modules, summed part by part; the last part times a number."""

    def product() -> Tensor:
        size = A.shape[1] // parts
        total = A[:, :size] @ B[:size]
        for start in range(size, A.shape[1], size):
            part = A[:, start : start + size] @ B[start : start + size]
            if last != 1.0 and start + size == A.shape[1]:
                part = part * last
            total = total + part
        return total.relu()

    return product


@rounds
def a_product_whole_and_in_four_parts() -> Pair:
    return Pair(in_parts(1), in_parts(4))


@rounds
def a_product_in_two_parts_and_in_four() -> Pair:
    return Pair(in_parts(2), in_parts(4))


@diverges(cause="structure")
def a_product_in_two_parts_and_in_four_of_which_one_is_scaled() -> Pair:
    return Pair(in_parts(2), in_parts(4, last=1.01))


# ---- packed weights ------------------------------------------------------------------------------------------

WIDE = torch.randn(3, 7, 1000, generator=torch.Generator().manual_seed(8))


def linear(seed: int, size: int, out: int) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(size, out, bias=False)


GATE, UP, DOWN = linear(1, 1000, 96), linear(2, 1000, 96), linear(3, 96, 32)


def packed(*layers: nn.Linear, scale: float = 1.0) -> nn.Linear:
    """Layers as one, the rows of the last times a number."""
    whole = nn.Linear(
        layers[0].in_features, sum(layer.out_features for layer in layers), bias=False
    )
    with torch.no_grad():
        whole.weight.copy_(torch.cat([*(layer.weight for layer in layers)]))
        whole.weight[-layers[-1].out_features :] *= scale
    return whole


def gated(m: nn.Module, gate: Tensor, up: Tensor) -> Tensor:
    return m.down(nn.functional.silu(gate) * up)


def in_two() -> nn.Module:
    return Of(lambda m, x: gated(m, m.gate(x), m.up(x)), gate=GATE, up=UP, down=DOWN)


def in_one(both: nn.Linear, *, swapped: bool = False) -> nn.Module:
    order = slice(None, None, -1) if swapped else slice(None)
    return Of(lambda m, x: gated(m, *m.both(x).chunk(2, -1)[order]), both=both, down=DOWN)


@rounds
def gate_and_up_are_one_product() -> Pair:
    return infer((in_two(), in_one(packed(GATE, UP))), WIDE)


@diverges(cause="structure", says=("holds gate.weight, up.weight one after another",))
def gate_and_up_are_taken_for_one_another() -> Pair:
    return infer((in_two(), in_one(packed(GATE, UP), swapped=True)), WIDE)


@diverges(cause="weights", says=("holds, one after another, up.weight, gate.weight",))
def gate_and_up_are_packed_in_the_other_order() -> Pair:
    return infer((in_two(), in_one(packed(UP, GATE))), WIDE)


@diverges(cause="weights", module="up", says=("both.weight holds other numbers",))
def up_is_scaled_where_it_is_packed() -> Pair:
    """The first of the two agrees up to rounding; the second is looked at all the same."""
    return infer((in_two(), in_one(packed(GATE, UP, scale=1.01))), WIDE)


# ---- a norm written out, and one folded away -----------------------------------------------------------------

ROWS = torch.randn(4, 32, generator=torch.Generator().manual_seed(9))


def norm() -> nn.LayerNorm:
    torch.manual_seed(4)
    made = nn.LayerNorm(32)
    nn.init.normal_(made.weight)
    return made


def normed(*, eps: float = 1e-5, unbiased: bool = False) -> Pair:
    """A norm in one op against the same in steps."""

    def steps(m: nn.Module, x: Tensor) -> Tensor:
        spread = x.var(-1, keepdim=True, unbiased=unbiased)
        y = (x - x.mean(-1, keepdim=True)) / torch.sqrt(spread + eps)
        return m.out(y * m.norm.weight + m.norm.bias)

    made, out = norm(), linear(5, 32, 8)
    return infer(
        (Of(lambda m, x: m.out(m.norm(x)), norm=made, out=out), Of(steps, norm=made, out=out)), ROWS
    )


@rounds
def a_norm_is_written_out() -> Pair:
    return normed()


@diverges(cause="op-args", says=("eps: 1e-05 against 0.001",))
def a_norm_is_written_out_with_another_eps() -> Pair:
    return normed(eps=1e-3)


@diverges(cause="op-args", says=("divisor of the variance: n against n - 1",))
def a_norm_is_written_out_with_an_unbiased_variance() -> Pair:
    return normed(unbiased=True)


def folded(eps: float) -> Pair:
    """A convolution and its norm, against a convolution that the norm was folded into with an eps."""
    torch.manual_seed(6)
    conv, batch, out = nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8).eval(), nn.Conv2d(8, 4, 1)
    nn.init.normal_(batch.running_mean)
    nn.init.uniform_(batch.running_var, 0.5, 2.0)
    other = nn.BatchNorm2d(8, eps=eps).eval()
    other.load_state_dict(batch.state_dict())
    both = torch.nn.utils.fuse_conv_bn_eval(conv.eval(), other)
    return infer(
        (
            Of(lambda m, x: m.out(m.batch(m.conv(x)).relu()), conv=conv, batch=batch, out=out),
            Of(lambda m, x: m.out(m.conv(x).relu()), conv=both, out=out),
        ),
        torch.randn(2, 3, 8, 8),
    )


@rounds
def a_norm_is_folded_into_a_convolution() -> Pair:
    """The weights differ, and the norm that the other run has makes up for it."""
    return folded(1e-5)


@diverges("conv.weight", cause="weights")
def a_norm_is_folded_into_a_convolution_with_another_eps() -> Pair:
    return folded(0.1)


@diverges("first.weight", cause="weights")
def weights_that_cancel_without_ops_of_one_run_alone_differ() -> Pair:
    """A softmax takes away what is added to all: the results agree, and the weights are others all the same."""

    def model(shift: float) -> nn.Module:
        first = linear(7, 32, 32)
        with torch.no_grad():
            first.weight.zero_()
            first.weight[:, 0] = shift
        return Of(lambda m, x: (m.first(x) + x).softmax(-1), first=first)

    return infer((model(1.0), model(2.0)), ROWS)


# ---- rotary halves -------------------------------------------------------------------------------------------


def rotated(m: nn.Module, x: Tensor, *, interleaved: bool) -> Tensor:
    """Attention of two heads of 16 whose halves, or whose neighbours, are turned."""
    b, t, _ = x.shape
    q, k, v = (layer(x).view(b, t, 2, 16).transpose(1, 2) for layer in (m.q, m.k, m.v))
    angles = torch.arange(float(t))[:, None] * 100.0 ** -(torch.arange(8.0) / 8)
    cos, sin = angles.cos(), angles.sin()

    def turn(y: Tensor) -> Tensor:
        one, two = (y[..., ::2], y[..., 1::2]) if interleaved else y.chunk(2, -1)
        new = one * cos - two * sin, two * cos + one * sin
        return torch.stack(new, -1).flatten(-2) if interleaved else torch.cat(new, -1)

    y = nn.functional.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True)
    return m.out(y.transpose(1, 2).reshape(b, t, 32))


def rotary(*, permuted: bool) -> Pair:
    """Halves on the left; neighbours on the right, with the rows of query and key in their order, or not."""
    layers = {name: linear(seed, 32, 32) for seed, name in enumerate(("q", "k", "v", "out"), 10)}
    others = dict(layers)
    for name in ("q", "k") if permuted else ():
        others[name] = nn.Linear(32, 32, bias=False)
        rows = layers[name].weight.view(2, 2, 8, 32).transpose(1, 2).reshape(32, 32)
        others[name].weight = nn.Parameter(rows.contiguous().detach())
    models = (
        Of(lambda m, x: rotated(m, x, interleaved=False), **layers),
        Of(lambda m, x: rotated(m, x, interleaved=True), **others),
    )
    return infer(models, torch.randn(2, 5, 32))


@rounds
def rotary_neighbours_with_permuted_weights_for_rotary_halves() -> Pair:
    return rotary(permuted=True)


@diverges(cause="structure", says=("split", "slice"))
def rotary_neighbours_with_the_weights_of_rotary_halves() -> Pair:
    return rotary(permuted=False)


# ---- equal numbers in two types --------------------------------------------------------------------------------


class Overflowing(nn.Module):
    """A layer of float16 whose last product passes the largest number, unless its weight is kept in float32."""

    def __init__(self, *, keep: bool) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 64, bias=False), nn.Linear(64, 16, bias=False)
        self.half()
        with torch.no_grad():
            self.inner.weight.mul_(60)
            self.outer.weight.abs_().mul_(400)
        if keep:
            self.outer.float()

    def forward(self, x: Tensor) -> Tensor:
        y = self.outer(self.inner(x).relu().to(self.outer.weight.dtype))
        return (y + x) * 2


def diffed(
    folder: Path, runs: tuple[Callable[[], object], ...], models: object = None
) -> Diagnosis:
    for number, run in enumerate(runs):
        model = models[number] if isinstance(models, tuple) else None
        with torch.no_grad(), opdrift.record(folder / str(number), model=model):
            run()
    return opdrift.diff(folder / "0", folder / "1")


def test_what_is_cast_for_a_weight_of_another_type_is_no_origin_and_no_infinity_amplifies(
    tmp_path: Path,
):
    """The weight's type is the fault; the cast of equal numbers to it follows, and infinities have no size."""
    models = []
    for keep in (True, False):
        torch.manual_seed(14)
        models.append(Overflowing(keep=keep))
    x = torch.full((3, 16), 4.0, dtype=torch.float16)

    found = diffed(tmp_path, tuple(lambda m=m: m(x) for m in models), tuple(models))

    assert found.verdict == "diverged"
    assert [(o.name, o.cause.slug) for o in found.origins] == [("outer.weight", "dtype")]
    assert found.amplifiers == ()


def test_a_cast_of_equal_numbers_is_no_origin_beside_other_weights(tmp_path: Path):
    """The weight has other numbers, in another type: the cast to go with it adds nothing that differs."""
    models = []
    for keep in (True, False):
        torch.manual_seed(14)
        models.append(Overflowing(keep=keep))
    with torch.no_grad():
        models[0].outer.weight.mul_(0.5)
    x = torch.full((3, 16), 1e-2, dtype=torch.float16)

    found = diffed(tmp_path, tuple(lambda m=m: m(x) for m in models), tuple(models))

    assert [(o.name, o.cause.slug) for o in found.origins] == [("outer.weight", "weights")]


SUMMAND = nn.Parameter(torch.randn(64, generator=torch.Generator().manual_seed(7)).half())
HALF = torch.randn(8, 64, generator=torch.Generator().manual_seed(6)).half()


@diverges("aten.add.Tensor", cause="dtype", says=("the left run computes in float16",))
def a_sum_is_cast_on_one_side_and_what_goes_into_it_on_the_other() -> Pair:
    """The casts read different tensors: they are no pair."""
    models = (
        Of(lambda m, x: (x + m.b).float().relu(), b=SUMMAND),
        Of(lambda m, x: (x.float() + m.b).relu(), b=SUMMAND),
    )
    return infer(models, HALF)


@pytest.mark.parametrize("scenario", BOOK.scenarios, ids=lambda s: s.make.__name__)
def test_place_and_cause(scenario: Scenario, tmp_path: Path):
    check(scenario, tmp_path)
