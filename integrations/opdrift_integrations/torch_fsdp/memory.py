"""Where shards and gathered parameters lie, cut into the pieces that both are compared by."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from opdrift.composition import Joints
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


@dataclass(frozen=True, slots=True)
class Cut:
    """A buffer in pieces, and what follows from how it was cut.

    Attributes:
        buffer: Where the parameters lie in it.
        pieces: All of it, in the order in which memory has them.
        mine: The pieces of this rank's shard.
        mine_at: Where they are among `pieces`.
        parts: Joins the pieces of each parameter; `shards` those of each rank's shard.
        sizes: Of the pieces; `mine_sizes` of those of this rank's shard, `part_sizes` of those of each parameter.
    """

    buffer: Buffer
    pieces: tuple[Piece, ...]
    mine: tuple[Piece, ...]
    mine_at: slice
    parts: Joints
    shards: Joints
    sizes: tuple[int, ...]
    mine_sizes: tuple[int, ...]
    part_sizes: tuple[tuple[int, ...], ...]


def cut(buffer: Buffer) -> Cut:
    """Cut a buffer into the pieces by which it is compared."""
    pieces = pieces_of(buffer)
    of_parts = _places([piece.part for piece in pieces], len(buffer.parts))
    of_ranks = _places([piece.owner for piece in pieces], buffer.ranks)
    mine_at = of_ranks[buffer.rank]
    sizes = tuple(piece.size for piece in pieces)
    return Cut(
        buffer,
        pieces,
        pieces[mine_at],
        mine_at,
        Joints(sizes, of_parts),
        Joints(sizes, of_ranks),
        sizes,
        sizes[mine_at],
        tuple(sizes[places] for places in of_parts),
    )


def _places(numbers: Sequence[int | None], count: int) -> list[slice]:
    """Where each number from 0 to `count` is among these; each comes at even steps."""
    places: list[list[int]] = [[] for _ in range(count)]
    for at, number in enumerate(numbers):
        if number is not None:
            places[number].append(at)
    found = []
    for each in places:
        step = each[1] - each[0] if len(each) > 1 else 1
        found.append(slice(each[0], each[-1] + 1, step) if each else slice(0, 0))
        assert len(range(*found[-1].indices(len(numbers)))) == len(each)
    return found


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

    def shard(self) -> Sequence[Stretches]:
        """All of this rank's shard, in its pieces."""

    def whole(self) -> Sequence[Stretches]:
        """All that was gathered, in its pieces."""

    def segment(self) -> Sequence[Stretches]:
        """What this rank contributed to what was gathered, in its pieces."""

    def parameter(self, part: int) -> Any:
        """A gathered parameter as the model computes with it."""


@dataclass(frozen=True, slots=True)
class FlatMemory:
    """One flat tensor for all parameters (FSDP1, fairscale).

    Attributes:
        cut: How it is cut.
        master: This rank's shard.
        everything: The gathered tensor with its padding, one dim.
        strides: Of each parameter that is not contiguous; None for the others.
    """

    cut: Cut
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

    def shard(self) -> Sequence[Stretches]:
        """The one shard."""
        return ((self.master, self.cut.mine_sizes),)

    def whole(self) -> Sequence[Stretches]:
        """The one gathered tensor."""
        return ((self.everything, self.cut.sizes),)

    def segment(self) -> Sequence[Stretches]:
        """A slice of the gathered tensor."""
        start, end = self.cut.buffer.own
        return ((self.everything[start:end], self.cut.mine_sizes),)

    def parameter(self, part: int) -> Any:
        """A gathered parameter as the model computes with it."""
        where, stride = self.cut.buffer.parts[part], self.strides[part]
        flat = self.everything[where.offset : where.offset + where.size]
        return flat.view(where.shape) if stride is None else flat.as_strided(where.shape, stride)


@dataclass(frozen=True, slots=True)
class EachMemory:
    """A tensor for each parameter (FSDP2).

    Attributes:
        cut: How they are cut.
        params: The `FSDPParam` of each.
        outer: Per parameter the product of the dims before the one that is sharded: ranks alternate so often.
    """

    cut: Cut
    params: Sequence[Any]
    outer: Sequence[int]

    @property
    def masters(self) -> Sequence[Any]:
        """This rank's shards, padded, one dim each."""
        return [shard_of(param) for param in self.params]

    @property
    def gathered(self) -> Sequence[Any]:
        """The gathered tensors, padded, one dim each."""
        return [param.all_gather_outputs[0] for param in self.params]

    def own(self, piece: Piece) -> Any:
        """A piece of this rank's shard as it is kept."""
        assert piece.part is not None
        return shard_of(self.params[piece.part])

    def shard(self) -> Sequence[Stretches]:
        """The shard of each parameter."""
        sizes = self.cut.mine_sizes
        return [(shard_of(param), (size,)) for param, size in zip(self.params, sizes, strict=True)]

    def whole(self) -> Sequence[Stretches]:
        """Each gathered parameter, in one where the ranks lie end to end in it."""
        if max(self.outer) == 1:
            return list(zip(self.gathered, self.cut.part_sizes, strict=True))
        found: list[Stretches] = []
        for part, sizes in enumerate(self.cut.part_sizes):
            if self.outer[part] == 1:
                found.append((self.params[part].all_gather_outputs[0], sizes))
            else:
                found += [(self._of(part, rank), (size,)) for rank, size in enumerate(sizes)]
        return found

    def segment(self) -> Sequence[Stretches]:
        """A slice of each gathered parameter."""
        rank = self.cut.buffer.rank
        return [(self._of(part, rank), (size,)) for part, size in enumerate(self.cut.mine_sizes)]

    def parameter(self, part: int) -> Any:
        """A gathered parameter as the model computes with it."""
        return self.params[part]._unsharded_param

    def _of(self, part: int, rank: int) -> Any:
        """What a rank contributed to a gathered parameter."""
        whole = self.params[part].all_gather_outputs[0]
        return whole.view(self.outer[part], self.cut.buffer.ranks, -1)[:, rank]


def shard_of(param: Any) -> Any:
    """This rank's shard of an `FSDPParam`, padded: of the whole group, or after a forward of a smaller one."""
    state = param.sharded_state
    if state is type(state).SHARDED_POST_FORWARD:
        return param._sharded_post_forward_param_data.reshape(-1)
    return param._sharded_param_data
