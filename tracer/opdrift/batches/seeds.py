"""Where the batch and the padded length are in what a model is called with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from opdrift.batch import Batch

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Input:
    """An input as far as it is looked at: its shape and what kind of numbers it holds."""

    name: str
    shape: Shape
    kind: Literal["float", "integer", "bool"] = "float"


@dataclass(frozen=True, slots=True)
class Seed:
    """Where the axes are in an input.

    Attributes:
        batch: The dim of the batch; None if it carries none.
        lengths: The dims of the padded length: both of a mask of queries by keys.
        unknown: Why the batch cannot be told from another dim of its size; None if it can.
        length_unknown: The same for the padded length.
    """

    batch: int | None = None
    lengths: tuple[int, ...] = ()
    unknown: str | None = None
    length_unknown: str | None = None


def find_seeds(
    inputs: Sequence[Input], batch: Batch, length: int | None
) -> tuple[list[Seed], int | None]:
    """Find the axes in the inputs of one call.

    The batch is the leading dim of its size, or else the second one (T x B layouts, recurrent states).
    The padded length is the dim whose size is the longest sample's; if no input has one, the other dim of the
    2-d inputs, if they agree. Where two dims could be meant, nothing is claimed.

    Args:
        inputs: In the order of the arguments.
        batch: What the user said.
        length: The padded length as known from an earlier call; None at the first.

    Returns:
        A seed for each input, and the padded length, None if there is none.
    """
    places = [_batch_dim(given, batch.size, first=i == 0) for i, given in enumerate(inputs)]
    if batch.lengths is None:
        return [Seed(dim, unknown=why) for dim, why in places], None
    dims = [dim for dim, _ in places]
    if length is None:
        length = _padded_length(list(zip(inputs, dims, strict=True)), batch.lengths, batch.size)
    seeds = []
    for given, (dim, why) in zip(inputs, places, strict=True):
        found, unknown = _length_dims(given, dim, length, alone=batch.size == 1)
        seeds.append(Seed(dim, found, why, unknown))
    return seeds, length


def _batch_dim(given: Input, size: int, *, first: bool) -> tuple[int | None, str | None]:
    shape = given.shape
    if size == 1 or not shape or 0 in shape:
        return None, None
    second = len(shape) > 1 and shape[1] == size
    if shape[0] == size:
        if second and not first and given.kind != "integer" and len(shape) < 4:
            return None, (
                f"{given.name} has two leading dims of {size}: a mask of {size} positions and a state of"
                f" {size} layers look the same as a batch"
            )
        return 0, None
    return (1, None) if second else (None, None)


def _other_dims(given: Input, batch_dim: int | None, *, alone: bool) -> list[int]:
    """Dims that can be the padded length: not the batch, of an input that carries it."""
    if batch_dim is None and not alone:
        return []
    return [d for d in range(len(given.shape)) if d != batch_dim]


def _padded_length(
    inputs: Iterable[tuple[Input, int | None]], lengths: Sequence[int], size: int
) -> int | None:
    longest = max(lengths)
    tables: set[int] = set()
    for given, dim in inputs:
        others = [given.shape[d] for d in _other_dims(given, dim, alone=size == 1)]
        if longest in others:
            return longest
        if len(given.shape) == 2:
            tables.update(n for n in others if n > longest)
    return tables.pop() if len(tables) == 1 else None


def _length_dims(
    given: Input, batch_dim: int | None, length: int | None, *, alone: bool
) -> tuple[tuple[int, ...], str | None]:
    dims = _other_dims(given, batch_dim, alone=alone)
    if length is None:
        return (), f"no dim of the inputs is the padded length of {given.name}" if dims else None
    if length < 2:
        return (), None
    found = tuple(d for d in dims if given.shape[d] == length)
    if len(found) < 2:
        return found, None
    last_two = found == (len(given.shape) - 2, len(given.shape) - 1)
    if last_two and (given.kind == "bool" or len(given.shape) == 4):
        return found, None
    return (
        (),
        f"{given.name} has {len(found)} dims of {length}, and one of them is the padded length",
    )
