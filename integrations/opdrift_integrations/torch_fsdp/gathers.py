"""Write down what FSDP1 and FSDP2 do to parameters, and check it against this rank's own shards.

Both resize storages and switch pointers, which no dispatched op shows; `flat` and `groups` watch the calls
that do it, and this module says what came of them. The words are those of the fairscale integration. All
marks have `library` ("torch_fsdp"), `unit` (path of the module; null if the recorder does not know it),
`phase` (forward, backward, or summon: the program asked for the parameters) and `step` (how many optimizer
steps were done before). Those about parameters have `buffer`, `parameters` [[name, offset, shape]], `tied`
[[name, owner]], where there are any `split` [name] (FSDP2: those of which tensor parallelism has left a part on this
rank, which is gathered) and `replicas` (FSDP2 on a mesh of two dimensions: the ranks that hold the same parts), and
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
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from opdrift.plugins import Digest, RecorderLike
from opdrift_integrations.digests import as_field, cast_digests, end_to_end, raw_field, same
from opdrift_integrations.failures import Failures
from opdrift_integrations.layouts import Buffer
from opdrift_integrations.tensors import between, dtype_name, is_readable, storage_id
from opdrift_integrations.torch_fsdp.memory import Memory, Piece, pieces_of

_log = logging.getLogger(__name__)

LIBRARY = "torch_fsdp"

Digests = Sequence[Digest | None]


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a shard held when it was last read: its storages, the writes they had seen, its pieces."""

    storages: tuple[int, ...]
    writes: tuple[int, ...]
    pieces: Digests


@dataclass(slots=True, eq=False)
class Unit:
    """What is known of one buffer of an FSDP unit; it holds no tensor, so that a program may drop its model.

    Attributes:
        path: Where the unit is in the model; None if the recorder does not know it.
        buffer: Where the parameters lie in it.
        offloaded: Its shard is kept in the host's memory.
        blocking: Whether the copy of an offloaded shard is waited for.
    """

    path: str | None
    buffer: Buffer
    offloaded: bool = False
    blocking: bool = True
    pieces: tuple[Piece, ...] = ()
    #: The pieces of this rank's shard.
    mine: tuple[Piece, ...] = ()
    #: What every mark says of the buffer.
    fields: dict[str, Any] = field(default_factory=dict)
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
    #: Each piece as it was gathered, and what they are of each parameter.
    arrived: Digests = field(default_factory=list)
    wholes: Digests = field(default_factory=list)
    #: Each parameter as it was when the trace was last told its name.
    called: Digests = field(default_factory=list)
    #: Parameters whose shard in the model is not the one that is sent.
    exchanged: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        """Cut the buffer."""
        self.pieces = pieces_of(self.buffer)
        self.mine = tuple(piece for piece in self.pieces if piece.owner == self.buffer.rank)
        self.fields = self.buffer.as_fields()

    def mine_of(self, digests: Digests) -> Digests:
        """Of digests of all pieces, those of this rank's shard."""
        of_pieces = zip(self.pieces, digests, strict=True)
        return [digest for piece, digest in of_pieces if piece.owner == self.buffer.rank]


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
        buffer = unit.buffer
        self.recorder.mark(
            kind,
            library=self.library,
            unit=unit.path,
            phase=phase,
            step=self.step,
            **unit.fields,
            layout=buffer.layout,
            **fields,
        )

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
                is the shard's content bit for bit unless it was cast.
        """
        with self.recorder.quiet():
            if not unit.named and unit.path is not None:
                self._name_shard(unit, memory)
            as_kept = all(master.dtype == dtype for master in memory.masters)
            writes, seen = _writes(self.recorder, memory), unit.seen
            unit.unread = (
                sent
                and as_kept
                and seen is not None
                and (seen.storages, seen.writes) == (_storages(memory), writes)
            )
            if unit.unread and seen is not None:
                held = seen.pieces
            else:
                held = self._look(unit, memory, phase, writes)
            if unit.cast_dtype is dtype and _alike(held, unit.cast_from):
                return
            if as_kept or None in held:
                unit.source = held
            else:
                unit.source = cast_digests(self.recorder, memory.shard(unit.mine), dtype)
            unit.cast_from, unit.cast_dtype = held, dtype

    def exchanged(self, unit: Unit, phase: str, names: Sequence[str]) -> None:
        """Parameters whose shard in the model is another tensor than the one that is sent: each is told once."""
        new = [name for name in names if name not in unit.exchanged]
        unit.exchanged = frozenset(names)
        if new:
            self.mark("shard-exchanged", unit, phase, exchanged=new)

    def stepped(self, unit: Unit, memory: Memory) -> None:
        """An optimizer has made a step: learn what the shard holds now, so that a hidden write shows."""
        seen, writes = unit.seen, _writes(self.recorder, memory)
        if seen is None or writes == seen.writes:
            return
        with self.recorder.quiet():
            unit.seen = self._see(unit, memory, writes)

    def _look(self, unit: Unit, memory: Memory, phase: str, writes: tuple[int, ...]) -> Digests:
        """Read the shard; a mark tells where it changed although nothing has written it."""
        now, before = self._see(unit, memory, writes), unit.seen
        unit.seen = now
        untouched = before is not None and (before.storages, before.writes) == (
            now.storages,
            now.writes,
        )
        if before is None or not untouched:
            return now.pieces
        changed = [
            {**_where(unit, piece), "before": as_field(old), "found": as_field(new)}
            for piece, old, new in zip(unit.mine, before.pieces, now.pieces, strict=True)
            if same(old, new) is False
        ]
        if changed:
            self.mark("shard-changed", unit, phase, mismatch=changed)
        return now.pieces

    def _see(self, unit: Unit, memory: Memory, writes: tuple[int, ...]) -> _Seen:
        found = self.recorder.digests(memory.shard(unit.mine))
        return _Seen(_storages(memory), writes, found)

    def _name_shard(self, unit: Unit, memory: Memory) -> None:
        unit.named = True
        for piece in unit.mine:
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
            if unit.unread and not _alike(unit.mine_of(unit.arrived), unit.source):
                # the shard was written past the dispatcher, or the gather is wrong
                assert unit.seen is not None
                unit.source = self._look(unit, memory, phase, unit.seen.writes)
                unit.cast_from = unit.source
        owners = [piece.owner for piece in unit.pieces]
        segments = _joined_by(unit.arrived, owners, unit.buffer.ranks)
        checked = self._checked(unit, unit.mine_of(unit.arrived))
        self._sent(unit, memory, phase, checked["intact"])
        self._told(
            "gather",
            unit,
            memory,
            phase,
            ranks,
            segments=[as_field(segment) for segment in segments],
            wholes=[None if whole is None else raw_field(whole) for whole in unit.wholes],
            **checked,
        )

    def used(self, unit: Unit, memory: Memory, phase: str, ranks: Sequence[int] | None) -> None:
        """The parameters were still there; `read_shard` has seen the shard as it is now."""
        with self.recorder.quiet():
            if not unit.wholes:  # gathered before this was recorded
                self._look_at_gathered(unit, memory)
            mine = self.recorder.digests(memory.segment(unit.mine))
        self._told("use", unit, memory, phase, ranks, **self._checked(unit, mine))

    def _look_at_gathered(self, unit: Unit, memory: Memory) -> None:
        """Learn what the model computes with, and name it if that is new."""
        unit.arrived = self.recorder.digests(memory.whole(unit.pieces))
        unit.wholes = self._wholes(unit, unit.arrived)
        if unit.path is not None and not _alike(unit.wholes, unit.called):
            self.name_parameters(unit, memory)
            unit.called = unit.wholes

    def _wholes(self, unit: Unit, found: Digests) -> Digests:
        """What the pieces of each parameter are end to end."""
        parts = [piece.part for piece in unit.pieces]
        return _joined_by(found, parts, len(unit.buffer.parts))

    def name_parameters(self, unit: Unit, memory: Memory) -> None:
        """Give what the model computes with the names that the model has for it."""
        numbers = {part.name: number for number, part in enumerate(unit.buffer.parts)}
        for name, part in unit.buffer.names():
            content = memory.parameter(numbers[part.name])
            self.recorder.name_tensor(content, name, kind="parameter")

    def _checked(self, unit: Unit, found: Digests) -> dict[str, Any]:
        """Whether this rank's segment is its shard, and the parameters where it is not."""
        mismatch = [
            {
                **_where(unit, piece),
                "zeros": there is not None and there.raw == 0,
                "found": as_field(there),
            }
            for piece, sent, there in zip(unit.mine, unit.source, found, strict=True)
            # what pads a flat parameter is never read
            if piece.part is not None and same(sent, there) is False
        ]
        if mismatch:
            return {"intact": False, "mismatch": mismatch}
        known = all(d is not None for d in (*unit.source, *found))
        return {"intact": True if known else None}

    def _sent(self, unit: Unit, memory: Memory, phase: str, intact: bool | None) -> None:
        """The cast, and under offload the move, that came before the gather."""
        source, destination = memory.masters[0], memory.gathered[0]
        fields = {
            **between(source, destination),
            "bytes": unit.buffer.shard * destination.element_size(),
            "source": as_field(end_to_end(unit.cast_from)),
            "destination": as_field(end_to_end(unit.source)),
            # what arrived tells that it was sent right, not what went wrong on the way
            "intact": intact or None,
        }
        if source.dtype != destination.dtype:
            self.mark("cast", unit, phase, what="shard", **fields)
        if unit.offloaded:
            self.mark("move", unit, phase, direction="load", blocking=unit.blocking, **fields)

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
        self.mark(
            kind,
            unit,
            phase,
            nth=unit.nth[kind],
            ranks=None if ranks is None else list(ranks),
            rank=unit.buffer.rank,
            bytes=sum(each.numel() * each.element_size() for each in memory.gathered),
            dtype=dtype_name(first.dtype),
            device=str(first.device),
            padding=unit.buffer.padding,
            shard=as_field(end_to_end(unit.source)),
            own=[
                [piece.part, piece.offset, piece.size, raw_field(sent)]
                for piece, sent in zip(unit.mine, unit.source, strict=True)
                if sent is not None
            ],
            **fields,
        )

    # ---- giving it back -----------------------------------------------------------------------------

    def released(self, unit: Unit, memory: Memory, phase: str, rebound: Sequence[str]) -> None:
        """What was gathered is about to be given back: is it still what it was?"""
        if not unit.wholes or not all(is_readable(each) for each in memory.gathered):
            return  # gathered before this was recorded, or given back already
        with self.recorder.quiet():
            changed = self._changed(unit, memory, phase)
        lost = any(not each["written_back"] for each in changed)
        first = memory.gathered[0]
        fields: dict[str, Any] = {}
        if changed:
            fields["changed"] = changed
        if rebound:
            fields["rebound"] = list(rebound)
        self.mark(
            "reshard",
            unit,
            phase,
            nth=unit.nth.get("gather", 0),
            bytes=sum(each.numel() * each.element_size() for each in memory.gathered),
            device=str(first.device),
            intact=not lost and not rebound,
            **fields,
        )
        if unit.offloaded:
            moved = {**between(first, memory.masters[0]), "bytes": 0}
            self.mark("move", unit, phase, direction="drop", **moved)

    def _changed(self, unit: Unit, memory: Memory, phase: str) -> list[dict[str, Any]]:
        """The parameters that do not hold any more what was gathered, and whether the shard has it."""
        found = self.recorder.digests(memory.whole(unit.pieces))
        if _alike(found, unit.arrived):
            return []
        changed: list[dict[str, Any]] = []
        wholes = zip(unit.buffer.parts, unit.wholes, self._wholes(unit, found), strict=True)
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
        mine = zip(unit.mine, unit.mine_of(unit.arrived), unit.mine_of(found), strict=True)
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
        if bytes_:
            self.recorder.mark(
                "free",
                library=self.library,
                unit=unit.path,
                phase=phase,
                step=self.step,
                buffer=unit.buffer.name,
                what=what,
                bytes=bytes_,
                device=device,
            )


def _writes(recorder: RecorderLike, memory: Memory) -> tuple[int, ...]:
    return tuple(recorder.writes(master) for master in memory.masters)


def _storages(memory: Memory) -> tuple[int, ...]:
    return tuple(storage_id(master) for master in memory.masters)


def _where(unit: Unit, piece: Piece) -> dict[str, Any]:
    name = None if piece.part is None else unit.buffer.parts[piece.part].name
    return {"parameter": name, "offset": piece.offset, "numel": piece.size}


def _joined_by(found: Digests, numbers: Sequence[int | None], count: int) -> Digests:
    """What the pieces of each number from 0 to `count` are end to end; those of None are left out."""
    grouped: list[list[Digest | None]] = [[] for _ in range(count)]
    for digest, number in zip(found, numbers, strict=True):
        if number is not None:
            grouped[number].append(digest)
    return [end_to_end(digests) for digests in grouped]


def _alike(one: Digests, other: Digests) -> bool:
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
