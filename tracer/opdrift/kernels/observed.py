"""What was observed of ops on its way into the trace: marks of kind `kernels`, one for some hundred ops."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter_ns as now
from typing import Any, Final, Literal

#: A mark is written after so many ops, or when its first op is so old: a killed run loses a second or so.
_OPS: Final = 512
_AGE_NS: Final = 500_000_000


class ObservedOps:
    """Ops that were watched, and what each was seen to run. Each mark holds its own texts.

    Args:
        source: Who tells: the libraries' verbose output, or a profiler.
        write_mark: Writes a mark of kind `kernels` with these fields.
    """

    def __init__(
        self,
        source: Literal["verbose", "profiler"],
        write_mark: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self._source = source
        self._write_mark = write_mark
        # reentrant, as collecting garbage may run ops of the program anywhere
        self._lock = threading.RLock()
        self._begin()

    def _begin(self) -> None:
        self._names: dict[str, int] = {}
        self._ops: list[tuple[int, list[int]]] = []
        self._raw: list[tuple[int, str]] = []
        self._ambiguous: list[int] = []
        self._first = self._last = self._count = 0
        self._due = 0

    def add(
        self,
        seq: int,
        names: Sequence[str] = (),
        *,
        raw: Sequence[str] = (),
        ambiguous: bool = False,
    ) -> None:
        """Note what an op ran.

        Args:
            seq: Its number.
            names: In order, one for each call of a library or kernel; none if it ran none.
            raw: What else was said, and is not understood.
            ambiguous: Other ops ran at the same time: what was said could be any of theirs.
        """
        with self._lock:
            if self._count == 0:
                self._first = self._last = seq
                self._due = now() + _AGE_NS
            elif seq > self._last:
                self._last = seq
            elif seq < self._first:
                self._first = seq
            self._count += 1
            if names:
                known = self._names
                self._ops.append((seq, [known.setdefault(name, len(known)) for name in names]))
            self._raw.extend((seq, text) for text in raw)
            if ambiguous:
                self._ambiguous.append(seq)
            if self._count >= _OPS or now() > self._due:
                self._write()

    def write(self) -> None:
        """Write what there is."""
        with self._lock:
            if self._count:
                self._write()

    def refuse(self, why: str) -> None:
        """Say in the trace that from here on nothing is observed, and why."""
        self.write()
        self._write_mark({"source": self._source, "refused": why})

    def disown(self, why: str) -> None:
        """Say that nothing is observed from here on, and that what was may be of somebody else.

        What is not written yet is dropped. When the other began is not known, so what was written is in doubt, too.
        """
        with self._lock:
            self._begin()
            self._write_mark({"source": self._source, "refused": why, "foreign": True})

    def _write(self) -> None:
        fields = {
            "source": self._source,
            "first": self._first,
            "last": self._last,
            "names": list(self._names),
            "ops": self._ops,
            "raw": self._raw,
            "ambiguous": self._ambiguous,
        }
        self._begin()
        self._write_mark(fields)
