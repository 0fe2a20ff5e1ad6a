"""Sample 0 alone against sample 0 in a batch of 15 (facebookresearch/fairseq2#1481).

A LLaMA-style decoder gives other outputs for the same sample when it is computed with others, and
the maintainers suspected that attention takes another backend. The traces of two runs say which
kernels ran and why. They were recorded with `batch=`, so `diff-trace --samples` says at which op sample 0
differs first, by how much, and whether rounding explains it.

    python examples/batch_size.py
    python examples/batch_size.py --layers 12 --width 4096 --heads 8    # the report's model; 10 GB
    python examples/batch_size.py --batch 15 -o mine.trace              # one run of your own
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import _story
import torch
from torch import Tensor, nn

import opdrift

#: The same samples are drawn whatever the batch, so that sample 0 is always the same.
MOST = 15


@dataclass(frozen=True)
class Sizes:
    """The size of the model and of its input."""

    layers: int
    width: int
    heads: int
    length: int
    vocabulary: int = 512


class Attention(nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.q, self.k, self.v, self.out = (
            nn.Linear(sizes.width, sizes.width, bias=False) for _ in range(4)
        )
        pairs = sizes.width // sizes.heads // 2
        speed = 10_000.0 ** -(torch.arange(pairs) / pairs)
        angle = torch.arange(sizes.length)[:, None] * speed
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def rotate(self, x: Tensor) -> Tensor:
        """Turn each pair of features by an angle that grows with the position."""
        cos, sin = self.get_buffer("cos"), self.get_buffer("sin")
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) -> the same."""
        q, k, v = (
            project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.q, self.k, self.v)
        )
        mixed = nn.functional.scaled_dot_product_attention(
            self.rotate(q), self.rotate(k), v, is_causal=True
        )
        y: Tensor = self.out(mixed.transpose(1, 2).flatten(-2))
        return y


class GatedLinear(nn.Module):
    """LLaMA's feed-forward network."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        inner = sizes.width * 8 // 3
        self.gate = nn.Linear(sizes.width, inner, bias=False)
        self.up = nn.Linear(sizes.width, inner, bias=False)
        self.down = nn.Linear(inner, sizes.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) -> the same."""
        y: Tensor = self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return y


class Layer(nn.Module):
    """Attention, then feed-forward, each after a norm and around a residual."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(sizes.width)
        self.attention = Attention(sizes)
        self.ffn_norm = nn.RMSNorm(sizes.width)
        self.ffn = GatedLinear(sizes)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) -> the same."""
        x = x + self.attention(self.attention_norm(x))
        y: Tensor = x + self.ffn(self.ffn_norm(x))
        return y


class Decoder(nn.Module):
    """Tokens to logits."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embed = nn.Embedding(sizes.vocabulary, sizes.width)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, length) -> (batch, length, vocabulary)."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def run(sizes: Sizes, batch: int, dtype: torch.dtype, trace: Path) -> Tensor:
    """The logits of sample 0, computed together with `batch - 1` others, recorded."""
    torch.manual_seed(0)
    model = Decoder(sizes).eval().to(dtype)
    tokens = torch.randint(sizes.vocabulary, (MOST, sizes.length))[:batch]
    recording = opdrift.record(
        trace,
        model=model,
        batch=opdrift.Batch(batch),
        kernels="full",  # what MKL and oneDNN say of each op: routine, sizes, threads
        label=f"batch of {batch}",
    )
    with torch.no_grad(), recording:
        logits: Tensor = model(tokens)[:1].clone()
    return logits


def story(sizes: Sizes, batch: int, dtype: torch.dtype, keep: Path | None) -> None:
    """Alone, and with others; compared."""
    with _story.workspace(keep) as folder:
        _story.heading(f"Sample 0 alone, and in a batch of {batch}")
        alone = run(sizes, 1, dtype, folder / "alone.trace")
        together = run(sizes, batch, dtype, folder / "batch.trace")
        difference = (alone - together).double()
        relative = difference.norm() / alone.double().norm()
        print(
            f"logits of sample 0: largest difference {difference.abs().max():.1e},"
            f" relative difference {relative:.1e}",
            flush=True,
        )
        _story.heading(
            "Which kernels ran, and why: did the batch size change the attention backend?"
        )
        _story.command(folder, "opdrift", "show", "alone.trace", "--kernels")
        _story.command(folder, "opdrift", "show", "batch.trace", "--kernels")

        _story.heading("Sample 0 of one run against sample 0 of the other")
        _story.command(folder, "diff-trace", "alone.trace", "batch.trace", "--samples", "0:0")


def main() -> None:
    """Read the options, and run once or the whole story."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, value, text in (
        ("layers", 4, "layers of the decoder"),
        ("width", 512, "features of a token"),
        ("heads", 8, "attention heads"),
        ("length", 64, "tokens of a sample"),
        ("batch", 15, "samples computed together"),
    ):
        parser.add_argument(f"--{name}", type=int, default=value, metavar="N", help=text)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("-o", "--output", type=Path, metavar="TRACE", help="only one run, here")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave the story's traces here")
    options = parser.parse_args()
    if not 1 <= options.batch <= MOST:
        parser.error(f"--batch is 1 to {MOST}")
    sizes = Sizes(options.layers, options.width, options.heads, options.length)
    dtype = getattr(torch, options.dtype)
    if options.output is None:
        story(sizes, options.batch, dtype, options.keep)
    else:
        run(sizes, options.batch, dtype, options.output)


if __name__ == "__main__":
    main()
