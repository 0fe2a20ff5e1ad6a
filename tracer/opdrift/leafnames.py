"""The names of tensors: parameters, buffers, inputs, results, and contents that integrations call something."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from torch import Tensor
from torch.nn import Parameter

from opdrift.memory import Generated
from opdrift.storages import MAX_LAYOUTS, Leaf, StorageState, key_of, version_of

if TYPE_CHECKING:
    from opdrift.buffers import ThreadBuffers
    from opdrift.values import Values

#: From so many names on, those of tensors that died are forgotten.
_MANY: Final = 65536


class Names:
    """The names of the tensors of one recorder.

    Args:
        values: Which content each of them holds.
        write_leaf: Writes a row of the table `leaves`.
    """

    def __init__(
        self, values: Values, write_leaf: Callable[[tuple[str, str, str, int, int, int]], None]
    ) -> None:
        self._values = values
        self._write_leaf = write_leaf
        #: by id of the Python object: (weak reference, name, kind)
        self._names: dict[int, tuple[weakref.ref[Tensor], str, str]] = {}

    def give(
        self,
        t: ThreadBuffers,
        tensor: Tensor,
        name: str,
        kind: str,
        when: str,
        row: bytes | None = None,
    ) -> bool:
        """Give a tensor's present content a name, and fingerprint it if nothing has.

        `row` is a fingerprint of the same content, if there is one: it is not read once more.
        Returns whether its storage was new, or a parameter whose fingerprint is the last one of this thread: then it is
        known what it holds without reading it again.
        """
        state: StorageState | None = getattr(tensor.untyped_storage(), self._values.key, None)
        key = key_of(tensor)
        is_known = state is None
        if state is None:
            state, _ = self._values.new_leaf(tensor)
        leaf = state.leaf
        entry = state.values.get(key)
        if entry is not None and leaf is not None and state.at:
            at = tensor.untyped_storage().data_ptr() or 1
            if at != state.at or version_of(tensor) != state.version:
                entry = self._values.rereading.moved(t, tensor, state, entry)
            elif kind == "buffer" and when == "gather":
                # running statistics are written with no version moved
                entry = self._values.rereading.reread(t, tensor, state, entry)
        if entry is None:
            entry = self._values.make_another(t, state, key)
        if isinstance(state.special, Generated):
            entry, _ = self._values.unsettled.generated(t, tensor, state, entry, 0)
        if leaf is None and self._is_last(t, tensor, state, entry[0]):
            leaf, is_known = self._values.made_leaf(tensor, state), True
            leaf.read(key, tensor.numel(), self._values.last_digest(t))
        elif (leaf is None or key != leaf.key) and self._values.can_read(tensor):
            self._values.show(t, tensor, state, entry[0], key, row)
        if kind not in ("output", "gradient"):  # a result keeps the name that it had
            self._names[id(tensor)] = (weakref.ref(tensor), name, kind)
            if leaf is not None and (name, kind) not in leaf.names:
                leaf.names = [known for known in leaf.names if known[0]]
                leaf.names.append((name, kind))
        self.tell(t, leaf, entry[0], name, kind, when)
        return is_known

    def _is_last(self, t: ThreadBuffers, tensor: Tensor, state: StorageState, value: int) -> bool:
        """Whether a parameter that an op made is what was fingerprinted last on this thread."""
        return type(tensor) is Parameter and state.special is None and t.latest_value() == value

    def tell(
        self, t: ThreadBuffers, leaf: Leaf | None, value: int, name: str, kind: str, when: str
    ) -> None:
        """Write a row of the table `leaves`."""
        if leaf is not None:
            if len(leaf.told) >= MAX_LAYOUTS:
                leaf.told.clear()
            leaf.told.add(value)
        self._write_leaf((name, kind, when, value, t.seq, t.call))

    def is_input(self, tensor: Tensor) -> bool:
        """Whether no op made a tensor's content, no model owns it, and it was not named as it is now."""
        known = self._values.value_of(tensor)
        if known is None:
            return True
        state, entry = known
        leaf = state.leaf
        if leaf is None or leaf.made or state.writes:
            return False
        if any(kind not in ("input", "constant") for _, kind in leaf.names):
            return False
        return entry is None or entry[0] not in leaf.told or not any(n for n, _ in leaf.names)

    def of(self, t: ThreadBuffers, tensor: Tensor) -> tuple[str, str] | None:
        """The (name, kind) of a tensor that was named, or is a parameter or buffer of the running module."""
        named = self._names.get(id(tensor))
        if named is not None and named[0]() is tensor:
            return named[1], named[2]
        return self._in_module(t, tensor)

    def _in_module(self, t: ThreadBuffers, tensor: Tensor) -> tuple[str, str] | None:
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

    def prune(self) -> None:
        """Forget those of tensors that died."""
        if len(self._names) > _MANY:
            for ident, named in list(self._names.items()):
                if named[0]() is None:
                    self._names.pop(ident, None)
