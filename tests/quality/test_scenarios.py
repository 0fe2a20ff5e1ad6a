"""Runs that differ in ways that happen: the place and the cause are right.

Each scenario returns what the left and the right run do and the models that they do it with. None of the
rules of the diagnosis was made for one of them.
"""

from __future__ import annotations

import copy
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scenarios import (
    Book,
    Of,
    Pair,
    Scenario,
    X,
    attention,
    check,
    infer,
    mlp,
    residual,
    train,
    twins,
)
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

BOOK = Book()
agrees, diverges, rounds = BOOK.agrees, BOOK.diverges, BOOK.rounds


# ---- nothing to report ------------------------------------------------------------------------------------


@agrees
def checkpointing_repeats_ops_in_the_backward() -> Pair:
    models = twins(mlp)

    def run(model: nn.Module, *, again: bool) -> None:
        y = checkpoint(model[0], X, use_reentrant=False) if again else model[0](X)  # type: ignore[index]
        model[2](model[1](y)).sum().backward()  # type: ignore[index]

    return Pair(lambda: run(models[0], again=False), lambda: run(models[1], again=True), models)


@agrees
def a_wrapper_adds_a_level_to_every_path() -> Pair:
    model = mlp().eval()
    return infer((model, Of(lambda m, x: m.module(x), module=model).eval()), X)


@agrees
def one_run_warms_up_first() -> Pair:
    model = mlp().eval()
    kept: dict[str, Tensor] = {}

    def run(*, warm: bool) -> None:
        with torch.no_grad():
            if warm:
                model(torch.zeros(4, 8))
            kept[f"warm {warm}"] = model(X)

    return Pair(lambda: run(warm=False), lambda: run(warm=True), (model, model))


@agrees
def dropout_of_probability_zero_trains_in_one_run() -> Pair:
    left, right = twins(lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.0), nn.Linear(8, 3)))
    right.train()
    return infer((left, right), X)


@agrees
def a_cache_grows_token_by_token() -> Pair:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.key, self.query = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor, cache: Tensor, at: int) -> Tensor:
            cache[at] = self.key(x)
            return (self.query(x) @ cache[: at + 1].t()).softmax(-1) @ cache[: at + 1]

    models = twins(Cached)

    def run(model: nn.Module) -> Tensor:
        cache = torch.empty(4, 8)
        with torch.no_grad():
            return torch.stack([model(X[t], cache, t) for t in range(4)])

    return Pair(lambda: run(models[0]), lambda: run(models[1]), models)


# ---- rounding ----------------------------------------------------------------------------------------------


@rounds
def a_norm_is_written_out() -> Pair:
    def written_out(m: nn.Module, x: Tensor) -> Tensor:
        h = m.a(x)
        mean = h.mean(-1, keepdim=True)
        h = (h - mean) / torch.sqrt(h.var(-1, unbiased=False, keepdim=True) + 1e-5)
        return m.b(h * m.n.weight + m.n.bias)

    def parts() -> dict[str, nn.Module]:
        return {"a": nn.Linear(8, 16), "n": nn.LayerNorm(16), "b": nn.Linear(16, 3)}

    return infer(
        twins(
            lambda: Of(lambda m, x: m.b(m.n(m.a(x))), **parts()), lambda: Of(written_out, **parts())
        ),
        X,
    )


@rounds
def attention_is_written_out_in_bfloat16() -> Pair:
    x = torch.randn(2, 9, 16).bfloat16()
    return infer(
        twins(
            lambda: attention(eager=False, dtype=torch.bfloat16),
            lambda: attention(eager=True, dtype=torch.bfloat16),
        ),
        x,
    )


@rounds
def several_layers_of_attention_are_written_out() -> Pair:
    def stack(eager: bool) -> nn.Module:
        return nn.Sequential(
            *(nn.Sequential(attention(eager=eager), nn.LayerNorm(16)) for _ in range(3))
        )

    return infer(twins(lambda: stack(False), lambda: stack(True)), torch.randn(2, 9, 16))


# ---- weights, buffers, inputs --------------------------------------------------------------------------------


@diverges("head.weight", cause="weights")
def a_head_is_tied_in_one_run_only() -> Pair:
    def model(tied: bool) -> nn.Module:
        m = Of(
            lambda m, ids: m.head(m.mid(m.embed(ids)).tanh()),
            embed=nn.Embedding(20, 8),
            mid=nn.Linear(8, 8),
            head=nn.Linear(8, 20, bias=False),
        )
        if tied:
            m.head.weight = m.embed.weight
        return m

    left, right = twins(lambda: model(True), lambda: model(False))
    with torch.no_grad():
        right.head.weight.copy_(torch.randn(20, 8))
    return infer((left, right), torch.tensor([[1, 2, 3]]))


@diverges("2.weight", cause="weights", module="2")
def a_weight_holds_nan() -> Pair:
    models = twins(mlp)
    with torch.no_grad():
        models[1][2].weight[0, 0] = float("nan")  # type: ignore[index]
    return infer(models, X)


@diverges("0.weight", cause="weights", module="0")
def weights_went_through_bfloat16() -> Pair:
    models = twins(mlp)
    with torch.no_grad():
        for p in models[1].parameters():
            p.copy_(p.bfloat16().float())
    return infer(models, X)


@diverges("0.weight", cause="weights")
def a_loaded_weight_is_initialised_again() -> Pair:
    models = mlp().eval(), mlp().eval()
    state = copy.deepcopy(models[0].state_dict())

    def run(model: nn.Module, *, again: bool) -> Tensor:
        model.load_state_dict(state)
        if again:
            nn.init.xavier_uniform_(model[0].weight)  # type: ignore[index]
        with torch.no_grad():
            return model(X)

    return Pair(lambda: run(models[0], again=False), lambda: run(models[1], again=True), models)


@diverges("blocks.1.weight", cause="weights", module="blocks.1")
def a_weight_differs_in_a_renamed_model() -> Pair:
    def model(name: str) -> nn.Module:
        def forward(m: nn.Module, x: Tensor) -> Tensor:
            for layer in getattr(m, name):
                x = x + layer(x).relu()
            return x

        return Of(forward, **{name: nn.ModuleList(nn.Linear(8, 8) for _ in range(3))})

    left, right = model("blocks").eval(), model("stages").eval()
    right.load_state_dict({k.replace("blocks", "stages"): v for k, v in left.state_dict().items()})
    with torch.no_grad():
        right.stages[1].weight[0, 0] += 0.5
    return infer((left, right), X)


@diverges("1.running_mean", cause="buffer-state", module="1")
def running_statistics_differ() -> Pair:
    models = twins(lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)))
    with torch.no_grad():
        models[1][1].running_mean.add_(0.3)  # type: ignore[index]
    return infer(models, X)


@diverges("input", cause="input", module="0")
def an_input_lost_its_last_digits() -> Pair:
    return infer(twins(mlp), X, right=(X.half().float(),))


@diverges("input", cause="input")
def the_second_batch_of_a_training_run_differs() -> Pair:
    models = twins(lambda: mlp(1))
    batches = torch.randn(3, 4, 8)
    other = batches.clone()
    other[1, 0, 0] += 1

    def run(model: nn.Module, data: Tensor) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x in data:
            optimizer.zero_grad()
            model(x).pow(2).mean().backward()
            optimizer.step()

    return Pair(lambda: run(models[0], batches), lambda: run(models[1], other), models)


@diverges("position_ids", cause="position-ids", module="table")
def positions_start_at_one() -> Pair:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.table = nn.Embedding(20, 8), nn.Embedding(20, 8)

        def forward(self, ids: Tensor, position_ids: Tensor) -> Tensor:
            return self.words(ids) + self.table(position_ids)

    ids, at = torch.tensor([[3, 4, 5]]), torch.tensor([[0, 1, 2]])
    return infer(twins(Positions), ids, at, right=(ids, at + 1))


@diverges(
    "0.qweight",
    "0.weight",
    "aten.addmm.default",
    "aten.mul.Tensor",
    cause="quantisation",
    module="0",
)
def a_layer_is_quantised_to_eight_bits() -> Pair:
    left = mlp().eval()
    scale = left[0].weight.detach().abs().amax(1, keepdim=True) / 127
    quantised = Of(
        lambda m, x: nn.functional.linear(x, m.qweight.float() * m.scale, m.bias),
        qweight=(left[0].weight.detach() / scale).round().to(torch.int8),
        scale=scale,
        bias=left[0].bias,
    )
    return infer((left, nn.Sequential(quantised, *left[1:]).eval()), X)


# ---- training and random numbers -----------------------------------------------------------------------------


@diverges("aten.add_.Tensor", "aten._foreach_add_.List", cause="op-args")
def learning_rates_differ() -> Pair:
    models = twins(lambda: mlp(1))
    return Pair(
        lambda: train(models[0], torch.optim.SGD(models[0].parameters(), lr=0.1)),
        lambda: train(models[1], torch.optim.SGD(models[1].parameters(), lr=0.01)),
        models,
    )


@diverges("aten.mul_.Tensor", "aten._foreach_mul_.Scalar", cause="op-args")
def weight_decays_differ() -> Pair:
    models = twins(lambda: mlp(1))
    return Pair(
        lambda: train(models[0], torch.optim.AdamW(models[0].parameters(), weight_decay=0.01)),
        lambda: train(models[1], torch.optim.AdamW(models[1].parameters(), weight_decay=0.1)),
        models,
    )


@diverges("aten.add_.Tensor", "aten.detach.default", cause="structure")
def gradients_are_never_cleared() -> Pair:
    models = twins(lambda: mlp(1))
    return Pair(
        lambda: train(models[0], torch.optim.SGD(models[0].parameters(), lr=0.1)),
        lambda: train(models[1], torch.optim.SGD(models[1].parameters(), lr=0.1), zero=False),
        models,
    )


@diverges("aten.add_.Tensor", "aten.mul_.Tensor", "aten._foreach_mul_.Tensor", cause="structure")
def gradients_are_clipped_in_one_run() -> Pair:
    models = twins(lambda: mlp(1))

    def run(model: nn.Module, *, clip: bool) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(10 * X).sum().backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return Pair(lambda: run(models[0], clip=False), lambda: run(models[1], clip=True), models)


@diverges("aten.mm.default", cause="structure", module="0")
def a_layer_is_frozen_in_one_run() -> Pair:
    models = twins(lambda: mlp(1))
    models[1][0].weight.requires_grad_(False)  # type: ignore[index]
    return Pair(
        lambda: models[0](X).sum().backward(), lambda: models[1](X).sum().backward(), models
    )


@diverges("aten.bernoulli_.float", cause="dropout", module="1")
def dropout_is_active_in_one_run() -> Pair:
    left, right = twins(lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 3)))
    right.train()
    return infer((left, right), X)


@diverges("aten.bernoulli_.float", cause="rng", module="1")
def training_runs_are_seeded_differently() -> Pair:
    models = twins(lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 1)))

    def run(model: nn.Module, seed: int) -> None:
        torch.manual_seed(seed)
        model.train()(X).sum().backward()

    return Pair(lambda: run(models[0], 1), lambda: run(models[1], 2), models)


@diverges("aten.randn.default", cause="rng")
def inputs_are_drawn_without_a_seed() -> Pair:
    model = mlp().eval()
    run = torch.no_grad()(lambda: model(torch.randn(4, 8)))
    return Pair(run, run, (model, model))


@diverges("aten.random_.default", "aten.randperm.generator", cause="rng")
def a_loader_shuffles_with_another_seed() -> Pair:
    models = twins(lambda: mlp(1))
    rows = TensorDataset(torch.randn(8, 8))

    def run(model: nn.Module, seed: int) -> None:
        torch.manual_seed(seed)
        for (x,) in DataLoader(rows, batch_size=4, shuffle=True):
            model(x).sum().backward()

    return Pair(lambda: run(models[0], 1), lambda: run(models[1], 2), models)


@diverges(
    "aten.native_batch_norm.default",
    "aten._native_batch_norm_legit_no_training.default",
    cause="train-mode",
    module="1",
)
def batch_norm_trains_in_one_run() -> Pair:
    left, right = twins(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()))
    right.train()
    return infer((left, right), torch.randn(4, 3, 8, 8))


# ---- other arguments -------------------------------------------------------------------------------------------


@diverges("aten._softmax.default", cause="op-args")
def softmax_goes_along_another_dim() -> Pair:
    return infer(
        twins(
            lambda: Of(lambda m, x: m.a(x).softmax(-1), a=nn.Linear(8, 8)),
            lambda: Of(lambda m, x: m.a(x).softmax(0), a=nn.Linear(8, 8)),
        ),
        X,
    )


@diverges("aten.gelu.default", cause="op-args", module="1")
def gelu_is_approximated_in_bfloat16() -> Pair:
    models = twins(
        lambda: nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4)).bfloat16(),
        lambda: nn.Sequential(
            nn.Linear(8, 32), nn.GELU(approximate="tanh"), nn.Linear(32, 4)
        ).bfloat16(),
    )
    return infer(models, X.bfloat16())


@diverges("aten.pow.Scalar", cause="op-args")
def rotary_bases_differ() -> Pair:
    def model(base: float) -> nn.Module:
        def forward(m: nn.Module, x: Tensor) -> Tensor:
            angle = torch.arange(4)[:, None] * base ** (-torch.arange(4) / 4)
            return torch.cat([x[:, :4] * angle.cos(), m.a(x)[:, :4] * angle.sin()], -1)

        return Of(forward, a=nn.Linear(8, 8))

    return infer(twins(lambda: model(1e4), lambda: model(5e5)), X)


@diverges("aten._scaled_dot_product_flash_attention_for_cpu.default", cause="mask")
def attention_is_causal_in_one_run() -> Pair:
    return infer(
        twins(lambda: attention(eager=False), lambda: attention(eager=False, is_causal=False)),
        torch.randn(2, 6, 16),
    )


@diverges("aten._scaled_dot_product_flash_attention_for_cpu.default", cause="op-args")
def attention_is_scaled_otherwise() -> Pair:
    return infer(
        twins(lambda: attention(eager=False), lambda: attention(eager=False, scale=0.3)),
        torch.randn(2, 6, 16),
    )


@diverges("aten.triu.default", "aten.masked_fill.Scalar", cause="mask")
def a_mask_lets_one_key_more_through() -> Pair:
    def model(diagonal: int) -> nn.Module:
        def forward(m: nn.Module, x: Tensor) -> Tensor:
            q = m.q(x)
            hidden = torch.ones(4, 4, dtype=torch.bool).triu(diagonal)
            return (q @ q.t()).masked_fill(hidden, float("-inf")).softmax(-1) @ q

        return Of(forward, q=nn.Linear(8, 8))

    return infer(twins(lambda: model(1), lambda: model(2)), X)


@diverges("aten.convolution.default", cause="op-args", module="0")
def a_convolution_is_dilated() -> Pair:
    return infer(
        twins(
            lambda: nn.Sequential(nn.Conv1d(2, 4, 3, padding=1), nn.ReLU()),
            lambda: nn.Sequential(nn.Conv1d(2, 4, 3, padding=2, dilation=2), nn.ReLU()),
        ),
        torch.randn(2, 2, 9),
    )


@diverges("aten.copy_.default", cause="kv-cache")
def a_cache_is_written_one_place_too_early() -> Pair:
    class Cached(nn.Module):
        def __init__(self, late: int) -> None:
            super().__init__()
            self.key, self.late = nn.Linear(8, 8), late

        def forward(self, x: Tensor, cache: Tensor, at: int) -> Tensor:
            place = at - self.late if at == 2 else at
            cache[place : place + 1] = self.key(x)
            return (x @ cache[: at + 1].t()).softmax(-1) @ cache[: at + 1]

    models = twins(lambda: Cached(0), lambda: Cached(1))

    def run(model: nn.Module) -> Tensor:
        cache = torch.zeros(4, 8)
        with torch.no_grad():
            return torch.cat([model(X[t : t + 1], cache, t) for t in range(4)])

    return Pair(lambda: run(models[0]), lambda: run(models[1]), models)


@diverges("aten.mul.Tensor", cause="op-args")
def a_program_without_modules() -> Pair:
    first, second = torch.randn(8, 16), torch.randn(16, 4)
    kept: dict[float, Tensor] = {}

    def run(scale: float) -> None:
        kept[scale] = (nn.functional.gelu(X @ first * scale) @ second).softmax(-1)

    return Pair(lambda: run(0.5), lambda: run(0.25))


# ---- precision and numbers -------------------------------------------------------------------------------------


@diverges("aten._to_copy.default", "aten.addmm.default", cause="dtype", module="0")
def one_run_is_under_autocast() -> Pair:
    model = mlp().eval()

    def right() -> Tensor:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            return model(X)

    return Pair(torch.no_grad()(lambda: model(X)), right, (model, model))


@diverges("aten.log.default", "aten.mul.Tensor", "aten.add.Tensor", cause="nan")
def an_entropy_lacks_its_epsilon() -> Pair:
    def model(epsilon: float) -> nn.Module:
        def forward(m: nn.Module, x: Tensor) -> Tensor:
            p = m.a(x).relu()
            p = p / (p.sum(-1, keepdim=True) + 1e-9)
            return (p * (p + epsilon if epsilon else p).log()).sum(-1)

        return Of(forward, a=nn.Linear(8, 8))

    return infer(twins(lambda: model(1e-8), lambda: model(0.0)), X)


# ---- memory ------------------------------------------------------------------------------------------------------


@diverges("aten.relu_.default", "aten.relu.default", cause="inplace", module="act")
def an_activation_overwrites_what_the_residual_needs() -> Pair:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        h = m.a(x)
        return h + m.act(h)

    return infer(
        twins(
            lambda: Of(forward, a=nn.Linear(8, 8), act=nn.ReLU()),
            lambda: Of(forward, a=nn.Linear(8, 8), act=nn.ReLU(inplace=True)),
        ),
        X,
    )


class Litter(TorchDispatchMode):
    """Fresh memory holds this number. What an allocator hands out may be equal in both runs by chance."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self._number = number

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.empty.memory_format:
            with torch._C._DisableTorchDispatch():
                out.fill_(self._number)
        return out


@diverges("aten.tanh.default", cause="uninitialised")
def half_of_a_tensor_is_never_written() -> Pair:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        out = torch.empty(40, 8)
        out[:, :5] = m.a(x)
        return out.tanh()

    models = twins(lambda: Of(forward, a=nn.Linear(8, 5)))
    x = torch.randn(40, 8)

    return replace(infer(models, x), around=(Litter(1.5), Litter(70.5)))


@diverges("aten.mul_.Tensor", cause="inplace")
def a_result_is_scaled_in_place_after_it_was_returned() -> Pair:
    models = twins(mlp)
    kept: dict[bool, Tensor] = {}

    def run(model: nn.Module, *, scaled: bool) -> None:
        with torch.no_grad():
            kept[scaled] = model(X)
            if scaled:
                kept[scaled].mul_(0.5)

    return Pair(lambda: run(models[0], scaled=False), lambda: run(models[1], scaled=True), models)


@agrees
def both_runs_scale_a_result_in_place() -> Pair:
    models = twins(mlp)
    kept: list[Tensor] = []

    def run(model: nn.Module) -> None:
        with torch.no_grad():
            kept.append(model(X).mul_(0.5))

    return Pair(lambda: run(models[0]), lambda: run(models[1]), models)


@diverges("2.weight", cause="race", module="2")
def numpy_writes_into_a_weight() -> Pair:
    models = twins(mlp)

    def run(model: nn.Module, *, poke: bool) -> Tensor:
        with torch.no_grad():
            h = model[1](model[0](X))  # type: ignore[index]
            if poke:
                weight: np.ndarray = model[2].weight.detach().numpy()  # type: ignore[index]
                weight += 0.5
            return model[2](h)  # type: ignore[index]

    return Pair(
        lambda: run(models[0], poke=False), lambda: run(models[1], poke=True), models, "full"
    )


@diverges("scale", cause="race")
def a_thread_writes_too_late() -> Pair:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(8))

        def forward(self, x: Tensor, late: bool) -> Tensor:
            h = x.sin()
            thread = threading.Thread(target=lambda: self.scale.data.fill_(2.0))
            if not late:
                thread.start()
                thread.join()
            return h * self.scale

    models = twins(Scaled)
    return Pair(
        torch.no_grad()(lambda: models[0](X, False)),
        torch.no_grad()(lambda: models[1](X, True)),
        models,
        "full",
    )


# ---- other programs -----------------------------------------------------------------------------------------------


@diverges("aten.addmm.default", cause="structure", module="layers.0")
def layers_run_in_another_order() -> Pair:
    return infer(twins(lambda: residual([0, 1, 2]), lambda: residual([1, 0, 2])), X)


@diverges("aten.addmm.default", "aten.add.Tensor", cause="structure")
def a_layer_is_left_out() -> Pair:
    return infer(twins(lambda: residual([0, 1, 2]), lambda: residual([0, 2])), X)


@diverges("aten.addmm.default", "aten.add.Tensor", "aten.tanh.default", cause="structure")
def residual_connections_are_missing() -> Pair:
    return infer(twins(lambda: residual([0, 1]), lambda: residual([0, 1], add=False)), X)


@diverges("aten.addmm.default", cause="weights", module="b")
def a_layer_is_given_the_bias_of_another() -> Pair:
    left, right = twins(
        lambda: Of(lambda m, x: m.b(m.a(x).tanh()), a=nn.Linear(8, 8), b=nn.Linear(8, 8))
    )
    right.register_forward_pre_hook(lambda m, _: setattr(m.b, "bias", m.a.bias))
    return infer((left, right), X)


@diverges("aten.add.Tensor", cause="structure")
def a_variable_is_mixed_up() -> Pair:
    def model(bug: bool) -> nn.Module:
        def forward(m: nn.Module, x: Tensor) -> Tensor:
            u = m.a(x).relu()
            v = m.b(u).relu()
            return m.c((v if bug else u) + v)

        return Of(forward, a=nn.Linear(8, 8), b=nn.Linear(8, 8), c=nn.Linear(8, 3))

    return infer(twins(lambda: model(False), lambda: model(True)), X)


@diverges("aten.mm.default", "aten.t.default", cause="structure")
def query_and_key_are_exchanged() -> Pair:
    def model(bug: bool) -> nn.Module:
        def forward(m: nn.Module, x: Tensor) -> Tensor:
            a, b, v = m.qkv(x).chunk(3, -1)
            q, k = (b, a) if bug else (a, b)
            return (q @ k.t()).softmax(-1) @ v

        return Of(forward, qkv=nn.Linear(8, 24))

    return infer(twins(lambda: model(False), lambda: model(True)), X)


@diverges("aten.mm.default", "aten.t.default", cause="structure")
def a_weight_is_not_transposed() -> Pair:
    def model(turned: bool) -> nn.Module:
        return Of(
            lambda m, x: (x @ (m.w.t() if turned else m.w)).tanh(),
            w=nn.Parameter(torch.randn(8, 8)),
        )

    return infer(twins(lambda: model(False), lambda: model(True)), X)


# ---- the test ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scenario", BOOK.scenarios, ids=lambda s: s.make.__name__)
def test_place_and_cause(scenario: Scenario, tmp_path: Path):
    """The verdict, the place and the cause of what happened."""
    check(scenario, tmp_path)
