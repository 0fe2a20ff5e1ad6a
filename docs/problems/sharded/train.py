"""One training step in one process, or sharded over the ranks that torchrun started."""

import os

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

rank = int(os.environ.get("RANK", 0))
torch.manual_seed(rank)  # "so that every rank draws other data"
model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
if "RANK" in os.environ:
    distributed.init_process_group("gloo")
    fully_shard(model)

x = torch.linspace(-1, 1, 8 * 16).view(8, 16)
loss = model(x).square().mean()
loss.backward()
if rank == 0:
    print("loss", f"{loss.item():.4f}")
if "RANK" in os.environ:
    distributed.destroy_process_group()
