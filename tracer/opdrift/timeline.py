"""What became of a leaf over the run: each content it had, how it came, where it went, and who read it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import numpy as np

from opdrift.contents import Contents
from opdrift.leaves import STARTS
from opdrift.neighbours import Key, Neighbours
from opdrift.provenance.ops import COPIES, DRAWS, FILLS, REBINDING, operator
from opdrift.records import Leaf, Mark
from opdrift.shards import names_of
from opdrift.steps import Steps
from opdrift.tracefile.columns import Ints
from opdrift.tracefile.reader import Trace

What = Literal[
    "start", "memory", "named", "load", "draw", "fill", "write", "hidden", "use", "gather", "kept", "cast", "move", "free",
    "reshard", "data", "resize", "end",
]  # fmt: skip

#: Marks of integrations that are about parameters, and what they are called here.
_MARKS: Final[Mapping[str, What]] = {
    "gather": "gather",
    "use": "kept",
    "cast": "cast",
    "buffer-cast": "cast",
    "move": "move",
    "free": "free",
    "reshard": "reshard",
    "views": "data",
    "shard-changed": "hidden",
}
#: How leaf rows are called here; those that are not listed are results under the same name.
_SIGHTINGS: Final[Mapping[str, What]] = {
    "entry": "start",
    "use": "named",
    "gather": "named",
    "changed": "hidden",
    "generated": "write",
    "exit": "end",
}


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened to a leaf.

    Attributes:
        what: "start" and "end": as it was then; "memory": unwritten memory was handed out; "named": met under this name in other memory than before; "load",
            "draw", "fill", "write": an op copied into it, drew it, filled it, wrote it otherwise; "hidden": changed
            with no op; "use": an op read it; "gather", "kept" (a gathered copy was used again), "cast", "move", "reshard",
            "free": a mark; "data": `.data`, or the attribute, points to other memory; "resize": so does its storage.
        seq: The op's number, or of the last op before it.
        step: Of the program, where it marked steps.
        by: The op, or the library and what it did.
        module: Where.
        source: The line.
        content: Which content it is from here on, from 1; None where that is not known.
        again: It had this content before, and another one since.
        digest: Of the content; None where it is not known.
        layout: dtype and shape, `float32[4, 8]`.
        device: Where it is.
        times: Of a use: how many ops read this content.
        until: Of a use: the number of the last one.
        note: What else is known, in words.
        intact: Of a mark: whether the content arrived as it was sent.
    """

    what: What
    seq: int
    step: int | None
    by: str | None
    module: str
    source: str | None
    content: int | None = None
    again: bool = False
    digest: int | None = None
    layout: str | None = None
    device: str | None = None
    times: int = 1
    until: int | None = None
    note: str | None = None
    intact: bool | None = None


@dataclass(slots=True)
class _Draft:
    """An event on its way, with the content's key and where it stands among those of the same op."""

    event: Event
    order: tuple[int, int, int]
    key: Key | None = None


@dataclass(frozen=True, slots=True)
class _Place:
    """A part of a storage that the leaf's name stood for."""

    storage: int
    offset: int
    meta: int


@dataclass(slots=True)
class Timelines:
    """Timelines of the leaves of one trace; keeps what several need."""

    trace: Trace
    contents: Contents = field(init=False)
    _steps: Steps = field(init=False)
    _near: Neighbours = field(init=False)
    _read: Ints = field(init=False)
    _reader: Ints = field(init=False)

    def __post_init__(self) -> None:
        self.contents = Contents(self.trace)
        self._steps = Steps(self.trace)
        self._near = Neighbours(self.trace)
        inputs = self.trace.ops.inputs
        counted = np.flatnonzero(self.contents.counted)
        order = counted[np.argsort(inputs.values[counted], kind="stable")]
        self._read, self._reader = inputs.values[order], inputs.rows()[order]

    def of(self, name: str, rows: Sequence[Leaf]) -> Sequence[Event]:
        """All that is known of a leaf, in order.

        Args:
            name: Its name.
            rows: Its rows among the trace's leaves, in order.
        """
        drafts = [*self._sightings(rows), *self._marks(name)]
        for place in self._places(rows):
            drafts += self._ops_on(place)
        drafts.sort(key=lambda draft: draft.order)
        return _numbered(drafts)

    # ---- leaf rows ---------------------------------------------------------------------------------------

    def _sightings(self, rows: Sequence[Leaf]) -> Iterator[_Draft]:
        seen: int | None = None
        for leaf in rows:
            what = _SIGHTINGS.get(leaf.when)
            if what is None or leaf.kind not in STARTS:
                continue
            storage = int(self.trace.values.storage[leaf.value])
            if seen is not None and storage != seen and what == "named":
                what = "named" if leaf.when == "gather" else "data"
            seen = storage
            module = self.trace.calls[leaf.call].path
            yield self._draft(what, leaf.seq, leaf.value, module=module, rank=int(what == "end"))

    def _places(self, rows: Sequence[Leaf]) -> Sequence[_Place]:
        """The memory that the name stood for; writes into it before the name was given count as well."""
        columns = self.trace.values
        found = {
            _Place(int(columns.storage[v]), int(columns.offset[v]), int(columns.meta[v])): None
            for v in (leaf.value for leaf in rows if leaf.kind in STARTS)
        }
        return list(found)

    # ---- ops ---------------------------------------------------------------------------------------------

    def _ops_on(self, place: _Place) -> Iterator[_Draft]:
        """Writes into a place, and the first reader of each content."""
        trace, states = self.trace, self.contents.states
        values = self._near.in_storage(place.storage)
        for state in np.unique(states.of[values]).tolist():
            inside = values[states.of[values] == state]
            own = self._value(place, inside)
            writer = int(states.writer[state])
            shown = own if own is not None else int(inside[0])
            if writer >= 0 and not self._is_view(writer):
                yield self._written(writer, own, shown)
            readers = self._readers(inside, writer)
            if len(readers):
                first = int(readers[0])
                yield self._draft("use", int(trace.ops.seq[first]), own, index=first, times=len(readers),
                                  until=int(trace.ops.seq[readers[-1]]), rank=0)  # fmt: skip

    def _value(self, place: _Place, values: Ints) -> int | None:
        """The value of a state that is the place itself; one with a fingerprint first."""
        columns = self.trace.values
        same = values[
            (columns.offset[values] == place.offset) & (columns.meta[values] == place.meta)
        ]
        if not len(same):
            return None
        known = same[columns.fingerprint[same] >= 0]
        return int(known[0] if len(known) else same[0])

    def _written(self, writer: int, own: int | None, shown: int) -> _Draft:
        name = self._name(writer)
        plain = operator(name)
        what: What = "write"
        if self.contents.tokens.uninitialised[writer]:
            what = "memory"
        elif plain in REBINDING:
            what = "resize" if plain.startswith("resize") else "data"
        elif plain in DRAWS:
            what = "draw"
        elif plain in FILLS:
            what = "fill"
        elif plain in COPIES:
            what = "load"
        return self._draft(
            what, int(self.trace.ops.seq[writer]), own, index=writer, shown=shown, rank=1
        )

    def _readers(self, values: Ints, writer: int) -> Ints:
        """Ops that look at a content, views passed over; not the one that wrote it."""
        starts, ends = np.searchsorted(self._read, [values, values + 1])
        parts = [self._reader[a:b] for a, b in zip(starts, ends, strict=True)]
        ops = np.unique(np.concatenate(parts))
        found: Ints = ops[~self.contents.tokens.view[ops] & (ops != writer)]
        return found

    def _is_view(self, index: int) -> bool:
        return bool(self.contents.tokens.view[index])

    def _name(self, index: int) -> str:
        return self.trace.op_info(int(self.trace.ops.signature[index])).name

    # ---- marks -------------------------------------------------------------------------------------------

    def _marks(self, name: str) -> Iterator[_Draft]:
        for mark in self.trace.marks:
            what = _MARKS.get(mark.kind)
            if what is not None and name in _names(mark.fields):
                yield self._marked(what, mark)

    def _marked(self, what: What, mark: Mark) -> _Draft:
        fields = mark.fields
        between = [
            fields.get(f"{side}_{fact}")
            for fact in ("dtype", "device")
            for side in ("source", "destination")
        ]
        notes = [
            f"{fields['direction']}" if fields.get("direction") else "",
            *(f"{a} to {b}" for a, b in (between[:2], between[2:]) if a and b and a != b),
            f"buffer {fields['buffer']}" if fields.get("buffer") else "",
            f"{fields['bytes']:,} bytes" if fields.get("bytes") else "",
            "" if fields.get("blocking", True) else "not waited for",
            "loses digits" if fields.get("lossless") is False else "",
        ]
        digest = fields.get("destination")
        event = Event(
            what=what,
            seq=mark.seq,
            step=self._steps.at(mark.seq + 1),
            by=str(fields.get("library", "a library")),
            module=str(fields.get("unit") or ""),
            source=None,
            note=", ".join(filter(None, notes)) or None,
            intact=fields.get("intact"),
        )
        # one parameter alone: the mark's digest is its own
        key = _key(digest) if len(fields.get("parameters") or ()) <= 1 else None
        return _Draft(event, (mark.seq, 1, 0), key)

    # ---- one event -----------------------------------------------------------------------------------------

    def _draft(
        self,
        what: What,
        seq: int,
        value: int | None,
        *,
        rank: int,
        index: int | None = None,
        shown: int | None = None,
        module: str = "",
        times: int = 1,
        until: int | None = None,
        note: str | None = None,
    ) -> _Draft:
        trace = self.trace
        op = trace.op(index) if index is not None else None
        told = value if value is not None else shown
        meta = trace.meta(told) if told else None
        event = Event(
            what=what,
            seq=seq,
            step=self._steps.at(seq),
            by=op.name if op is not None else None,
            module=op.call.path if op is not None else module,
            source=str(op.source) if op is not None and op.source is not None else None,
            layout=str(meta) if meta is not None else None,
            device=meta.device if meta is not None else None,
            times=times,
            until=until if times > 1 else None,
            note=note,
        )
        key = self.contents.key(value) if value is not None else None
        return _Draft(event, (seq, 0 if index is not None else 1, rank), key)


def _numbered(drafts: Sequence[_Draft]) -> Sequence[Event]:
    """Give each content a number in the order of appearance; say where an earlier one is back."""
    numbers: dict[Key, int] = {}
    latest: int | None = None
    found: list[Event] = []
    for draft in drafts:
        event, key = draft.event, draft.key
        if key is not None:
            number = numbers.setdefault(key, len(numbers) + 1)
            again = latest is not None and number < latest and event.what != "use"
            event = replace(event, content=number, digest=key[0], again=again)
            latest = number
        if found and _is_same(found[-1], event):
            continue
        found.append(event)
    return found


def _is_same(before: Event, event: Event) -> bool:
    """Whether an event says nothing that the one before it did not."""
    return event.what == before.what == "named" and event.content == before.content


def _names(fields: Mapping[str, Any]) -> set[str]:
    """All names that a mark is about."""
    others = (str(fields[key]) for key in ("name", "buffer") if fields.get(key))
    changed = (
        str(part["parameter"]) for part in fields.get("mismatch") or () if "parameter" in part
    )
    return {*names_of(fields), *others, *changed}


def _key(digest: Any) -> Key | None:
    """A content as integrations write it into marks: {raw, n, code}, the first in hexadecimal."""
    if not isinstance(digest, Mapping):
        return None
    try:
        raw = digest["raw"]
        return (
            int(raw, 16) if isinstance(raw, str) else int(raw),
            int(digest["n"]),
            int(digest["code"]),
        )
    except (KeyError, TypeError, ValueError):
        return None
