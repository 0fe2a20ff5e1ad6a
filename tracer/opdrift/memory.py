"""What the memory behind a storage holds: nothing yet, parts, or what somebody still writes."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from opdrift.fingerprint.accelerator import Accelerator
from opdrift.neutral import Work, silent, written_tensors

if TYPE_CHECKING:
    import numpy.typing as npt

    from opdrift.plans import Plan
    from opdrift.storages import Key

    Mask = npt.NDArray[np.bool_]

#: A storage of more elements than this is not followed element by element.
MAX_MASK: Final = 1 << 22
#: A glimpse is so many bytes at so many places.
_GLIMPSE_BYTES: Final = 16
_GLIMPSE_PLACES: Final = 4
#: The arguments that an indexed write takes its new elements from.
_CONTENTS: Final = frozenset({"source", "src", "value", "values", "fill_value"})


class Unwritten:
    """Memory that was handed out and not, or not wholly, written since."""

    __slots__ = ("_glimpse", "_grain", "_mask", "_vague")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        #: which elements were written, and the bytes of such an element; None before the first write
        self._mask: Mask | None = None
        self._grain = 1
        #: a part was written, and the whole is too large to be followed
        self._vague = False
        self._glimpse = glimpse(storage)

    def holds(self, tensor: Tensor) -> bool:
        """Whether every element of a tensor is known to be written."""
        if self._mask is None or self._vague:
            return False
        return bool(self._elements(tensor).all())

    def may_hold(self, tensor: Tensor) -> bool:
        """Whether every element of a tensor may be written, as far as is known."""
        return self._vague or self.holds(tensor)

    def write(
        self, storage: torch.UntypedStorage, tensor: Tensor, selection: Mask | None = None
    ) -> bool:
        """Note that a tensor is written now, or those of its elements that `selection` names.

        Returns:
            Whether the whole storage is written.
        """
        elements = storage.nbytes() // tensor.element_size()
        if selection is None and tensor.numel() >= elements:
            return True
        self._glimpse = glimpse(storage)
        if elements > MAX_MASK:
            self._vague = True
        if self._vague:
            return False
        if self._mask is None:
            self._grain = tensor.element_size()
            self._mask = np.zeros(elements, np.bool_)
        target = self._elements(tensor)
        target[...] = True if selection is None else target | selection[..., None]
        return bool(self._mask.all())

    def written_elements(self, tensor: Tensor) -> Mask | None:
        """Which elements of a tensor are known to be written; None if none is."""
        if self._mask is None:
            return None
        return np.asarray(self._elements(tensor).all(axis=-1))

    @classmethod
    def received(
        cls, storage: torch.UntypedStorage, tensor: Tensor, written: Mask | None
    ) -> Unwritten:
        """Memory that was written, and into a tensor of which a copy has put elements of which not all are.

        Args:
            storage: The memory.
            tensor: What the copy has written.
            written: Which elements of its source are written, in a shape that the tensor's extends; None if none is.
        """
        found = cls(storage)
        elements = storage.nbytes() // tensor.element_size()
        if written is None and tensor.numel() >= elements:
            return found
        found._vague = elements > MAX_MASK
        if not found._vague:
            found._grain = tensor.element_size()
            found._mask = np.ones(elements, np.bool_)
            found._elements(tensor)[...] = False if written is None else written[..., None]
        return found

    def _elements(self, tensor: Tensor) -> Mask:
        """The part of the mask that belongs to a tensor: its shape, and an axis of grains per element."""
        assert self._mask is not None
        size, nbytes = tensor.element_size(), tensor.untyped_storage().nbytes()
        # a storage that was resized is other memory
        if nbytes // self._grain != len(self._mask):
            self._mask, self._grain = np.zeros(nbytes // size, np.bool_), size
        elif size < self._grain:
            self._mask, self._grain = np.repeat(self._mask, self._grain // size), size
        grains = size // self._grain
        return np.lib.stride_tricks.as_strided(
            self._mask[tensor.storage_offset() * grains :],
            shape=(*tensor.shape, grains),
            strides=(*(stride * grains for stride in tensor.stride()), 1),
        )

    def was_touched(self, storage: torch.UntypedStorage) -> bool:
        """Whether something wrote it with no op that was seen: numpy, a kernel that is no op.

        True on a device: only waiting for it would tell, and kernels that are no ops are common there.
        """
        return storage.device.type != "cpu" or glimpse(storage) != self._glimpse


class InFlight:
    """A collective or a copy that still fills the storage; it must not be read before it is done.

    Args:
        work: What tells when it is done; None where nothing tells when it is done.
        readable: Whether `is_completed()` means that the output may be read (not so for reduce_scatter on gloo).
        message: It is one rank's message: `is_completed()` means that the program's own wait has returned, and what is
            read before is a matter of time, whatever has come by then.
    """

    __slots__ = ("_done", "_message", "_readable", "_work", "filled")

    def __init__(self, work: Work | None, *, readable: bool, message: bool = False) -> None:
        #: storage -> layouts and value ids of what is being filled in it
        self.filled: dict[int, list[tuple[Key, int]]] = {}
        self._work = work
        self._readable = readable
        self._message = message
        self._done = False

    def is_under_way(self) -> bool:
        """Whether it is certain that the output is not there yet, or that the program has not waited for it.

        On gloo a work says so a moment after its future does, by which C++ waits (measured: DDP under load).
        """
        if self._work is None or not self._readable or self.is_done():
            return False
        future = getattr(self._work, "get_future", None)
        if future is None or self._message:
            return True
        try:
            return not future().done()
        except RuntimeError:
            return False  # a backend without futures

    def wait(self) -> None:
        """Wait until it is done."""
        if self._work is not None:
            self._work.wait()
            self._done = True

    def is_done(self) -> bool:
        """Whether the output may be read now."""
        if not self._done and self._work is not None:
            self._done = self._readable and self._work.is_completed()
        return self._done

    def is_pending(self) -> bool:
        """Whether it is known that the output is not there yet; of some works nothing is known."""
        return self._work is not None and self._readable and not self.is_done()


class Generated:
    """A buffer of code that torch.compile generated, which writes it with no op that could be seen."""

    __slots__ = ()


Special = Unwritten | InFlight | Generated


def glimpse(storage: torch.UntypedStorage) -> bytes | None:
    """A few bytes of a storage, spread over it; None if none can be had without waiting for a device."""
    size = storage.nbytes()
    if not size or storage.device.type != "cpu":
        return None
    step = max((size - _GLIMPSE_BYTES) // (_GLIMPSE_PLACES - 1), _GLIMPSE_BYTES)
    places = range(0, size, step)[:_GLIMPSE_PLACES]
    at = storage.data_ptr()
    return b"".join(
        ctypes.string_at(at + place, min(_GLIMPSE_BYTES, size - place)) for place in places
    )


class Transfer:
    """A copy from a device to the host that the program has not waited for.

    Args:
        device: Where it comes from; it was the last thing that its current stream was given.
    """

    def __init__(self, device: torch.device) -> None:
        self._accelerator = Accelerator(device)
        self._event = self._accelerator.mark()

    def is_completed(self) -> bool:
        """Whether it is done."""
        if self._event is None or self._accelerator.is_capturing():
            return False
        return self._event.query()

    def wait(self) -> None:
        """Wait until it is done."""
        if self._event is not None:
            self._event.synchronize()


def under_way(use: Use, target: Tensor) -> InFlight | None:
    """What still fills memory of the host after a copy that was not waited for; None after any other."""
    source = use.args[1] if use.plan.writes else use.args[0]
    non_blocking = use.args[2] if len(use.args) > 2 else use.kwargs.get("non_blocking")
    if non_blocking is not True or not target.is_cpu or source.is_cpu or source.is_meta:
        return None
    return InFlight(Transfer(source.device), readable=True)


class Use(NamedTuple):
    """A call of an op that is about to run: the overload and its arguments."""

    plan: Plan
    args: Sequence[Any]
    kwargs: Mapping[str, Any]

    def reads(self, tensor: Tensor) -> bool:
        """Whether the op looks at the content of one of its tensor arguments."""
        if self.kwargs and self._makes_meta():
            return False
        if self.plan.scatters:
            return tensor is not self.args[0] or self._accumulates()
        return self.plan.reads and not self.overwrites(tensor)

    def _makes_meta(self) -> bool:
        """Whether what comes out has no content: weights are put on "meta" when they are taken out of a module."""
        device = self.kwargs.get("device")
        return isinstance(device, torch.device) and device.type == "meta"

    def overwrites(self, tensor: Tensor) -> bool:
        """Whether the op writes one of its tensor arguments without reading it."""
        return self.plan.overwrites and any(written is tensor for written in written_tensors(*self))

    def _accumulates(self) -> bool:
        """Whether `index_put_` or `put_` adds to what is there."""
        return (self.args[3] if len(self.args) > 3 else self.kwargs.get("accumulate")) is True

    def selection(self) -> Mask:
        """Which elements of its first argument an indexed write writes: the op itself, run on flags."""
        names = [argument.name for argument in self.plan.func._schema.arguments]
        with silent(), torch._C.DisableTorchFunction(), torch.no_grad():
            target = torch.zeros(self.args[0].shape, dtype=torch.bool, device="cpu")
            self.plan.call(
                target,
                *(_as_flag(name, a) for name, a in zip(names[1:], self.args[1:], strict=False)),
                **{name: _as_flag(name, a) for name, a in self.kwargs.items()},
            )
            return target.numpy()


def handed_on(use: Use, of: Special | None, into: Special | None) -> Unwritten | None:
    """What the memory of a copy's target is once it has run, where the source is not wholly written; else None.

    Args:
        use: The copy.
        of: What the memory of its source is.
        into: What that of its target was.
    """
    target, source = use.args[:2]
    if not isinstance(of, Unwritten) or of is into or of.may_hold(source):
        return None
    written, storage = of.written_elements(source), target.untyped_storage()
    if not isinstance(into, Unwritten):
        return Unwritten.received(storage, target, written)
    arrived = np.broadcast_to(False if written is None else written, target.shape)
    return None if into.write(storage, target, arrived) else into


def _as_flag(name: str, a: Any) -> Any:
    if name in _CONTENTS:
        return (
            torch.ones(a.shape, dtype=torch.bool, device="cpu") if isinstance(a, Tensor) else True
        )
    if isinstance(a, Tensor):
        return a.cpu()
    if isinstance(a, list | tuple):
        return [_as_flag("", item) for item in a]
    return a
