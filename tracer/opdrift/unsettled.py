"""Inputs in memory that cannot just be read: nothing has written it, something fills it, or generated code has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from opdrift.memory import Generated, InFlight, Unwritten
from opdrift.neutral import silent
from opdrift.records import COMPILED, READ_IN_FLIGHT, READ_UNINITIALISED, REREAD
from opdrift.storages import Entry, StorageState, in_layout, is_readable, key_of

if TYPE_CHECKING:
    from torch import Tensor

    from opdrift.buffers import ThreadBuffers
    from opdrift.memory import Use
    from opdrift.values import Values


class Unsettled:
    """What an op reads from such memory.

    Args:
        values: The values of the recording.
    """

    def __init__(self, values: Values) -> None:
        self._values = values

    def look(
        self,
        t: ThreadBuffers,
        tensor: Tensor,
        state: StorageState,
        entry: Entry,
        use: Use,
        flags: int,
    ) -> tuple[Entry, int]:
        """An input in memory that is unwritten, in flight or generated code's: its value, the op's flags."""
        if tensor.numel() == 0 or not use.reads(tensor):
            return entry, flags
        special = state.special
        if isinstance(special, Generated):
            return self.generated(t, tensor, state, entry, flags)
        if isinstance(special, InFlight):
            # on a device the program may have ordered streams, which nobody can see from here
            if tensor.is_cpu and special.is_under_way():
                return entry, flags | READ_IN_FLIGHT
            if special.is_done():
                self._arrived(t, tensor, state, special)
                # what is around the part that was filled, its content does not tell
                if state.partial:
                    self._values.show(t, tensor, state, entry[0], key_of(tensor))
            return entry, flags
        if not isinstance(special, Unwritten) or not is_readable(tensor):
            return entry, flags
        if special.was_touched(tensor.untyped_storage()):
            state.special = None
            flags |= REREAD
        elif not special.may_hold(tensor):
            if use.plan.hands_on:
                return entry, flags
            flags |= READ_UNINITIALISED
        if entry[0] != state.hashed and self._values.fingerprint(
            t, tensor, entry[0], is_there=True
        ):
            state.hashed = entry[0]
        return entry, flags

    def _arrived(
        self, t: ThreadBuffers, tensor: Tensor, state: StorageState, in_flight: InFlight
    ) -> None:
        """Fingerprint what was filled, whole, whatever part of it is read first: that is a matter of time."""
        state.special = None
        with silent():
            for key, value in in_flight.filled.pop(state.id, ()):
                whole = in_layout(tensor.untyped_storage(), key)
                if whole is not None:
                    self._values.show(t, whole, state, value, key)

    def generated(
        self, t: ThreadBuffers, tensor: Tensor, state: StorageState, entry: Entry, flags: int
    ) -> tuple[Entry, int]:
        """A buffer that generated code may have written since it was last seen."""
        leaf = state.leaf
        assert leaf is not None
        if not flags & COMPILED:
            state.special = None  # handed over: from here on it is the program's
        elsewhere = self._values.is_elsewhere(tensor)
        if leaf.key is not None or (elsewhere and state.hashed):
            # on a device it counts as written: to look would mean to wait at every op
            if not elsewhere and self._values.rereading.is_unchanged(tensor, leaf):
                return entry, flags
            state.writes += 1
            state.values = {}
            leaf.forget()
            entry = self._values.make(t, state, key_of(tensor))
        self._values.show(t, tensor, state, entry[0], key_of(tensor))
        return entry, flags | REREAD
