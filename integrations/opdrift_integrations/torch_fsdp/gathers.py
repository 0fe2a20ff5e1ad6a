"""Write down what FSDP1 and FSDP2 do to parameters, and check it against this rank's own shards.

Both resize storages and switch pointers, which no dispatched op shows; `flat` and `groups` watch the calls
that do it, and this module says what came of them. The words are those of the fairscale integration. All
marks have `library` ("torch_fsdp"), `unit` (path of the module; null if the recorder does not know it),
`phase` (forward, backward, or summon: the program asked for the parameters) and `step` (how many optimizer
steps were done before). Those about parameters have `buffer`, `parameters` [[name, offset, shape]], `tied`
[[name, owner]], where there are any `split` [name] (FSDP2: those of which tensor parallelism has left a part on this
rank, which is gathered) and `replicas` (hybrid sharding: the ranks that hold the same parts), and
`layout`: "flat" where the parameters follow each other and shards cut them anywhere
(FSDP1; offsets count from the start of the buffer), "each" where a shard holds its rank's padded part of each
parameter (FSDP2; offsets count from the start of a shard).

`gather`  The parameters of a unit were put together; `use`: they were still there. `nth`, `ranks` (of the
          group), `rank` (this one's number in it), `bytes`, `dtype`, `device`, `padding` (elements), `shard`
          (digest of this rank's own shard as cast), `own` [[number of the parameter or null, offset in it,
          elements, hash]] (the pieces of that shard), `intact` (own shard and own segment are equal) and, where
          they are not, `mismatch` [{parameter, offset, numel, zeros, found}]. A gather also has `segments`
          (digest of each rank's part of what was gathered) and `wholes` (hash of each parameter, what the ranks
          contributed end to end).
`cast`    The shard was cast for computing: digests of `source` and `destination`, dtypes, `intact`.
`move`    Offload: `direction` "load" copies the shard to the compute device (`blocking`, `intact`), "drop" goes
          back to the shard in host memory, which was there all the time (a pointer is switched, 0 bytes).
`reshard` What was gathered is given back: `intact` (it holds what was gathered, or its change went into the
          shard), `changed` [{parameter, written_back, before, found}], `rebound` (parameters whose tensor in the module is no
          part of what was gathered).
`free`    The storage of what was gathered, or of a cast shard, was resized to nothing: `bytes`, `device`.
`views`   FSDP1: the module's parameters were made anew as views, `what` "unsharded" or "sharded".
`shard-changed`  A shard does not hold what it held when last seen, and no op that was recorded wrote it:
          `mismatch` [{parameter, offset, numel, before, found}].
`shard-exchanged`  FSDP2: the model's tensor of a shard is not the one that is sent: `exchanged` (parameters).
`buffer-cast`  FSDP1: a buffer was cast for good; as of fairscale.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from opdrift.composition import end_to_end
from opdrift.plugins import Digest, RecorderLike
from opdrift_integrations.digests import as_field, cast_digests, raw_fields, same
from opdrift_integrations.failures import Failures
from opdrift_integrations.layouts import Buffer
from opdrift_integrations.tensors import between, dtype_name, is_readable
from opdrift_integrations.torch_fsdp.memory import Cut, Memory, Piece, cut

_log = logging.getLogger(__name__)

LIBRARY = "torch_fsdp"

Digests = Sequence[Digest | None]


#: Of each tensor of a shard its storage, and how often that was written.
Versions = Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a shard held when it was last read, piece by piece, and where it was kept then."""

    versions: Versions
    pieces: Digests


@dataclass(frozen=True, slots=True)
class _Told:
    """What writes marks about this: what was gathered in forward is mostly gathered in backward again."""

    about: tuple[Any, ...]
    write: Callable[..., None]


@dataclass(slots=True, eq=False)
class Unit:
    """What is known of one buffer of an FSDP unit; it holds no tensor, so that a program may drop its model.

    Attributes:
        path: Where the unit is in the model; None if the recorder does not know it.
        buffer: Where the parameters lie in it.
        offloaded: Its shard is kept in the host's memory.
        blocking: Whether the copy of an offloaded shard is waited for.
        cut: The pieces of the buffer.
    """

    path: str | None
    buffer: Buffer
    offloaded: bool = False
    blocking: bool = True
    cut: Cut = field(init=False)
    #: Each name of a parameter, tied ones included, and the parameter's number.
    names: list[tuple[str, int]] = field(init=False)
    #: What every mark says of the buffer.
    fields: dict[str, Any] = field(init=False)
    #: The same, and what the library says of it.
    common: dict[str, Any] = field(default_factory=dict)
    #: Writes marks of a kind, once one was written.
    forms: dict[str, Callable[..., None]] = field(default_factory=dict)
    #: Writes those of a kind that say what contents are, once one was written.
    told: dict[str, _Told] = field(default_factory=dict)
    #: Its shard has been named.
    named: bool = False
    nth: dict[str, int] = field(default_factory=dict)
    seen: _Seen | None = None
    #: Nothing is known to have written the shard since then, and what arrives from it tells whether that is so.
    unread: bool = False
    #: This rank's shard in the dtype that is gathered, per piece, and what it was cast from.
    source: Digests = field(default_factory=list)
    cast_from: Digests = field(default_factory=list)
    cast_dtype: torch.dtype | None = None
    #: It is gathered in another dtype than it is kept in.
    is_cast: bool = False
    #: Each piece as it was gathered, and what they are of each parameter.
    arrived: Digests = field(default_factory=list)
    wholes: Digests = field(default_factory=list)
    #: Each parameter as it was when the trace was last told its name.
    called: Digests = field(default_factory=list)
    #: Parameters whose shard in the model is not the one that is sent.
    exchanged: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        """Cut the buffer."""
        self.cut = cut(self.buffer)
        self.fields = self.buffer.as_fields()
        numbers = {part.name: number for number, part in enumerate(self.buffer.parts)}
        self.names = [(name, numbers[part.name]) for name, part in self.buffer.names()]

    def mine_of(self, digests: Digests) -> Digests:
        """Of digests of all pieces, those of this rank's shard."""
        return digests[self.cut.mine_at]


class Follower:
    """Follows the units of one recorder.

    Args:
        recorder: Where the marks go.
        library: Their field `library`.
        called: The library in a sentence.
    """

    def __init__(
        self, recorder: RecorderLike, library: str = LIBRARY, called: str = "torch's FSDP"
    ) -> None:
        self.recorder = recorder
        self.library = library
        self.step = 0
        self._thread = threading.get_ident()
        self.failed = Failures(recorder, library, called)

    def is_mine(self, *, known: bool) -> bool:
        """Whether this recorder is meant: its thread, or a unit that it knows (backward has its own)."""
        return known or threading.get_ident() == self._thread

    def lacks(self, what: str, missing: Sequence[str]) -> None:
        """Say that this torch has not what one of its FSDPs is watched by."""
        _log.warning(
            "opdrift does not follow %s in this run: this torch (%s) has no %s. Ops are recorded as ever;"
            " gathers are not checked.",
            what,
            torch.__version__,
            ", ".join(missing),
        )
        for name in missing:
            error = f"{name} is not there, {what} is not followed"
            self.recorder.mark("integration-failed", library=LIBRARY, error=error, missing=name)

    def mark(self, kind: str, unit: Unit, phase: str, **fields: Any) -> None:
        """Write a mark about a unit's parameters."""
        write = unit.forms.get(kind)
        if write is None:
            write = unit.forms[kind] = self.recorder.form(kind, self._common(unit))
        write(phase=phase, step=self.step, **fields)

    def _writer(
        self, kind: str, unit: Unit, make: Callable[..., dict[str, Any]], *about: Any
    ) -> Callable[..., None]:
        """What writes marks that also say what `make(unit, *about)` does; nothing in `about` may change."""
        told = unit.told.get(kind)
        if told is None or told.about != about:
            write = self.recorder.form(kind, self._common(unit), partial(make, unit, *about))
            told = unit.told[kind] = _Told(about, write)
        return told.write

    def _common(self, unit: Unit) -> dict[str, Any]:
        """What every mark about a unit's parameters says; it is made once."""
        if not unit.common:
            common = {"library": self.library, "unit": unit.path, "layout": unit.buffer.layout}
            unit.common = {**common, **unit.fields}
        return unit.common

    # ---- the shard ----------------------------------------------------------------------------------

    def read_shard(
        self, unit: Unit, memory: Memory, dtype: torch.dtype, phase: str, *, sent: bool
    ) -> None:
        """Read this rank's shard where FSDP is about to use it, as it will be cast.

        Args:
            unit: What is known of the unit.
            memory: Where the shard lies.
            dtype: In which it is gathered.
            phase: What it is gathered for.
            sent: It is gathered now. A shard that nothing has written is not read then: what arrives is read, and
                is the shard's content bit for bit. One that is cast is read for forward all the same, since a cast
                hides small changes.
        """
        with self.recorder.quiet():
            if not unit.named and unit.path is not None:
                self._name_shard(unit, memory)
            masters, seen = memory.masters, unit.seen
            as_kept = masters[0].dtype is dtype  # all of a buffer are of one dtype
            versions = self.recorder.versions(masters)
            is_told = as_kept or (phase == "backward" and unit.cast_dtype is dtype)
            unit.unread = sent and is_told and seen is not None and seen.versions == versions
            unit.is_cast, cast = not as_kept, None
            if unit.unread and seen is not None:
                held = seen.pieces
            else:
                # with the cast, where it is another since the optimizer's step
                is_new = seen is None or not _alike(seen.pieces, unit.cast_from)
                recast = unit.is_cast and (is_new or unit.cast_dtype is not dtype)
                held, cast = self._look(unit, memory, phase, versions, dtype if recast else None)
            if unit.cast_dtype is not dtype or not _alike(held, unit.cast_from):
                unit.cast_dtype = dtype
                self._cast(unit, memory, held, cast)

    def _cast(self, unit: Unit, memory: Memory, held: Digests, cast: Digests | None = None) -> None:
        """Learn what this rank's shard is in the dtype that is gathered, if that was not read with it."""
        unit.source = unit.cast_from = held
        if unit.is_cast and unit.cast_dtype is not None and None not in held:
            unit.source = cast or cast_digests(self.recorder, memory.shard(), unit.cast_dtype)

    def exchanged(self, unit: Unit, phase: str, names: Sequence[str]) -> None:
        """Parameters whose shard in the model is another tensor than the one that is sent: each is told once."""
        new = [name for name in names if name not in unit.exchanged]
        unit.exchanged = frozenset(names)
        if new:
            self.mark("shard-exchanged", unit, phase, exchanged=new)

    def stepped(self, unit: Unit, memory: Memory) -> None:
        """An optimizer has made a step: learn what it left in the shard, so that a hidden write shows."""
        if unit.seen is None:
            return
        versions = self.recorder.versions(memory.masters)
        if [writes for _, writes in versions] != [writes for _, writes in unit.seen.versions]:
            left = self.recorder.digests_left(memory.shard())
            unit.seen = _Seen(versions, left or self.recorder.digests(memory.shard()))

    def _look(
        self,
        unit: Unit,
        memory: Memory,
        phase: str,
        versions: Versions,
        dtype: torch.dtype | None = None,
    ) -> tuple[Digests, Digests | None]:
        """Read the shard, and what it is in another dtype if that is asked for and can be known in the same pass.

        A mark tells where it changed although nothing has written it.
        """
        both = None if dtype is None else self.recorder.cast_digests(memory.shard(), dtype)
        now, cast = both or (self.recorder.digests(memory.shard()), None)
        before, unit.seen = unit.seen, _Seen(versions, now)
        if before is None or before.versions != versions or _alike(before.pieces, now):
            return now, cast
        changed = [
            {**_where(unit, piece), "before": as_field(old), "found": as_field(new)}
            for piece, old, new in zip(unit.cut.mine, before.pieces, now, strict=True)
            if same(old, new) is False
        ]
        if changed:
            self.mark("shard-changed", unit, phase, mismatch=changed)
        return now, cast

    def _name_shard(self, unit: Unit, memory: Memory) -> None:
        unit.named = True
        for piece in unit.cut.mine:
            if piece.part is None:
                continue
            part = unit.buffer.parts[piece.part]
            held = min(piece.size, part.size - piece.offset)
            if held > 0:
                content = memory.own(piece)[:held]
                self.recorder.name_tensor(content, part.name, kind="shard")

    # ---- what was gathered --------------------------------------------------------------------------

    def gathered(self, unit: Unit, memory: Memory, phase: str, ranks: Sequence[int] | None) -> None:
        """The parameters were put together from what `read_shard` saw."""
        with self.recorder.quiet():
            self._look_at_gathered(unit, memory)
            mine = unit.mine_of(unit.arrived)
            if unit.unread and not _alike(mine, unit.source):
                # the shard was written past the dispatcher, or the gather is wrong
                assert unit.seen is not None
                held, _ = self._look(unit, memory, phase, unit.seen.versions)
                self._cast(unit, memory, held)
            checked = self._checked(unit, mine)
            self._sent(unit, memory, phase, checked["intact"])
            self._told("gather", unit, memory, phase, ranks, **checked)

    def used(self, unit: Unit, memory: Memory, phase: str, ranks: Sequence[int] | None) -> None:
        """The parameters were still there; `read_shard` has seen the shard as it is now."""
        with self.recorder.quiet():
            if not unit.wholes:  # gathered before this was recorded
                self._look_at_gathered(unit, memory)
            mine = self.recorder.digests(memory.segment())
            self._told("use", unit, memory, phase, ranks, **self._checked(unit, mine))

    def _look_at_gathered(self, unit: Unit, memory: Memory) -> None:
        """Learn what the model computes with, and name it if that is new."""
        arrived = self.recorder.digests(memory.whole())
        if not _alike(arrived, unit.arrived):
            unit.arrived = arrived
            unit.wholes = unit.cut.parts.of(arrived)
        if unit.path is not None and not _alike(unit.wholes, unit.called):
            self.name_parameters(unit, memory, unit.wholes)
            unit.called = unit.wholes

    def name_parameters(self, unit: Unit, memory: Memory, read: Digests | None = None) -> None:
        """Give what the model computes with the names that the model has for it.

        Args:
            unit: What is known of the unit.
            memory: Where the parameters lie.
            read: What each of them holds, if it was read just now.
        """
        found = read or [None] * len(unit.buffer.parts)
        named = [(memory.parameter(part), name, found[part]) for name, part in unit.names]
        self.recorder.name_tensors(named, kind="parameter")

    def _checked(self, unit: Unit, found: Digests) -> dict[str, Any]:
        """Whether this rank's segment is its shard, and the parameters where it is not."""
        if _alike(found, unit.source):
            return {"intact": True}
        mismatch = [
            {
                **_where(unit, piece),
                "zeros": there is not None and there.raw == 0,
                "found": as_field(there),
            }
            for piece, sent, there in zip(unit.cut.mine, unit.source, found, strict=True)
            # what pads a flat parameter is never read
            if piece.part is not None and same(sent, there) is False
        ]
        if mismatch:
            return {"intact": False, "mismatch": mismatch}
        known = all(d is not None for d in (*unit.source, *found))
        return {"intact": True if known else None}

    def _sent(self, unit: Unit, memory: Memory, phase: str, intact: bool | None) -> None:
        """The cast, and under offload the move, that came before the gather."""
        if not (unit.is_cast or unit.offloaded):
            return
        source, destination = memory.masters[0], memory.gathered[0]
        about = (
            *(source.dtype, source.device, destination.dtype, destination.device),
            *(unit.cast_from, unit.source),
        )
        # what arrived tells that it was sent right, not what went wrong on the way
        fields = {"phase": phase, "step": self.step, "intact": intact or None}
        if unit.is_cast:
            self._writer("cast", unit, _copy_fields, *about)(what="shard", **fields)
        if unit.offloaded:
            moved = self._writer("move", unit, _copy_fields, *about)
            moved(direction="load", blocking=unit.blocking, **fields)

    def _told(
        self,
        kind: str,
        unit: Unit,
        memory: Memory,
        phase: str,
        ranks: Sequence[int] | None,
        **fields: Any,
    ) -> None:
        unit.nth[kind] = unit.nth.get(kind, 0) + 1
        first = memory.gathered[0]
        of_all = (unit.arrived, unit.wholes) if kind == "gather" else ()
        members = None if ranks is None else tuple(ranks)
        write = self._writer(
            kind, unit, _gather_fields, first.dtype, first.device, members, unit.source, *of_all
        )
        write(phase=phase, step=self.step, nth=unit.nth[kind], **fields)

    # ---- giving it back -----------------------------------------------------------------------------

    def released(self, unit: Unit, memory: Memory, phase: str, rebound: Sequence[str]) -> None:
        """What was gathered is about to be given back: is it still what it was?"""
        gathered = memory.gathered
        if not unit.wholes or not all(map(is_readable, gathered)):
            return  # gathered before this was recorded, or given back already
        with self.recorder.quiet():
            changed = self._changed(unit, memory, phase)
        first = gathered[0]
        fields: dict[str, Any] = {"phase": phase, "step": self.step}
        if changed:
            fields["changed"] = changed
        if rebound:
            fields["rebound"] = list(rebound)
        lost = any(not each["written_back"] for each in changed)
        write = self._writer("reshard", unit, _held_fields, first.dtype, first.device)
        write(nth=unit.nth.get("gather", 0), intact=not lost and not rebound, **fields)
        if unit.offloaded:
            moved = {**between(first, memory.masters[0]), "bytes": 0}
            self.mark("move", unit, phase, direction="drop", **moved)

    def _changed(self, unit: Unit, memory: Memory, phase: str) -> list[dict[str, Any]]:
        """The parameters that do not hold any more what was gathered, and whether the shard has it."""
        found = self.recorder.digests(memory.whole())
        if _alike(found, unit.arrived):
            return []
        changed: list[dict[str, Any]] = []
        wholes = zip(unit.buffer.parts, unit.wholes, unit.cut.parts.of(found), strict=True)
        for number, (part, before, now) in enumerate(wholes):
            if same(before, now) is not False:
                continue
            written = self._written_back(unit, memory, number, found)
            if written is None and phase == "summon":
                written = True  # this rank holds none of it; those that do can tell
            changed.append(
                {
                    "parameter": part.name,
                    "written_back": bool(written),
                    "before": as_field(before),
                    "found": as_field(now),
                }
            )
        return changed

    def _written_back(self, unit: Unit, memory: Memory, part: int, found: Digests) -> bool | None:
        """Whether this rank's shard has the change of a parameter; None if it is in what other ranks hold."""
        mine = zip(unit.cut.mine, unit.mine_of(unit.arrived), unit.mine_of(found), strict=True)
        changed = [
            (piece, now)
            for piece, before, now in mine
            if piece.part == part and same(before, now) is False
        ]
        if not changed:
            return None
        return all(same(self.recorder.digest(memory.own(piece)), now) for piece, now in changed)

    def freed(self, unit: Unit, phase: str, bytes_: int, device: str, what: str) -> None:
        """A storage was resized to nothing."""
        if not bytes_:
            return
        form = f"free {what} on {device}"
        write = unit.forms.get(form)
        if write is None:
            fields = {
                "library": self.library,
                "unit": unit.path,
                "buffer": unit.buffer.name,
                "what": what,
                "device": device,
            }
            write = unit.forms[form] = self.recorder.form("free", fields)
        write(phase=phase, step=self.step, bytes=bytes_)


def _copy_fields(
    unit: Unit,
    source_dtype: torch.dtype,
    source_device: torch.device,
    dtype: torch.dtype,
    device: torch.device,
    source: Digests,
    destination: Digests,
) -> dict[str, Any]:
    """What marks say of a shard that was copied."""
    return {
        "source_dtype": dtype_name(source_dtype),
        "destination_dtype": dtype_name(dtype),
        "source_device": str(source_device),
        "destination_device": str(device),
        "bytes": unit.buffer.shard * dtype.itemsize,
        "source": as_field(end_to_end(source)),
        "destination": as_field(end_to_end(destination)),
    }


def _held_fields(unit: Unit, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """What marks say of the memory that was gathered into."""
    return {"bytes": unit.buffer.size * dtype.itemsize, "device": str(device)}


def _gather_fields(
    unit: Unit,
    dtype: torch.dtype,
    device: torch.device,
    ranks: tuple[int, ...] | None,
    source: Digests,
    arrived: Digests | None = None,
    wholes: Digests = (),
) -> dict[str, Any]:
    """What marks say of what was gathered, and of this rank's shard in the dtype of that."""
    fields = {
        **_held_fields(unit, dtype, device),
        "rank": unit.buffer.rank,
        "ranks": None if ranks is None else list(ranks),
        "dtype": dtype_name(dtype),
        "padding": unit.buffer.padding,
        "shard": as_field(end_to_end(source)),
        "own": [
            [piece.part, piece.offset, piece.size, sent]
            for piece, sent in zip(unit.cut.mine, raw_fields(source), strict=True)
            if sent is not None
        ],
    }
    if arrived is None:
        return fields
    return {
        **fields,
        "segments": [as_field(segment) for segment in unit.cut.shards.of(arrived)],
        "wholes": raw_fields(wholes),
    }


def _where(unit: Unit, piece: Piece) -> dict[str, Any]:
    name = None if piece.part is None else unit.buffer.parts[piece.part].name
    return {"parameter": name, "offset": piece.offset, "numel": piece.size}


def _alike(one: Digests, other: Digests) -> bool:
    if one == other:  # tells it in a tenth of the time, if they are of one recorder
        return None not in one
    return len(one) == len(other) and all(
        same(a, b) is True for a, b in zip(one, other, strict=True)
    )


def phase_of(unit: Any) -> str:
    """What FSDP gathers for: forward, backward, or "summon" where the program asked for the parameters.

    `unit` is a `FlatParamHandle` of FSDP1 or an `FSDPParamGroup` of FSDP2: both have a `_training_state`.
    """
    state = unit._training_state.name
    if "BACKWARD" in state:
        return "backward"
    return "forward" if state == "FORWARD" else "summon"
