"""What is known of each tensor that accelerate moves in and out of a module."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from opdrift.plugins import Digest
from opdrift_integrations.accelerate.marks import Move
from opdrift_integrations.digests import same


@dataclass(slots=True)
class Slot:
    """A parameter or buffer of one module, and its content as last seen.

    Attributes:
        number: Which slot this is, from 0: what joins the marks of one.
        name: Its name in the model, as last told.
        unit: Path of the module that holds it; None while the recorder does not know it.
        loads: How often it was loaded.
        known: What it held when it was last outside: the content that a load has to bring.
        seen: When that was: "attach" (as it was taken from the module), "write" (as a file was
            written) or "load".
        loaded: What the last load brought.
        address: Where that lay.
        aliased: The last load copied nothing: the module used the source itself.
        source: The memory that it was last loaded from, and `named`: what that was called then, and how often it had
            been written.
        moved: The memory that it was last loaded from was another than at the load before.
        tied: ((name, the name that was loaded from the same memory before),)
        forms: Direction -> its last move, and what writes a mark that says the same.
    """

    number: int
    owner: weakref.ref[nn.Module]
    name: str = ""
    unit: str | None = None
    loads: int = 0
    known: Digest | None = None
    seen: str | None = None
    loaded: Digest | None = None
    address: int = 0
    aliased: bool = False
    source: Callable[[], torch.UntypedStorage | None] = lambda: None
    named: tuple[str, int] | None = None
    moved: bool = False
    tied: tuple[tuple[str, str], ...] = ()
    forms: dict[str, tuple[Move, Callable[..., None]]] = field(default_factory=dict)


class Slots:
    """The slots of one recorder."""

    def __init__(self) -> None:
        #: (id of a module, name) -> the slot, which says whether it is still that module.
        self._of: dict[tuple[int, str], Slot] = {}
        self._all: list[Slot] = []
        #: Where a source lies in memory -> the source, and the first name that was loaded from there.
        self._sources: dict[int, tuple[weakref.ref[torch.UntypedStorage], str]] = {}

    def of(self, owner: nn.Module, name: str) -> Slot:
        """The slot of a module's own parameter or buffer; it is made at its first move."""
        key = id(owner), name
        slot = self._of.get(key)
        if slot is None or slot.owner() is not owner:
            slot = self._of[key] = Slot(len(self._all), weakref.ref(owner))
            self._all.append(slot)
        return slot

    def holding(self, content: Digest | None, but: Slot) -> list[str]:
        """Names of other slots that hold a content; none for zeros, which tell nothing."""
        if content is None or content.raw == 0:
            return []
        return [
            slot.name
            for slot in self._all
            if slot is not but and (same(slot.known, content) or same(slot.loaded, content))
        ]

    def tied(self, slot: Slot, source: torch.Tensor) -> tuple[tuple[str, str], ...]:
        """((name, owner),) where a slot is loaded from memory that another name was loaded from before."""
        address, storage = source.data_ptr(), source.untyped_storage()
        found = self._sources.get(address)
        if address and (found is None or found[0]() is None):
            self._sources[address] = weakref.ref(storage), slot.name
            return ()
        return () if found is None or found[1] == slot.name else ((slot.name, found[1]),)


def owner_of(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that holds a tensor with a dotted name itself, and the tensor's name in it."""
    if "." not in name:
        return module, name
    path, _, own = name.rpartition(".")
    return module.get_submodule(path), own


def held(owner: nn.Module, name: str) -> Any:
    """A module's own parameter or buffer, without asking the module's `__getattr__`."""
    found = owner._parameters.get(name)
    return owner._buffers.get(name) if found is None else found


def differing(wanted: torch.Tensor, found: torch.Tensor) -> dict[str, Any]:
    """Where two contents of equal layout differ, bit by bit: the fields of a `mismatch`.

    `offset` is the first differing element, `numel` how many there are up to the last one, `differing`
    how many of those differ, `zeros` whether all that differ are zero.
    """
    both = [
        tensor.detach().reshape(-1).contiguous().view(torch.uint8).reshape(tensor.numel(), -1)
        for tensor in (wanted.to(found.device), found)
    ]
    places = (both[0] != both[1]).any(1).nonzero().reshape(-1)
    first, last = int(places[0]), int(places[-1])
    return {
        "offset": first,
        "numel": last - first + 1,
        "differing": len(places),
        "zeros": not bool(both[1][places].any()),
    }
