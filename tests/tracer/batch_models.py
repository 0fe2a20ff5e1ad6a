"""Small models of several kinds that treat a padded batch rightly, or make one known mistake with it.

Each takes the padded batch, and `mask` (True at valid positions) or `lengths`. `fault` names the mistake.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional


class EagerBert(nn.Module):
    """Token and position embeddings, then attention written out, as old BERT code has it."""

    def __init__(self, fault: str = "", width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.fault, self.heads = fault, heads
        self.tokens, self.positions = nn.Embedding(40, width), nn.Embedding(32, width)
        self.norm = nn.LayerNorm(width)
        self.attention = EagerAttention(fault, width, heads)
        self.head = nn.Linear(width, 5)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        where = torch.arange(ids.shape[1]).expand_as(ids)
        if self.fault == "positions from the mask":
            where = (mask.long().cumsum(1) - 1).clamp(min=0)
        x = self.norm(self.tokens(ids) + self.positions(where))
        return self.head(x + self.attention(x, mask))


class EagerAttention(nn.Module):
    """Scores, mask, softmax, sum."""

    def __init__(self, fault: str, width: int, heads: int) -> None:
        super().__init__()
        self.fault, self.heads = fault, heads
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        b, t, e = x.shape
        q, k, v = (
            layer(x).view(b, t, self.heads, -1).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        scores = q @ k.transpose(-1, -2) / math.sqrt(e // self.heads)
        hidden = ~mask[:, None, None, :]
        if self.fault == "mask of the other polarity":
            hidden = ~hidden
        if self.fault == "mask from the other side":
            length = mask.sum(1)
            hidden = (torch.arange(t) < t - length[:, None])[:, None, None, :]
        if self.fault != "mask never arrives":
            scores = scores.masked_fill(hidden, -1e9)
        dim = (
            1
            if self.fault == "softmax over the heads"
            else 0
            if self.fault == "softmax over the batch"
            else -1
        )
        return (scores.softmax(dim) @ v).transpose(1, 2).reshape(b, t, e)


class FusedBert(nn.Module):
    """Attention by scaled_dot_product_attention; a mask that hides nothing is dropped, as libraries do."""

    def __init__(self, fault: str = "", width: int = 16, heads: int = 2, layers: int = 2) -> None:
        super().__init__()
        self.fault, self.heads = fault, heads
        self.tokens = nn.Embedding(40, width)
        self.layers = nn.ModuleList(FusedLayer(fault, width, heads, i) for i in range(layers))
        self.head = nn.Linear(width, 5)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        keep = None if bool(mask.all()) else mask[:, None, None, :]
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x, keep)
        return self.head(x)


class FusedLayer(nn.Module):
    def __init__(self, fault: str, width: int, heads: int, number: int) -> None:
        super().__init__()
        self.fault, self.heads, self.number = fault, heads, number
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, keep: Tensor | None) -> Tensor:
        b, t, e = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.fault == "second layer forgets the mask" and self.number == 1:
            keep = None
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=keep)
        x = x + y.transpose(1, 2).reshape(b, t, e)
        return x + self.down(functional.gelu(self.up(x)))


class Llama(nn.Module):
    """RMS norm, rotary positions, causal attention with fewer keys than queries, gated feed-forward."""

    def __init__(self, fault: str = "", width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.fault = fault
        self.tokens = nn.Embedding(40, width)
        self.layers = nn.ModuleList(LlamaLayer(fault, width) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, 40, bias=False)
        self.register_buffer("speed", 1000.0 ** -(torch.arange(4) / 4))

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        t = ids.shape[1]
        x = self.tokens(ids)
        where = (mask.long().cumsum(1) - 1).clamp(min=0)
        if "padded length" in self.fault:
            where = torch.arange(t)[None].expand_as(ids)
        angle = where[..., None] * self.speed
        if self.fault == "sinusoids of the padded length":
            x = x + torch.cat((angle.sin(), angle.cos()), -1).repeat(1, 1, 4)
        turn = torch.cat((angle, angle), -1)[:, None]
        keep = torch.ones(t, t, dtype=torch.bool).tril() & mask[:, None, :]
        keep = (keep | torch.eye(t, dtype=torch.bool))[:, None]
        if self.fault == "causal only":
            keep = torch.ones(t, t, dtype=torch.bool).tril()[None, None].expand(len(ids), 1, t, t)
        for layer in self.layers:
            x = layer(x, turn.cos(), turn.sin(), keep)
        return self.head(self.norm(x))


class LlamaLayer(nn.Module):
    def __init__(self, fault: str, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.q, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, width // 2, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, keep: Tensor) -> Tensor:
        b, t, e = x.shape
        h = self.norms[0](x)
        q, k, v = (m(h).view(b, t, -1, 8).transpose(1, 2) for m in (self.q, self.k, self.v))
        q, k = (z * cos + torch.cat((-z[..., 4:], z[..., :4]), -1) * sin for z in (q, k))
        k, v = (z.repeat_interleave(2, dim=1) for z in (k, v))
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=keep)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, e))
        h = self.norms[1](x)
        return x + self.down(functional.silu(self.gate(h)) * self.up(h))


class Esm(nn.Module):
    """Length first (T x B x E), as fair-esm and fairseq; scales by the share of masked tokens."""

    def __init__(self, fault: str = "", width: int = 16) -> None:
        super().__init__()
        self.fault = fault
        self.tokens = nn.Embedding(33, width, padding_idx=1)
        self.attention = nn.MultiheadAttention(width, 2)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 33)

    def forward(self, ids: Tensor) -> Tensor:
        padding = ids.eq(1)
        x = self.tokens(ids)
        lengths = (~padding).sum(-1)
        share = (ids == 32).sum(-1) / lengths
        if self.fault == "share over the batch":
            share = ((ids == 32).sum() / lengths.sum()).expand(len(ids))
        x = x * (1 - 0.12) / (1 - share)[:, None, None]
        x = x.transpose(0, 1)
        h = self.norm(x)
        if self.fault == "batch and length exchanged":
            h = h.transpose(0, 1)
            y = self.attention(h, h, h, need_weights=False)[0].transpose(0, 1)
        else:
            hidden = padding if bool(padding.any()) else None
            y = self.attention(h, h, h, key_padding_mask=hidden, need_weights=False)[0]
        return self.head((x + y).transpose(0, 1))


class Speech(nn.Module):
    """Convolutions over a waveform, then features of each frame."""

    def __init__(self, fault: str = "", channels: int = 6) -> None:
        super().__init__()
        self.fault = fault
        self.first = nn.Conv1d(1, channels, 4, stride=2)
        self.second = nn.Conv1d(channels, channels, 3, padding=1)
        self.norm = {
            "instance norm over time": nn.InstanceNorm1d(channels),
            "group norm over time": nn.GroupNorm(2, channels),
        }.get(fault, nn.Identity())
        self.out = nn.Linear(channels, 4)

    def forward(self, wave: Tensor, lengths: Tensor) -> Tensor:
        x = functional.gelu(self.norm(self.first(wave[:, None])))
        frames = (lengths - 4) // 2 + 1
        valid = (torch.arange(x.shape[-1]) < frames[:, None])[:, None, :]
        if self.fault != "convolution reaches into padding":
            x = x * valid
        x = functional.gelu(self.second(x))
        if self.fault == "mean over time":
            return self.out(x.mean(-1))
        if self.fault == "maximum over time":
            return self.out((functional.logsigmoid(x) * valid).amax(-1))
        if self.fault == "pooled over time":
            return self.out(functional.adaptive_avg_pool1d(x, 1).squeeze(-1))
        if self.fault == "divides by the padded length":
            return self.out((x * valid).sum(-1) / x.shape[-1])
        if self.fault == "masked mean":
            return self.out((x * valid).sum(-1) / frames[:, None])
        if self.fault == "spectrum over time":
            return self.out(torch.fft.rfft(x * 1.0, dim=-1).abs()[..., :3].mean(-1))
        return self.out(x.transpose(1, 2))


class Recurrent(nn.Module):
    """An LSTM over embedded tokens."""

    def __init__(self, fault: str = "", width: int = 8) -> None:
        super().__init__()
        self.fault = fault
        self.tokens = nn.Embedding(20, width)
        self.lstm = nn.LSTM(
            width,
            width,
            batch_first=fault != "batch taken for length",
            bidirectional="both" in fault,
        )
        self.head = nn.Linear(width * (2 if "both" in fault else 1), 3)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        x = self.tokens(ids)
        if "packed" in self.fault:
            packed = nn.utils.rnn.pack_padded_sequence(
                x, lengths, batch_first=True, enforce_sorted=False
            )
            y, (h, _) = self.lstm(packed)
            if self.fault == "packed, then the wrong one":
                h = torch.roll(h, 1, 1)
            return self.head(h[-1])
        y, (h, _) = self.lstm(x)
        if self.fault == "last state after padding":
            return self.head(h[-1])
        if self.fault == "last position":
            return self.head(y[:, -1])
        if self.fault == "last valid position":
            return self.head(y[torch.arange(len(ids)), lengths - 1])
        return self.head(y)


class Mixture(nn.Module):
    """Tokens go to the best of several experts; with a capacity, those that come late are dropped."""

    def __init__(self, fault: str = "", width: int = 8, experts: int = 3) -> None:
        super().__init__()
        self.fault = fault
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        b, t, e = x.shape
        flat = x.reshape(b * t, e)
        gate, choice = self.router(flat).softmax(-1).max(-1)
        y = torch.zeros_like(flat)
        one_hot = functional.one_hot(choice, len(self.experts))
        place = (one_hot.cumsum(0) * one_hot).sum(-1) - 1
        room = 3 if self.fault == "capacity of the batch" else b * t
        for number, expert in enumerate(self.experts):
            rows = torch.where((choice == number) & (place < room))[0]
            y.index_add_(0, rows, expert(flat[rows]) * gate[rows, None])
        return self.head(x + y.view(b, t, e))


class Mixing(nn.Module):
    """Two layers with something between them that looks at the other samples, or at none."""

    def __init__(self, fault: str = "", width: int = 12) -> None:
        super().__init__()
        self.fault = fault
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, 4)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.fault == "centred by the batch":
            h = h - h.mean(0)
        elif self.fault == "scaled by the largest of the batch":
            h = h / h.abs().max()
        elif self.fault == "standardised over everything":
            h = (h - h.mean()) / h.std()
        elif self.fault == "softmax over the samples":
            h = h.softmax(0)
        elif self.fault == "quantised by the batch":
            scale = h.abs().amax() / 127
            h = (h / scale).round().clamp(-128, 127) * scale
        elif self.fault == "quantised by the sample":
            scale = h.abs().amax(-1, keepdim=True) / 127
            h = (h / scale).round().clamp(-128, 127) * scale
        elif self.fault == "rolled":
            h = h + torch.roll(h, 1, 0)
        elif self.fault == "sum over the batch size":
            h = h / len(h)
        elif self.fault == "batch norm":
            h = self.norm(h)
        elif self.fault == "dropout":
            h = functional.dropout(h, 0.3, training=True)
        else:
            h = h / h.norm(dim=-1, keepdim=True)
        return self.second(torch.relu(h))


class Pooling(nn.Module):
    """One vector for a sequence, by attention over its positions."""

    def __init__(self, fault: str = "", width: int = 8) -> None:
        super().__init__()
        self.fault = fault
        self.score, self.head = nn.Linear(width, 1), nn.Linear(width, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        score = self.score(torch.tanh(x)).squeeze(-1)
        if self.fault != "no mask":
            score = score.masked_fill(~mask, float("-inf"))
        return self.head((score.softmax(-1)[..., None] * x).sum(1))


class Stepwise(nn.Module):
    """Decoding step by step with a cache that is filled in place."""

    def __init__(self, fault: str = "", width: int = 8) -> None:
        super().__init__()
        self.fault = fault
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        keys, values = torch.zeros_like(x), torch.zeros_like(x)
        steps = []
        for t in range(x.shape[1]):
            keys[:, t], values[:, t] = self.k(x[:, t]), self.v(x[:, t])
            if t == 3 and self.fault == "centred in the cache":
                keys[:, 1] = keys[:, 1] - keys[:, 1].mean(0)
            seen = keys[:, : t + 1], values[:, : t + 1]
            steps.append(functional.scaled_dot_product_attention(self.q(x[:, t : t + 1]), *seen))
        return torch.cat(steps, 1)


class OneByOne(nn.Module):
    """A loop over the samples."""

    def __init__(self, fault: str = "", width: int = 12) -> None:
        super().__init__()
        self.out = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.out(row) for row in x])
