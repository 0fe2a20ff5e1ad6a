"""A sample alone and in a padded batch, in models of transformers and fused layers of torch.

Libraries drop masks that hide nothing, pick other kernels for them, and unpack nested tensors: alone a model runs other ops
than in a batch although nothing is wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import opdrift

transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # the libraries' own
    pytest.mark.slow,
]

LENGTHS = (9, 5, 7)
SAMPLE = 1
SDPA = "aten._scaled_dot_product_flash_attention_for_cpu.default"
SMALL: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}


@dataclass(frozen=True)
class Runs:
    """A model, and how it is called for the sample alone and for the batch; `found` is empty for a sound one."""

    model: nn.Module
    alone: Callable[[], object]
    together: Callable[[], object]
    found: tuple[str, str, str] | None = None
    side: Literal["left", "right"] = "right"
    lengths: tuple[int, ...] | None = LENGTHS


def ids(side: str) -> tuple[Tensor, Tensor, Tensor]:
    """The sample's tokens, those of the padded batch, and its mask."""
    generator = torch.Generator().manual_seed(3)
    each = [torch.randint(3, 30, (n,), generator=generator) for n in LENGTHS]
    padded = torch.zeros(3, max(LENGTHS), dtype=torch.long)
    for row, tokens in zip(padded, each, strict=True):
        start = len(row) - len(tokens) if side == "left" else 0
        row[start : start + len(tokens)] = tokens
    return each[SAMPLE][None], padded, (padded != 0).long()


def bert(attention: str) -> nn.Module:
    model: nn.Module = transformers.BertModel(transformers.BertConfig(**SMALL)).eval()
    model.set_attn_implementation(attention)  # type: ignore[operator]
    return model


def gpt2(attention: str) -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=50,
        n_positions=32,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    model: nn.Module = transformers.GPT2LMHeadModel(config).eval()
    model.set_attn_implementation(attention)  # type: ignore[operator]
    return model


def llama(attention: str) -> nn.Module:
    config = transformers.LlamaConfig(
        **SMALL, num_key_value_heads=2, max_position_embeddings=64, attn_implementation=attention
    )
    model: nn.Module = transformers.LlamaForCausalLM(config).eval()
    return model


def wav2vec(norm: str) -> nn.Module:
    small = {**SMALL, "num_attention_heads": 2}
    config = transformers.Wav2Vec2Config(
        **small,
        conv_dim=(16, 16),
        conv_stride=(5, 2),
        conv_kernel=(10, 3),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
        feat_extract_norm=norm,
        do_stable_layer_norm=norm == "layer",
        apply_spec_augment=False,
    )
    model: nn.Module = transformers.Wav2Vec2Model(config).eval()
    return model


def masked(model: nn.Module, side: Literal["left", "right"], **found: Any) -> Runs:
    """Called with the mask of its padding."""
    one, many, mask = ids(side)
    return Runs(
        model,
        lambda: model(one, attention_mask=torch.ones_like(one)),
        lambda: model(many, attention_mask=mask),
        side=side,
        **found,
    )


def unmasked(model: nn.Module, side: Literal["left", "right"], **found: Any) -> Runs:
    """Called without one."""
    one, many, _ = ids(side)
    return Runs(model, lambda: model(one), lambda: model(many), side=side, **found)


def placed(model: nn.Module, *, mask: bool, found: tuple[str, str, str] | None = None) -> Runs:
    """Padded on the left, with positions from the mask; the mask itself may be all ones."""
    one, many, given = ids("left")
    positions = (given.cumsum(1) - 1).clamp(min=0)
    seen = given if mask else torch.ones_like(given)
    return Runs(
        model,
        lambda: model(one, attention_mask=torch.ones_like(one), position_ids=positions[1:2, -5:]),
        lambda: model(many, attention_mask=seen, position_ids=positions),
        found,
        "left",
    )


WAVES = (400, 260, 333)


def heard(model: nn.Module, *, mask: bool, found: tuple[str, str, str] | None = None) -> Runs:
    """Waveforms padded with zeros."""
    torch.manual_seed(4)
    waves = torch.randn(3, 400) * (torch.arange(400) < torch.tensor(WAVES)[:, None])
    given = (torch.arange(400) < torch.tensor(WAVES)[:, None]).long() if mask else None
    return Runs(
        model,
        lambda: model(waves[1:2, :260]),
        lambda: model(waves, attention_mask=given),
        found,
        lengths=WAVES,
    )


def encoded(
    *, nested: bool, hidden: str = "padding", found: tuple[str, str, str] | None = None
) -> Runs:
    """nn.TransformerEncoder on its fast path: one fused op a layer."""
    torch.manual_seed(4)
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested).eval()
    valid = torch.arange(9) < torch.tensor(LENGTHS)[:, None]
    x = torch.randn(3, 9, 32) * valid[..., None]
    mask = {"padding": ~valid, "valid": valid, "nothing": None}[hidden]
    return Runs(
        model,
        lambda: model(x[1:2, :5]),
        lambda: model(x, src_key_padding_mask=mask),
        found,
    )


ATTENTION = "encoder.layer.0.attention.self"
FUSED = "aten._transformer_encoder_layer_fwd.default"
CASES: dict[str, Callable[[], Runs]] = {
    "bert, sdpa": lambda: masked(bert("sdpa"), "right"),
    "bert, eager": lambda: masked(bert("eager"), "right"),
    "bert, sdpa, no mask": lambda: unmasked(bert("sdpa"), "right", found=(SDPA, ATTENTION, "mask")),
    "bert, eager, no mask": lambda: unmasked(
        bert("eager"), "right", found=("aten._softmax.default", ATTENTION, "mask")
    ),
    "gpt2, right": lambda: masked(gpt2("sdpa"), "right"),
    "gpt2, left, positions from the mask": lambda: placed(gpt2("sdpa"), mask=True),
    "gpt2, left, eager, positions from the mask": lambda: placed(gpt2("eager"), mask=True),
    "gpt2, left, positions of the padded length": lambda: masked(
        gpt2("sdpa"), "left", found=("aten.embedding.default", "transformer.wpe", "position-ids")
    ),
    "gpt2, left, mask of ones": lambda: placed(
        gpt2("sdpa"), mask=False, found=(SDPA, "transformer.h.0.attn", "mask")
    ),
    "llama, left: only distances of positions count": lambda: masked(llama("sdpa"), "left"),
    "llama, left, eager": lambda: masked(llama("eager"), "left"),
    "llama, right": lambda: masked(llama("sdpa"), "right"),
    "llama, left, eager, no mask": lambda: unmasked(
        llama("eager"), "left", found=("aten._softmax.default", "model.layers.0.self_attn", "mask")
    ),
    "llama, left, no mask": lambda: unmasked(
        llama("sdpa"), "left", found=(SDPA, "model.layers.0.self_attn", "mask")
    ),
    "wav2vec 2, layer norm": lambda: heard(wav2vec("layer"), mask=True),
    "wav2vec 2, group norm over time": lambda: heard(
        wav2vec("group"),
        mask=True,
        found=(
            "aten.native_group_norm.default",
            "feature_extractor.conv_layers.0.layer_norm",
            "padding",
        ),
    ),
    "wav2vec 2, positions by convolution over padding": lambda: heard(
        wav2vec("layer"),
        mask=False,
        found=("aten.convolution.default", "encoder.pos_conv_embed.conv", "padding"),
    ),
    "encoder": lambda: encoded(nested=False),
    "encoder, nested": lambda: encoded(nested=True),
    "encoder, no mask": lambda: encoded(
        nested=True, hidden="nothing", found=(FUSED, "layers.0", "mask")
    ),
    "encoder, mask inverted": lambda: encoded(
        nested=False, hidden="valid", found=(FUSED, "layers.0", "mask")
    ),
    "encoder, nested, mask inverted": lambda: encoded(
        nested=True, hidden="valid", found=(FUSED, "layers.0", "mask")
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_sample_of_a_library_model(name: str, tmp_path: Path):
    torch.manual_seed(0)
    runs = CASES[name]()
    own = None if runs.lengths is None else [runs.lengths[SAMPLE]]
    with (
        torch.no_grad(),
        opdrift.record(
            tmp_path / "many.trace",
            model=runs.model,
            batch=opdrift.Batch(3, runs.lengths, runs.side),
        ),
    ):
        runs.together()
    with (
        torch.no_grad(),
        opdrift.record(
            tmp_path / "one.trace", model=runs.model, batch=opdrift.Batch(1, own, runs.side)
        ),
    ):
        runs.alone()

    found = opdrift.diff(tmp_path / "one.trace", tmp_path / "many.trace", samples=(0, SAMPLE))

    if runs.found is None:
        assert found.verdict in ("identical", "rounding"), found.first
        return
    assert found.verdict == "diverged"
    assert found.first is not None
    assert (found.first.op, found.first.module, found.first.cause.slug) == runs.found
