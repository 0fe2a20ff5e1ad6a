"""Lets fairscale's FullyShardedDataParallel run on a machine without any GPU. Only for that.

fairscale 0.4.13 assumes CUDA: it makes streams, pins memory and calls `torch.cuda.synchronize`
with no switch to turn that off. Inside `fairscale_on_cpu()` the *name* `torch` in fairscale's FSDP
module stands for a proxy whose `.cuda` does nothing, and pinning a CPU tensor or recording it on a
stream does nothing. Its buckets of gradients have two dimensions, of which gloo reduces and scatters none: they are
handed over flat, which is what NCCL makes of them. torch itself is left alone, and nothing of this is used where a GPU is.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist


class _NoStream:
    """Stands for a CUDA stream; on a CPU everything has happened already."""

    def wait_stream(self, other: object) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


class _TorchWithoutCuda:
    """`torch`, but for `.cuda`."""

    def __init__(self) -> None:
        # One stream for all: fairscale asserts that two lookups give the same one.
        stream = _NoStream()
        self.cuda = types.SimpleNamespace(
            is_available=lambda: True,  # fairscale reads it only to decide whether to make streams
            Stream=lambda *args, **kwargs: stream,
            current_stream=lambda *args: stream,
            stream=lambda _: contextlib.nullcontext(),
            synchronize=lambda *args: None,
            memory_allocated=lambda *args: 0,
            max_memory_allocated=lambda *args: 0,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _DistributedWithFlatInputs:
    """`torch.distributed`, but for how gradients are handed over to be reduced."""

    def _reduce_scatter_base(
        self, output: torch.Tensor, given: torch.Tensor, **options: Any
    ) -> Any:
        return dist.reduce_scatter_tensor(output, given.reshape(-1), **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)


def _same_on_cpu(method: Any, *, returns_self: bool) -> Any:
    def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.device.type == "cpu":
            return tensor if returns_self else None
        return method(tensor, *args, **kwargs)

    return call


@contextlib.contextmanager
def fairscale_on_cpu() -> Iterator[None]:
    """Inside, fairscale FSDP works with `compute_device=torch.device("cpu")`."""
    import fairscale.internal.reduce_scatter_bucketer as bucketer  # noqa: PLC0415
    import fairscale.nn.data_parallel.fully_sharded_data_parallel as fsdp  # noqa: PLC0415

    fsdp.torch = _TorchWithoutCuda()
    bucketer.dist = _DistributedWithFlatInputs()
    # Both methods are inherited from a C base class: a class attribute shadows them until deleted.
    shadows: Any = torch.Tensor
    shadows.pin_memory = _same_on_cpu(torch.Tensor.pin_memory, returns_self=True)
    shadows.record_stream = _same_on_cpu(torch.Tensor.record_stream, returns_self=False)
    try:
        yield
    finally:
        fsdp.torch, bucketer.dist = torch, dist
        del shadows.pin_memory, shadows.record_stream
