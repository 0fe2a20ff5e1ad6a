"""accelerate's offload to host memory and disk: each move in and out becomes a mark; offloaded parameters keep their names."""

from __future__ import annotations

from contextlib import AbstractContextManager

from opdrift.plugins import RecorderLike

__all__ = ["AccelerateIntegration"]


class AccelerateIntegration:
    """Follows `cpu_offload`, `disk_offload`, `dispatch_model` and their hooks; the marks are listed in `watcher`."""

    name = "accelerate"
    library = "accelerate"

    def attach(self, recorder: RecorderLike) -> AbstractContextManager[None]:
        """Watch every tensor that accelerate moves on this thread inside the block."""
        # Not above: recorders load this class to learn its library, installed or not.
        from opdrift_integrations.accelerate.watcher import Watcher  # noqa: PLC0415

        return Watcher(recorder).watching()
