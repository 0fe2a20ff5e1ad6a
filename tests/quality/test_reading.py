"""Causes that depend on what a value is read as, each beside the nearest case that is something else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import opdrift

Run = Callable[[], Any]


def cause_of(folder: Path, left: Run, right: Run, **options: Any) -> tuple[str, str]:
    """(op or leaf, cause) of the first divergence of two programs."""
    for name, run in (("left", left), ("right", right)):
        with opdrift.record(folder / name, **options), torch.no_grad():
            run()
    first = opdrift.diff(folder / "left", folder / "right").first
    assert first is not None
    return first.name or first.op, first.cause.slug


@pytest.fixture
def qkv() -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, 1, 6, 8) for _ in range(3)]


def test_a_mask_made_in_another_way_is_a_mask(tmp_path: Path, qkv: list[Tensor]) -> None:
    """The runs put a mask together from other ops, and attention reads what comes of it."""
    pad = torch.arange(6) > 3
    _, slug = cause_of(
        tmp_path,
        lambda: F.scaled_dot_product_attention(*qkv, attn_mask=~pad[None, None, None]),
        lambda: F.scaled_dot_product_attention(
            *qkv, attn_mask=pad[None, None, None] | torch.eye(6, dtype=torch.bool)
        ),
    )
    assert slug == "mask"


def test_an_additive_mask_of_another_shape_is_a_mask(tmp_path: Path, qkv: list[Tensor]) -> None:
    """Added to the scores before the softmax, it hides positions."""
    query, key, _ = qkv
    late = torch.arange(6) > 3

    def run(bias: Callable[[], Tensor]) -> Tensor:
        return (query @ key.mT + bias()).softmax(-1)

    _, slug = cause_of(
        tmp_path,
        lambda: run(lambda: torch.zeros(6).masked_fill(late, -1e9)),
        lambda: run(lambda: torch.full((6, 6), -1e9).triu(1)),
    )
    assert slug == "mask"


def test_another_way_to_make_what_attention_reads_as_keys_is_no_mask(
    tmp_path: Path, qkv: list[Tensor]
) -> None:
    """The same ops before an operand that is no mask."""
    query, key, value = qkv
    _, slug = cause_of(
        tmp_path,
        lambda: F.scaled_dot_product_attention(query, key.neg().exp(), value),
        lambda: F.scaled_dot_product_attention(query, key.abs(), value),
    )
    assert slug == "structure"


def decode(cache: Tensor, end: Callable[[int], int]) -> list[Tensor]:
    """Three steps that each write one row of a cache and attend to its first rows."""
    found = []
    for step in range(3):
        row = torch.full((1, 1, 1, 8), float(step + 1)).cos()
        cache[:, :, step : step + 1] = row
        kept = cache[:, :, : end(step)]
        found.append(F.scaled_dot_product_attention(row, kept, kept))
    return found


def test_another_length_of_a_cache_is_kv_cache(tmp_path: Path) -> None:
    """What was written is the same; attention reads one row less from the second step on."""
    torch.manual_seed(0)
    start = torch.randn(1, 1, 4, 8)
    _, slug = cause_of(
        tmp_path,
        lambda: decode(start.clone(), lambda step: step + 1),
        lambda: decode(start.clone(), lambda step: max(step, 1)),
    )
    assert slug == "kv-cache"


def test_another_part_of_a_fresh_tensor_is_op_args(tmp_path: Path, qkv: list[Tensor]) -> None:
    """Nothing was kept from an earlier step: attention is handed another slice."""
    query, key, value = qkv

    def run(end: int) -> Tensor:
        doubled = key * 2
        return F.scaled_dot_product_attention(query, doubled[:, :, :end], value[:, :, :end])

    _, slug = cause_of(tmp_path, lambda: run(6), lambda: run(5))
    assert slug in ("op-args", "structure")


def test_two_seeds_set_while_recording_are_rng(tmp_path: Path) -> None:
    """Dropout is meant to be active: both programs seed it, and not alike."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), torch.randn(4, 8)

    def run(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return model(x)

    found = cause_of(tmp_path, lambda: run(1), lambda: run(2), model=model)
    assert found == ("aten.bernoulli_.float", "rng")


def test_dropout_that_nobody_seeds_is_dropout(tmp_path: Path) -> None:
    """Nothing says that the program meant to draw."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), torch.randn(4, 8)
    found = cause_of(tmp_path, lambda: model(x), lambda: model(x), model=model)
    assert found == ("aten.bernoulli_.float", "dropout")


def test_another_probability_from_the_same_state_is_op_args(tmp_path: Path) -> None:
    """The generators agree; how much is dropped does not."""
    x = torch.ones(64)

    def run(p: float) -> Tensor:
        torch.manual_seed(1)
        return F.dropout(x, p)

    assert cause_of(tmp_path, lambda: run(0.1), lambda: run(0.5)) == (
        "aten.bernoulli_.float",
        "op-args",
    )


class Dequantised(nn.Module):
    def __init__(self, weight: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", scale)
        self.register_buffer("q", (weight / scale).round().clamp(-128, 127).to(torch.int8))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.q.float() * self.scale)


def test_the_same_weights_in_steps_of_another_size_are_quantisation(tmp_path: Path) -> None:
    """One scale for all rows on one side, one a row on the other."""
    torch.manual_seed(0)
    weight, x = torch.randn(16, 24) * torch.logspace(-2, 0, 16)[:, None], torch.randn(3, 24)
    models = [
        Dequantised(weight, weight.abs().amax(1, keepdim=True) / 127),
        Dequantised(weight, weight.abs().max() / 127),
    ]
    for name, model in zip(("left", "right"), models, strict=True):
        with opdrift.record(tmp_path / name, model=model), torch.no_grad():
            model(x)
    first = opdrift.diff(tmp_path / "left", tmp_path / "right").first
    assert first is not None
    assert first.cause.slug == "quantisation"


def test_codes_of_other_weights_are_not_quantisation(tmp_path: Path) -> None:
    """Two models that were quantised alike hold other weights."""
    torch.manual_seed(0)
    x = torch.randn(3, 24)
    for name in ("left", "right"):
        weight = torch.randn(16, 24)
        model = Dequantised(weight, torch.tensor(0.03))
        with opdrift.record(tmp_path / name, model=model), torch.no_grad():
            model(x)
    first = opdrift.diff(tmp_path / "left", tmp_path / "right").first
    assert first is not None
    assert first.name == "q"
    assert first.cause.slug != "quantisation"


class Spoilt(TorchDispatchMode):
    """Makes the fused layer's result a tenth larger; entered around the recorder, which sees what comes out."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if "_transformer_encoder_layer_fwd" in str(func):
            with torch._C._DisableTorchDispatch():
                out.mul_(1.1)
        return out


def test_a_fault_on_a_fused_path_is_the_kernel_at_most_likely(tmp_path: Path) -> None:
    """The runs take two ways, and that alone is no more than rounding: something else may be wrong on one of them."""
    torch.manual_seed(0)
    layer, x = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval(), torch.randn(2, 5, 16)
    with Spoilt(), opdrift.record(tmp_path / "left", model=layer), torch.no_grad():
        layer(x)
    with opdrift.record(tmp_path / "right", model=layer):
        layer(x)

    found = opdrift.diff(tmp_path / "left", tmp_path / "right").first

    assert found is not None
    assert found.material
    assert (found.cause.slug, found.cause.confidence) == ("kernel", "likely")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_padding_that_a_fused_path_leaves_out_is_the_kernel_for_certain(tmp_path: Path) -> None:
    """Packed into a nested tensor, padded positions come back as zeros."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2).eval(), torch.randn(2, 5, 16)
    padding = torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 3:] = True
    with opdrift.record(tmp_path / "left", model=model), torch.no_grad():
        model(x, src_key_padding_mask=padding)
    with opdrift.record(tmp_path / "right", model=model):
        model(x, src_key_padding_mask=padding)

    found = opdrift.diff(tmp_path / "left", tmp_path / "right").first

    assert found is not None
    assert (found.cause.slug, found.cause.confidence) == ("kernel", "certain")
