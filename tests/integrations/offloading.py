"""Record models that accelerate offloads, and read what is found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import cpu_offload, disk_offload
from torch import nn

import opdrift
from opdrift.records import Cause, Finding
from opdrift.tracefile.reader import Trace

CPU = torch.device("cpu")
X = torch.linspace(-1, 1, 8).view(2, 4)


def recorded(
    path: Path, model: nn.Module, *, steps: int = 2, between: Callable[[], object] | None = None
) -> Trace:
    """The trace of some forwards; `between` runs before the last one."""
    with opdrift.record(path, model=model) as recorder, torch.no_grad():
        for step in range(steps):
            if step == steps - 1 and between is not None:
                between()
            recorder.mark("step", step=step)
            model(X)
    return opdrift.load(path)


def on_disk(folder: Path, model: nn.Module, **options: Any) -> nn.Module:
    return disk_offload(model, folder, execution_device=CPU, **options)


def in_memory(folder: Path, model: nn.Module, **options: Any) -> nn.Module:
    return cpu_offload(model, execution_device=CPU, **options)


def only(found: tuple[Finding, ...]) -> Finding:
    assert len(found) == 1, found
    return found[0]


def said(finding: Finding) -> str:
    return said_of(finding.cause)


def said_of(cause: Cause) -> str:
    return "\n".join([cause.summary, *cause.evidence, cause.try_])
