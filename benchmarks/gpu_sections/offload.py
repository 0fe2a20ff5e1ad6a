"""Section: weights that accelerate copies to the device at each call are compared with where they come from."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn

import opdrift
from gpu_sections.check import Check
from opdrift.findings import findings
from opdrift.tracefile.reader import Trace


def check_offload(check: Check, scratch: Path) -> None:
    """An offloaded run against a plain one, what its moves say, and a copy that is torn on the device."""
    try:
        from accelerate import cpu_offload, hooks  # noqa: PLC0415
    except ImportError:
        print("  accelerate is not installed (pip install 'opdrift[accelerate]'): not checked")
        return
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 16))
    x = torch.randn(8, 64)
    plain = _recorded(scratch / "plain.trace", copy.deepcopy(model).to(check.device), x, check)
    offloaded = cpu_offload(model, execution_device=check.device)
    followed = _recorded(scratch / "offloaded.trace", offloaded, x, check)
    verdict = opdrift.diff(plain, followed).verdict
    check.expect(verdict == "identical", f"offloaded against plain is {verdict}")
    wrong = findings([followed])
    check.expect(not wrong, f"a correct offload has findings: {wrong}")
    loads = [m.fields for m in followed.marks if m.fields.get("direction") == "load"]
    copied = [m for m in loads if not m["aliased"]]
    check.expect(len(loads) == 12, f"{len(loads)} of 12 loads were marked")
    check.expect(all(m["intact"] for m in loads), "a load is not known to be intact")
    if check.is_gpu:
        check.expect(len(copied) == len(loads), "a load to the device is said to copy nothing")

    right = hooks.set_module_tensor_to_device

    def torn(module: nn.Module, name: str, *args: Any, **options: Any) -> None:
        right(module, name, *args, **options)
        weight = module._parameters[name]
        if options.get("value") is not None and weight is not None and weight.shape == (16, 128):
            half = weight.detach().clone()
            half[8:] = 0
            module._parameters[name] = nn.Parameter(half)

    with mock.patch.object(hooks, "set_module_tensor_to_device", torn):
        found = findings([_recorded(scratch / "torn.trace", offloaded, x, check)])
    named = {(f.kind, f.name) for f in found}
    check.expect(named == {("move", "3.weight")}, f"a torn copy of 3.weight is told as {named}")
    print(
        f"  {len(loads)} loads, {len(copied)} copied to {check.device}; {verdict}; a torn copy is found"
    )


def _recorded(path: Path, model: nn.Module, x: torch.Tensor, check: Check) -> Trace:
    with opdrift.record(path, model=model, overwrite=True), torch.no_grad():
        for _ in range(2):
            model(x.to(check.device))
    return opdrift.load(path)
