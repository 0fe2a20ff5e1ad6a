"""Parameters whose tensor a program replaced by another one: `.data =`, `set_()`, a new parameter under the old name.

Nothing of that passes the dispatcher. What shows it is that a name is met in other memory than before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from opdrift.compare import number
from opdrift.records import Leaf
from opdrift.shards import names_of
from opdrift.steps import Steps
from opdrift.tracefile.reader import Trace

#: What integrations follow of the tensors that their libraries put in the place of a parameter.
_FOLLOWED: Final = frozenset({"gather", "move"})
#: The library of moves that the program makes by itself (`.to(device)`): what it puts in the place of a parameter after them is another matter.
_BY_ITSELF: Final = "torch"


@dataclass(frozen=True, slots=True)
class Replacement:
    """One parameter's tensor, put in the place of another.

    Attributes:
        name: Of the parameter.
        before: The row under which the tensor before it was met.
        after: The row under which this one was.
        since: Number of the last op that used the one before; 0 if none did.
        until: Number of the op at which this one was met.
        last: The last value that is known of the one before.
    """

    name: str
    before: Leaf
    after: Leaf
    since: int
    until: int
    last: int

    def holds(self, trace: Trace, value: int) -> bool:
        """Whether a value is the new tensor as it was met: nothing wrote it since."""
        columns, met = trace.values, self.after.value
        return bool(
            columns.storage[value] == columns.storage[met]
            and columns.write[value] == columns.write[met]
        )


def replacements(trace: Trace) -> Mapping[str, Sequence[Replacement]]:
    """Name of a parameter -> how its tensor was replaced, in order; only those of which it was."""
    followed = {
        name
        for mark in trace.marks
        if mark.kind in _FOLLOWED and mark.fields.get("library") != _BY_ITSELF
        for name in names_of(mark.fields)
    }
    brought = _brought(trace)
    storage = trace.values.storage
    latest: dict[str, Leaf] = {}
    found: dict[str, list[Replacement]] = {}
    for leaf in trace.leaves:
        if leaf.kind != "parameter" or leaf.when not in ("entry", "use") or not leaf.name:
            continue
        before, latest[leaf.name] = latest.get(leaf.name), leaf
        if before is None or storage[before.value] == storage[leaf.value]:
            continue
        # brought in from the disk or another device: the same parameter, elsewhere
        moved = trace.meta(before.value).device != trace.meta(leaf.value).device
        moved |= int(storage[leaf.value]) in brought.get(leaf.name, ())
        if not moved and leaf.name not in followed:
            found.setdefault(leaf.name, []).append(_replacement(trace, before, leaf))
    return found


def _brought(trace: Trace) -> Mapping[str, set[int]]:
    """Name of a parameter -> the storages that the program itself moved it to, from one device to another and on."""
    found: dict[str, set[int]] = defaultdict(set)
    inputs, outputs, storage = trace.ops.inputs, trace.ops.outputs, trace.values.storage
    for mark in trace.marks:
        op = trace.index_of(mark.seq) if mark.kind == "move" else None
        if op is None or mark.fields.get("library") != _BY_ITSELF:
            continue
        sources = set(storage[inputs[op]].tolist())
        names = {*names_of(mark.fields), *(n for n, known in found.items() if known & sources)}
        for name in names:
            found[name].update(storage[outputs[op]].tolist())
    return found


def _replacement(trace: Trace, before: Leaf, after: Leaf) -> Replacement:
    ops, columns = trace.ops, trace.values
    values = np.flatnonzero(columns.storage == columns.storage[before.value])
    used = np.concatenate(
        [lists.rows()[np.isin(lists.values, values)] for lists in (ops.inputs, ops.outputs)]
    )
    earlier = ops.seq[used][ops.seq[used] <= after.seq]
    maker = trace.producer[values]
    same = values[
        (columns.offset[values] == columns.offset[before.value])
        & (columns.meta[values] == columns.meta[before.value])
        & (columns.fingerprint[values] >= 0)
        & ((maker < 0) | (ops.seq[maker] <= after.seq))
    ]
    last = int(same[np.argmax(columns.write[same])]) if len(same) else before.value
    return Replacement(after.name, before, after, int(earlier.max(initial=0)), after.seq + 1, last)


def replaced_words(trace: Trace, found: Replacement, made: str) -> list[str]:
    """When a tensor was replaced, by what, and what both hold, a sentence each.

    Args:
        trace: Where.
        found: The replacement.
        made: How the new one was made, in words: `was drawn by ...`.
    """
    steps = Steps(trace)
    when = f"before {_op(steps, found.until)}"
    if found.since:
        when = f"between {_op(steps, found.since)}, the last that used the old one, and {_op(steps, found.until)}"
    return [
        f"`.data =`, `set_()` or a new Parameter put another tensor in its place {when}: no op shows that",
        f"the old one held {_holds(trace, found.last)}, the new one holds {_holds(trace, found.after.value)};"
        f" the new one {made}",
    ]


def _op(steps: Steps, seq: int) -> str:
    step = steps.known_at(seq)
    return f"op {seq}" if step is None else f"op {seq} (step {step})"


def _holds(trace: Trace, value: int) -> str:
    """The content of a value, in words."""
    known = trace.fingerprint(value)
    if known is None:
        return "what was not read"
    return f"{number(known.min)} to {number(known.max)} (norm {number(known.ssq**0.5)})"
