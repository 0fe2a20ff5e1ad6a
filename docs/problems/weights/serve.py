"""Serve a text encoder from a checkpoint; run once with `--save` to make one."""

import sys

import torch
from torch import nn


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(100, 32)
        self.mix = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.norm = nn.LayerNorm(32)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.norm(x + self.mix(x)).mean(1)


if "--save" in sys.argv:
    torch.save({f"model.{k}": v for k, v in Encoder().state_dict().items()}, "encoder.pt")
    sys.exit()

model = Encoder().eval()
model.load_state_dict(torch.load("encoder.pt"), strict=False)
with torch.no_grad():
    embedding = model(torch.tensor([[17, 4, 62, 8]]))
print("embedding", *(f"{x:+.3f}" for x in embedding[0, :4]))
