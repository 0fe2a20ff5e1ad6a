"""Write down what accelerate does to parameters and buffers.

accelerate puts a module's weights in place before its forward and takes them away after it, by
replacing entries of `module._parameters` (accelerate 1.15.0, `hooks.py`). Where host memory is also where
the module computes, no op shows that; and files are read past the dispatcher. So its functions are
watched. All marks have `library` "accelerate", `unit` (path of the module that holds the tensor, null if
the recorder does not know it) and `phase`: "attach" (a hook is put on the module), "forward", "detach", or
"checkpoint" (accelerate loads a checkpoint).

`move`    A tensor was moved: `direction` "load" puts it in place, "drop" takes it away (its content stays where
          it is loaded from), "write" puts it into a file, "place" moves it from one device to another for good.
          `slot` (a number that joins the moves of one tensor), `nth` (which load), `parameters` [[name, offset,
          shape]], `tied` [[name, the name that was loaded from the same memory before]], `source_dtype`,
          `destination_dtype`, `source_device`, `destination_device` (also "disk", then with `file`), `bytes`,
          `blocking`, `aliased` (the module uses the very memory that it is loaded from), `source` and `destination`
          (digests), `intact` (false: the destination is not the source; or, at a drop, what was changed since the
          load is lost). Where it is false, `mismatch` [{parameter, offset, numel, differing, zeros}] and
          `holds` (names whose content it is instead).
          A load has `known` (digest of the source when last seen), `seen` (when: "attach", "write" or "load") and
          `source_unchanged`, and `source_moved` (it is other memory than at the load before); a drop has `rebound` (the module's tensor lies elsewhere than what was loaded), and no
          digests where the module shared its source's memory.

Moves of whole modules (`cpu_offload_with_hook`) are one mark each, with the digests compared tensor by tensor.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import weakref
from collections.abc import Generator, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from accelerate import hooks
from accelerate.utils import modeling, offload
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from opdrift.plugins import Digest, RecorderLike
from opdrift_integrations.accelerate.marks import DISK, Copied, Dropped, Loaded, Move, Outcome
from opdrift_integrations.accelerate.slots import Slot, Slots, differing, held, owner_of
from opdrift_integrations.digests import same
from opdrift_integrations.failures import Failures
from opdrift_integrations.patching import watch_all
from opdrift_integrations.paths import join
from opdrift_integrations.tensors import dtype_name

Observation = Generator[None, Any, None]

_META = torch.device("meta")


class Compared(NamedTuple):
    """A copy and what it was made from.

    Attributes:
        copied: It has memory of its own.
        source: Digest of what it was made from.
        destination: Its own digest.
        intact: Whether it is what it has to be; None if one of them could not be read.
        wrong: What a mark says where it is not.
    """

    copied: bool
    source: Digest | None
    destination: Digest | None
    intact: bool | None
    wrong: dict[str, Any]


class Watcher:
    """The observers of one recorder."""

    def __init__(self, recorder: RecorderLike) -> None:
        self._recorder = recorder
        self._thread = threading.get_ident()
        self._slots = Slots()
        #: Tensors that were read from a file, and which.
        self._read_from: WeakIdKeyDictionary = WeakIdKeyDictionary()
        #: File -> what was last written into it.
        self._written: dict[str, Digest | None] = {}
        #: (phase, prefix of the names) of the hooks that run now, the innermost last.
        self._running: list[tuple[str, str]] = []
        self._failed = Failures(recorder, "accelerate")

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Observe accelerate inside the block."""
        align, whole = hooks.AlignDevicesHook, hooks.CpuOffload
        points = (
            (align, "init_hook", functools.partial(self.during, "attach")),
            (align, "pre_forward", functools.partial(self.during, "forward")),
            (align, "post_forward", functools.partial(self.during, "forward")),
            (align, "detach_hook", functools.partial(self.during, "detach")),
            (whole, "init_hook", functools.partial(self.whole, "attach", "drop")),
            (whole, "pre_forward", functools.partial(self.whole, "forward", "load")),
            (hooks, "set_module_tensor_to_device", self.place),
            (modeling, "set_module_tensor_to_device", self.place),
            (modeling, "offload_weight", self.write),
            (offload, "offload_weight", self.write),
            (offload.OffloadedWeightsLoader, "__getitem__", self.read),
        )
        with watch_all(points, self._failed, self._failed.missing):
            yield

    # ---- observers ----------------------------------------------------------------------------------

    def during(self, phase: str, hook: Any, *args: Any, **kwargs: Any) -> Observation:
        """A method of `AlignDevicesHook`: what it moves belongs to this phase."""
        if not self._here():
            return
        # PrefixedDataset: how accelerate itself calls the module, before the recorder has met the model
        prefix = getattr(hook.weights_map, "prefix", "")
        self._running.append((phase, prefix))
        try:
            yield
        finally:
            self._running.pop()

    def read(self, loader: Any, key: str) -> Observation:
        """`OffloadedWeightsLoader.__getitem__`: from the state dict in memory, or from a file."""
        result = yield
        if self._here() and key not in loader.state_dict:
            file = loader.index[key].get("safetensors_file")
            self._read_from[result] = file or os.path.join(loader.save_folder, f"{key}.dat")

    def write(
        self, weight: Any, weight_name: str, folder: Any, *args: Any, **kw: Any
    ) -> Observation:
        """`offload_weight`: a tensor goes into a file of its own."""
        yield
        if not self._here():
            return
        file = os.path.join(folder, f"{weight_name}.dat")
        content = self._written[file] = self._recorder.digest(weight)
        move = Move(
            "write",
            self._phase(),
            None,
            None,
            join(weight_name),
            weight.shape,
            weight.nbytes,
            weight.dtype,
            weight.device,
            weight.dtype,
            DISK,
            file,
            True,
            content,
        )
        self._recorder.mark("move", **move.fields())

    def place(
        self,
        module: nn.Module,
        tensor_name: str,
        device: Any,
        value: Any = None,
        dtype: Any = None,
        fp16_statistics: Any = None,
        tied_params_map: Any = None,
        non_blocking: bool = False,
        *args: Any,
        **kwargs: Any,
    ) -> Observation:
        """`set_module_tensor_to_device`: a tensor of a module is replaced by one elsewhere."""
        if threading.get_ident() != self._thread:
            return
        owner, name = owner_of(module, tensor_name)
        old = held(owner, name)
        yield
        new = held(owner, name)
        if new is old or new is None or old is None:
            return
        slot = self._slots.of(owner, name)
        if slot.unit is None or not new.is_meta:
            self._place_in_model(slot, owner, name, tensor_name)
        blocking = not non_blocking
        if new.is_meta:
            if not old.is_meta:
                self._drop(slot, old, blocking=blocking)
        elif isinstance(value, torch.Tensor):
            kind = "buffer" if name in owner._buffers else "parameter"
            self._load(slot, value, new, kind, blocking=blocking)
        elif old.device != new.device:
            self._replace(slot, old, new, blocking=blocking)

    def whole(
        self, phase: str, direction: str, hook: Any, module: nn.Module, *args: Any, **kwargs: Any
    ) -> Observation:
        """A method of `CpuOffload`: it moves a whole module with `.to`, if it is elsewhere."""
        target = torch.device("cpu" if direction == "drop" else hook.execution_device)
        first = next(module.parameters(), None)
        if not self._here() or first is None or first.device == target:
            yield
            return
        # Digests, and no references: the module is to be freed tensor by tensor.
        before = {
            path: (self._recorder.digest(tensor), tensor.dtype)
            for path, tensor in _tensors(module)
            if tensor.device != target
        }
        origin = str(first.device)
        yield
        moved = [(path, tensor) for path, tensor in _tensors(module) if path in before]
        unit = self._recorder.clean_path(module)
        named = [(join(unit or "", path), path, tensor) for path, tensor in moved]
        bad = [
            {"parameter": name, "offset": 0, "numel": tensor.numel()}
            for name, path, tensor in named
            if same(before[path][0], self._recorder.digest(tensor)) is False
        ]
        self._running.append((phase, ""))
        try:
            self._recorder.mark(
                "move",
                library="accelerate",
                unit=unit,
                phase=self._phase(),
                direction=direction,
                parameters=[[name, 0, list(tensor.shape)] for name, _, tensor in named],
                source_dtype=_common(dtype for _, dtype in before.values()),
                source_device=origin,
                destination_dtype=_common(tensor.dtype for _, tensor in moved),
                destination_device=str(target),
                bytes=sum(tensor.nbytes for _, tensor in moved),
                blocking=True,
                intact=None if target.type == "meta" else not bad,
                **({"mismatch": bad} if bad else {}),
            )
        finally:
            self._running.pop()

    # ---- what they share ----------------------------------------------------------------------------

    def _here(self) -> bool:
        return threading.get_ident() == self._thread

    def _place_in_model(self, slot: Slot, owner: nn.Module, own: str, given: str) -> None:
        """Name a slot as the recorder does, or, while that does not know the module, as accelerate does."""
        path = self._recorder.clean_path(owner)
        if path is None:
            slot.name = join(self._running[-1][1] if self._running else "", given)
        elif path != slot.unit:
            slot.unit, slot.name = path, join(path, own)

    def _load(
        self, slot: Slot, source: torch.Tensor, new: torch.Tensor, kind: str, *, blocking: bool
    ) -> None:
        file = self._read_from.get(source) if self._read_from else None
        copied = not _is_alias(new, source)
        slot.loads += 1
        slot.aliased = file is None and not copied
        slot.address = new.data_ptr()
        known, seen = slot.known, slot.seen
        if known is None and file in self._written:
            known, seen = self._written[file], "write"
        found = self._compare(slot, source, new, self._name(slot, source, new, kind, file))
        before, after = found.source, found.destination
        # A file may hold another precision than the module that was taken away.
        recast = known is not None and before is not None and known.code != before.code
        outcome = Loaded(
            after,
            slot.aliased,
            found.intact,
            known,
            seen,
            same(known, after if recast else before),
            slot.moved,
            slot.tied,
        )
        move = self._move(slot, "load", source, new, file, before, outcome, blocking=blocking)
        self._tell(slot, move, nth=slot.loads, **found.wrong)
        slot.known, slot.seen, slot.loaded = before, "load", after

    def _name(
        self, slot: Slot, source: torch.Tensor, new: torch.Tensor, kind: str, file: str | None
    ) -> Digest | None:
        """Name what was loaded; return its digest where it has just been read from a file, and the recorder knows it."""
        if file is not None:
            slot.tied, slot.moved = (), False
            return self._recorder.name_tensor(new, slot.name, kind=kind)
        storage, named = source.untyped_storage(), (slot.name, self._recorder.writes(source))
        is_there = slot.source() is storage
        slot.moved = slot.loads > 1 and not is_there
        # the memory has its name, and what it holds is known, unless that was written unseen
        if is_there and slot.aliased and slot.named == named:
            return None
        slot.source, slot.named = weakref.ref(storage), named
        slot.tied = self._slots.tied(slot, source)
        self._recorder.name_tensor(new, slot.name, kind=kind)
        return None

    def _replace(self, slot: Slot, old: torch.Tensor, new: torch.Tensor, *, blocking: bool) -> None:
        """A tensor was moved to another device for good."""
        found = self._compare(slot, old, new, None)
        outcome = Copied(found.destination, not found.copied, found.intact)
        move = self._move(slot, "place", old, new, None, found.source, outcome, blocking=blocking)
        self._tell(slot, move, **found.wrong)

    def _compare(
        self, slot: Slot, source: torch.Tensor, new: torch.Tensor, read: Digest | None
    ) -> Compared:
        """Compare a copy with what it was made from; `read` is the digest of the copy, where it is known.

        A digest that is as it was is the same object: it need not be compared again with what was told of it.
        """
        if _is_alias(new, source):
            content = _kept(slot.known, read or self._recorder.digest(source))
            return Compared(False, content, content, None if content is None else True, {})
        with self._recorder.quiet():
            before = _kept(slot.known, self._recorder.digest(source))
            after = _kept(slot.loaded, read or self._recorder.digest(new))
            cast = source if source.dtype == new.dtype else source.to(new.dtype)
            intact = same(before if cast is source else self._recorder.digest(cast), after)
            wrong = {}
            if intact is False:
                where = {"parameter": slot.name, **differing(cast, new)}
                wrong = {"mismatch": [where], "holds": self._slots.holding(after, slot)}
            return Compared(True, before, after, intact, wrong)

    def _drop(self, slot: Slot, old: torch.Tensor, *, blocking: bool) -> None:
        outcome: Dropped | None = None
        further: dict[str, Any] = {}
        if slot.loads and self._phase() == "forward":
            content, outcome, further = self._given_back(slot, old)
        else:
            content = self._recorder.digest(old)
            slot.known, slot.seen = content, "attach"
        move = self._move(slot, "drop", old, old, None, content, outcome, blocking=blocking)
        self._tell(slot, move._replace(destination_device=_META), **further)

    def _given_back(
        self, slot: Slot, old: torch.Tensor
    ) -> tuple[Digest | None, Dropped, dict[str, Any]]:
        """What is taken away after a forward, what has become of it, and further fields of the mark."""
        rebound = old.data_ptr() != slot.address
        further: dict[str, Any] = {"nth": slot.loads}
        # What the module shares with its source is not lost; the next load looks at it.
        if slot.aliased and not rebound:
            return None, Dropped(None, True, True, rebound), further
        content = _kept(slot.loaded, self._recorder.digest(old))
        intact = same(slot.loaded, content)
        if intact is False:
            further["holds"] = self._slots.holding(content, slot)
        return content, Dropped(slot.loaded, False, intact, rebound), further

    def _move(
        self,
        slot: Slot,
        direction: str,
        source: torch.Tensor,
        new: torch.Tensor,
        file: str | None,
        content: Digest | None,
        outcome: Outcome,
        *,
        blocking: bool,
    ) -> Move:
        return Move(
            direction,
            self._phase(),
            slot.unit,
            slot.number,
            slot.name,
            new.shape,
            new.nbytes,
            source.dtype,
            source.device if file is None else DISK,
            new.dtype,
            new.device,
            file,
            blocking,
            content,
            outcome,
        )

    def _tell(self, slot: Slot, move: Move, **fields: Any) -> None:
        """Write the mark of a move; one that says what the last one said is not made into JSON again."""
        known = slot.forms.get(move.direction)
        if known is None or known[0] != move:
            known = move, self._recorder.form("move", move.fields())
            slot.forms[move.direction] = known
        known[1](**fields)

    def _phase(self) -> str:
        return self._running[-1][0] if self._running else "checkpoint"


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _is_alias(new: torch.Tensor, source: torch.Tensor) -> bool:
    return new.data_ptr() == source.data_ptr() and new.dtype == source.dtype


def _kept(before: Digest | None, now: Digest | None) -> Digest | None:
    """What is there now, as the object that it was before if it is still that."""
    return before if same(before, now) else now


def _common(dtypes: Iterable[torch.dtype]) -> str | None:
    """The dtype that all have; None if they have several."""
    names = {dtype_name(dtype) for dtype in dtypes}
    return names.pop() if len(names) == 1 else None
