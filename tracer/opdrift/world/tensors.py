"""The tensors that a rank hands to others, as it wrote them down before."""

from __future__ import annotations

from typing import Any, Final

from opdrift.composition import Content
from opdrift.wording import some

#: [dtype, elements] of each tensor.
Tensors = tuple[tuple[str, int], ...]
#: What each tensor, or each rank's part of one, held; None where it could not be read.
Sent = tuple[Content | None, ...]
#: So many are listed.
_LISTED: Final = 3


def tensors_of(found: Any) -> Tensors | None:
    """The tensors of a field of a mark; None where that is not known."""
    return None if found is None else tuple((dtype, elements) for dtype, elements in found)


def sent_of(found: Any) -> Sent:
    """The contents of a field of a mark; none where they were not read."""
    return tuple(
        None if part is None else Content(int(part[0], 16), part[1], part[2])
        for part in found or ()
    )


def in_words(tensors: Tensors) -> str:
    """`float32[64], int64[3]`."""
    return some([f"{dtype}[{elements:,}]" for dtype, elements in tensors], _LISTED)
