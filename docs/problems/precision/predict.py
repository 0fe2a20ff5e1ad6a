"""Attention with rotary positions, in float32 or with `--bf16`."""

import sys

import torch
from torch import nn


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", 10000.0 ** -(torch.arange(0, 16, 2) / 16))

    def forward(self, positions):
        angles = positions[:, None].to(self.inv_freq.dtype) * self.inv_freq
        return angles.cos(), angles.sin()


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.rotary = Rotary()
        self.query, self.key = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x, positions):
        cos, sin = self.rotary(positions)
        q, k = (self.turned(p, cos, sin) for p in (self.query(x), self.key(x)))
        return (q @ k.T / 4).softmax(-1)

    def turned(self, x, cos, sin):
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


torch.manual_seed(0)
model, x = Attention().eval(), torch.randn(12, 16)
if "--bf16" in sys.argv:
    model, x = model.to(torch.bfloat16), x.to(torch.bfloat16)
with torch.no_grad():
    y = model(x, torch.arange(1000, 1012))
print("attends most to", y.argmax(-1).tolist())
