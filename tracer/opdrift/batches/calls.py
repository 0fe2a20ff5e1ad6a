"""An op as the rules see it: where the followed axes lie in its operands, and what becomes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from opdrift.batches.lengths import Lengths
from opdrift.tracefile.axes import (
    BATCH,
    LENGTH_UNKNOWN,
    MIXED,
    UNKNOWN,
    UNSURE,
    Position,
    fits,
)

COUNT: Final = -1
"""The axis of what `arange` made: its items are 0, 1, ..., so indexing with all of them moves nothing."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor argument.

    Attributes:
        index: Which of the tensors of the call it is.
        shape: Its shape.
        positions: Where the batch and padded lengths lie in it.
        flags: As in the table `axes`.
        boolean: It is a mask where it is used as an index.
        counts: Along which dim its items are 0, 1, ..., all others being of size 1 or expanded.
    """

    index: int
    shape: Shape
    positions: tuple[Position, ...] = ()
    flags: int = 0
    boolean: bool = False
    counts: int | None = None

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.shape)

    @property
    def batch(self) -> tuple[Position, ...]:
        """Where the batch lies."""
        return tuple(p for p in self.positions if p.axis == BATCH)

    @property
    def lengths(self) -> tuple[Position, ...]:
        """Where padded lengths lie."""
        return tuple(p for p in self.positions if p.axis != BATCH)


class Placed(NamedTuple):
    """Where the axes lie in an output.

    `laid_out_by` says which operands the output's dims come from, all if None: padding that could not be
    followed in another one (a mask that is summed away) is not in it. `constant` says that its content depends
    on none of them.
    """

    positions: tuple[Position, ...] = ()
    flags: int = 0
    laid_out_by: tuple[int, ...] | None = None
    constant: bool = False


class Learned(NamedTuple):
    """Where the axes must lie in an operand that none was known of, since the op lines it up with another."""

    operand: int
    positions: tuple[Position, ...]


@dataclass(slots=True)
class Call:
    """One call of an op.

    Attributes:
        name: Without namespace and overload: `add_`.
        args: Positional arguments, an `Operand` for each tensor.
        kwargs: The others.
        outputs: Shapes of what it returned, then of what else it wrote.
        lengths: The extents of padded axes.
        arguments: Position of each argument, by name.
        learned: Filled by the rules.
    """

    name: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    outputs: Sequence[Shape]
    lengths: Lengths
    arguments: Mapping[str, int] = field(default_factory=dict)
    learned: list[Learned] = field(default_factory=list)

    @property
    def operands(self) -> Iterator[Operand]:
        """All tensors among the arguments, in order."""
        yield from _operands(self.args)
        yield from _operands(self.kwargs.values())

    def value(self, name: str, default: Any = None) -> Any:
        """An argument by its name in the schema."""
        position = self.arguments.get(name)
        if position is not None and position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default)

    def tensor(self, name: str) -> Operand | None:
        """A tensor argument by its name."""
        found = self.value(name)
        return found if isinstance(found, Operand) else None


Rule = Callable[[Call, int], Placed]
"""Where the axes lie in output k of a call."""


def _operands(items: Iterable[Any]) -> Iterator[Operand]:
    for item in items:
        if isinstance(item, Operand):
            yield item
        elif isinstance(item, list | tuple):
            yield from _operands(item)


def settle(call: Call, k: int, placed: Placed) -> Placed:
    """Finish what a rule found: drop what cannot be, and add what follows from the operands' flags.

    A position that does not fit the output's shape is a rule that does not cover the case: the answer is
    "unknown", never a wrong dim.
    """
    flags = placed.flags
    kept: list[Position] = []
    for position in dict.fromkeys(placed.positions):
        if position.size == 1:
            continue
        if not fits(position, call.outputs[k]):
            flags |= UNKNOWN if position.axis == BATCH else LENGTH_UNKNOWN
        else:
            kept.append(position)
    kept, clash = _without_clashes(kept)
    flags |= clash
    for operand in () if placed.constant else call.operands:
        flags |= operand.flags & (MIXED | UNKNOWN | UNSURE)
        if placed.laid_out_by is None or operand.index in placed.laid_out_by:
            flags |= operand.flags & LENGTH_UNKNOWN
    batch = sum(p.axis == BATCH for p in kept)
    if batch > 1:
        flags |= MIXED
    if batch and flags & UNKNOWN:
        flags = flags & ~UNKNOWN | UNSURE
    if any(p.axis > BATCH for p in kept) or all(n == 1 for n in call.outputs[k]):
        flags &= ~LENGTH_UNKNOWN
    return Placed(tuple(kept), flags)


def _without_clashes(positions: list[Position]) -> tuple[list[Position], int]:
    """Drop padded axes of which two with other extents lie in the same place."""
    places: dict[tuple[int, ...], int] = {}
    for position in positions:
        places[position[:4]] = places.get(position[:4], 0) + (position.axis > BATCH)
    kept = [p for p in positions if p.axis <= BATCH or places[p[:4]] == 1]
    return kept, LENGTH_UNKNOWN if len(kept) < len(positions) else 0


def moved(position: Position, dim: int) -> Position:
    """The same position in another dim."""
    return position._replace(dim=dim)


def dim_of(dim: int, ndim: int) -> int:
    """A dim counted from the front."""
    return dim + ndim if dim < 0 else dim


def aligned(operand: Operand, shape: Shape) -> list[Position]:
    """The positions of an operand that is broadcast to a shape: dims are matched from the right."""
    shift = len(shape) - operand.ndim
    return [
        moved(p, p.dim + shift)
        for p in operand.positions
        if p.dim + shift >= 0 and shape[p.dim + shift] == operand.shape[p.dim]
    ]


def line_up(call: Call, operand: Operand, shape: Shape, positions: Iterable[Position]) -> None:
    """Note where axes must lie in an operand that is broadcast to `shape`, where they lie as in `positions`.

    Element by element, item n of an axis meets item n of the operand: a mask, a position table or a
    draw of random numbers, in which nothing could be followed.
    """
    shift = len(shape) - operand.ndim
    padded = {p.dim for p in operand.lengths}
    found = [
        moved(p, p.dim - shift)
        for p in dict.fromkeys(positions)
        if p.dim >= shift and operand.shape[p.dim - shift] == shape[p.dim]
    ]
    batch = [p for p in found if p.axis == BATCH and not operand.batch]
    lengths = [p for p in found if p.axis != BATCH and p.dim not in padded]
    if (batch or lengths) and len(batch) < 2:
        call.learned.append(Learned(operand.index, (*operand.positions, *batch, *lengths)))
