"""Whether the tensors of a checkpoint reached the model of a trace, and which of the model's came from elsewhere."""

from __future__ import annotations

from opdrift.checkpoints.answer import Check, Missing, check, dtypes_of
from opdrift.checkpoints.ranks import check_ranks
from opdrift.checkpoints.stored import StoredCheckpoint, StoredTensor, read
from opdrift.checkpoints.told import compared, dropped, in_parts, sentence

__all__ = [
    "Check",
    "Missing",
    "StoredCheckpoint",
    "StoredTensor",
    "check",
    "check_ranks",
    "compared",
    "dropped",
    "dtypes_of",
    "in_parts",
    "read",
    "sentence",
]
