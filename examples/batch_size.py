"""Sample 0 alone against sample 0 in a batch of 15 (facebookresearch/fairseq2#1481).

A LLaMA-style decoder gives other outputs for the same sample when it is computed with others, and
the maintainers suspected that attention takes another backend. The traces of two runs say which
kernels ran and why, and their records of single samples (`batch=`) say at which op sample 0 differs
first, by how much, and how much rounding explains there. `diff-trace --samples` will say that by itself
in a later version; here a few lines of the reading API do.

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
from opdrift.bounds import OpViews, explained
from opdrift.compare import difference
from opdrift.contents import Contents
from opdrift.samples import OneSample, pair

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
        trace, model=model, batch=opdrift.Batch(batch), label=f"batch of {batch}"
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

        _story.heading("Sample 0 of one run against sample 0 of the other, op by op")
        follow_sample(opdrift.load(folder / "alone.trace"), opdrift.load(folder / "batch.trace"))


def follow_sample(left: opdrift.Trace, right: opdrift.Trace) -> None:
    """Print at which op sample 0 differs first, and by how much there and at the end."""
    if [left.op(i).name for i in range(len(left.ops))] != [
        right.op(i).name for i in range(len(right.ops))
    ]:
        print("the two runs issue other ops, so they are not compared op by op")
        return
    sides = OneSample(Contents(left), 0), OneSample(Contents(right), 0)
    views = OpViews(left)
    compared = 0
    differing: list[tuple[int, float]] = []
    for index in range(len(left.ops)):
        for a, b in zip(left.op(index).outputs, right.op(index).outputs, strict=True):
            found = pair(*sides, a, b)
            if found is None:
                continue
            compared += 1
            if found[0].key != found[1].key:
                differing.append((index, difference(*found).relative or 0.0))
    print(f"{compared} outputs of {len(left.ops)} ops hold a record of sample 0 in both runs")
    if not differing:
        print("sample 0 is the same in all of them, bit for bit")
        return
    index, size = differing[0]
    op = left.op(index)
    bound = explained(views[index])
    print(f"first difference: {op.name} in {op.call.path} ({op.source})")
    print(f"  relative difference {size:.1e}; rounding explains up to {bound.loose:.1e} there")
    largest = max(size for _, size in differing)
    print(f"  {len(differing) - 1} outputs after it differ too, by {largest:.1e} at most")
    print(
        "  verdict: rounding, the same arithmetic in another order"
        if size <= bound.loose
        else "  verdict: more than rounding explains"
    )


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
