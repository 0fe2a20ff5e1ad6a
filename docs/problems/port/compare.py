"""A reference model and its rewrite, with the reference's weights under other names."""

import torch
from torch import nn

import opdrift


class Block(nn.Module):
    def __init__(self, *, eps):
        super().__init__()
        self.ln_1 = nn.LayerNorm(32, eps=eps)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x):
        return x + self.mlp(self.ln_1(x))


class Reference(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(100, 32)
        self.h = nn.ModuleList([Block(eps=1e-12) for _ in range(2)])
        self.head = nn.Linear(32, 10)

    def forward(self, tokens):
        x = self.wte(tokens) / 100
        for block in self.h:
            x = block(x)
        return self.head(x)


class RewrittenBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Rewrite(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(100, 32)
        self.layers = nn.ModuleList([RewrittenBlock() for _ in range(2)])
        self.head = nn.Linear(32, 10)

    def forward(self, tokens):
        x = self.tokens(tokens) / 100
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


NAMES = {"wte": "tokens", "h": "layers", "ln_1": "norm", "mlp.0": "up", "mlp.2": "down"}


def renamed(name):
    for old, new in NAMES.items():
        name = name.replace(f"{old}.", f"{new}.")
    return name


torch.manual_seed(0)
reference, rewrite = Reference().eval(), Rewrite().eval()
rewrite.load_state_dict({renamed(k): v for k, v in reference.state_dict().items()})
tokens = torch.randint(100, (2, 6))
with torch.no_grad():
    with opdrift.record("reference.trace", model=reference):
        wanted = reference(tokens)
    with opdrift.record("rewrite.trace", model=rewrite):
        got = rewrite(tokens)
print("largest difference", f"{(wanted - got).abs().max():.3f}")
