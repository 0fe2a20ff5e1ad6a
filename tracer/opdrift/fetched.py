"""Tensors of a model that a library brought in while the run was recorded: from files, or as it loaded a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from opdrift.tracefile.reader import Trace


@dataclass(frozen=True, slots=True)
class Fetched:
    """How a library brought a tensor in.

    Attributes:
        library: Which one.
        file: The file that it was read from, which holds what nothing in this run had before; None where the library
            loaded a checkpoint of which the trace does not say the name.
    """

    library: str
    file: str | None


def fetched(trace: Trace) -> dict[str, Fetched]:
    """Name -> how a tensor was first brought in; without those that come back as the run itself had put them away."""
    found: dict[str, Fetched] = {}
    told: set[str] = set()
    moves = [mark.fields for mark in trace.marks if mark.kind == "move"]
    # what goes into a file outside of a module's call is a checkpoint's part only where others are loaded alike
    checkpoint = any(_is(fields, "load", "checkpoint") for fields in moves)
    for fields in moves:
        if fields.get("direction") != "load" and not (
            checkpoint and _is(fields, "write", "checkpoint")
        ):
            continue
        names = {str(part[0]) for part in fields.get("parameters") or ()} - told
        told |= names
        library = str(fields.get("library") or "a library")
        if fields.get("phase") == "checkpoint":
            found |= {name: Fetched(library, None) for name in names}
        elif (
            fields.get("file")
            and fields["direction"] == "load"
            and not fields.get("source_unchanged")
        ):
            found |= {name: Fetched(library, str(fields["file"])) for name in names}
    return found


def _is(fields: Mapping[str, Any], direction: str, phase: str) -> bool:
    return (fields.get("direction"), fields.get("phase")) == (direction, phase)
