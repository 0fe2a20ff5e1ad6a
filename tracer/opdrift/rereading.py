"""Read leaves again at their use, to find writes that no op made."""

from __future__ import annotations

import weakref
from time import perf_counter_ns as now
from typing import TYPE_CHECKING, Final

import torch

from opdrift.neutral import silent
from opdrift.storages import Entry, Key, Leaf, StorageState, in_layout, key_of, version_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from opdrift.buffers import ThreadBuffers
    from opdrift.fingerprint.partials import Rows
    from opdrift.memory import Use
    from opdrift.values import Values

#: Share of the run's time that re-reading may take under integrity="auto", and a first grant.
RECHECK_SHARE: Final = 0.015
RECHECK_GRANT_NS: Final = 750_000
#: To look at a leaf and find that it has had its turn takes so long (measured in a loop of tiny ops).
_LOOK_NS: Final = 1_000
#: After so many uses of leaves that have had their turn, another round begins.
_ROUND: Final = 256
#: At least so many bytes a device reads in a nanosecond when it fingerprints them (decision 7): its time counts, too.
_DEVICE_BYTES_PER_NS: Final = 500
_NEVER: Final = 1 << 62
#: Before the clock of a thread that has not run an op yet.
_ALWAYS: Final = -1


class Rereading:
    """When leaves are read again, and what comes of it.

    Args:
        values: The values of the recording.
        integrity: How often: "auto", "full" or "off".
        thread: The buffers of the current thread.
    """

    def __init__(
        self, values: Values, integrity: str, *, thread: Callable[[], ThreadBuffers]
    ) -> None:
        self._values = values
        self._thread = thread
        self._always = integrity == "full"
        self.opened = now()
        self._spent = 0
        #: leaves may be read again at use from this moment on (perf_counter_ns)
        self.gate = _NEVER if integrity == "off" else _ALWAYS
        #: leaves whose turn is not later than this round may be read
        self.round = 0
        self._passed_over = 0

    def look(
        self,
        t: ThreadBuffers,
        tensor: Tensor,
        state: StorageState,
        entry: Entry,
        use: Use,
        *,
        compiled: int,
    ) -> Entry:
        """A leaf at its use: has it moved, or is it to be read again? The present value of it.

        `compiled` says that code which torch.compile generated reads it: such code writes its own buffers with no op.
        """
        # views and writes look at no content: FSDP gives memory back, and fills other memory later
        if not use.reads(tensor):
            return entry
        leaf = state.leaf
        if compiled and leaf is not None and leaf.made:
            changed = state.special is None and self.is_unchanged(tensor, leaf) is False
            return self._changed(t, tensor, state, leaf, told=False) if changed else entry
        at = tensor.untyped_storage().data_ptr() or 1
        if at != state.at or version_of(tensor) != state.version:
            found = self.moved(t, tensor, state, entry)
            if found is not entry:
                return found
        return self._recheck(t, tensor, state, entry) if t.clock > self.gate else entry

    def passes_over(self, leaf: Leaf | None) -> bool:
        """Whether a leaf at its use has had its turn to be read again; the gate is open.

        This is all that most uses come to, so it asks nothing else, not even whether the op reads it.
        """
        if leaf is None or self._always or leaf.turn <= self.round:
            return False
        self._passed_over += 1
        if self._passed_over >= _ROUND:
            self.round += 1
            return False
        self._spend(_LOOK_NS)
        return True

    def moved(self, t: ThreadBuffers, tensor: Tensor, state: StorageState, entry: Entry) -> Entry:
        """A leaf whose address or version changed with no op that we saw: read it again.

        The content, not the trigger, tells whether it changed.
        """
        at, version = tensor.untyped_storage().data_ptr() or 1, version_of(tensor)
        leaf = state.leaf
        assert leaf is not None
        # `p` and `p.data` have two version counters
        known = at == state.at and version in leaf.versions
        state.at, state.version = at, version
        if known:
            return entry
        leaf.at_version(version)
        return self.reread(t, tensor, state, entry)

    def reread(self, t: ThreadBuffers, tensor: Tensor, state: StorageState, entry: Entry) -> Entry:
        """The value of a leaf as it is now, after something may have written it with no op that we saw."""
        leaf = state.leaf
        assert leaf is not None
        if state.special is not None or self.is_unchanged(tensor, leaf):
            return entry
        return self._changed(t, tensor, state, leaf)

    def _recheck(
        self, t: ThreadBuffers, tensor: Tensor, state: StorageState, entry: Entry
    ) -> Entry:
        """Read a leaf again at use if the time for it is there; a change without a writer is a new value."""
        leaf = state.leaf
        if leaf is None or state.special is not None:
            return entry
        if self.passes_over(leaf):
            return entry
        self._passed_over = 0
        leaf.turn = self.round + 1
        started = now()
        if not self._always and self._values.is_elsewhere(tensor):
            self._probe(t, tensor, state, leaf)
            self._spent += tensor.nbytes // _DEVICE_BYTES_PER_NS
        elif self.is_unchanged(tensor, leaf) is False:
            entry = self._changed(t, tensor, state, leaf)
        self._spend(now() - started)
        return entry

    def _spend(self, nanoseconds: int) -> None:
        """Take time off the budget; once the first grant is used up the gate closes until there is more."""
        self._spent += nanoseconds
        if not self._always and self._spent > RECHECK_GRANT_NS:
            self.gate = self.opened + int((self._spent - RECHECK_GRANT_NS) / RECHECK_SHARE)

    def is_unchanged(self, tensor: Tensor, leaf: Leaf) -> bool | None:
        """Whether a leaf holds what it held when last read, by any view of it; None if that is unknown.

        Waits for a device that holds it.
        """
        elsewhere = self._values.is_elsewhere(tensor)
        if leaf.key is None and elsewhere:
            self._values.devices.settle(tensor.device)  # what it held may be under way
        whole = None if leaf.key is None else self._whole(tensor, leaf.key)
        if whole is None or not self._values.can_read(whole):
            return None
        if not elsewhere:
            return self._values.digest(whole) == leaf.raw
        row = self._values.devices.now(whole)
        return None if row is None else int(row["raw"]) == leaf.raw

    def watch(self, t: ThreadBuffers, tensor: Tensor, state: StorageState, key: Key) -> None:
        """Keep the digest of what an op made and what was fingerprinted just now, to check it at its uses."""
        if self._values.is_elsewhere(tensor) or tensor.is_conj() or tensor.is_neg():
            return
        state.leaf = leaf = Leaf(self.round, made=True)
        state.at = tensor.untyped_storage().data_ptr() or 1
        state.version = version_of(tensor)
        leaf.at_version(state.version)
        leaf.read(key, tensor.numel(), self._values.last_digest(t))

    def watch_written(
        self, t: ThreadBuffers, tensor: Tensor, state: StorageState, entry: Entry, key: Key
    ) -> None:
        """As `watch`, after a write; what is around a part that was written is watched, too."""
        if state.leaf is not None:
            if state.partial:
                self.learn_whole(tensor, state.leaf)
        elif state.hashed == entry[0]:
            self.watch(t, tensor, state, key)

    def learn_whole(self, tensor: Tensor, leaf: Leaf) -> None:
        """Read as much of a storage as was ever known, after a part of it was written."""
        key = leaf.widest
        whole = None if key is None else self._whole(tensor, key)
        if key is not None and whole is not None and self._values.can_read(whole):
            leaf.read(key, whole.numel(), self._values.digest(whole))

    def learn(self, tensor: Tensor, state: StorageState, leaf: Leaf) -> None:
        """Read a leaf whose fingerprint is another value's, so that it can be told when it changes."""
        key, size = key_of(tensor), tensor.numel()
        if self._values.is_elsewhere(tensor):
            self._values.devices.probe(tensor, state.when_read(key, size))
        else:
            leaf.read(key, size, self._values.digest(tensor))

    def _probe(self, t: ThreadBuffers, tensor: Tensor, state: StorageState, leaf: Leaf) -> None:
        """Let a device read a leaf again; that it has changed is told once that has arrived."""
        key = leaf.key
        whole = None if key is None else self._whole(tensor, key)
        if key is None or whole is None:
            return
        # weakly: a state that lives says that its storage does
        reference, writes, size = weakref.ref(state), state.writes, whole.numel()
        raw, moment = leaf.raw, (t.seq, t.call)

        def compare(rows: Rows) -> None:
            state = reference()
            if state is not None and state.writes == writes and int(rows["raw"][0]) != raw:
                entry = self._found_changed(state, leaf, key, moment)
                rows["value"] = state.hashed = entry[0]
                leaf.read(key, size, int(rows["raw"][0]))

        self._values.devices.probe(whole, compare)

    def _found_changed(
        self, state: StorageState, leaf: Leaf, key: Key, moment: tuple[int, int]
    ) -> Entry:
        """As `_changed`, of a content that was read some ops ago: they were recorded with the older value."""
        state.writes += 1
        state.values = {}
        leaf.forget()
        entry = self._values.make(self._thread(), state, key)
        for name, kind in leaf.names or [("", "constant")]:
            leaf.told.add(entry[0])
            self._values.write_leaf((name, kind, "changed", entry[0], *moment))
        return entry

    def _whole(self, tensor: Tensor, key: Key) -> Tensor | None:
        """The tensor in this layout on the storage of another."""
        if key == key_of(tensor) and not (tensor.is_conj() or tensor.is_neg()):
            return tensor
        with silent(), torch._C.DisableTorchFunction(), torch.no_grad():
            return in_layout(tensor.untyped_storage(), key)

    def _changed(
        self,
        t: ThreadBuffers,
        tensor: Tensor,
        state: StorageState,
        leaf: Leaf,
        *,
        told: bool = True,
    ) -> Entry:
        """Register what a leaf holds that no op wrote, in the layout that was known and in this one."""
        key = key_of(tensor)
        whole = None if leaf.key is None else self._whole(tensor, leaf.key)
        if whole is None:
            whole = tensor
        state.writes += 1
        state.values = {}
        leaf.forget()
        entry = self._values.make(t, state, key_of(whole))
        if self._values.can_read(whole):
            self._values.show(t, whole, state, entry[0], key_of(whole))
        for name, kind in (leaf.names or [("", "constant")]) if told else ():
            self._values.names.tell(t, leaf, entry[0], name, kind, "changed")
        return state.values.get(key) or self._values.adopt_layout(t, tensor, state, key)
