"""Which tensors a program declares to be the same on several ranks: a DTensor's placements say so."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor

from opdrift.neutral import silent

if TYPE_CHECKING:
    from opdrift.buffers import ThreadBuffers
    from opdrift.values import Values

#: So many values are known to be told already; after that some are told again.
_REMEMBERED: Final = 4096

Ranks = tuple[int, ...]


class Placements:
    """Tells of the local tensors of DTensors that ops are given.

    Args:
        values: Identity of tensors.
        write_mark: Writes a mark: (thread buffers, kind, fields).
    """

    def __init__(
        self,
        values: Values,
        write_mark: Callable[[ThreadBuffers, str, Mapping[str, Any]], None],
    ) -> None:
        self._values = values
        self._write_mark = write_mark
        #: mesh and placements -> the ranks that hold the same as this one
        self._ranks: dict[tuple[Any, Any], Ranks] = {}
        self._told: dict[int, None] = {}

    def note(self, t: ThreadBuffers, name: str, arguments: Sequence[Any]) -> None:
        """Write down which inputs of an op are to be the same on several ranks, each once."""
        found: dict[Ranks, list[int]] = {}
        for tensor in _dtensors(arguments):
            ranks = self._held_by(tensor._spec)
            value = self._value(tensor._local_tensor) if len(ranks) > 1 else None
            if value is not None and value not in self._told:
                self._remember(value)
                found.setdefault(ranks, []).append(value)
        for ranks, values in found.items():
            fields = {"op": name, "values": values, "ranks": list(ranks)}
            self._write_mark(t, "replicated", fields)

    def _value(self, local: Tensor) -> int | None:
        """The value of a local tensor that is there: a collective may still be filling others."""
        if type(local) is not Tensor:
            return None
        found = self._values.value_of(local)
        return None if found is None or found[1] is None else found[1][0]

    def _remember(self, value: int) -> None:
        if len(self._told) >= _REMEMBERED:
            self._told.clear()
        self._told[value] = None

    def _held_by(self, spec: Any) -> Ranks:
        key = spec.mesh, spec.placements
        if key not in self._ranks:
            with silent():
                self._ranks[key] = replicated_over(spec.mesh, spec.placements)
        return self._ranks[key]


def replicated_over(mesh: Any, placements: Sequence[Any]) -> Ranks:
    """The ranks of a mesh that hold the same as this one: those that differ from it in replicated dims only."""
    here = mesh.get_coordinate()
    if here is None:
        return ()
    along = [
        range(size) if placement.is_replicate() else (place,)
        for size, place, placement in zip(mesh.shape, here, placements, strict=True)
    ]
    grid = mesh.mesh.tolist()
    return tuple(sorted(_at(grid, place) for place in product(*along)))


def _at(grid: Any, place: Sequence[int]) -> int:
    for number in place:
        grid = grid[number]
    return int(grid)


def _dtensors(arguments: Sequence[Any]) -> Iterator[Any]:
    """The DTensors among arguments, also in lists, by what they have: their module may not be imported."""
    for each in arguments:
        if isinstance(each, (list, tuple)):
            yield from _dtensors(each)
        elif isinstance(each, Tensor) and hasattr(each, "_spec") and hasattr(each, "_local_tensor"):
            yield each
