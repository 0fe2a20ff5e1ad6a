"""torch's FSDP1 and FSDP2 (`fully_shard`): gathers, casts, moves and frees become marks; parameters keep their names."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from opdrift.plugins import RecorderLike

__all__ = ["TorchFsdpIntegration"]


class TorchFsdpIntegration:
    """Follows `torch.distributed.fsdp`; the marks are listed in `gathers`."""

    name = "torch_fsdp"
    library = "torch.distributed.fsdp"

    def attach(self, recorder: RecorderLike) -> AbstractContextManager[None]:
        """Watch every FSDP unit that this thread uses inside the block."""
        # Not above: recorders load this class to learn its library, used or not.
        from opdrift_integrations.torch_fsdp.watching import watching  # noqa: PLC0415

        return watching(recorder)

    def owns(self, tensor: Any) -> bool:
        """Whether a tensor is a shard, or a flat parameter, that stands for the model's own parameters."""
        from opdrift_integrations.torch_fsdp.watching import is_shard  # noqa: PLC0415

        return is_shard(tensor)
