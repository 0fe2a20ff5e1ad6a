"""Moves between devices that the program makes by itself, as `.to(device)` does: each becomes a mark."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from opdrift.memory import Use

#: What the marks call who moved it, where integrations have the name of their library.
LIBRARY = "torch"


def transfer(use: Use, out: Tensor, attribute: str, module: str) -> dict[str, Any] | None:
    """The fields of a "move" mark; None where nothing went from one device to another.

    Args:
        use: A call of `_to_copy` or `copy_`.
        out: What was copied into.
        attribute: Under which storages hold what is known of them.
        module: Where it ran.
    """
    source = use.args[1] if use.plan.writes else use.args[0]
    if not isinstance(source, Tensor):
        return None
    there, here = _device(source), _device(out)
    # what goes to or comes from "meta" has no content: it is made or thrown away, not moved
    if there == here or "meta" in (there.type, here.type):
        return None
    names = _names(source, attribute) or _names(out, attribute)
    non_blocking = use.args[2] if len(use.args) > 2 else use.kwargs.get("non_blocking")
    return {
        "library": LIBRARY,
        "unit": names[0].rpartition(".")[0] if names else module,
        "direction": _direction(there, here),
        "parameters": [[name, 0, list(source.shape)] for name in names],
        "shape": list(source.shape),
        "source_dtype": str(source.dtype).removeprefix("torch."),
        "destination_dtype": str(out.dtype).removeprefix("torch."),
        "source_device": str(there),
        "destination_device": str(here),
        "bytes": out.numel() * out.element_size(),
        "blocking": non_blocking is not True,
    }


def _direction(source: torch.device, destination: torch.device) -> str:
    ends = ("host" if device.type == "cpu" else "device" for device in (source, destination))
    return "-to-".join(ends)


def _device(tensor: Tensor) -> torch.device:
    return tensor.device


def _names(tensor: Tensor, attribute: str) -> list[str]:
    """The names of what lies in a tensor's storage; none for a layout without one."""
    try:
        state = getattr(tensor.untyped_storage(), attribute, None)
    except (RuntimeError, NotImplementedError):
        return []
    if state is None or state.leaf is None:
        return []
    return [name for name, kind in state.leaf.names if name and kind != "constant"]
