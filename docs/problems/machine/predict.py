"""A regression head on fixed features: the same weights, the same input, everywhere."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 8)).eval()
with torch.no_grad():
    y = model(torch.linspace(-1, 1, 32 * 64).view(32, 64))
print("first", f"{y[0, 0]:+.9f}")
