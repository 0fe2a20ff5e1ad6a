"""What marks say of tensors, and whether one can be read."""

from __future__ import annotations

from typing import Any

import torch


def between(source: Any, destination: Any) -> dict[str, Any]:
    """The fields of a mark about a content that went from one tensor to another."""
    return {
        "source_dtype": dtype_name(source.dtype),
        "destination_dtype": dtype_name(destination.dtype),
        "source_device": str(source.device),
        "destination_device": str(destination.device),
        "bytes": destination.numel() * destination.element_size(),
    }


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype as traces write it, `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def storage_id(tensor: Any) -> int:
    """Identity of a storage that stays the same when it is freed and filled again."""
    return int(tensor.untyped_storage()._cdata)


def shares_storage(one: Any, other: Any) -> bool:
    """Whether two tensors lie in one storage."""
    # one that begins at the other's address does, and that is told in a third of the time
    at = one.data_ptr()
    return bool(at and at == other.data_ptr()) or storage_id(one) == storage_id(other)


def is_readable(tensor: Any) -> bool:
    """False if the storage was freed: reading it would kill the process."""
    needed = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    return bool(tensor.untyped_storage().nbytes() >= needed)
