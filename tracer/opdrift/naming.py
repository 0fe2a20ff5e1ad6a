"""Give leaves and results their names: parameters, buffers, inputs, outputs, gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.nn import Module
from torch.nn.parameter import is_lazy

from opdrift.interning import parts
from opdrift.scopes import cleaner, name_arguments, unwrapped, walk

if TYPE_CHECKING:
    from opdrift.buffers import ThreadBuffers
    from opdrift.plugins import Digest, OwnsParameters
    from opdrift.values import Values

#: Most are of these: neither lazy nor made of others.
_PLAIN: Final = frozenset({torch.Tensor, torch.nn.Parameter})

WriteMark = Callable[["ThreadBuffers", str, Mapping[str, Any]], None]
LeafRow = tuple[str, str, str, int, int, int]


class Naming:
    """Names the leaves of one recording. To be called with dispatch switched off."""

    def __init__(
        self, values: Values, *, write_mark: WriteMark, write_leaf: Callable[[LeafRow], None]
    ) -> None:
        self._values = values
        self._write_mark = write_mark
        self._write_leaf = write_leaf
        #: models whose tensors were named, by id; weak, so that a program may drop its model
        self._models: dict[int, tuple[weakref.ref[Module], str]] = {}
        self._inside: dict[int, weakref.ref[Module]] = {}
        #: integrations whose library holds other tensors in place of the parameters
        self.owners: list[OwnsParameters] = []

    def tensor(
        self,
        t: ThreadBuffers,
        tensor: torch.Tensor,
        name: str,
        kind: str,
        when: str,
        row: bytes | None = None,
    ) -> tuple[int, int, int] | None:
        """Name a tensor's present content; return what `Engine.digest` says of it where that is known.

        `row` is a fingerprint of the same content, if there is one.
        """
        read = None
        for part_name, part in plain_parts(name, tensor):
            given = row if part is tensor else None
            is_known = self._values.names.give(t, part, part_name, kind, when, given)
            if is_known and part is tensor:
                read = self._values.digest_read(part)
        return read

    def tensors(
        self,
        t: ThreadBuffers,
        named: Iterable[tuple[torch.Tensor, str, Digest | None]],
        kind: str,
        when: str,
    ) -> None:
        """Name the present contents of many tensors, each with a digest of it where that was read just now.

        Such a content is not read once more if an op that has just written it left a fingerprint of it.
        """
        found = list(named)
        # all of them first: each name may empty the buffer that they are in
        rows = t.latest_fingerprints([digest for _, _, digest in found])
        for (tensor, name, digest), row in zip(found, rows, strict=True):
            is_whole = digest is not None and digest.n == tensor.numel()
            self.tensor(t, tensor, name, kind, when, row if is_whole else None)

    def model(self, t: ThreadBuffers, model: Module, prefix: str) -> None:
        """Name and fingerprint a model's parameters and buffers, and say in a mark what it is."""
        self._models[id(model)] = weakref.ref(model), prefix
        non_persistent: list[str] = []
        sharded: list[str] = []
        own = cleaner(model)
        for path, module in model.named_modules():
            self._inside[id(module)] = weakref.ref(module)
            non_persistent += [
                _joined(prefix, own(path), name) for name in module._non_persistent_buffers_set
            ]
        counts = {"parameter": 0, "buffer": 0}
        for kind, path, tensor in _tensors(model, remove_duplicate=False):
            if any(owner.owns(tensor) for owner in self.owners):
                continue
            self.tensor(t, tensor, _joined(prefix, own(path)), kind, "entry")
            if _is_sharded(tensor):
                sharded.append(_joined(prefix, own(path)))
            counts[kind] += 1
        fields = {
            "name": prefix,
            "type": type(model).__name__,
            "training": model.training,
            "parameters": counts["parameter"],
            "buffers": counts["buffer"],
            "non_persistent": sorted(non_persistent),
            "sharded": sharded,
        }
        self._write_mark(t, "model", fields)

    def knows(self, module: Module) -> bool:
        """Whether a module is one of the named models, a part of one, or a wrapper around it."""
        for each in (module, unwrapped(module)):
            found = self._inside.get(id(each))
            if found is not None and found() is each:
                return True
        return False

    def arguments(
        self, t: ThreadBuffers, module: Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """Name what a root module was called with, as far as no op made it and nobody named it."""
        for name, tensor in name_arguments(module, args, kwargs):
            for part_name, part in plain_parts(name, tensor):
                if self._values.names.is_input(part):
                    self._values.names.give(t, part, part_name, "input", "use")

    def results(self, t: ThreadBuffers, call: int, output: Any) -> None:
        """Name what a root module returned."""
        t.call, outside = call, t.call
        try:
            for name, tensor in walk("output", output):
                self.tensor(t, tensor, name, "output", "return")
        finally:
            t.call = outside

    def rest(self, t: ThreadBuffers) -> None:
        """Name results that no module returned: changed parameters and buffers, gradients, what still lives."""
        for reference, prefix in self._models.values():
            model = reference()
            if model is None:
                continue
            own = cleaner(model)
            for kind, path, tensor in _tensors(model, remove_duplicate=True):
                name = _joined(prefix, own(path))
                for part_name, part in plain_parts(name, tensor):
                    found = self._values.value_of(part)
                    if found is not None and found[0].writes:
                        self._values.names.give(t, part, part_name, kind, "exit")
                # torch warns where a tensor that is no leaf is asked for its gradient
                if tensor.is_leaf and tensor.grad is not None:
                    self.tensor(t, tensor.grad, name, "gradient", "exit")
        for value in self._values.made.alive():
            self._write_leaf(("", "alive", "exit", value, t.seq, 0))


def _tensors(model: Module, *, remove_duplicate: bool) -> Iterator[tuple[str, str, torch.Tensor]]:
    for path, parameter in model.named_parameters(remove_duplicate=remove_duplicate):
        yield "parameter", path, parameter
    for path, buffer in model.named_buffers(remove_duplicate=remove_duplicate):
        yield "buffer", path, buffer


def _is_sharded(tensor: torch.Tensor) -> bool:
    """Whether this rank holds a part of it: a DTensor that is not replicated, what torch's or fairscale's FSDP took."""
    placements = getattr(tensor, "placements", ())
    flags = ("_is_sharded", "_is_flat_param", "_fsdp_flattened")
    return any(not placement.is_replicate() for placement in placements) or any(
        getattr(tensor, flag, False) is True for flag in flags
    )


def _joined(*names: str) -> str:
    return ".".join(name for name in names if name)


def plain_parts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The plain tensors that hold a tensor's content: itself, a DTensor's local part, a wrapper's or sparse one's parts.

    None for a parameter of a lazy module, which has no shape yet.
    """
    if type(tensor) not in _PLAIN:
        if is_lazy(tensor):
            return
        local = getattr(tensor, "_local_tensor", None)
        if isinstance(local, torch.Tensor):
            tensor = local
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        yield from _wrapped_parts(name, tensor)
        return
    if tensor.layout is torch.strided and not tensor.is_nested:
        yield name, tensor
        return
    for position, part in enumerate(parts(tensor)):
        yield f"{name}.{position}", part


def _wrapped_parts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The parts of a subclass that says of which tensors it consists: jagged tensors, quantised weights."""
    flatten = getattr(tensor, "__tensor_flatten__", None)
    # what a collective may still be filling must not be touched
    if flatten is None or type(tensor).__qualname__ == "AsyncCollectiveTensor":
        return  # the ops that it runs show its inner tensors
    for attribute in flatten()[0]:
        yield from plain_parts(f"{name}.{attribute}", getattr(tensor, attribute))
