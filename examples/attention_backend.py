"""One attention layer, run in five ways that make torch choose another backend or library, and why.

The layer calls `scaled_dot_product_attention` with a relative position bias, as T5 and Swin do. Nothing in
its code names a backend: torch chooses by the mask, the dropout, the sizes and strides of the heads, and
the type. Each way is recorded and compared with the plain one; `diff-trace` says what each run ran, why, and
which argument made the choice another one.

    python examples/attention_backend.py
    python examples/attention_backend.py --way learned-bias -o mine.trace     # one run of your own
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import _story
import torch
import torch.nn.functional as F  # noqa: N812 (as torch writes it)
from torch import Tensor, nn

import opdrift

WIDTH, HEADS, LENGTH, BATCH = 64, 4, 16, 2


class Attention(nn.Module):
    """Self-attention with a bias that depends on the distance of two positions."""

    def __init__(self, *, value_size: int = WIDTH) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, value_size)
        self.out = nn.Linear(value_size, WIDTH)
        self.bias = nn.Parameter(torch.randn(HEADS, LENGTH, LENGTH) * 0.1)
        self.dropout = 0.0

    def forward(self, x: Tensor) -> Tensor:
        """Attend, whichever backend torch takes."""
        query, key, value = (
            layer(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        bias = self.bias.to(query.dtype).unsqueeze(0)
        mixed = F.scaled_dot_product_attention(query, key, value, bias, self.dropout)
        joined: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return joined


@dataclass(frozen=True)
class Way:
    """How to run the layer, and what is to be expected."""

    what: str
    change: Callable[[Attention], object]
    value_size: int = WIDTH


def _plain(layer: Attention) -> None:
    layer.bias.requires_grad_(False)


def _dropout(layer: Attention) -> None:
    _plain(layer)
    layer.dropout = 0.1


def _half(layer: Attention) -> None:
    _plain(layer)
    layer.bfloat16()


WAYS: Final[Mapping[str, Way]] = {
    "plain": Way("the bias is frozen, as in inference", _plain),
    "learned-bias": Way("the bias is a parameter that is trained", lambda layer: layer),
    "dropout": Way("attention drops a tenth of its weights", _dropout),
    "small-values": Way("the heads of the values are half as wide", _plain, WIDTH // 2),
    "bfloat16": Way("the layer is cast to bfloat16", _half),
}


def run(name: str, trace: Path) -> None:
    """Record the layer in one of the ways; weights and input are always the same."""
    way = WAYS[name]
    torch.manual_seed(0)
    layer = Attention(value_size=way.value_size)
    x = torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
    way.change(layer)
    with opdrift.record(trace, model=layer, label=f"attention, {name}"):
        layer(x.to(layer.out.weight.dtype))


def story(keep: Path | None) -> None:
    """Every way, and each against the plain one."""
    with _story.workspace(keep) as folder:
        for name, way in WAYS.items():
            run(name, folder / f"{name}.trace")
            if name == "plain":
                _story.heading(f"{name}: {way.what}")
                _story.command(folder, "opdrift", "show", "plain.trace", "--kernels")
                continue
            _story.heading(f"{name}: {way.what}")
            if name in ("learned-bias", "dropout"):
                _story.diff_trace(folder, "plain.trace", f"{name}.trace")
            else:  # other weights, or other types: the picks are what is of interest
                _story.command(folder, "opdrift", "show", f"{name}.trace", "--kernels")


def main() -> None:
    """Read the options, and run one way or the whole story."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--way", choices=tuple(WAYS), help="only this one; needs -o")
    parser.add_argument("-o", "--output", type=Path, metavar="TRACE", help="where to record it")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="leave the story's traces here")
    options = parser.parse_args()
    if options.way is None:
        story(options.keep)
    elif options.output is None:
        parser.error("--way needs -o TRACE")
    else:
        run(options.way, options.output)


if __name__ == "__main__":
    main()
