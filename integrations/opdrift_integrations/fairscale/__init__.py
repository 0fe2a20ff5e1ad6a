"""fairscale FullyShardedDataParallel: gathers, casts, moves and frees become marks; parameters keep their names."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from opdrift.plugins import RecorderLike

__all__ = ["FairscaleIntegration"]


class FairscaleIntegration:
    """Follows `fairscale.nn.data_parallel.FullyShardedDataParallel`; the marks are listed in `watcher`."""

    name = "fairscale"
    library = "fairscale"

    def attach(self, recorder: RecorderLike) -> AbstractContextManager[None]:
        """Watch every FSDP unit that this thread uses inside the block."""
        # Not above: recorders load this class to learn its library, installed or not.
        from opdrift_integrations.fairscale.watcher import Watcher  # noqa: PLC0415

        return Watcher(recorder).watching()

    def owns(self, tensor: Any) -> bool:
        """Whether a tensor is a shard, or a flat parameter, that stands for the model's own parameters."""
        return hasattr(tensor, "_is_sharded")  # set by FullyShardedDataParallel._shard_parameters_
