"""Where the original parameters lie in what a library gathers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Part:
    """An original parameter inside a buffer: `size` elements from `offset`."""

    name: str
    offset: int
    size: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Buffer:
    """One gathered tensor: the shards of all ranks end to end, padded to equal length.

    Attributes:
        name: The library's name of it, `layers.0.flat_param_0`.
        parts: The original parameters in it, in order.
        tied: Further names of a part: (name, name of the part).
        shard: Elements that each rank holds, padding included.
        ranks: How many ranks hold one; 1 if the unit is not sharded.
        rank: Which of them is this process.
        layout: "flat": the parameters follow each other, and shards cut them anywhere; offsets count from the
            start of the buffer. "each": every parameter is sharded by itself, and a shard holds its rank's part
            of each; offsets count from the start of any shard.
    """

    name: str
    parts: tuple[Part, ...]
    tied: tuple[tuple[str, str], ...]
    shard: int
    ranks: int
    rank: int
    layout: Literal["flat", "each"] = "flat"

    @property
    def size(self) -> int:
        """Elements of the gathered tensor, padding included."""
        return self.shard * self.ranks

    @property
    def own(self) -> tuple[int, int]:
        """First element of this rank's segment, and the one after its last."""
        return self.shard * self.rank, self.shard * (self.rank + 1)

    @property
    def padding(self) -> int:
        """Elements at the end that belong to no parameter."""
        return self.size - sum(part.size for part in self.parts)

    def names(self) -> Iterator[tuple[str, Part]]:
        """Each name of each parameter, tied ones included."""
        by_name = {part.name: part for part in self.parts}
        yield from by_name.items()
        for name, owner in self.tied:
            if owner in by_name:
                yield name, by_name[owner]

    def as_fields(self) -> dict[str, Any]:
        """What every mark about a buffer says of it."""
        return {
            "buffer": self.name,
            "parameters": [[part.name, part.offset, list(part.shape)] for part in self.parts],
            "tied": [list(pair) for pair in self.tied],
        }
