"""What is known of a storage: the steps that its axes take, and flags."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from torch import Tensor

from opdrift.batches.calls import COUNT, Placed
from opdrift.tracefile.axes import (
    BATCH,
    LENGTH_UNKNOWN,
    UNKNOWN,
    Missing,
    Position,
    Step,
    locate,
    step_of,
)

_MAX_PLACES: Final = 65536


class Track(NamedTuple):
    """What is known of a storage: the steps of its axes, and flags."""

    steps: tuple[Step, ...] = ()
    flags: int = 0

    @property
    def carries(self) -> bool:
        """Whether it tells of the batch or of a padded length."""
        return bool(self.flags) or any(step.axis != COUNT for step in self.steps)


LOST: Final = Track((), UNKNOWN | LENGTH_UNKNOWN)


class Known:
    """What hangs on a storage: its track, and the value of it that was recorded last."""

    __slots__ = ("carries", "recorded", "track")

    def __init__(self, track: Track) -> None:
        self.track: Track | None = track
        self.carries = track.carries
        self.recorded = 0


class Tracks:
    """The tracks of one recorder, by an attribute of the storages' Python objects, as its values are."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._places: dict[tuple[object, ...], tuple[tuple[Position, ...], int]] = {}

    def known(self, tensor: Tensor) -> Known | None:
        """What hangs on a tensor's storage."""
        try:
            found: Known | None = getattr(tensor.untyped_storage(), self._key, None)
        except (RuntimeError, NotImplementedError):  # sparse, mkldnn, nested
            return None
        return found

    def of(self, tensor: Tensor) -> Track | None:
        """The track of a tensor's storage; where there is none to hang it on, nothing can be followed."""
        if tensor.is_nested:
            return LOST
        try:
            found: Known | None = getattr(tensor.untyped_storage(), self._key, None)
        except (RuntimeError, NotImplementedError):
            return LOST
        return None if found is None else found.track

    def put(self, tensor: Tensor, track: Track) -> None:
        """Replace the track of a tensor's storage."""
        known = self.known(tensor)
        is_empty = not track.steps and not track.flags
        if known is not None:
            known.track = None if is_empty else track
            known.carries = track.carries
        elif not is_empty:
            setattr(tensor.untyped_storage(), self._key, Known(track))

    def located(self, track: Track, tensor: Tensor) -> tuple[tuple[Position, ...], int]:
        """Where a track's axes lie in a tensor of its storage, and its flags there."""
        strides = byte_strides(tensor)
        key = (track, tensor.shape, strides)
        found = self._places.get(key)
        if found is None:
            if len(self._places) >= _MAX_PLACES:
                self._places.clear()
            found = self._places[key] = locate_all(track, tensor.shape, strides)
        return found


def locate_all(
    track: Track, shape: Sequence[int], strides: Sequence[int]
) -> tuple[tuple[Position, ...], int]:
    """Where the axes of a track lie; an axis of which only a part is there is unknown."""
    found = [(step, locate(step, shape, strides)) for step in track.steps]
    positions = tuple(p for _, p in found if isinstance(p, Position))
    flags = track.flags
    if any(step.axis == BATCH for step in track.steps) and not any(
        p.axis == BATCH for p in positions
    ):
        flags |= UNKNOWN
    cut = any(step.axis > BATCH and p is Missing.CUT for step, p in found)
    if cut and not any(p.axis > BATCH for p in positions):
        flags |= LENGTH_UNKNOWN
    return positions, flags


def track_of(placed: Placed, tensor: Tensor) -> Track:
    """The track of a tensor in which the axes lie like this."""
    if not placed.positions:
        return Track((), placed.flags)
    strides = byte_strides(tensor)
    steps = (step_of(position, strides) for position in placed.positions)
    return Track(tuple(sorted({step for step in steps if step is not None})), placed.flags)


def byte_strides(tensor: Tensor) -> tuple[int, ...]:
    """The strides in bytes, so that a view of another dtype changes nothing."""
    size = tensor.element_size()
    return tuple(stride * size for stride in tensor.stride())
