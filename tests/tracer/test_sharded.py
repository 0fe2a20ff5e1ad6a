"""Training with torch's own wrappers, two ranks on gloo: nothing is called wrong that is right."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

PROGRAM = """
    import json, sys, warnings, torch, opdrift
    import torch.distributed as dist
    from opdrift.findings import findings
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.nn.parallel import DistributedDataParallel
    warnings.simplefilter("ignore")  # torch 2.13 renames collectives
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # memory that nothing wrote holds NaN
    rank = int(sys.argv[1])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)

    def fsdp1(model):
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"))

    def fsdp2(model):
        mesh = init_device_mesh("cpu", (2,))
        fully_shard(model[0], mesh=mesh)
        return fully_shard(model, mesh=mesh)

    found = {}
    for name, wrap in {"fsdp1": fsdp1, "fsdp2": fsdp2, "ddp": DistributedDataParallel}.items():
        torch.manual_seed(0)
        model = wrap(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        with opdrift.record(f"{name}.trace", model=model, integrity="full"):
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.ones(2, 8)).sum().backward()
                optimizer.step()
        trace = opdrift.load(f"{name}.trace", rank=rank)
        found[name] = {
            "findings": [finding.cause.summary for finding in findings([trace])],
            "failures": [dict(failure) for failure in trace.footer.failures],
        }
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(found))
"""


@pytest.mark.slow
def test_sharded_training_has_no_findings(
    python: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
):
    """Memory is gathered into, given back and filled again, and collectives write what no schema says."""
    done: dict[int, subprocess.CompletedProcess[str]] = {}

    def start(rank: int) -> None:
        done[rank] = python(PROGRAM, str(rank), str(tmp_path / "store"), timeout=120)

    threads = [threading.Thread(target=start, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    nothing = {"findings": [], "failures": []}
    for rank in (0, 1):
        assert done[rank].returncode == 0, done[rank].stderr
        assert json.loads(done[rank].stdout.splitlines()[-1]) == {
            "fsdp1": nothing,
            "fsdp2": nothing,
            "ddp": nothing,
        }
