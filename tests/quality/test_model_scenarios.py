"""Models that are written or configured otherwise: small mistakes of ports and refactorings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from scenarios import Book, Of, Pair, Scenario, X, check, infer, mlp, train, twins
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (as everybody calls it)

BOOK = Book()
diverges = BOOK.diverges

Forward = Callable[[nn.Module, Tensor], Tensor]
LABELS = torch.tensor([1, 2, 0, 3])


def written(left: Forward, right: Forward, **more: object) -> Pair:
    """A model with two layers, `a` and `b`, and a norm, written in two ways."""

    def model(forward: Forward) -> nn.Module:
        parts = {"a": nn.Linear(8, 8), "b": nn.Linear(8, 8), "n": nn.LayerNorm(8)}
        return Of(forward, **parts, **more)

    return infer(twins(lambda: model(left), lambda: model(right)), X)


# ---- arguments ---------------------------------------------------------------------------------------------


@diverges("aten._softmax.default", cause="op-args", says=("dim: -1 against 0",))
def softmax_along_the_batch() -> Pair:
    return written(lambda m, x: m.a(x).softmax(-1), lambda m, x: m.a(x).softmax(0))


@diverges("aten.gelu.default", cause="op-args", says=("approximate: none against tanh",))
def gelu_by_tanh() -> Pair:
    return written(lambda m, x: F.gelu(m.a(x)), lambda m, x: F.gelu(m.a(x), approximate="tanh"))


@diverges("aten.nll_loss_forward.default", cause="op-args", says=("reduction: 1 against 2",))
def a_loss_is_summed() -> Pair:
    return written(
        lambda m, x: F.cross_entropy(m.a(x), LABELS),
        lambda m, x: F.cross_entropy(m.a(x), LABELS, reduction="sum"),
    )


@diverges("aten.nll_loss_forward.default", cause="op-args", says=("ignore_index: -100 against 3",))
def a_loss_ignores_a_label() -> Pair:
    return written(
        lambda m, x: F.cross_entropy(m.a(x), LABELS),
        lambda m, x: F.cross_entropy(m.a(x), LABELS, ignore_index=3),
    )


@diverges("aten.std.correction", cause="op-args", says=("correction: 1 against 0",))
def a_deviation_is_biased() -> Pair:
    return written(
        lambda m, x: m.a(x) / m.a(x).std(-1, keepdim=True),
        lambda m, x: m.a(x) / m.a(x).std(-1, keepdim=True, unbiased=False),
    )


@diverges("aten.native_layer_norm.default", cause="op-args", says=("normalized_shape",))
def a_norm_takes_in_the_batch() -> Pair:
    return written(
        lambda m, x: F.layer_norm(m.a(x), (8,)), lambda m, x: F.layer_norm(m.a(x), (4, 8))
    )


@diverges("aten.div.Tensor", cause="op-args", says=("other: 0.7 against 1.0",))
def another_temperature() -> Pair:
    return written(lambda m, x: (m.a(x) / 0.7).softmax(-1), lambda m, x: (m.a(x) / 1.0).softmax(-1))


@diverges("aten.topk.default", cause="op-args", says=("k: 3 against 2",))
def fewer_experts() -> Pair:
    return written(
        lambda m, x: m.a(x).topk(3).values.sum(-1), lambda m, x: m.a(x).topk(2).values.sum(-1)
    )


@diverges("aten.bernoulli_.float", cause="op-args", says=("p: 0.9 against 0.7",))
def dropout_of_another_probability() -> Pair:
    def model(p: float) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.Dropout(p), nn.Linear(8, 1))

    models = twins(lambda: model(0.1), lambda: model(0.3))

    def run(model: nn.Module) -> None:
        torch.manual_seed(0)
        model.train()(X).sum().backward()

    return Pair(lambda: run(models[0]), lambda: run(models[1]), models)


# ---- positions, caches -------------------------------------------------------------------------------------


def rotary(*, base: float = 1e4, start: int = 0, interleaved: bool = False) -> Forward:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        h = m.a(x)
        angles = torch.arange(start, 4 + start)[:, None] * base ** (-torch.arange(4) / 4)
        cos, sin = angles.cos(), angles.sin()
        if interleaved:
            p, q = h[:, 0::2], h[:, 1::2]
            return m.b(torch.stack([p * cos - q * sin, p * sin + q * cos], -1).flatten(1))
        p, q = h[:, :4], h[:, 4:]
        return m.b(torch.cat([p * cos - q * sin, p * sin + q * cos], -1))

    return forward


@diverges("aten.pow.Scalar", cause="op-args", says=("10000.0 against 500000.0",))
def another_rotary_base() -> Pair:
    return written(rotary(), rotary(base=5e5))


@diverges(cause="position-ids", says=("start: 0 against 1",))
def rotary_positions_begin_at_one() -> Pair:
    return written(rotary(), rotary(start=1))


@diverges(cause=("op-args", "structure"))
def rotary_halves_are_interleaved() -> Pair:
    return written(rotary(), rotary(interleaved=True))


@diverges(cause="op-args", says=("start: 0 against 1",))
def a_count_that_is_no_position() -> Pair:
    def forward(start: int) -> Forward:
        return lambda m, x: m.a(x) * torch.arange(start, start + 8).float().sqrt()

    return written(forward(0), forward(1))


@diverges(cause="kv-cache")
def a_cache_is_read_one_step_short() -> Pair:
    class Cached(nn.Module):
        def __init__(self, short: int) -> None:
            super().__init__()
            self.key, self.query, self.short = nn.Linear(8, 8), nn.Linear(8, 8), short

        def forward(self, x: Tensor, cache: Tensor, at: int) -> Tensor:
            cache[at] = self.key(x)
            keys = cache[: max(1, at + 1 - self.short)]
            return (self.query(x) @ keys.t()).softmax(-1) @ keys

    models = twins(lambda: Cached(0), lambda: Cached(1))

    def run(model: nn.Module) -> Tensor:
        cache = torch.zeros(4, 8)
        with torch.no_grad():
            return torch.stack([model(X[t], cache, t) for t in range(4)])

    return Pair(lambda: run(models[0]), lambda: run(models[1]), models)


# ---- precision ---------------------------------------------------------------------------------------------


@diverges("aten.cumsum.default", cause="dtype")
def a_sum_wraps_around_in_eight_bits() -> Pair:
    counts = torch.full((8,), 40, dtype=torch.int8)
    return written(
        lambda m, x: m.a(x) * m.counts.cumsum(0).float(),
        lambda m, x: m.a(x) * m.counts.cumsum(0, dtype=torch.int8).float(),
        counts=counts,
    )


@diverges(cause=("dtype", "nan"))
def a_product_overflows_in_half_precision() -> Pair:
    return written(lambda m, x: m.b(m.a(x) * 3e4), lambda m, x: m.b((m.a(x).half() * 3e4).float()))


@diverges(cause="dtype", says=("bfloat16",))
def a_residual_is_added_in_sixteen_bits() -> Pair:
    return written(lambda m, x: x + m.a(x), lambda m, x: (x.bfloat16() + m.a(x).bfloat16()).float())


@diverges("aten._softmax.default", cause="dtype", says=("bfloat16",))
def a_softmax_runs_in_sixteen_bits() -> Pair:
    return written(
        lambda m, x: m.a(x).softmax(-1), lambda m, x: m.a(x).bfloat16().softmax(-1).float()
    )


# ---- other programs ----------------------------------------------------------------------------------------


@diverges("aten.gelu.default", "aten.relu.default", cause="structure")
def another_activation() -> Pair:
    return written(lambda m, x: m.b(F.gelu(m.a(x))), lambda m, x: m.b(F.relu(m.a(x))))


@diverges(cause="structure", says=("1 op more here: div",))
def scores_are_not_scaled() -> Pair:
    return written(
        lambda m, x: (m.a(x) @ m.b(x).t() / 8**0.5).softmax(-1) @ x,
        lambda m, x: (m.a(x) @ m.b(x).t()).softmax(-1) @ x,
    )


@diverges(cause="structure")
def a_loss_is_smoothed() -> Pair:
    return written(
        lambda m, x: F.cross_entropy(m.a(x), LABELS),
        lambda m, x: F.cross_entropy(m.a(x), LABELS, label_smoothing=0.1),
    )


@diverges("aten.mean.default", "aten.sum.default", cause="structure")
def a_loss_is_averaged_over_padding() -> Pair:
    def loss(m: nn.Module, x: Tensor) -> Tensor:
        return F.cross_entropy(m.a(x), LABELS, reduction="none") * m.kept

    return written(
        lambda m, x: loss(m, x).sum() / m.kept.sum(),
        lambda m, x: loss(m, x).mean(),
        kept=torch.tensor([1.0, 1.0, 1.0, 0.0]),
    )


@diverges(cause="structure")
def the_norm_comes_after_instead_of_before() -> Pair:
    return written(lambda m, x: x + m.a(m.n(x)), lambda m, x: m.n(x + m.a(x)))


@diverges(cause="structure", says=("1 op more here: add",))
def a_residual_is_missing() -> Pair:
    return written(lambda m, x: m.b(x + m.a(x)), lambda m, x: m.b(m.a(x)))


@diverges(cause="structure")
def a_bias_is_missing() -> Pair:
    return written(
        lambda m, x: F.linear(x, m.a.weight, m.a.bias), lambda m, x: F.linear(x, m.a.weight)
    )


@diverges("aten.bmm.default", cause="structure", says=("in another shape",))
def heads_are_split_otherwise() -> Pair:
    def split(count: int) -> Forward:
        def forward(m: nn.Module, x: Tensor) -> Tensor:
            q = m.a(x).view(4, count, 8 // count).transpose(0, 1)
            y = (q @ q.transpose(-1, -2)).softmax(-1) @ q
            return m.b(y.transpose(0, 1).reshape(4, 8))

        return forward

    return written(split(2), split(4))


@diverges(cause="structure")
def a_convolution_reflects_at_its_border() -> Pair:
    def model(mode: str) -> nn.Module:
        return nn.Sequential(nn.Conv1d(2, 4, 3, padding=1, padding_mode=mode))

    return infer(twins(lambda: model("zeros"), lambda: model("reflect")), torch.randn(2, 2, 9))


@diverges("aten.mul_.Tensor", cause="inplace")
def a_view_is_written_and_its_base_is_used() -> Pair:
    def doubled(copies: bool) -> Forward:
        def forward(m: nn.Module, x: Tensor) -> Tensor:
            h = m.a(x)
            part = h[:, :4].clone() if copies else h[:, :4]
            part.mul_(2)
            return m.b(h) + part.sum()

        return forward

    return written(doubled(True), doubled(False))


# ---- training ----------------------------------------------------------------------------------------------


@diverges(cause="structure", module="b")
def a_detach_is_missing() -> Pair:
    def model() -> nn.Module:
        return Of(lambda m, x: m.b(m.a(x)), a=nn.Linear(8, 8), b=nn.Linear(8, 1))

    models = twins(model)

    def run(model: nn.Module, *, detached: bool) -> None:
        h = model.a(X)
        model.b(h.detach() if detached else h).sum().backward()

    return Pair(
        lambda: run(models[0], detached=True), lambda: run(models[1], detached=False), models
    )


@diverges("aten.div.Tensor", cause="structure", says=("1 op more here: div",))
def accumulated_gradients_are_not_averaged() -> Pair:
    models = twins(lambda: mlp(1))

    def run(model: nn.Module, *, averages: bool) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x in X.chunk(2):
            loss = model(x).pow(2).mean()
            (loss / 2 if averages else loss).backward()
        optimizer.step()

    return Pair(
        lambda: run(models[0], averages=True), lambda: run(models[1], averages=False), models
    )


@diverges("x", "input", cause="input")
def batches_come_in_another_order() -> Pair:
    models, batches = twins(lambda: mlp(1)), torch.randn(3, 4, 8)

    def run(model: nn.Module, order: list[int]) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for i in order:
            optimizer.zero_grad()
            model(batches[i]).pow(2).mean().backward()
            optimizer.step()

    return Pair(lambda: run(models[0], [0, 1]), lambda: run(models[1], [1, 0]), models)


@diverges(cause="op-args")
def adam_forgets_faster() -> Pair:
    models = twins(lambda: mlp(1))

    def run(model: nn.Module, beta: float) -> None:
        train(model, torch.optim.Adam(model.parameters(), betas=(0.9, beta)))

    return Pair(lambda: run(models[0], 0.999), lambda: run(models[1], 0.95), models)


def dropping() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 8), nn.Dropout(0.3))


@diverges("aten.bernoulli_.float", cause="rng", module="1", says=("right run has drawn more",))
def a_permutation_is_drawn_before() -> Pair:
    models = twins(dropping)

    def run(model: nn.Module, *, draws: bool) -> None:
        torch.manual_seed(0)
        if draws:
            torch.randperm(5)
        model.train()(X).sum().backward()

    return Pair(lambda: run(models[0], draws=False), lambda: run(models[1], draws=True), models)


@diverges("aten.bernoulli_.float", cause="rng", module="3")
def the_seed_is_set_again_half_way() -> Pair:
    models = twins(dropping)

    def run(model: nn.Module, *, again: bool) -> None:
        torch.manual_seed(0)
        h = model.train()[1](model[0](X))  # type: ignore[index]
        if again:
            torch.manual_seed(0)
        model[3](model[2](h)).sum().backward()  # type: ignore[index]

    return Pair(lambda: run(models[0], again=False), lambda: run(models[1], again=True), models)


@pytest.mark.parametrize("scenario", BOOK.scenarios, ids=lambda s: s.make.__name__)
def test_place_and_cause(scenario: Scenario, tmp_path: Path):
    """The op and what is other about it."""
    check(scenario, tmp_path)
