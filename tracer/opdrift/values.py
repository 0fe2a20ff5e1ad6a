"""Which content a tensor holds: storages, write counts, layouts, fingerprints.

What is known of a storage hangs as an attribute on its Python object, which torch keeps as long as the
C++ storage lives: no weak references, no clean-up, no reuse of ids (notes: recorder, Q1).
"""

from __future__ import annotations

import itertools
import json
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter_ns as now
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor

from opdrift.buffers import FINGERPRINTS, VALUE, VALUES

if TYPE_CHECKING:
    from opdrift.buffers import ThreadBuffers
    from opdrift.fingerprint.engine import Engine

#: Types whose content is their storage's. Every other subclass is passed on and seen by its inner ops.
PLAIN: Final = frozenset({torch.Tensor, torch.nn.Parameter, torch.nn.Buffer})
_MAX_METAS: Final = 65536
#: A storage larger than this is not followed byte by byte until it is wholly written.
_MAX_MASK: Final = 1 << 22
#: Share of the run's time that re-reading leaves may take under integrity="auto", and a first grant.
RECHECK_SHARE: Final = 0.015
RECHECK_GRANT_NS: Final = 500_000
_NEVER: Final = 1 << 62

Key = tuple[Any, ...]
Entry = tuple[int, int]


class Unwritten:
    """Memory that was handed out and not, or not wholly, written since; `mask` tells which elements were."""

    __slots__ = ("mask",)

    def __init__(self) -> None:
        self.mask: Any = None


class InFlight:
    """A collective that still fills the storage; it must not be read before it is done."""

    __slots__ = ("readable", "work")

    def __init__(self, work: Any, *, readable: bool) -> None:
        self.work = work
        #: whether `is_completed()` means that the output may be read (not so for reduce_scatter on gloo)
        self.readable = readable


class Leaf:
    """What a storage that no recorded op made is called, and what it held when last read."""

    __slots__ = ("checks", "names", "raw", "versions")

    def __init__(self) -> None:
        self.names: list[tuple[str, str]] = []
        self.versions: set[int | None] = set()
        #: layout key -> (raw, value id) at the last reading
        self.raw: dict[Key, int] = {}
        self.checks = 0


class StorageState:
    """What is known of one storage; lives exactly as long as it.

    Attributes:
        at: 0, or for a leaf the address at which it was seen.
        values: layout key -> (value id, meta id) of the present write count.
        special: None, or why its content cannot just be read.
        partial: Its last write covered a part of it only.
        last: The value id given last; `hashed`: the one fingerprinted last.
    """

    __slots__ = (
        "__weakref__",
        "at",
        "device",
        "hashed",
        "id",
        "last",
        "leaf",
        "partial",
        "special",
        "values",
        "version",
        "writes",
    )

    def __init__(self, ident: int, device: torch.device, at: int = 0) -> None:
        self.id = ident
        self.device = device
        self.at = at
        self.writes = 0
        self.values: dict[Key, Entry] = {}
        self.version: int | None = None
        self.special: Unwritten | InFlight | None = None
        self.partial = False
        self.last = 0
        self.hashed = 0
        self.leaf: Leaf | None = None


def span(tensor: Tensor) -> int:
    """Bytes of storage up to the last element of a tensor of at least one element."""
    last = tensor.storage_offset() + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return int(last + 1) * tensor.element_size()


def is_readable(tensor: Tensor) -> bool:
    """Whether the memory behind a tensor is there; reading a freed storage kills the process (H3)."""
    if tensor.numel() == 0:
        return True
    return tensor.untyped_storage().nbytes() >= span(tensor)


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
    ) -> None:
        self.key = key
        self.engine = engine
        self.kinds = engine.kinds
        self.put, self.put_large, self.large = engine.put, engine.put_large, engine.LARGE
        self.row_bytes = engine.ROW_BYTES
        self.integrity = integrity
        self._write_name = write_name
        self._write_leaf = write_leaf
        self._flush = flush
        self._metas: dict[Key, int] = {}
        self._meta_ids = itertools.count(1)
        self._value_ids = itertools.count(1)
        self._storage_ids = itertools.count(1)
        #: storages made during the run: those still alive at exit are results
        self.made: deque[weakref.ref[StorageState]] = deque()
        #: why contents were left out, with counts
        self.skipped: dict[str, int] = {}
        #: names of tensors by id of the Python object: (weak reference, name, kind)
        self._names: dict[int, tuple[weakref.ref[Tensor], str, str]] = {}
        self.spent = 0
        self.opened = now()
        #: leaves may be read again at use from this moment on (perf_counter_ns)
        self.gate = _NEVER if integrity == "off" else 0
        self._leaf_count = 0
        self._check_count = 0

    # ---- the hot path ------------------------------------------------------------------------------

    def make(self, t: ThreadBuffers, state: StorageState, key: Key) -> Entry:
        """Give the present content of a storage in one layout a value id."""
        shape, stride, offset, dtype = key
        meta_key = (shape, stride, dtype, state.device)
        meta = self._metas.get(meta_key)
        if meta is None:
            meta = self._new_meta(meta_key)
        value = next(self._value_ids)
        entry = state.values[key] = (value, meta)
        row = t.value_count
        if row == VALUES:
            self._flush(t)
            row = 0
        VALUE.pack_into(t.values, row * VALUE.size, value, state.id, offset, state.writes, meta)
        t.value_count = row + 1
        state.last = value
        return entry

    def output(
        self,
        t: ThreadBuffers,
        tensor: Tensor,
        outputs: list[int],
        *,
        quiet: bool,
        fresh: bool = False,
    ) -> None:
        """Register an op's output; fingerprint it unless `quiet` (views, fresh memory) or known already."""
        storage = tensor.untyped_storage()
        state: StorageState | None = getattr(storage, self.key, None)
        key = (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)
        if state is None:
            state = StorageState(next(self._storage_ids), tensor.device)
            setattr(storage, self.key, state)
            self.made.append(weakref.ref(state))
            if fresh:
                state.special = Unwritten()
        else:
            entry = state.values.get(key)
            if entry is not None:  # an alias of something known: no new value, no hash
                outputs.append(entry[0])
                return
        value = self.make(t, state, key)[0]
        outputs.append(value)
        if not quiet:
            self.fingerprint(t, tensor, value)
            state.hashed = value
        elif (
            state.partial
            and state.special is None
            and self.integrity != "off"
            and is_readable(tensor)
        ):
            # a part was written, so no other fingerprint tells this view's content
            self.fingerprint(t, tensor, value)
            state.hashed = value

    def fingerprint(self, t: ThreadBuffers, tensor: Tensor, value: int) -> None:
        """Fingerprint a readable tensor into the thread's ring."""
        kind = self.kinds.get(tensor.dtype)
        if not tensor.is_cpu:
            found = self._from_device(tensor)
            if found is None:
                return
            tensor, kind = found, self.kinds[found.dtype]
        elif kind is None or not tensor.is_contiguous() or tensor.is_neg() or tensor.is_conj():
            tensor = self.engine.plain(tensor)
            kind = self.kinds[tensor.dtype]
        row = t.fingerprint_count
        if row == FINGERPRINTS:
            self._flush(t)
            row = 0
        n, address = tensor.numel(), tensor.data_ptr()
        if not address and n:  # autograd's zeros have no memory, and reading it would end the process
            tensor = self.engine.plain(tensor)
            address = tensor.data_ptr()
        (self.put if n < self.large else self.put_large)(
            t.fingerprint_at + row * self.row_bytes, address, n, kind, value
        )
        t.fingerprint_count = row + 1

    # ---- inputs that are not known -------------------------------------------------------------------

    def adopt(self, t: ThreadBuffers, tensor: Tensor) -> Entry:
        """Register an input seen for the first time with this write count and layout: a leaf, or a view."""
        storage = tensor.untyped_storage()
        state: StorageState | None = getattr(storage, self.key, None)
        key = (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)
        if state is not None:
            entry = self.make(t, state, key)
            if (
                state.partial
                and self.integrity != "off"
                and self._settle(state)
                and is_readable(tensor)
            ):
                self.fingerprint(t, tensor, entry[0])
                state.hashed = entry[0]
            return entry
        state, leaf = self._new_leaf(tensor)
        entry = self.make(t, state, key)
        if self._can_read(tensor):
            self.fingerprint(t, tensor, entry[0])
            leaf.raw[key] = self._last_raw(t)
        named = self._names.get(id(tensor))
        if named is not None and named[0]() is tensor:
            name, kind = named[1:]
        else:
            name, kind = self._name_in_module(t, tensor) or ("", "constant")
        leaf.names.append((name, kind))
        self._write_leaf((name, kind, "use", entry[0], t.seq, t.call))
        return entry

    def meet_parameter(
        self, t: ThreadBuffers, tensor: Tensor, state: StorageState, entry: Entry
    ) -> None:
        """Name a parameter whose content an op of this run made, at its first use."""
        state.leaf = leaf = Leaf()
        found = self._name_in_module(t, tensor)
        if found is not None:
            leaf.names.append(found)
            self._write_leaf((*found, "use", entry[0], t.seq, t.call))

    def _name_in_module(self, t: ThreadBuffers, tensor: Tensor) -> tuple[str, str] | None:
        """The name of a parameter or buffer that was put into the running module after it was named.

        Offloading makes new Parameter objects at every forward, inside the module's call (H7).
        """
        module = t.module() if t.module is not None else None
        if module is None:
            return None
        for kind, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
            for name, own in tensors.items():
                if own is tensor:
                    return (f"{t.path}.{name}" if t.path else name), kind
        return None

    def _new_leaf(self, tensor: Tensor) -> tuple[StorageState, Leaf]:
        storage = tensor.untyped_storage()
        state = StorageState(next(self._storage_ids), tensor.device, storage.data_ptr() or 1)
        setattr(storage, self.key, state)
        state.version = None if tensor.is_inference() else tensor._version
        state.leaf = leaf = Leaf()
        leaf.versions.add(state.version)
        self._leaf_count += 1
        return state, leaf

    def moved(self, t: ThreadBuffers, tensor: Tensor, state: StorageState, entry: Entry) -> Entry:
        """A leaf whose address or version changed with no op that we saw: read it again.

        The fingerprint, not the trigger, tells whether the content changed.
        """
        storage = tensor.untyped_storage()
        at = storage.data_ptr() or 1
        version = None if tensor.is_inference() else tensor._version
        leaf = state.leaf
        assert leaf is not None
        if (
            at == state.at and version in leaf.versions
        ):  # `p` and `p.data` have two version counters
            state.version = version
            return entry
        state.at = at
        state.version = version
        leaf.versions.add(version)
        known = leaf.raw.get((tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype))
        if (
            known is not None
            and self._can_read(tensor)
            and int(self.engine.fingerprint(tensor)["raw"]) == known
        ):
            return entry  # moved or touched, and the same content
        return self._reread(t, tensor, state, leaf)

    def _reread(self, t: ThreadBuffers, tensor: Tensor, state: StorageState, leaf: Leaf) -> Entry:
        state.writes += 1
        state.values = {}
        leaf.raw = {}
        key = (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)
        entry = self.make(t, state, key)
        if self._can_read(tensor):
            self.fingerprint(t, tensor, entry[0])
            leaf.raw[key] = self._last_raw(t)
        for name, kind in leaf.names or [("", "constant")]:
            self._write_leaf((name, kind, "changed", entry[0], t.seq, t.call))
        return entry

    def recheck(self, t: ThreadBuffers, tensor: Tensor, state: StorageState, entry: Entry) -> Entry:
        """Read a leaf again at use if the time for it is there; a change without a writer is a new value."""
        leaf = state.leaf
        if leaf is None or state.special is not None:
            return entry
        if (
            self.integrity != "full"
            and leaf.checks * self._leaf_count > self._check_count + self._leaf_count
        ):
            return entry  # others' turn
        started = now()
        key = (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)
        known = leaf.raw.get(key)
        if known is None or not self._can_read(tensor):
            return entry
        leaf.checks += 1
        self._check_count += 1
        raw = int(self.engine.fingerprint(tensor)["raw"])
        if raw != known:
            entry = self._reread(t, tensor, state, leaf)
        self.spent += now() - started
        if self.integrity != "full" and self.spent > RECHECK_GRANT_NS:
            self.gate = self.opened + int((self.spent - RECHECK_GRANT_NS) / RECHECK_SHARE)
        return entry

    def special(self, t: ThreadBuffers, tensor: Tensor, state: StorageState, entry: Entry) -> bool:
        """Handle an input whose storage is unwritten or in flight; True if the op reads unwritten memory."""
        if t.unread is None or any(a is tensor for a in t.unread):
            return False
        special = state.special
        if isinstance(special, InFlight):
            if self._settle(state) and is_readable(tensor):
                self.fingerprint(t, tensor, entry[0])
            return False
        if not isinstance(special, Unwritten) or tensor.numel() == 0:
            return False
        unwritten = special.mask is None or not bool(_part(special.mask, tensor).all())
        if unwritten and is_readable(tensor):
            self.fingerprint(t, tensor, entry[0])
        return unwritten

    def _settle(self, state: StorageState) -> bool:
        """Whether the storage may be read now; a completed collective is done with."""
        special = state.special
        if isinstance(special, InFlight):
            if not special.readable or not special.work.is_completed():
                return False
            state.special = None
        return True

    # ---- writes ----------------------------------------------------------------------------------------

    def written(
        self,
        t: ThreadBuffers,
        tensors: Sequence[Tensor],
        outputs: list[int],
        *,
        bumps: bool = False,
        in_flight: InFlight | None = None,
    ) -> None:
        """Bring the write counts of written tensors up to date and register their new contents.

        `bumps` says that torch will raise the version counters once the mode has returned.
        """
        for tensor in tensors:
            storage = tensor.untyped_storage()
            state: StorageState | None = getattr(storage, self.key, None)
            if (
                state is None
            ):  # seen as an input before, unless the op's own inputs could not be read
                state, _ = self._new_leaf(tensor)
            state.writes += 1
            state.values = {}
            nbytes = storage.nbytes()
            state.partial = tensor.numel() * tensor.element_size() < nbytes
            if state.at:
                state.at = storage.data_ptr() or 1
                state.version = None if tensor.is_inference() else tensor._version
                leaf = state.leaf
                if leaf is not None:
                    leaf.versions.add(state.version)
                    if bumps and state.version is not None:
                        leaf.versions.add(state.version + 1)
                    leaf.raw = {}
            if in_flight is not None:
                state.special = in_flight
            elif isinstance(state.special, Unwritten):
                _fill(state, state.special, tensor, nbytes)
            else:
                state.special = None
        for tensor in tensors:
            self.output(t, tensor, outputs, quiet=in_flight is not None or not is_readable(tensor))

    # ---- names -----------------------------------------------------------------------------------------

    def name(self, t: ThreadBuffers, tensor: Tensor, name: str, kind: str, when: str) -> int | None:
        """Give a tensor's present content a name, and fingerprint it if nothing has; return its value id."""
        state: StorageState | None = getattr(tensor.untyped_storage(), self.key, None)
        key = (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)
        self._names[id(tensor)] = (weakref.ref(tensor), name, kind)
        entry = None
        if state is None:
            state, leaf = self._new_leaf(tensor)
        elif state.leaf is not None:
            leaf = state.leaf
            entry = state.values.get(key)
            if (
                entry is not None
                and state.at
                and (
                    (tensor.untyped_storage().data_ptr() or 1) != state.at
                    or (not tensor.is_inference() and tensor._version != state.version)
                )
            ):
                entry = self.moved(t, tensor, state, entry)
        else:
            leaf = None
            entry = state.values.get(key)
        if entry is None:
            entry = self.make(t, state, key)
        readable = (
            self._settle(state)
            and not isinstance(state.special, Unwritten)
            and self._can_read(tensor)
        )
        if readable and entry[0] != state.hashed and (leaf is None or key not in leaf.raw):
            self.fingerprint(t, tensor, entry[0])
            state.hashed = entry[0]
            if leaf is not None:
                leaf.raw[key] = self._last_raw(t)
        if leaf is not None and (name, kind) not in leaf.names:
            leaf.names = [known for known in leaf.names if known[0]]
            leaf.names.append((name, kind))
        self._write_leaf((name, kind, when, entry[0], t.seq, t.call))
        return entry[0]

    def value_of(self, tensor: Tensor) -> tuple[StorageState, Entry | None] | None:
        """What is known of a tensor without registering anything."""
        state: StorageState | None = getattr(tensor.untyped_storage(), self.key, None)
        if state is None:
            return None
        return state, state.values.get(
            (tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype)
        )

    def alive(self) -> Iterator[int]:
        """The last value of each storage that was made during the run and still lives."""
        for reference in list(self.made):
            state = reference()
            if state is not None and state.last:
                yield state.last

    def prune(self) -> None:
        """Forget storages that died; memory stays bounded by what is alive."""
        if len(self.made) > 4096:
            self.made = deque(reference for reference in list(self.made) if reference() is not None)
        if len(self._names) > 65536:
            self._names = {
                ident: named for ident, named in list(self._names.items()) if named[0]() is not None
            }

    # ---- small things ------------------------------------------------------------------------------------

    def _new_meta(self, key: Key) -> int:
        if len(self._metas) >= _MAX_METAS:
            self._metas.clear()  # ids go on: a layout seen again gets a second one
        meta = self._metas[key] = next(self._meta_ids)
        shape, stride, dtype, device = key
        self._write_name(
            "meta",
            meta,
            json.dumps(
                [
                    list(map(int, shape)),
                    list(map(int, stride)),
                    str(dtype).removeprefix("torch."),
                    str(device),
                ]
            ),
        )
        return meta

    def _can_read(self, tensor: Tensor) -> bool:
        reason = self.engine.can_fingerprint(tensor)
        if reason is not None:
            self.skipped[reason] = self.skipped.get(reason, 0) + 1
            return False
        return True

    def _from_device(self, tensor: Tensor) -> Tensor | None:
        if not self._can_read(tensor):
            return None
        return self.engine.plain(tensor)

    def _last_raw(self, t: ThreadBuffers) -> int:
        start = (t.fingerprint_count - 1) * self.row_bytes
        return int.from_bytes(t.fingerprints[start : start + 8], "little")


def _part(mask: Any, tensor: Tensor) -> Any:
    """The elements of a storage's mask that belong to a tensor."""
    return np.lib.stride_tricks.as_strided(
        mask[tensor.storage_offset() :],
        shape=tuple(tensor.shape),
        strides=tuple(stride * mask.itemsize for stride in tensor.stride()),
    )


def _fill(state: StorageState, unwritten: Unwritten, tensor: Tensor, nbytes: int) -> None:
    """Note that a tensor's part of an unwritten storage is written now."""
    elements = nbytes // tensor.element_size()
    if not state.partial or elements > _MAX_MASK:
        state.special = None
        return
    if unwritten.mask is None or len(unwritten.mask) != elements:
        unwritten.mask = np.zeros(elements, np.bool_)
    if tensor.numel():
        _part(unwritten.mask, tensor)[...] = True
    if unwritten.mask.all():
        state.special = None
