"""Whole models: one sample is changed, and where the batch was followed to, nothing else may move."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from following import Count, count
from torch import Tensor, nn
from torch.nn import functional

Case = tuple[Callable[..., object], dict[str, Tensor], dict[str, int], int]
"""A run, its inputs, where the batch lies in them, and its size."""


@pytest.fixture(autouse=True)
def _no_gradients():
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def ids(*shape: int) -> Tensor:
    return torch.randint(5, 40, shape)


def all_followed(found: Count, *, mixed: int = 0) -> None:
    """Every result followed, but for so many that mix samples."""
    assert found.wrong == []
    assert (found.unknown, found.unsure, found.mixed) == (0, 0, mixed)
    assert found.followed == found.outputs - mixed > 0


# ---- models written here ---------------------------------------------------------------------------------


class Rotary(nn.Module):
    """Causal attention with rotary positions, grouped key heads and a cache."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, width // 2, bias=False) for _ in range(2))

    def forward(self, x: Tensor, cache: list[Tensor]) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, x.shape[-1] // self.heads)).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        start = cache[0].shape[2] if cache else 0
        angle = torch.arange(start, start + x.shape[1])[:, None] * 0.1 ** torch.arange(2)
        q, k = (_turned(each, angle.cos(), angle.sin()) for each in (q, k))
        if cache:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        cache[:] = [k, v]
        y = functional.scaled_dot_product_attention(
            q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), is_causal=start == 0
        )
        return self.out(y.transpose(1, 2).reshape(x.shape))


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Llama(nn.Module):
    """A decoder as LLaMA's: RMS norms, rotary attention, gated feed-forward."""

    def __init__(self, width: int = 16, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.attention = nn.ModuleList(Rotary(width) for _ in range(layers))
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2 * layers))
        self.gate, self.up = nn.Linear(width, 24, bias=False), nn.Linear(width, 24, bias=False)
        self.down = nn.Linear(24, width, bias=False)

    def forward(self, tokens: Tensor, caches: list[list[Tensor]] | None = None) -> Tensor:
        x = self.embed(tokens)
        for i, attention in enumerate(self.attention):
            x = x + attention(self.norms[2 * i](x), caches[i] if caches is not None else [])
            y = self.norms[2 * i + 1](x)
            x = x + self.down(functional.silu(self.gate(y)) * self.up(y))
        return x @ self.embed.weight.T

    def generate(self, tokens: Tensor, steps: int = 3) -> Tensor:
        caches: list[list[Tensor]] = [[] for _ in self.attention]
        for _ in range(steps):
            logits = self(tokens, caches)
            tokens = logits[:, -1:].argmax(-1)
        return tokens


class Bert(nn.Module):
    """An encoder as BERT's, with attention written out and a mask of the padding."""

    def __init__(self, width: int = 16, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.words, self.places = nn.Embedding(50, width), nn.Embedding(20, width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.pool = nn.Linear(width, width)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        batch, length = tokens.shape
        x = self.norm(self.words(tokens) + self.places(torch.arange(length)[None]))
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        scores = scores + (1.0 - mask[:, None, None].float()) * torch.finfo(torch.float32).min
        y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(x.shape)
        return torch.tanh(self.pool(self.norm(x + self.out(y))[:, 0]))


class Convolutions(nn.Module):
    """A picture classifier with batch norm, grouped and strided convolutions, pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, stride=2, groups=4)
        self.last = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.max_pool2d(functional.relu(self.norm(self.first(x))), 2)
        return self.last(functional.adaptive_avg_pool2d(self.second(x), 1).flatten(1))


def mlp() -> Case:
    model = nn.Sequential(
        nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4), nn.Softmax(-1)
    )
    return model.eval().forward, {"input": torch.randn(4, 6)}, {"input": 0}, 4


def mlp_as_wide_as_the_batch() -> Case:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    return model.forward, {"input": torch.randn(4, 4)}, {"input": 0}, 4


def convolutions() -> Case:
    return Convolutions().eval().forward, {"x": torch.randn(3, 3, 12, 12)}, {"x": 0}, 3


def convolutions_of_as_many_channels() -> Case:
    model = nn.Sequential(nn.Conv1d(4, 4, 3), nn.InstanceNorm1d(4), nn.ConvTranspose1d(4, 4, 3))
    return model.forward, {"input": torch.randn(4, 4, 8)}, {"input": 0}, 4


def lstm() -> Case:
    model = nn.LSTM(6, 5, 2, batch_first=True, bidirectional=True)
    return (lambda input: model(input)), {"input": torch.randn(3, 7, 6)}, {"input": 0}, 3


def gru_step_by_step() -> Case:
    model = nn.GRUCell(6, 5)

    def run(input: Tensor) -> Tensor:
        state = torch.zeros(3, 5)
        for step in input:
            state = model(step, state)
        return state

    return run, {"input": torch.randn(4, 3, 6)}, {"input": 1}, 3


def attention_of_length_batch_width() -> Case:
    model = nn.MultiheadAttention(8, 2).eval()
    return (lambda x: model(x, x, x)), {"x": torch.randn(5, 3, 8)}, {"x": 1}, 3


def fused_encoder() -> Case:
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    return model.forward, {"src": torch.randn(3, 5, 8)}, {"src": 0}, 3


def encoder_and_decoder() -> Case:
    model = nn.Transformer(8, 2, 1, 1, 12, batch_first=True).eval()
    inputs = {"src": torch.randn(3, 5, 8), "tgt": torch.randn(3, 4, 8)}
    return model.forward, inputs, {"src": 0, "tgt": 0}, 3


def llama() -> Case:
    return Llama().forward, {"tokens": ids(3, 6)}, {"tokens": 0}, 3


def llama_with_batch_length_and_heads_of_one_size() -> Case:
    return Llama().forward, {"tokens": ids(4, 4)}, {"tokens": 0}, 4


def llama_with_a_cache() -> Case:
    return Llama().generate, {"tokens": ids(3, 6)}, {"tokens": 0}, 3


def bert() -> Case:
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2, [1] * 2 + [0] * 4])
    return Bert().forward, {"tokens": ids(3, 6), "mask": mask}, {"tokens": 0}, 3


WRITTEN_HERE = [
    mlp,
    mlp_as_wide_as_the_batch,
    convolutions,
    convolutions_of_as_many_channels,
    lstm,
    gru_step_by_step,
    attention_of_length_batch_width,
    fused_encoder,
    encoder_and_decoder,
    llama,
    llama_with_batch_length_and_heads_of_one_size,
    llama_with_a_cache,
    bert,
]  # fmt: skip


@pytest.mark.parametrize("case", WRITTEN_HERE, ids=lambda case: case.__name__)
def test_every_result_of_a_model_is_followed(case: Callable[[], Case]):
    all_followed(count(*case()))


@pytest.mark.parametrize("case", WRITTEN_HERE, ids=lambda case: case.__name__)
def test_inference_mode_shows_composite_ops_whole_and_they_are_followed_too(
    case: Callable[[], Case],
):
    with torch.inference_mode():
        all_followed(count(*case()))


def test_batch_statistics_are_mixed_from_the_norm_on():
    model = Convolutions().train()
    first = model.first

    def run(x: Tensor) -> None:
        model.norm.num_batches_tracked = None
        torch.relu(model.norm(torch.relu(first(x))))

    found = count(run, {"x": torch.randn(3, 3, 8, 8)}, {"x": 0}, 3)

    assert found.wrong == []
    # followed: the convolution, its relu; mixed: the norm with both of its statistics, a relu
    assert (found.followed, found.mixed, found.unknown) == (2, 4, 0)


@pytest.mark.parametrize(
    "case", WRITTEN_HERE[:-2] + WRITTEN_HERE[-1:], ids=lambda case: case.__name__
)
def test_gradients_of_activations_are_followed_and_those_of_weights_are_mixed(
    case: Callable[[], Case],
):
    model, inputs, dims, size = case()

    def run(**given: Tensor) -> None:
        with torch.enable_grad():
            for tensor in given.values():
                tensor.requires_grad_(tensor.is_floating_point())
            out = model(**given)
            while not isinstance(out, Tensor):
                out = out[0]
            out.square().sum().backward()

    found = count(run, inputs, dims, size)

    assert found.wrong == []
    assert found.followed > 0
    if case is not lstm:  # its backward reads memory whose layout is the library's own
        assert (found.unknown, found.unsure) == (0, 0)
        assert found.followed > found.mixed > 0


# ---- other people's models ---------------------------------------------------------------------------------

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 99,
}


@pytest.fixture
def made():
    """A small model of transformers, drawn at random."""
    transformers = pytest.importorskip("transformers")

    def make(name: str, attention: str = "sdpa", **sizes: object) -> nn.Module:
        config = transformers.AutoConfig.for_model(name, **{**SIZES, **sizes})
        config._attn_implementation = attention
        return transformers.AutoModel.from_config(config).eval()

    return make


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama"])
def test_transformers_are_followed(made: Callable[..., nn.Module], name: str, attention: str):
    """What is left mixes the samples: has any of them padding?"""
    model = made(name, attention, **({"num_key_value_heads": 2} if name == "llama" else {}))
    mask = torch.tensor([[1] * 7, [1] * 5 + [0] * 2, [1] * 7])
    inputs = {"input_ids": ids(3, 7), "attention_mask": mask}

    found = count(model.forward, inputs, {"input_ids": 0}, 3)

    assert found.wrong == []
    assert (found.unknown, found.unsure) == (0, 0)
    assert found.mixed <= 4
    assert found.followed > 50


@pytest.mark.slow
def test_esm_lays_the_batch_second_and_is_followed():
    esm = pytest.importorskip("esm")
    model = esm.ESM2(num_layers=2, embed_dim=32, attention_heads=4).eval()
    tokens = torch.randint(4, 20, (3, 9))

    def run(tokens: Tensor) -> object:
        return model(tokens, repr_layers=[2], return_contacts=True)

    all_followed(count(run, {"tokens": tokens}, {"tokens": 0}, 3), mixed=1)  # is any token padding?
