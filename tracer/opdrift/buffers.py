"""Rows of one thread, packed until the next flush.

The hot path takes no lock: a thread appends to buffers of its own and stores the row count last, so
that the watchdog sees whole rows only. Packing a row costs 0.1 us and a column at flush nothing but
a view (notes: recorder, Q7).
"""

from __future__ import annotations

import ctypes
import itertools
import struct
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from opdrift.tfp1 import Code
from opdrift.tracefile.writer import list_column

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch.nn import Module

    from opdrift.plugins import Digest
    from opdrift.tracefile.writer import Columns, TraceWriter

OP: Final = struct.Struct("<qqqqQIIIBBHHII")
OP_FIELDS: Final = np.dtype(
    [
        ("seq", "<i8"),
        ("start", "<i8"),
        ("duration", "<i8"),
        ("node", "<i8"),
        ("rng", "<u8"),
        ("signature", "<u4"),
        ("call", "<u4"),
        ("source", "<u4"),
        ("thread", "u1"),
        ("phase", "u1"),
        ("flags", "<u2"),
        ("mutated", "<u2"),
        ("inputs", "<u4"),
        ("outputs", "<u4"),
    ]
)
CALL: Final = struct.Struct("<IIIIIBB")
CALL_FIELDS: Final = np.dtype(
    [
        ("call", "<u4"),
        ("parent", "<u4"),
        ("path", "<u4"),
        ("number", "<u4"),
        ("source", "<u4"),
        ("training", "u1"),
        ("thread", "u1"),
    ]
)
_VALUE_ID: Final = struct.Struct("<q")
VALUE: Final = struct.Struct("<qqqII")
VALUE_FIELDS: Final = np.dtype(
    [("value", "<i8"), ("storage", "<i8"), ("offset", "<i8"), ("write", "<u4"), ("meta", "<u4")]
)

OPS: Final = 4096
VALUES: Final = 8192
FINGERPRINTS: Final = 2048
IDS: Final = 1 << 15
CALLS: Final = 4096
#: Of fewer ids than this there is a ready packer of a length: `PACK_IDS[length](buffer, offset, *ids)`.
MANY_IDS: Final = 65
PACK_IDS: Final = [struct.Struct(f"<{n}q").pack_into for n in range(MANY_IDS)]
#: Attributes of a `Struct` are looked up anew each time.
OP_BYTES: Final = OP.size
VALUE_BYTES: Final = VALUE.size

#: Among so many of the latest fingerprints one of the same content is looked for: all that an op or two have written.
_LATEST: Final = 128

Counts = tuple[int, int, int, int]
MakeColumns = Callable[["npt.NDArray[Any]"], "Columns"]


class Place(NamedTuple):
    """Where a thread was before a module call or a scope began; `holder` tells which one (scopes: below 0)."""

    call: int
    source: int
    path: str
    module: weakref.ref[Module] | None
    holder: int

    @property
    def is_module(self) -> bool:
        """Whether it was a module call."""
        return self.holder > 0


class ThreadBuffers:
    """Buffers and place of one thread: its module call, its line, its packed rows."""

    __slots__ = (
        "_value_at",
        "call",
        "call_count",
        "calls",
        "clock",
        "columns",
        "done",
        "due",
        "fingerprint_at",
        "fingerprint_count",
        "fingerprint_row",
        "fingerprints",
        "id_count",
        "ident",
        "ids",
        "index",
        "module",
        "modules",
        "op_count",
        "ops",
        "path",
        "paused",
        "seq",
        "source",
        "stack",
        "switches",
        "value_count",
        "values",
    )

    def __init__(self, index: int, fingerprint_row: np.dtype[Any], columns: MakeColumns) -> None:
        self.index = index
        self.ident = threading.get_ident()
        self.ops = bytearray(OP_BYTES * OPS)
        self.values = bytearray(VALUE_BYTES * VALUES)
        self.ids = bytearray(8 * IDS)
        self.calls = bytearray(CALL.size * CALLS)
        self.fingerprint_row = fingerprint_row
        assert fingerprint_row.fields is not None
        self._value_at = fingerprint_row.fields["value"][1]
        self.columns = columns
        self.fingerprints = bytearray(fingerprint_row.itemsize * FINGERPRINTS)
        self.fingerprint_at = ctypes.addressof(
            (ctypes.c_char * len(self.fingerprints)).from_buffer(self.fingerprints)
        )
        self.op_count = self.value_count = self.fingerprint_count = self.id_count = (
            self.call_count
        ) = 0
        #: how far each buffer was flushed by the watchdog: ops, values, fingerprints, ids, calls
        self.done = [0, 0, 0, 0, 0]
        self.call = 0
        self.source = 0
        self.seq = 0
        #: when the next flush is due (perf_counter_ns)
        self.due = 0
        #: when the last op ended
        self.clock = 0
        self.paused = 0
        #: the path and the module of the present call, and how many module calls are open
        self.path = ""
        self.module: weakref.ref[Module] | None = None
        self.modules = 0
        self.stack: list[Place] = []
        #: how what steers choices stood when the trace was last told (`choices.switches`)
        self.switches: tuple[object, ...] = ()

    @property
    def pending(self) -> bool:
        """Whether rows wait for a flush."""
        return (
            self.op_count > self.done[0]
            or self.value_count > self.done[1]
            or self.fingerprint_count > self.done[2]
            or self.call_count > self.done[4]
        )

    def counts(self) -> Counts:
        """How many whole rows there are now: ops, values, fingerprints, calls.

        Ops are counted first: what they refer to was appended before them.
        """
        return self.op_count, self.value_count, self.fingerprint_count, self.call_count

    def latest_fingerprints(self, digests: Sequence[Digest | None]) -> list[bytes | None]:
        """The rows of contents that are among those fingerprinted last; None of the others."""
        first, size = max(self.fingerprint_count - _LATEST, 0), self.fingerprint_row.itemsize
        rows = np.frombuffer(
            self.fingerprints, self.fingerprint_row, self.fingerprint_count - first, first * size
        )
        columns = zip(*(rows[name].tolist() for name in ("raw", "n", "code")), strict=True)
        places = dict(zip(columns, itertools.count(first * size, size)))  # it never ends
        found: list[bytes | None] = []
        for digest in digests:
            at = None
            # a code of 8 bits stands for several formats, of which each counts otherwise
            if digest is not None and digest.code != Code.FP8:
                at = places.get((digest.raw, digest.n, digest.code))
            found.append(None if at is None else bytes(self.fingerprints[at : at + size]))
        return found

    def latest_value(self) -> int | None:
        """Of which value the last fingerprint is; None if there is none since the last flush."""
        if not self.fingerprint_count:
            return None
        start = (self.fingerprint_count - 1) * self.fingerprint_row.itemsize
        found: int = _VALUE_ID.unpack_from(self.fingerprints, start + self._value_at)[0]
        return found

    def repeat_fingerprint(self, row: bytes, value: int) -> bool:
        """Write a fingerprint once more, for another value that is known to hold the same; False if there is no room."""
        at = self.fingerprint_count
        if at == FINGERPRINTS:
            return False
        start = at * len(row)
        self.fingerprints[start : start + len(row)] = row
        _VALUE_ID.pack_into(self.fingerprints, start + self._value_at, value)
        self.fingerprint_count = at + 1
        return True

    def write(self, writer: TraceWriter, counts: Counts, *, reset: bool) -> None:
        """Append the counted rows that no flush has written; `reset` only from the owning thread."""
        ops, values, fingerprints, calls = counts
        done = self.done
        if values > done[1]:
            rows = np.frombuffer(self.values, VALUE_FIELDS, values)[done[1] :]
            writer.append(
                "values", [np.ascontiguousarray(rows[name]) for name in VALUE_FIELDS.names or ()]
            )
        if fingerprints > done[2]:
            writer.append(
                "tensors",
                self.columns(
                    np.frombuffer(self.fingerprints, self.fingerprint_row, fingerprints)[done[2] :]
                ),
            )
        if calls > done[4]:
            rows = np.frombuffer(self.calls, CALL_FIELDS, calls)[done[4] :]
            writer.append(
                "calls", [np.ascontiguousarray(rows[name]) for name in CALL_FIELDS.names or ()]
            )
        ids = done[3]
        if ops > done[0]:
            ids += self._write_ops(writer, np.frombuffer(self.ops, OP_FIELDS, ops)[done[0] :], ids)
        self.done = [ops, values, fingerprints, ids, calls]
        if reset:
            self.discard()

    def discard(self) -> None:
        """Begin anew with empty buffers; only the owning thread may."""
        self.op_count = self.value_count = self.fingerprint_count = self.id_count = (
            self.call_count
        ) = 0
        self.done = [0, 0, 0, 0, 0]

    def _write_ops(self, writer: TraceWriter, rows: Any, start: int) -> int:
        inputs, outputs = rows["inputs"].astype(np.int64), rows["outputs"].astype(np.int64)
        total = int(inputs.sum() + outputs.sum())
        ids = np.frombuffer(self.ids, "<i8", start + total)[start:]
        is_output = np.repeat(
            np.tile([False, True], len(rows)), np.stack([inputs, outputs], 1).ravel()
        )
        names = [name for name in OP_FIELDS.names or () if name not in ("inputs", "outputs")]
        columns: list[Any] = [np.ascontiguousarray(rows[name]) for name in names]
        writer.append(
            "ops",
            [*columns, list_column(inputs, ids[~is_output]), list_column(outputs, ids[is_output])],
        )
        return total
