"""What the marks of moves say; moves that say the same share their JSON."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch

from opdrift.plugins import Digest
from opdrift_integrations.digests import as_field
from opdrift_integrations.tensors import dtype_name

#: What a mark calls the device of a file.
DISK: Final = "disk"


class Copied(NamedTuple):
    """What became of a copy."""

    destination: Digest | None
    aliased: bool
    intact: bool | None


class Loaded(NamedTuple):
    """What became of a load, and of its source since it was last seen."""

    destination: Digest | None
    aliased: bool
    intact: bool | None
    known: Digest | None
    seen: str | None
    source_unchanged: bool | None
    source_moved: bool
    tied: tuple[tuple[str, str], ...]


class Dropped(NamedTuple):
    """What became of what was loaded (`destination`) until it was taken away."""

    destination: Digest | None
    aliased: bool
    intact: bool | None
    rebound: bool


Outcome = Copied | Loaded | Dropped | None


class Move(NamedTuple):
    """A move of one tensor. The fields are those of the mark, as `watcher` lists them, but which load it is."""

    direction: str
    phase: str
    unit: str | None
    slot: int | None
    name: str
    shape: torch.Size
    bytes: int
    source_dtype: torch.dtype
    source_device: torch.device | str
    destination_dtype: torch.dtype
    destination_device: torch.device | str
    file: str | None
    blocking: bool
    source: Digest | None
    outcome: Outcome = None

    def fields(self) -> dict[str, Any]:
        """The fields in JSON's types."""
        outcome = {} if self.outcome is None else self.outcome._asdict()
        return {
            "library": "accelerate",
            "unit": self.unit,
            "phase": self.phase,
            "direction": self.direction,
            **({} if self.slot is None else {"slot": self.slot}),
            "parameters": [[self.name, 0, list(self.shape)]],
            "bytes": self.bytes,
            "source_dtype": dtype_name(self.source_dtype),
            "source_device": str(self.source_device),
            "destination_dtype": dtype_name(self.destination_dtype),
            "destination_device": str(self.destination_device),
            **({} if self.file is None else {"file": self.file}),
            "blocking": self.blocking,
            "source": as_field(self.source),
            **{
                name: as_field(value) if name in ("destination", "known") else value
                for name, value in outcome.items()
            },
        }
