"""Settings, flags, casts, exceptions and calls that differ."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
from scenarios import (
    Book,
    Of,
    Pair,
    RunError,
    Scenario,
    X,
    check,
    infer,
    mlp,
    residual,
    train,
    twins,
)
from torch import Tensor, nn
from torch.nn import functional

BOOK = Book()
agrees, diverges, rounds = BOOK.agrees, BOOK.diverges, BOOK.rounds

Around = Callable[[], AbstractContextManager[object]]


def around(left: Around, right: Around, model: nn.Module, x: Tensor = X) -> Pair:
    """One model, called inside a context on each side."""
    model = model.eval()

    def run(context: Around) -> Tensor:
        with torch.no_grad(), context():
            return model(x)

    return Pair(lambda: run(left), lambda: run(right), (model, model))


@contextmanager
def setting(set_: Callable[[object], object], value: object, back: object) -> Iterator[None]:
    set_(value)
    try:
        yield
    finally:
        set_(back)


# ---- flags -------------------------------------------------------------------------------------------------


@diverges("aten.mul.Tensor", cause="flags", says=("flush_denormal was changed from False to True",))
def denormals_are_flushed_in_one_run() -> Pair:
    return around(
        nullcontext,
        lambda: setting(torch.set_flush_denormal, True, False),
        Of(lambda m, x: (m.tiny * 0.5).sum() + x * 0, tiny=torch.full((64,), 1e-39)),
    )


@diverges("aten.div.Tensor", cause="flags", says=("default_dtype",))
def the_default_dtype_is_changed() -> Pair:
    return around(
        nullcontext,
        lambda: setting(torch.set_default_dtype, torch.float64, torch.float32),
        Of(lambda m, x: (torch.arange(8) / 7).sin()),
    )


@rounds
def threads_are_changed_in_one_run() -> Pair:
    return around(
        nullcontext,
        lambda: setting(torch.set_num_threads, 2, 1),
        Of(lambda m, x: x.sum()),
        torch.randn(1 << 20),
    )


@diverges("aten.add.Tensor", cause=("uninitialised", "flags"))
def fresh_memory_is_filled_in_one_run() -> Pair:
    return around(
        nullcontext,
        lambda: setting(torch.use_deterministic_algorithms, True, False),
        Of(lambda m, x: torch.empty(64).add(x.sum())),
    )


# ---- precision ---------------------------------------------------------------------------------------------


def autocast(dtype: torch.dtype) -> Around:
    return lambda: torch.autocast("cpu", dtype=dtype)


@diverges(cause="dtype", origins=1)
def autocast_is_on_in_one_run() -> Pair:
    return around(nullcontext, autocast(torch.bfloat16), mlp())


@diverges(
    "aten.addmm.default",
    cause="dtype",
    says=("cast by op", "autocast.cpu changed to True after op 0"),
)
def autocast_is_on_around_modules_that_return_other_types() -> Pair:
    """What they return agrees as bfloat16 rounds, and is of two types: the first of them is the place."""
    blocks = Of(
        lambda m, x: x + m.down(m.up(x)).tanh(),
        up=nn.Sequential(nn.Linear(8, 16), nn.Tanh()),
        down=nn.Linear(16, 8),
    )
    return around(nullcontext, autocast(torch.bfloat16), blocks)


@diverges("aten._to_copy.default", cause="dtype", origins=1)
def autocast_casts_to_other_types() -> Pair:
    return around(autocast(torch.float16), autocast(torch.bfloat16), mlp())


@diverges(cause="autocast-cache", says=("made before weight was written",))
def autocast_spans_a_weight_update() -> Pair:
    models = twins(lambda: nn.Linear(8, 8))

    def in_one(model: nn.Module) -> Tensor:
        with autocast(torch.bfloat16)():
            model(X)
            with torch.no_grad():
                model.weight.mul_(2.0)
            return model(X)

    def in_two(model: nn.Module) -> Tensor:
        with autocast(torch.bfloat16)():
            model(X)
        with torch.no_grad():
            model.weight.mul_(2.0)
        with autocast(torch.bfloat16)():
            return model(X)

    return Pair(lambda: in_two(models[0]), lambda: in_one(models[1]), models)


@agrees
def autocast_spans_two_calls_and_no_update() -> Pair:
    models = twins(lambda: nn.Linear(8, 8))

    def run(model: nn.Module, *, one: bool) -> list[Tensor]:
        found = []
        with autocast(torch.bfloat16)() if one else nullcontext():
            for x in (X, 2 * X):
                with autocast(torch.bfloat16)():
                    found.append(model(x))
        return found

    return Pair(lambda: run(models[0], one=False), lambda: run(models[1], one=True), models)


# ---- arguments ---------------------------------------------------------------------------------------------


def encoder(**options: object) -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, **options)  # type: ignore[arg-type]
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()


TOKENS = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(2))
FUSED = "aten._transformer_encoder_layer_fwd.default"


@diverges(FUSED, cause="op-args", says=("eps: 1e-05 against 0.01",), origins=1)
def epsilon_differs_on_the_fused_path() -> Pair:
    return infer(
        twins(lambda: encoder(layer_norm_eps=1e-5), lambda: encoder(layer_norm_eps=1e-2)), TOKENS
    )


@diverges(FUSED, cause="op-args", says=("eps: 1e-05 against 0.01",))
def epsilon_differs_between_the_fused_path_and_the_slow_one() -> Pair:
    left, right = twins(lambda: encoder(layer_norm_eps=1e-5), lambda: encoder(layer_norm_eps=1e-2))
    return Pair(
        lambda: left(TOKENS).detach(), torch.no_grad()(lambda: right(TOKENS)), (left, right)
    )


@diverges(FUSED, cause="op-args", says=("activation: relu against gelu",))
def the_activation_differs_between_the_slow_path_and_the_fused_one() -> Pair:
    left, right = twins(lambda: encoder(activation="relu"), lambda: encoder(activation="gelu"))
    return Pair(
        lambda: left(TOKENS).detach(), torch.no_grad()(lambda: right(TOKENS)), (left, right)
    )


@diverges("aten.native_layer_norm.default", cause="op-args", origins=1)
def epsilon_differs_in_six_norms() -> Pair:
    def model(eps: float) -> nn.Module:
        return nn.Sequential(
            *(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8, eps=eps)) for _ in range(6))
        )

    return infer(twins(lambda: model(1e-5), lambda: model(1e-3)), X)


@diverges("aten.native_layer_norm.default", cause="op-args", origins=2)
def two_settings_are_two_origins() -> Pair:
    def model(eps: float, dim: int) -> nn.Module:
        return nn.Sequential(
            nn.Linear(8, 8), nn.LayerNorm(8, eps=eps), nn.Linear(8, 8), nn.Softmax(dim)
        )

    return infer(twins(lambda: model(1e-5, -1), lambda: model(1e-3, 0)), X)


@diverges("aten.addcdiv_.default", cause="op-args", origins=1)
def learning_rates_differ_in_three_steps() -> Pair:
    models = twins(lambda: mlp(1))

    def run(model: nn.Module, lr: float) -> None:
        train(model, torch.optim.Adam(model.parameters(), lr=lr), steps=3)

    return Pair(lambda: run(models[0], 0.1), lambda: run(models[1], 0.01), models)


@diverges(cause="structure", origins=1, says=("1 op more here: mul_",))
def biases_decay_in_one_run() -> Pair:
    models = twins(lambda: mlp(1))

    def run(model: nn.Module, decay: float) -> None:
        groups = [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": decay},
        ]
        train(model, torch.optim.AdamW(groups, lr=0.1), steps=1)

    return Pair(lambda: run(models[0], 0.0), lambda: run(models[1], 0.1), models)


@diverges("layers.1.weight", cause="weights", origins=1)
def two_layers_are_not_loaded() -> Pair:
    left, right = twins(lambda: residual([0, 1, 2, 3]))
    for i in (1, 3):
        right.layers[i].reset_parameters()
    return infer((left, right), X)


@diverges("aten.bernoulli_.float", cause="dropout", origins=3)
def three_dropouts_are_three_origins() -> Pair:
    layers = [layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.Dropout(0.3))]
    model = nn.Sequential(*layers)
    run = torch.no_grad()(lambda: model(X))
    return Pair(run, run, (model, model))


# ---- exceptions, calls, kernels that are not seen ------------------------------------------------------------


@diverges(cause="structure", says=("the right run ended with RunError: no such key after op 2",))
def a_run_raises_half_way() -> Pair:
    models = twins(mlp)

    def run(model: nn.Module, *, fails: bool) -> Tensor:
        with torch.no_grad():
            h = model[0](X)  # type: ignore[index]
            if fails:
                raise RunError("no such key")
            return model[2](model[1](h))  # type: ignore[index]

    return Pair(lambda: run(models[0], fails=False), lambda: run(models[1], fails=True), models)


class Causal(nn.Module):
    """Attention over what came before, between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, *, fails: bool = False) -> Tensor:
        x = self.up(x).view(1, 1, -1, 8)
        if fails:
            raise RunError("no such key")
        return self.down(functional.scaled_dot_product_attention(x, x, x, is_causal=True))


@diverges(cause="structure", says=("the right run ended with RunError: no such key after op ",))
def a_run_raises_in_a_call_that_was_made_before() -> Pair:
    """Its result would have been that of the call before; it is missing all the same."""
    models = twins(Causal)

    def run(model: nn.Module, *, fails: bool) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            return model(X), model(X, fails=fails)

    return Pair(lambda: run(models[0], fails=False), lambda: run(models[1], fails=True), models)


def calls(left: list[Tensor], right: list[Tensor], *, keep: bool) -> Pair:
    """A model called several times, whose results are kept or thrown away."""
    model, kept = mlp().eval(), []

    def run(inputs: list[Tensor]) -> None:
        for x in inputs:
            with torch.no_grad():
                y = model(x)
            if keep:
                kept.append(y)

    return Pair(lambda: run(left), lambda: run(right), (model, model))


@agrees
def a_call_before_the_others_is_thrown_away() -> Pair:
    return calls([X], [2 * X, X], keep=False)


@agrees
def a_call_after_the_others_is_thrown_away() -> Pair:
    return calls([X], [X, 2 * X], keep=False)


@agrees
def a_call_between_the_others_is_thrown_away() -> Pair:
    return calls([X, 3 * X], [X, 2 * X, 3 * X], keep=False)


@diverges(cause="structure")
def a_kept_result_is_missing_at_the_end() -> Pair:
    return calls([X, 2 * X], [X], keep=True)


@diverges(cause="structure")
def a_kept_result_is_missing_at_the_start() -> Pair:
    return calls([2 * X, X], [X], keep=True)


@diverges("aten.tanh.default", cause="kernel", says=("bypasses the dispatcher", "one hop"))
def a_kernel_that_is_not_seen_computes_otherwise() -> Pair:
    model, kept = nn.Linear(8, 8).eval(), []

    def extension(x: Tensor, epsilon: float) -> Tensor:
        out, made = torch.empty(4, 8), x.numpy() * 2 + epsilon
        ctypes.memmove(out.data_ptr(), made.ctypes.data, made.nbytes)
        return out

    def run(epsilon: float) -> None:
        with torch.no_grad():
            kept.append(extension(model(X), epsilon).view(8, 4).tanh().sum(1))

    return Pair(lambda: run(0.0), lambda: run(1e-3), (model, model))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("scenario", BOOK.scenarios, ids=lambda s: s.make.__name__)
def test_place_and_cause(scenario: Scenario, tmp_path: Path):
    """The setting is named, where it differs, and once."""
    check(scenario, tmp_path)
