"""One attention layer with the fused kernel (`sdpa`), written out (`eager`), or ported wrongly (`ported`)."""

import math
import sys

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention


class Attention(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x, keep):
        q, k, v = (p.unflatten(-1, (4, 16)).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
        if self.kind == "sdpa":
            y = scaled_dot_product_attention(q, k, v, attn_mask=keep[:, None, None, :])
        else:
            hide = keep if self.kind == "ported" else ~keep
            scores = q @ k.transpose(-1, -2) / math.sqrt(16)
            scores = scores.masked_fill(hide[:, None, None, :], float("-inf"))
            y = scores.softmax(-1) @ v
        return self.out(y.transpose(1, 2).flatten(2))


torch.manual_seed(0)
model = Attention(sys.argv[1]).eval()
keep = torch.arange(12)[None, :] < torch.tensor([[11], [7]])
with torch.no_grad():
    y = model(torch.randn(2, 12, 64), keep)
print("mean", f"{y.mean():+.4f}")
