"""What is known of one storage, and the geometry of tensors within it."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from opdrift.memory import InFlight, Special, Unwritten

#: So many layouts of one storage are known at a time (a data set is read through ever other windows).
MAX_LAYOUTS: Final = 4096
#: So many storages are made before those of them that died are forgotten; fewer than gc's threshold.
MAX_LATEST: Final = 256
#: So many version counters of a leaf are remembered; the latest count.
_MAX_VERSIONS: Final = 16

_QUANTISED: Final = frozenset(
    {torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4}
)

#: Where a tensor lies in its storage: shape, stride, offset, dtype.
Key = tuple[Any, ...]
#: Value id and meta id.
Entry = tuple[int, int]


class Leaf:
    """What a storage whose content is checked at its uses is called, and what it held when last read.

    Attributes:
        names: Its (name, kind) pairs.
        versions: Version counters at which it held its present content; None for inference tensors.
        key: The largest layout in which the present content was read, None if in none; `raw` is its digest.
        widest: The largest layout in which any content was read.
        told: Values that have a row among the leaves.
        turn: In which round it may be read again.
        made: A recorded op made it, so it is no leaf; it is checked because every use is.
    """

    __slots__ = (
        "_most",
        "_size",
        "key",
        "made",
        "names",
        "raw",
        "told",
        "turn",
        "versions",
        "widest",
    )

    def __init__(self, turn: int, *, made: bool = False) -> None:
        self.made = made
        self.names: list[tuple[str, str]] = []
        self.versions: set[int | None] = set()
        self.key: Key | None = None
        self.raw = 0
        self._size = -1
        self.widest: Key | None = None
        self._most = -1
        self.told: set[int] = set()
        self.turn = turn

    def at_version(self, *versions: int | None) -> None:
        """The content is the present one at these version counters, too."""
        if len(self.versions) > _MAX_VERSIONS:
            self.versions.clear()
        self.versions.update(versions)

    def read(self, key: Key, size: int, raw: int) -> None:
        """The present content was read in a layout of so many elements; the largest is kept."""
        if size > self._size:
            self.key, self._size, self.raw = key, size, raw
        if size > self._most:
            self.widest, self._most = key, size

    def forget(self) -> None:
        """It was written: what was read is no longer its content."""
        self.key, self._size = None, -1

    def is_row_of(self, tensor: Tensor) -> bool:
        """Whether what was read are just the elements of a tensor, in their order."""
        key = self.key
        return (
            key is not None
            and key[2] == tensor.storage_offset()
            and key[3] is tensor.dtype
            and self._size == tensor.numel()
            and tensor.is_contiguous()
            and is_row_major(*key[:2])
        )

    def tells(self, key: Key) -> bool:
        """Whether what was read says what another layout holds, because that lies within it."""
        if self.key is None or self.key[3] is not key[3] or not is_row_major(*self.key[:2]):
            return False
        start, first = key[2], self.key[2]
        return bool(first <= start and start + _extent(key) <= first + self._size)


class StorageState:
    """What is known of one storage; lives exactly as long as it.

    Attributes:
        at: 0, or if uses are checked the address at which it was seen; 1 where it has none.
        values: Layout -> (value id, meta id) of the present write count.
        special: None, or why its content cannot just be read.
        partial: Its last write covered a part of it only.
        last: The value id given last, unless that reads the bits as another dtype; `hashed`: the one fingerprinted last.
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
        self.special: Special | None = None
        self.partial = False
        self.last = 0
        self.hashed = 0
        self.leaf: Leaf | None = None

    def when_read(self, key: Key, size: int) -> Callable[[Any], None]:
        """What to do with the fingerprint, once it arrives, of the present content of a leaf.

        Args:
            key: The layout that is being read.
            size: Its elements.
        """
        # weakly: a state that lives says that its storage does
        reference, writes = weakref.ref(self), self.writes

        def then(rows: Any) -> None:
            state = reference()
            if state is not None and state.leaf is not None and state.writes == writes:
                state.leaf.read(key, size, int(rows["raw"][0]))

        return then

    def may_be_read(self, tensor: Tensor) -> bool:
        """Whether the memory behind a tensor is there, written, and written to the end."""
        special = self.special
        if special is None:
            return is_readable(tensor)
        if isinstance(special, InFlight) and not special.is_done():
            return False
        return is_readable(tensor) and not (
            isinstance(special, Unwritten) and not special.holds(tensor)
        )

    def rewritten(self, tensor: Tensor, *, bumps: bool) -> None:
        """A leaf was written by an op; `bumps` says that its version goes up once the mode has returned."""
        self.at = tensor.untyped_storage().data_ptr() or 1
        self.version = version = version_of(tensor)
        leaf = self.leaf
        if leaf is None:
            return
        leaf.forget()
        leaf.at_version(version)
        if bumps and version is not None:
            leaf.at_version(version + 1)


class Made:
    """The storages that were made during a run, as long as they live.

    Attributes:
        latest: The latest ones; most of them die at once.
    """

    __slots__ = ("_others", "_prune_at", "latest")

    def __init__(self) -> None:
        self.latest: list[weakref.ref[StorageState]] = []
        self._others: deque[weakref.ref[StorageState]] = deque()
        self._prune_at = 4096

    def drop_dead(self) -> None:
        """Forget those of the latest storages that died.

        Soon, because references that pile up make Python collect garbage: 100 ms each 100,000 ops.
        """
        latest, self.latest = self.latest, []
        self._others.extend(reference for reference in latest if reference() is not None)

    def alive(self) -> Iterator[int]:
        """The last value of each that still lives."""
        self.drop_dead()
        for reference in list(self._others):
            state = reference()
            if state is not None and state.last:
                yield state.last

    def prune(self) -> None:
        """Forget those that died since."""
        others = self._others
        if len(others) > self._prune_at:
            for _ in range(len(others)):  # in place: other threads append meanwhile
                reference = others.popleft()
                if reference() is not None:
                    others.append(reference)
            self._prune_at = max(4096, 2 * len(others))


def key_of(tensor: Tensor) -> Key:
    """The layout of a tensor within its storage."""
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype


def version_of(tensor: Tensor) -> int | None:
    """The version counter; inference tensors have none."""
    return None if tensor.is_inference() else tensor._version


def is_readable(tensor: Tensor) -> bool:
    """Whether the memory behind a tensor is there; reading a freed storage kills the process (H3)."""
    size = tensor.numel()
    if not size:
        return True
    if not tensor.is_contiguous():
        size = _extent(key_of(tensor))
    needed = (tensor.storage_offset() + size) * tensor.element_size()
    return bool(tensor.untyped_storage().nbytes() >= needed)


def in_layout(storage: torch.UntypedStorage, key: Key) -> Tensor | None:
    """A plain tensor on a storage; None for quantised dtypes, of which there are no plain tensors."""
    shape, stride, offset, dtype = key
    if dtype in _QUANTISED:
        return None
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, stride)


def _extent(key: Key) -> int:
    """Elements of storage from the first to the last element of a layout."""
    extent = 1
    for size, step in zip(key[0], key[1], strict=True):
        if not size:
            return 0
        extent += (size - 1) * step
    return int(extent)


def is_row_major(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether elements follow each other in memory in their order, as torch means by contiguous."""
    step = 1
    for size, place in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and place != step:
            return 0 in shape
        step *= size
    return True
