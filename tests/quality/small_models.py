"""Six small models, and a short run of each: what faults are planted into.

Each workload is built anew from a fixed seed, so that every run of it is the same run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # torch's own convention

#: Seeds the weights, and then the run: two runs of one workload draw the same numbers.
_WEIGHTS, _RUN = 5, 11


@dataclass(frozen=True)
class Workload:
    """A model, and what is done with it.

    Attributes:
        model: What is recorded.
        run: Runs it, and returns its results.
    """

    model: nn.Module
    run: Callable[[], Sequence[Tensor]]

    def results(self, returned: Sequence[Tensor]) -> list[Tensor]:
        """All that a run leaves behind: what it returned, gradients, parameters and buffers."""
        left = [*self.model.parameters(), *self.model.buffers()]
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        return [each.detach() for each in (*returned, *grads, *left)]


def _seeded(run: Callable[[], Sequence[Tensor]]) -> Callable[[], Sequence[Tensor]]:
    def seeded() -> Sequence[Tensor]:
        torch.manual_seed(_RUN)
        return run()

    return seeded


# ---- encoder -----------------------------------------------------------------------------------------------


class Encoder(nn.Module):
    """`nn.TransformerEncoderLayer` with a padding mask, dropout and learned positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(13, 8), nn.Embedding(6, 8)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 12, dropout=0.2, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(8, 13)

    def forward(self, ids: Tensor) -> Tensor:
        padding = ids.eq(0)
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=padding)
        return self.head(x)


def encoder() -> Workload:
    """A training step of an encoder."""
    torch.manual_seed(_WEIGHTS)
    model = Encoder().train()
    ids = torch.tensor([[3, 7, 1, 9, 4], [5, 2, 8, 0, 0]])
    step = torch.optim.SGD(model.parameters(), lr=0.1)

    def run() -> Sequence[Tensor]:
        logits = model(ids)
        loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten(), ignore_index=0)
        loss.backward()
        step.step()
        return [logits, loss]

    return Workload(model, _seeded(run))


# ---- decoder -----------------------------------------------------------------------------------------------


class RMSNorm(nn.Module):
    """As LLaMA writes it out."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))


class DecoderLayer(nn.Module):
    """Grouped-query attention over a cache, and a gated feed-forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(8), RMSNorm(8)
        self.q, self.o = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.k, self.v = nn.Linear(8, 4, bias=False), nn.Linear(8, 4, bias=False)
        self.gate, self.up = nn.Linear(8, 12, bias=False), nn.Linear(8, 12, bias=False)
        self.down = nn.Linear(12, 8, bias=False)

    def forward(self, x: Tensor, at: int, angles: tuple[Tensor, Tensor], cache: Tensor) -> Tensor:
        h, end = self.norm1(x), at + x.shape[1]
        q = rotated(self.q(h).unflatten(-1, (2, 4)).transpose(1, 2), angles)
        k = rotated(self.k(h).unflatten(-1, (1, 4)).transpose(1, 2), angles)
        cache[0, :, :, at:end] = k
        cache[1, :, :, at:end] = self.v(h).unflatten(-1, (1, 4)).transpose(1, 2)
        k, v = cache[:, :, :, :end].repeat_interleave(2, 2)
        seen = torch.arange(end) <= torch.arange(at, end)[:, None]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def rotated(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding."""
    cos, sin = angles
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class Decoder(nn.Module):
    """Two layers, rotary positions, a cache for keys and values."""

    inv_freq: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 8)
        self.layers = nn.ModuleList(DecoderLayer() for _ in range(2))
        self.norm, self.head = RMSNorm(8), nn.Linear(8, 13, bias=False)
        self.register_buffer("inv_freq", 100.0 ** (-torch.arange(0, 4, 2) / 4), persistent=False)

    def forward(self, ids: Tensor, at: int, caches: Sequence[Tensor]) -> Tensor:
        x = self.embed(ids)
        turn = torch.arange(at, at + ids.shape[1])[:, None] * self.inv_freq
        turn = torch.cat([turn, turn], -1)
        angles = turn.cos(), turn.sin()
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, at, angles, cache)
        return self.head(self.norm(x))


def decoder() -> Workload:
    """Prefill and two decoded tokens, sampled."""
    torch.manual_seed(_WEIGHTS)
    model = Decoder().eval()
    prompt = torch.tensor([[3, 7, 1], [5, 2, 8]])

    def run() -> Sequence[Tensor]:
        returned, ids, at = [], prompt, 0
        with torch.no_grad():
            caches = [torch.zeros(2, 2, 1, 5, 4) for _ in range(2)]
            for _ in range(3):
                logits = model(ids, at, caches)
                at += ids.shape[1]
                ids = torch.multinomial((logits[:, -1] / 0.7).softmax(-1), 1)
                returned += [logits, ids]
        return returned

    return Workload(model, _seeded(run))


# ---- conv net ----------------------------------------------------------------------------------------------


class ConvNet(nn.Module):
    """Convolutions, batch norm that trains, pooling, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            # no bias: before a norm over the batch its gradient is nothing but rounding, so no fault in it can be told
            nn.Conv2d(3, 4, 3, padding=1, bias=False),
            nn.BatchNorm2d(4),
            nn.GELU(),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 4, 3, groups=2, bias=False),
            nn.BatchNorm2d(4),
            nn.LeakyReLU(0.1),
            nn.Dropout(0.3),
        )
        self.skip, self.head = nn.Conv2d(3, 4, 3, stride=2), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x) + F.interpolate(self.skip(x), size=(2, 2))
        return self.head(h.mean((2, 3)))


def conv() -> Workload:
    """A training step of a conv net."""
    torch.manual_seed(_WEIGHTS)
    model = ConvNet().train()
    x, y = torch.randn(3, 3, 8, 8), torch.randn(3, 5)
    step = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def run() -> Sequence[Tensor]:
        found = model(x)
        loss = F.mse_loss(found, y)
        loss.backward()
        step.step()
        return [found, loss, *(state["momentum_buffer"] for state in step.state.values())]

    return Workload(model, _seeded(run))


# ---- protein encoder ---------------------------------------------------------------------------------------


class ProteinLayer(nn.Module):
    """As in ESM-2: length x batch x width, attention written out, norms before."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(8), nn.LayerNorm(8)
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
        self.fc1, self.fc2 = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(
        self, x: Tensor, padding: Tensor, angles: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        length, batch, _ = x.shape
        h = self.norm1(x)
        q, k, v = (
            each.contiguous().view(length, batch * 2, 4).transpose(0, 1)
            for each in (self.q(h) * 0.5, self.k(h), self.v(h))
        )
        scores = torch.bmm(rotated(q, angles), rotated(k, angles).transpose(1, 2))
        scores = scores.view(batch, 2, length, length)
        scores = scores.masked_fill(padding[:, None, None, :], float("-inf"))
        weights = scores.softmax(-1, dtype=torch.float32).type_as(scores)
        y = torch.bmm(weights.view(batch * 2, length, length), v)
        x = x + self.o(y.transpose(0, 1).reshape(length, batch, 8))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x)))), weights


class Protein(nn.Module):
    """Masked residues, padding, rotary positions, a tied head, contacts from the attention maps."""

    inv_freq: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8, padding_idx=1)
        self.layers = nn.ModuleList(ProteinLayer() for _ in range(2))
        self.norm, self.dense = nn.LayerNorm(8), nn.Linear(8, 8)
        self.bias, self.regression = nn.Parameter(0.1 * torch.randn(12)), nn.Linear(4, 1)
        self.register_buffer("inv_freq", 100.0 ** (-torch.arange(0, 4, 2) / 4))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        padding = tokens.eq(1)
        x = self.embed(tokens)
        x = x.masked_fill((tokens == 2).unsqueeze(-1), 0.0)
        ratio = (tokens == 2).sum(-1).to(x.dtype) / (~padding).sum(-1)
        x = x * (1 - 0.12) / (1 - ratio)[:, None, None]
        x = (x * (1 - padding.unsqueeze(-1).type_as(x))).transpose(0, 1)
        turn = torch.outer(torch.arange(tokens.shape[1]).float(), self.inv_freq)
        turn = torch.cat([turn, turn], -1)
        maps = []
        for layer in self.layers:
            x, weights = layer(x, padding, (turn.cos(), turn.sin()))
            maps.append(weights)
        x = F.gelu(self.dense(self.norm(x).transpose(0, 1)))
        logits = F.linear(x, self.embed.weight) + self.bias
        attention = torch.cat(maps, 1) * (~padding).type_as(x)[:, None, :, None]
        attention = attention + attention.transpose(-1, -2)
        across, down = attention.sum(-1, keepdim=True), attention.sum(-2, keepdim=True)
        corrected = attention - across * down / attention.sum((-1, -2), keepdim=True)
        return logits, self.regression(corrected.permute(0, 2, 3, 1)).squeeze(3).sigmoid()


def protein() -> Workload:
    """Embeddings and contacts of two sequences."""
    torch.manual_seed(_WEIGHTS)
    model = Protein().eval()
    tokens = torch.tensor([[0, 5, 2, 7, 9, 3], [0, 4, 6, 3, 1, 1]])

    def run() -> Sequence[Tensor]:
        with torch.no_grad():
            return model(tokens)

    return Workload(model, _seeded(run))


# ---- mixture of experts ------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Noisy top-2 routing; tokens are picked and put back by index."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.noise = nn.Linear(8, 3, bias=False), nn.Linear(8, 3, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.router(x)
        logits = logits + torch.randn_like(logits) * F.softplus(self.noise(x)) * 0.1
        top, chosen = logits.topk(2, -1)
        shares = torch.zeros_like(logits).scatter(1, chosen, top.softmax(-1))
        load = F.one_hot(chosen, 3).sum((0, 1)).float() / chosen.numel()
        balance = (load * shares.mean(0)).sum() * 3
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).any(-1).nonzero().squeeze(-1)
            share = shares.index_select(0, rows).gather(1, torch.full_like(rows, number)[:, None])
            out.index_add_(0, rows, expert(x[rows]) * share)
        return out, balance


class Mixture(nn.Module):
    """Two blocks of experts on an embedding with sorted lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 8)
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(2))
        self.blocks = nn.ModuleList(Experts() for _ in range(2))
        self.head = nn.Linear(8, 4)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x, balance = self.embed(ids).flatten(0, 1), torch.zeros(())
        for norm, block in zip(self.norms, self.blocks, strict=True):
            y, more = block(norm(x))
            x, balance = x + y, balance + more
        order = ids.sum(-1).argsort(descending=True)
        pooled = x.view(*ids.shape, 8).amax(1)[order]
        return self.head(pooled).log_softmax(-1), balance


def moe() -> Workload:
    """Inference with router noise."""
    torch.manual_seed(_WEIGHTS)
    model = Mixture().eval()
    ids = torch.tensor([[3, 7, 1, 9], [5, 2, 8, 4]])

    def run() -> Sequence[Tensor]:
        with torch.no_grad():
            return model(ids)

    return Workload(model, _seeded(run))


# ---- recurrent ---------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """A fused bidirectional LSTM, and a cell stepped by hand from a random state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.lstm = nn.LSTM(6, 5, bidirectional=True, batch_first=True)
        self.cell, self.head = nn.LSTMCell(10, 6), nn.Linear(6, 13)

    def forward(self, ids: Tensor) -> Tensor:
        x, _ = self.lstm(self.embed(ids))
        h, c = torch.randn(len(ids), 6) * 0.1, torch.zeros(len(ids), 6)
        steps = []
        for t in range(ids.shape[1]):
            h, c = self.cell(x[:, t], (h, c))
            steps.append(h)
        return self.head(torch.stack(steps, 1))


def lstm() -> Workload:
    """A training step with clipped gradients."""
    torch.manual_seed(_WEIGHTS)
    model = Recurrent().train()
    ids = torch.tensor([[3, 7, 1, 9], [5, 2, 8, 4]])
    step = torch.optim.SGD(model.parameters(), lr=0.1)

    def run() -> Sequence[Tensor]:
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        step.step()
        return [logits, loss]

    return Workload(model, _seeded(run))


MODELS: Final[dict[str, Callable[[], Workload]]] = {
    "encoder": encoder,
    "decoder": decoder,
    "conv": conv,
    "protein": protein,
    "moe": moe,
    "lstm": lstm,
}
