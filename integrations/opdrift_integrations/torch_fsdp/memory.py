"""Where shards and gathered parameters lie, cut into the pieces that both are compared by."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from opdrift_integrations.layouts import Buffer


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of a gathered buffer that one rank contributed, of one parameter.

    Attributes:
        owner: The rank's number in its group.
        part: Number of the parameter among the buffer's parts; None for padding between or behind them.
        offset: Element of the parameter with which it begins, as FSDP lays it out.
        start: Element of the owner's shard with which it begins.
        size: Elements.
    """

    owner: int
    part: int | None
    offset: int
    start: int
    size: int


def pieces_of(buffer: Buffer) -> tuple[Piece, ...]:
    """All of a buffer in pieces, in the order in which memory has them where it is gathered."""
    return tuple(_of_each(buffer) if buffer.layout == "each" else _of_flat(buffer))


def _of_each(buffer: Buffer) -> Iterator[Piece]:
    ends = [part.offset for part in buffer.parts[1:]] + [buffer.shard]
    for number, (part, end) in enumerate(zip(buffer.parts, ends, strict=True)):
        size = end - part.offset
        for owner in range(buffer.ranks):
            yield Piece(owner, number, owner * size, part.offset, size)


def _of_flat(buffer: Buffer) -> Iterator[Piece]:
    cuts = {buffer.shard * owner for owner in range(buffer.ranks)} | {buffer.size}
    for part in buffer.parts:
        cuts |= {part.offset, part.offset + part.size}
    bounds = sorted(cuts)
    number = 0
    for start, end in itertools.pairwise(bounds):
        while number < len(buffer.parts) and _end(buffer, number) <= start:
            number += 1
        inside = number < len(buffer.parts) and buffer.parts[number].offset <= start
        offset = start - buffer.parts[number].offset if inside else 0
        owner = start // buffer.shard
        yield Piece(
            owner, number if inside else None, offset, start - owner * buffer.shard, end - start
        )


def _end(buffer: Buffer, number: int) -> int:
    return buffer.parts[number].offset + buffer.parts[number].size


#: A tensor, and of how many elements each piece is that follows in it.
Stretches = tuple[Any, Sequence[int]]


class Memory(Protocol):
    """A buffer of a unit while it is gathered: its tensors, and this rank's shard. All of them are torch's."""

    @property
    def masters(self) -> Sequence[Any]:
        """The tensors that hold this rank's shard between gathers."""

    @property
    def gathered(self) -> Sequence[Any]:
        """The tensors that hold what was gathered."""

    def own(self, piece: Piece) -> Any:
        """A piece of this rank's shard as it is kept."""

    def full(self, piece: Piece) -> Any:
        """A piece of what was gathered."""

    def shard(self, pieces: Sequence[Piece]) -> Sequence[Stretches]:
        """All of this rank's shard, which consists of these pieces."""

    def whole(self, pieces: Sequence[Piece]) -> Sequence[Stretches]:
        """All that was gathered, which consists of these pieces."""

    def segment(self, pieces: Sequence[Piece]) -> Sequence[Stretches]:
        """What this rank contributed to what was gathered, which consists of these pieces."""

    def parameter(self, part: int) -> Any:
        """A gathered parameter as the model computes with it."""


@dataclass(frozen=True, slots=True)
class FlatMemory:
    """One flat tensor for all parameters (FSDP1).

    Attributes:
        buffer: Where the parameters lie in it.
        master: This rank's shard.
        everything: The gathered tensor with its padding, one dim.
        strides: Of each parameter that is not contiguous; None for the others.
    """

    buffer: Buffer
    master: Any
    everything: Any
    strides: tuple[tuple[int, ...] | None, ...]

    @property
    def masters(self) -> Sequence[Any]:
        """The one shard."""
        return (self.master,)

    @property
    def gathered(self) -> Sequence[Any]:
        """The one gathered tensor."""
        return (self.everything,)

    def own(self, piece: Piece) -> Any:
        """A piece of this rank's shard as it is kept."""
        return self.master[piece.start : piece.start + piece.size]

    def full(self, piece: Piece) -> Any:
        """A piece of what was gathered."""
        start = piece.owner * self.buffer.shard + piece.start
        return self.everything[start : start + piece.size]

    def shard(self, pieces: Sequence[Piece]) -> Sequence[Stretches]:
        """The one shard."""
        return ((self.master, _sizes(pieces)),)

    def whole(self, pieces: Sequence[Piece]) -> Sequence[Stretches]:
        """The one gathered tensor."""
        return ((self.everything, _sizes(pieces)),)

    def segment(self, pieces: Sequence[Piece]) -> Sequence[Stretches]:
        """A slice of the gathered tensor."""
        start, end = self.buffer.own
        return ((self.everything[start:end], _sizes(pieces)),)

    def parameter(self, part: int) -> Any:
        """A gathered parameter as the model computes with it."""
        where, stride = self.buffer.parts[part], self.strides[part]
        flat = self.everything[where.offset : where.offset + where.size]
        return flat.view(where.shape) if stride is None else flat.as_strided(where.shape, stride)


@dataclass(frozen=True, slots=True)
class EachMemory:
    """A tensor for each parameter (FSDP2).

    Attributes:
        buffer: Where the parameters lie in a shard.
        masters: This rank's shards, padded, one dim each.
        gathered: The gathered tensors, padded, one dim each.
        parameters: What the model computes with.
        outer: Per parameter the product of the dims before the one that is sharded: ranks alternate so often.
    """

    buffer: Buffer
    masters: Sequence[Any]
    gathered: Sequence[Any]
    parameters: Sequence[Any]
    outer: Sequence[int]

    def own(self, piece: Piece) -> Any:
        """A piece of this rank's shard as it is kept."""
        assert piece.part is not None
        return self.masters[piece.part]

    def full(self, piece: Piece) -> Any:
        """A piece of what was gathered."""
        assert piece.part is not None
        whole = self.gathered[piece.part]
        return whole.view(self.outer[piece.part], self.buffer.ranks, -1)[:, piece.owner]

    def shard(self, pieces: Sequence[Piece]) -> Sequence[Stretches]:
        """The shard of each parameter."""
        return [(self.own(piece), (piece.size,)) for piece in pieces]

    def whole(self, pieces: Sequence[Piece]) -> Sequence[Stretches]:
        """Each gathered parameter, in one where the ranks lie end to end in it."""
        found: list[Stretches] = []
        for number, outer in enumerate(self.outer):
            of_ranks = pieces[number * self.buffer.ranks : (number + 1) * self.buffer.ranks]
            if outer == 1:
                found.append((self.gathered[number], _sizes(of_ranks)))
            else:
                found += self.segment(of_ranks)
        return found

    def segment(self, pieces: Sequence[Piece]) -> Sequence[Stretches]:
        """A slice of each gathered parameter."""
        return [(self.full(piece), (piece.size,)) for piece in pieces]

    def parameter(self, part: int) -> Any:
        """A gathered parameter as the model computes with it."""
        return self.parameters[part]


def _sizes(pieces: Sequence[Piece]) -> list[int]:
    return [piece.size for piece in pieces]
