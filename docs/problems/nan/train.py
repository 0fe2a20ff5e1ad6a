"""Train a small scorer of pairs by cosine distance; the loss is NaN after some steps."""

import torch
from torch import nn

import opdrift


class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 16, padding_idx=0)
        self.project = nn.Linear(16, 16, bias=False)

    def forward(self, tokens):
        x = self.project(self.embed(tokens).sum(1))
        length = x.square().sum(-1, keepdim=True).sqrt()
        return x / (length + 1e-6)


torch.manual_seed(0)
model = Scorer()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = [torch.randint(1, 50, (4, 6)) for _ in range(6)]
data[3][2] = 0  # an empty text: padding alone

with opdrift.record("train.trace", model=model) as recorder:
    for step, tokens in enumerate(data):
        recorder.mark("step", number=step)
        loss = 1 - (model(tokens) @ model(tokens.flip(0)).T).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print("step", step, "loss", f"{loss.item():.4f}")
