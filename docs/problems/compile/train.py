"""One training step, eager or with `--compile`."""

import sys

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1))
step = torch.compile(model) if "--compile" in sys.argv else model

x, y = torch.randn(16, 32), torch.randn(16, 1)
loss = (step(x) - y).square().mean()
loss.backward()
print("loss", f"{loss.item():.4f}")
