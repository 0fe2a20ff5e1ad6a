"""Which content a tensor holds: storages, write counts, layouts, fingerprints.

What is known of a storage hangs as an attribute on its Python object, which torch keeps as long as the
C++ storage lives: no weak references, no clean-up, no reuse of ids (notes: recorder, Q1).
"""

from __future__ import annotations

import itertools
import json
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from opdrift.buffers import FINGERPRINTS, VALUE, VALUE_BYTES, VALUES
from opdrift.fingerprint.tensors import MANY, without_repeats
from opdrift.leafnames import Names
from opdrift.memory import Generated, InFlight, Unwritten, handed_on
from opdrift.rereading import Rereading
from opdrift.storages import (
    MAX_LATEST,
    MAX_LAYOUTS,
    Entry,
    Key,
    Leaf,
    Made,
    StorageState,
    is_readable,
    is_row_major,
    key_of,
    version_of,
)
from opdrift.unsettled import Unsettled

if TYPE_CHECKING:
    from opdrift.buffers import ThreadBuffers
    from opdrift.fingerprint.devices import Devices, Then
    from opdrift.fingerprint.engine import Engine
    from opdrift.memory import Use
    from opdrift.plans import Plan

#: Types whose content is their storage's. Every other subclass is passed on and seen by its inner ops.
PLAIN: Final = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})
_MAX_METAS: Final = 65536
#: Meta id, what fingerprints it, its components, their kind.
_Ready = tuple[int, Callable[[int, int, int, int, int], None], int, int]
_HOST: Final = torch.device("cpu")
_MAX_REASONS: Final = 50


class Values:
    """Values of one recorder. `key` is the attribute's name, so that two recorders do not mix."""

    def __init__(
        self,
        key: str,
        engine: Engine,
        *,
        write_name: Callable[[str, int, str], None],
        write_leaf: Callable[[tuple[str, str, str, int, int, int]], None],
        flush: Callable[[ThreadBuffers], None],
        integrity: str,
        devices: Devices,
        thread: Callable[[], ThreadBuffers],
    ) -> None:
        self.key = key
        self.engine = engine
        self.devices = devices
        self.kinds = engine.kinds
        self.put, self.put_large, self.large = engine.put, engine.put_large, engine.LARGE
        self.row_bytes = engine.ROW_BYTES
        self.integrity = integrity
        #: what ops made is checked at its uses, too
        self._watching = integrity == "full"
        self._write_name = write_name
        self.write_leaf = write_leaf
        self._flush = flush
        self.rereading = Rereading(self, integrity, thread=thread)
        self.unsettled = Unsettled(self)
        self._metas: dict[Key, int] = {}
        self._meta_ids = itertools.count(1)
        #: what new memory of the host in a layout that can be read as it is needs, all in one look-up
        self._ready: dict[Key, _Ready] = {}
        self._value_ids = itertools.count(1)
        self._storage_ids = itertools.count(1)
        #: those of them that are still alive at exit are results
        self.made = Made()
        #: why contents were left out, with counts
        self.skipped: dict[str, int] = {}
        self.names = Names(self, write_leaf)

    # ---- the hot path ------------------------------------------------------------------------------

    def make(self, t: ThreadBuffers, state: StorageState, key: Key) -> Entry:
        """Give the present content of a storage in one layout a value id."""
        shape, stride, offset, dtype = key
        meta_key = (shape, stride, dtype, state.device)
        meta = self._metas.get(meta_key)
        if meta is None:
            meta = self._new_meta(meta_key)
        value = next(self._value_ids)
        if not state.values or next(iter(state.values))[3] is dtype:
            state.last = value
        entry = state.values[key] = (value, meta)
        row = t.value_count
        if row == VALUES:
            self._flush(t)
            row = 0
        VALUE.pack_into(t.values, row * VALUE_BYTES, value, state.id, offset, state.writes, meta)
        t.value_count = row + 1
        return entry

    def output(self, t: ThreadBuffers, tensor: Tensor, outputs: list[int], plan: Plan) -> None:
        """Register an op's output; fingerprint it unless that is impossible, needless or done already."""
        storage = tensor.untyped_storage()
        state: StorageState | None = getattr(storage, self.key, None)
        key = (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)
        if state is None:
            ready, address = self._ready.get(key), 0
            if ready is not None and not plan.quiet and tensor.is_cpu:
                address = tensor.data_ptr()  # none: autograd's zeros without memory
            if ready is None or not address:
                self._new_output(t, tensor, storage, key, outputs, plan)
                return
            # as `_new_output`, without the calls: most outputs are of this sort
            row, print_row = t.value_count, t.fingerprint_count
            if row == VALUES or print_row == FINGERPRINTS:
                self._flush(t)
                row = print_row = 0
            meta, put, n, kind = ready
            value, ident = next(self._value_ids), next(self._storage_ids)
            state = StorageState(ident, _HOST)
            state.values[key] = value, meta
            state.last = state.hashed = value
            setattr(storage, self.key, state)
            made = self.made
            made.latest.append(weakref.ref(state))
            if len(made.latest) >= MAX_LATEST:
                made.drop_dead()
            VALUE.pack_into(t.values, row * VALUE_BYTES, value, ident, key[2], 0, meta)
            t.value_count = row + 1
            outputs.append(value)
            put(t.fingerprint_at + print_row * self.row_bytes, address, n, kind, value)
            t.fingerprint_count = print_row + 1
            if self._watching:
                self.rereading.watch(t, tensor, state, key)
            return
        entry = state.values.get(key)
        if entry is not None:  # an alias of something known: no new value, no hash
            outputs.append(entry[0])
            return
        value = self.make_another(t, state, key)[0]
        outputs.append(value)
        # after a partial write no other fingerprint tells this view's content
        if not plan.quiet or (state.partial and self.integrity != "off"):
            self.show(t, tensor, state, value, key)

    def _new_output(
        self,
        t: ThreadBuffers,
        tensor: Tensor,
        storage: torch.UntypedStorage,
        key: Key,
        outputs: list[int],
        plan: Plan,
    ) -> None:
        """Register an output in new memory of any sort."""
        state = StorageState(next(self._storage_ids), tensor.device)
        setattr(storage, self.key, state)
        self.made.latest.append(weakref.ref(state))
        value, meta = self.make(t, state, key)
        outputs.append(value)
        if plan.fresh:
            state.special = None if tensor.is_meta else Unwritten(storage)
        elif not plan.deferred:  # also where a view op had to copy: `reshape` in inference_mode
            state.hashed = value
            if not self.fingerprint(t, tensor, value):
                state.hashed = 0
            elif self._watching:
                self.rereading.watch(t, tensor, state, key)
        component = self.kinds.get(tensor.dtype)
        if component is not None and tensor.device == _HOST and is_row_major(*key[:2]):
            n = tensor.numel()
            put = self.put if n < self.large else self.put_large
            self._ready[key] = meta, put, n, component

    def last_digest(self, t: ThreadBuffers) -> int:
        """The digest in the fingerprint that was written last."""
        start = (t.fingerprint_count - 1) * self.row_bytes
        return int.from_bytes(t.fingerprints[start : start + 8], "little")

    def arriving(
        self, t: ThreadBuffers, tensor: Tensor, outputs: list[int], in_flight: InFlight
    ) -> None:
        """Register an output that is not there yet; it is fingerprinted at a use for which it is."""
        storage = tensor.untyped_storage()
        state = StorageState(next(self._storage_ids), tensor.device)
        setattr(storage, self.key, state)
        self.made.latest.append(weakref.ref(state))
        state.special = in_flight
        key = key_of(tensor)
        value = self.make(t, state, key)[0]
        in_flight.filled[state.id] = [(key, value)]
        outputs.append(value)

    def fingerprint(
        self, t: ThreadBuffers, tensor: Tensor, value: int, *, is_there: bool = False
    ) -> bool:
        """Fingerprint a readable tensor, into the thread's ring or its device's; False if that is impossible.

        Args:
            t: The buffers of the current thread.
            tensor: What to fingerprint.
            value: Its value id.
            is_there: `is_readable` has said that its storage is as long as it must be.
        """
        if self.is_elsewhere(tensor):
            return self._enqueue(tensor, value)
        kind = self.kinds.get(tensor.dtype)
        n, address = tensor.numel(), tensor.data_ptr()
        if (
            kind is None
            or not address  # a freed storage, or autograd's zeros
            or not tensor.is_contiguous()
            or tensor.is_neg()
            or tensor.is_conj()
        ):
            # else reading would end the process
            if not (is_there and address) and not self.can_read(tensor):
                return False
            tensor = self.engine.plain(tensor)
            n, address, kind = tensor.numel(), tensor.data_ptr(), self.kinds[tensor.dtype]
        row = t.fingerprint_count
        if row == FINGERPRINTS:
            self._flush(t)
            row = 0
        (self.put if n < self.large else self.put_large)(
            t.fingerprint_at + row * self.row_bytes, address, n, kind, value
        )
        t.fingerprint_count = row + 1
        return True

    def show(
        self,
        t: ThreadBuffers,
        tensor: Tensor,
        state: StorageState,
        value: int,
        key: Key,
        row: bytes | None = None,
    ) -> None:
        """Fingerprint a value of a storage that is known, if its content may be read now; `row` is one of the same content."""
        if value == state.hashed or not state.may_be_read(tensor):
            return
        if tensor.numel() > MANY and 0 in tensor.stride():
            # its content follows from that of what it repeats, as any view's does
            tensor = without_repeats(tensor)
            key = key_of(tensor)
            value = (state.values.get(key) or self.make_another(t, state, key))[0]
        leaf = state.leaf
        # a conjugate or negative view does not show what the layout holds
        if leaf is not None and (tensor.is_conj() or tensor.is_neg()):
            leaf = None
        if self.is_elsewhere(tensor):
            then = None if leaf is None else state.when_read(key, tensor.numel())
            if self._enqueue(tensor, value, then):
                state.hashed = value
            return
        known = row is not None and t.repeat_fingerprint(row, value)
        if not known and not self.fingerprint(t, tensor, value, is_there=True):
            return
        state.hashed = value
        if leaf is not None:
            leaf.read(key, tensor.numel(), self.last_digest(t))

    @staticmethod
    def is_elsewhere(tensor: Tensor) -> bool:
        """Whether a tensor is not in the host's memory, so that its fingerprint comes later."""
        return not tensor.is_cpu

    def _enqueue(self, tensor: Tensor, value: int, then: Then | None = None) -> bool:
        """Let its device fingerprint a tensor, without waiting; False if that is impossible."""
        reason = self.devices.put(tensor, value, then=then)
        if reason is not None:
            self.skip(reason)
        return reason is None

    def make_another(self, t: ThreadBuffers, state: StorageState, key: Key) -> Entry:
        """As `make`, for a storage of which other layouts may be known."""
        if len(state.values) >= MAX_LAYOUTS:
            state.values.clear()  # bounded; a layout seen again gets a second value
        return self.make(t, state, key)

    # ---- inputs that are not known -------------------------------------------------------------------

    def adopt(self, t: ThreadBuffers, tensor: Tensor, use: Use, *, compiled: int) -> Entry:
        """Register an input seen for the first time with this write count and layout: a leaf, or a view.

        `compiled` says that code which torch.compile generated handed it over.
        """
        state: StorageState | None = getattr(tensor.untyped_storage(), self.key, None)
        key = key_of(tensor)
        if state is not None:
            entry = self.adopt_layout(t, tensor, state, key)
            if not state.at:
                return entry
            return self.rereading.look(t, tensor, state, entry, use, compiled=compiled)
        state, leaf = self.new_leaf(tensor)
        entry = self.make(t, state, key)
        if not use.overwrites(tensor) and self.can_read(tensor):
            self.show(t, tensor, state, entry[0], key)
        if compiled and type(tensor) is Tensor:
            state.special = Generated()
        name, kind = self.names.of(t, tensor) or ("", "constant")
        leaf.names.append((name, kind))
        self.names.tell(
            t, leaf, entry[0], name, kind, "use" if state.special is None else "generated"
        )
        return entry

    def adopt_layout(
        self, t: ThreadBuffers, tensor: Tensor, state: StorageState, key: Key
    ) -> Entry:
        """Register another layout of a storage that is known."""
        entry = self.make_another(t, state, key)
        leaf = state.leaf
        # of a leaf only that part is known which was read
        elsewhere = (
            leaf is not None and not leaf.made and leaf.key is not None and not leaf.tells(key)
        )
        if elsewhere or (state.partial and self.integrity != "off"):
            self.show(t, tensor, state, entry[0], key)
        return entry

    def meet_parameter(
        self, t: ThreadBuffers, tensor: Tensor, state: StorageState, entry: Entry
    ) -> None:
        """Name a parameter whose content an op of this run made, at its first use."""
        leaf = self.made_leaf(tensor, state)
        if self.integrity != "off" and self.can_read(tensor) and state.may_be_read(tensor):
            self.rereading.learn(tensor, state, leaf)
        found = self.names.of(t, tensor)  # `.data =` leaves the Python object what it was
        if found is not None:
            leaf.names.append(found)
            self.names.tell(t, leaf, entry[0], *found, "use")

    def made_leaf(self, tensor: Tensor, state: StorageState) -> Leaf:
        """Check a storage that an op made at its uses, as a leaf's is."""
        state.leaf = leaf = Leaf(self.rereading.round + 1)
        state.at = tensor.untyped_storage().data_ptr() or 1
        state.version = version_of(tensor)
        leaf.at_version(state.version)
        return leaf

    def new_leaf(self, tensor: Tensor) -> tuple[StorageState, Leaf]:
        """Begin to know a storage that no op of this run made."""
        storage = tensor.untyped_storage()
        state = StorageState(next(self._storage_ids), tensor.device, storage.data_ptr() or 1)
        setattr(storage, self.key, state)
        state.version = version_of(tensor)
        state.leaf = leaf = Leaf(self.rereading.round + 1)
        leaf.at_version(state.version)
        return state, leaf

    # ---- writes ----------------------------------------------------------------------------------------

    def written(
        self,
        t: ThreadBuffers,
        tensors: Sequence[Tensor],
        outputs: list[int],
        *,
        use: Use | None = None,
        in_flight: InFlight | None = None,
    ) -> None:
        """Bring the write counts of written tensors up to date and register their new contents."""
        bumps = use is not None and use.plan.bumps
        selection = use.selection() if use is not None and self._needs_selection(use) else None
        lacking = self._handed_on(use) if use is not None and use.plan.hands_on else None
        for tensor in tensors:
            storage = tensor.untyped_storage()
            state: StorageState | None = getattr(storage, self.key, None)
            if state is None:
                # seen as an input before, unless the op's own inputs could not be read
                state, _ = self.new_leaf(tensor)
            state.writes += 1
            state.values = {}
            scattered = use is not None and use.plan.scatters
            state.partial = scattered or tensor.numel() * tensor.element_size() < storage.nbytes()
            if state.at:
                state.rewritten(tensor, bumps=bumps)
            if in_flight is not None:
                state.special = in_flight
            elif lacking is not None:
                state.special = lacking
            elif isinstance(state.special, Unwritten):
                if is_readable(tensor) and state.special.write(storage, tensor, selection):
                    state.special = None
            elif not isinstance(state.special, Generated):
                state.special = None
        for tensor in tensors:
            state = getattr(tensor.untyped_storage(), self.key)
            key = key_of(tensor)
            entry = state.values.get(key)
            if entry is None:
                entry = self.make(t, state, key)
                self.show(t, tensor, state, entry[0], key)
            if self._watching and state.special is None and not self.is_elsewhere(tensor):
                self.rereading.watch_written(t, tensor, state, entry, key)
            if in_flight is not None:
                in_flight.filled.setdefault(state.id, []).append((key, entry[0]))
            outputs.append(entry[0])

    def handed_over(self, t: ThreadBuffers, tensors: Sequence[Tensor]) -> None:
        """Register what a compiled region made in known memory and returns: its kernels may have written it last."""
        for tensor in tensors:
            state: StorageState = getattr(tensor.untyped_storage(), self.key)
            if isinstance(state.special, Generated):
                state.special = None
        self.written(t, tensors, [])

    def storage_id(self, tensor: Tensor) -> int:
        """The number of a tensor's storage; 0 if nothing is known of it, or if it has none."""
        try:
            state: StorageState | None = getattr(tensor.untyped_storage(), self.key, None)
        except (RuntimeError, NotImplementedError):  # sparse, mkldnn
            return 0
        return 0 if state is None else state.id

    def _needs_selection(self, use: Use) -> bool:
        """Whether an indexed write goes into memory that is not wholly written."""
        if not use.plan.scatters or self.is_elsewhere(use.args[0]):
            return False
        state = getattr(use.args[0].untyped_storage(), self.key, None)
        return state is not None and isinstance(state.special, Unwritten)

    def _handed_on(self, use: Use) -> Unwritten | None:
        """What a copy's target is afterwards, where the source is not wholly written; None where it is.

        FSDP2 copies shards that `to_empty` has handed out into padded ones, before anything fills them.
        """
        try:
            found = [getattr(a.untyped_storage(), self.key, None) for a in use.args[:2]]
        except (RuntimeError, NotImplementedError):  # sparse, mkldnn
            return None
        into, of = (None if state is None else state.special for state in found)
        return handed_on(use, of, into)

    # ---- what is known -----------------------------------------------------------------------------------

    def value_of(self, tensor: Tensor) -> tuple[StorageState, Entry | None] | None:
        """What is known of a tensor without registering anything."""
        state: StorageState | None = getattr(tensor.untyped_storage(), self.key, None)
        return None if state is None else (state, state.values.get(key_of(tensor)))

    def digest_read(self, tensor: Tensor) -> tuple[int, int, int] | None:
        """What `Engine.digest` says of a leaf, as it was when it was last read; None if that was not all of it."""
        known = self.value_of(tensor)
        leaf = None if known is None else known[0].leaf
        code = self.engine.code(tensor.dtype)
        if leaf is None or code is None or leaf.key != key_of(tensor):
            return None
        return leaf.raw, tensor.numel(), code

    def left(self, tensor: Tensor) -> tuple[int, int, int] | None:
        """As `digest_read`, of what the last write that was seen left in just these elements, in whatever shape.

        What has changed them since without an op does not count.
        """
        state: StorageState | None = getattr(tensor.untyped_storage(), self.key, None)
        leaf, code = None if state is None else state.leaf, self.engine.code(tensor.dtype)
        if leaf is None or code is None or not leaf.is_row_of(tensor):
            return None
        return leaf.raw, tensor.numel(), code

    def prune(self) -> None:
        """Forget what died; memory stays bounded by what is alive."""
        self.made.prune()
        self.names.prune()

    # ---- small things ------------------------------------------------------------------------------------

    def _new_meta(self, key: Key) -> int:
        if len(self._metas) >= _MAX_METAS:
            self._metas.clear()  # ids go on: a layout seen again gets a second one
            self._ready.clear()
        meta = self._metas[key] = next(self._meta_ids)
        shape, stride, dtype, device = key
        text = [
            list(map(int, shape)),
            list(map(int, stride)),
            str(dtype).removeprefix("torch."),
            str(device),
        ]
        self._write_name("meta", meta, json.dumps(text))
        return meta

    def can_read(self, tensor: Tensor) -> bool:
        """Whether a tensor's content can be read; if not, it is noted why."""
        reason = self.engine.can_fingerprint(tensor)
        if reason is not None:
            self.skip(reason)
        return reason is None

    def is_pending(self, tensor: Tensor) -> bool:
        """Whether a copy or a collective is known to fill a tensor still."""
        return self.is_filled_later(tensor.untyped_storage())

    def is_filled_later(self, storage: torch.UntypedStorage) -> bool:
        """As `is_pending`, of a storage."""
        state: StorageState | None = getattr(storage, self.key, None)
        special = None if state is None else state.special
        return isinstance(special, InFlight) and special.is_pending()

    def writes(self, tensor: Tensor) -> int:
        """How often a tensor's storage is known to have been written; 0 if nothing is known of it."""
        state: StorageState | None = getattr(tensor.untyped_storage(), self.key, None)
        return 0 if state is None else state.writes

    def versions(self, tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
        """Of each tensor's storage a number that no other has, and how often it is known to have been written."""
        found = []
        for tensor in tensors:
            storage = tensor.untyped_storage()
            state: StorageState | None = getattr(storage, self.key, None)
            # below 0: one that nothing is known of
            found.append((-storage._cdata, 0) if state is None else (state.id, state.writes))
        return found

    def skip(self, reason: str) -> None:
        """Note that a content was left out."""
        if reason not in self.skipped and len(self.skipped) >= _MAX_REASONS:
            reason = "for other reasons"
        self.skipped[reason] = self.skipped.get(reason, 0) + 1

    def digest(self, tensor: Tensor) -> int:
        """The digest of a readable tensor in the host's memory."""
        ready = self.engine.plain(tensor)
        return self.engine.raw(ready.data_ptr(), ready.numel(), self.kinds[ready.dtype])
