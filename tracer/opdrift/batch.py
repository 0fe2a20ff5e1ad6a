"""What a user tells the recorder of the batch that a run computes."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from opdrift.errors import InvalidOptionError


def _whole(number: object) -> int | None:
    """A whole number, of any kind that is one (also of numpy and torch); None for what is none."""
    try:
        return operator.index(number)  # type: ignore[arg-type]
    except TypeError:
        return None


@dataclass(frozen=True, slots=True)
class Batch:
    """The leading batch of a run, for per-sample records.

    The inputs carry it in their leading dim, if that has this size, or else in their second one (layouts with
    the length in front). Record a run of one sample with `Batch(1)`.

    Attributes:
        size: How many samples the batch holds.
        lengths: Valid length of each sample along the padded dimension; None means nothing is padded. The padded
            dimension is the one of the inputs that is as long as the longest sample.
        pad_side: On which side padding stands.
    """

    size: int
    lengths: Sequence[int] | None = None
    pad_side: Literal["left", "right"] = "right"

    def __post_init__(self) -> None:
        size = _whole(self.size)
        if size is None:
            raise InvalidOptionError(
                f"Batch(size={self.size!r}): the number of samples is a whole number, such as len(x)."
            )
        object.__setattr__(self, "size", size)
        if self.size < 1:
            raise InvalidOptionError(
                f"Batch(size={self.size!r}): a batch holds at least one sample."
            )
        if self.lengths is not None:
            lengths = tuple(self.lengths)
            whole = tuple(n for n in map(_whole, lengths) if n is not None and n >= 0)
            if len(whole) < len(lengths):
                wrong = next(n for n in lengths if (_whole(n) is None or n < 0))
                raise InvalidOptionError(
                    f"Batch(lengths=...) holds {wrong!r}: a length is a whole number from 0, how many positions of a"
                    " sample are no padding."
                )
            object.__setattr__(self, "lengths", whole)
            if len(self.lengths) != self.size:
                raise InvalidOptionError(
                    f"Batch(size={self.size}) has {len(self.lengths)} lengths; give one for each sample."
                )
        if self.pad_side not in ("left", "right"):
            raise InvalidOptionError(f"Batch(pad_side={self.pad_side!r}): say 'left' or 'right'.")
