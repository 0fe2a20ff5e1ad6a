"""One of two processes of a fairscale FSDP model; writes down its marks. Run by test_fairscale.py."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from conftest import FakeRecorder, example
from fairscale.nn.data_parallel import FullyShardedDataParallel as FSDP  # noqa: N817
from fairscale.nn.wrap import enable_wrap, wrap
from torch import nn

from opdrift_integrations.fairscale import FairscaleIntegration

warnings.filterwarnings("ignore")


def digests(names: dict[str, torch.Tensor]) -> dict[str, str]:
    return {name: f"{FakeRecorder().digest(tensor)}" for name, tensor in names.items()}


def main(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(3)
    net: nn.Module = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.Linear(3, 3))
    plain = {name: tensor.detach().half() for name, tensor in net.named_parameters()}
    (folder / "plain.json").write_text(json.dumps(digests(plain)))
    options = {"mixed_precision": True, "cpu_offload": True, "bucket_cap_mb": 0}
    with example("_fairscale_on_cpu").fairscale_on_cpu():
        with enable_wrap(wrapper_cls=FSDP, compute_device=torch.device("cpu"), **options):
            net[0], net[2] = wrap(net[0]), wrap(net[2])
            net = wrap(net)
        recorder = FakeRecorder(net)
        with FairscaleIntegration().attach(recorder):
            net(torch.ones(2, 4)).float().sum().backward()
    named = digests({name: tensor for kind, name, tensor in recorder.names if kind == "parameter"})
    marks = [{"kind": "named", "name": name, "digest": digest} for name, digest in named.items()]
    (folder / f"{rank}.json").write_text(json.dumps([*recorder.marks, *marks]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
