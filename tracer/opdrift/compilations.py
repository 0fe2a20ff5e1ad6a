"""Tell the trace what dynamo compiled during the run, and why it compiled it again.

Dynamo keeps a list of its compilations, with the guard that failed, whoever asks for it. It is read after the
compilation, so that nothing is put in front of it: no log is switched on, and no state of the compiler changes.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

#: What dynamo calls the rest of a function that goes on after a graph break.
_RESUMED: Final = re.compile(r"torch_dynamo_resume_in_(\w+)_at_\d+")
_LONGEST: Final = 500


class Compilations:
    """The compilations of one recording.

    Args:
        write_mark: Writes a mark: (kind, fields).
        failed: Notes a failure of the tracer itself.
    """

    def __init__(
        self,
        write_mark: Callable[[str, Mapping[str, Any]], None],
        *,
        failed: Callable[[str, BaseException], None],
    ) -> None:
        self._write_mark = write_mark
        self._failed = failed
        #: the end of the last compilation that was told, in microseconds
        self._told = time.time_ns() // 1000
        #: dynamo's number of a frame -> function, file and line
        self._frames: dict[str, dict[str, Any]] = {}
        self._pending = False

    def began(self, ident: str) -> None:
        """Dynamo, or the first backward pass, began to compile."""
        self.tell()
        self._write_mark("compile", {"event": "start", "id": ident})

    def ended(self, ident: str) -> None:
        """It is done; the list has it a moment later."""
        self._write_mark("compile", {"event": "end", "id": ident})
        self._pending = True

    def tell(self) -> None:
        """Write a mark for each compilation that is new in the list."""
        if not self._pending:
            return
        self._pending = False
        try:
            from torch._dynamo.utils import (  # noqa: PLC0415  # as in `neutral.around_compilation`
                get_compilation_metrics,
            )

            for each in get_compilation_metrics():
                if each.end_time_us is not None and each.end_time_us > self._told:
                    self._told = each.end_time_us
                    self._tell(each)
        except Exception as error:
            self._failed("the list of compilations", error)

    def _tell(self, metrics: Any) -> None:
        ident = metrics.compile_id or ""
        frame = ident.partition("/")[0]
        if metrics.co_name:
            self._frames[frame] = {
                "function": plain_name(metrics.co_name),
                "file": metrics.co_filename,
                "line": metrics.co_firstlineno,
            }
        elif not metrics.fail_reason:
            return  # a backward pass: its frame was told
        self._write_mark(
            "compilation",
            {
                "id": ident,
                **self._frames.get(frame, {}),
                "reason": _short(metrics.recompile_reason),
                "failed": _short(metrics.fail_reason),
                "breaks": sorted(filter(None, map(_short, metrics.restart_reasons or ()))),
            },
        )


def plain_name(name: str) -> str:
    """What the program calls a function: dynamo goes on after a graph break in one of its own making."""
    return _RESUMED.sub(r"\1", name)


def _short(text: str | None) -> str | None:
    """The first line of what dynamo says, which is often a page."""
    return text.strip().partition("\n")[0][:_LONGEST] if text else None
