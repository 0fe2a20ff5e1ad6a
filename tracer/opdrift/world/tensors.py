"""The tensors that a rank hands to others, as it wrote them down before."""

from __future__ import annotations

from typing import Any, Final

#: [dtype, elements] of each tensor.
Tensors = tuple[tuple[str, int], ...]
#: So many are listed.
_LISTED: Final = 3


def tensors_of(found: Any) -> Tensors | None:
    """The tensors of a field of a mark; None where that is not known."""
    return None if found is None else tuple((dtype, elements) for dtype, elements in found)


def in_words(tensors: Tensors) -> str:
    """`float32[64], int64[3]`."""
    said = [f"{dtype}[{elements:,}]" for dtype, elements in tensors[:_LISTED]]
    return ", ".join(said) + (
        f" and {len(tensors) - _LISTED} more" if len(tensors) > _LISTED else ""
    )
