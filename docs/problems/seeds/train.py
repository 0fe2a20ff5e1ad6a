"""Train three steps, seeded; with `--preview` look at a random example first, as a logger does."""

import sys

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
features = torch.randn(24, 16)
target = features[:, :1].sin()

if "--preview" in sys.argv:
    print("an example:", torch.randint(24, (1,)).item())

for step in range(3):
    rows = slice(8 * step, 8 * step + 8)
    loss = (model(features[rows]) - target[rows]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("step", step, "loss", f"{loss.item():.6f}")
