"""Which flags were in force at an op: those of the header, and what marks say of later changes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import Any

from opdrift.tracefile.reader import Trace

#: Asks for a flag, with a default.
Get = Callable[[str, Any], Any]


class Settings:
    """The flags of one trace over time."""

    def __init__(self, trace: Trace) -> None:
        self._start = trace.header.flags
        self._changes: dict[str, list[tuple[int, Any]]] = {}
        for mark in trace.marks:
            if mark.kind == "flags":
                for name, (_, new) in mark.fields.items():
                    self._changes.setdefault(name, []).append((mark.seq, new))

    def before(self, seq: int) -> Get:
        """Asks for the flags that the op with this number ran with."""

        def get(name: str, default: Any) -> Any:
            changes = self._changes.get(name, ())
            # a mark carries the number of the last op before it
            at = bisect_right(changes, seq - 1, key=lambda change: change[0])
            return changes[at - 1][1] if at else self._start.get(name, default)

        return get
