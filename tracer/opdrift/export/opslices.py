"""Ops as slices of a timeline: where, on what, which implementation, which result."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from opdrift.export.tracks import Facts, Items, Slice, Value
from opdrift.picks import Picks
from opdrift.plugins import OP_STATUSES, OpStatus, Process
from opdrift.records import Argument, OpInfo, Pick, Signature, TensorArgument
from opdrift.render.trace_json import flag_words
from opdrift.render.words import name
from opdrift.tracefile.columns import Ints

#: Ops that are worked on at a time.
CHUNK: Final = 8192
#: So many different ops are remembered; a run that has more forgets and begins anew.
_REMEMBERED: Final = 1 << 16
#: Ops whose implementation is looked up, some 10 us each: of more, the first, and so many on each side of the first
#: divergence.
LOOKED_UP: Final = 50_000
_AROUND: Final = 200
#: What a comparison says of an op, for people.
STATUS_WORDS: Final[Mapping[OpStatus, str]] = {
    "equal": "equal",
    "origin": "a difference begins here",
    "receiver": "inherited",
    "unpaired": "only in this run",
    "unknown": "not known",
}


@dataclass(frozen=True, slots=True)
class Dialect:
    """What differs between formats in how an op is told.

    Attributes:
        name: What an op is called.
        layouts: What is told of its arguments.
        own: What is told of one op alone, from its index, number, autograd node and phase.
        category: Of all ops; None tells what a comparison says, else the phase.
        step: What a step is called, with its number.
    """

    name: Callable[[OpInfo], str]
    layouts: Callable[[Signature], Items]
    own: Callable[[int, int, int, int], Items]
    category: str | None = None
    step: str = "step {}"


@dataclass(frozen=True, slots=True)
class Arrows:
    """Ids of the arrows that begin and that end at each op that has any."""

    out: Mapping[int, tuple[int, ...]]
    into: Mapping[int, tuple[int, ...]]


#: What ops have in common that are told alike: signature, path, source, flags and phase, status, layouts of the
#: outputs, pick.
_Alike = tuple[int, int, int, int, int, tuple[int, ...], str | None]


class OpSlices:
    """The ops of one process as slices."""

    def __init__(self, process: Process, dialect: Dialect, clock: int, arrows: Arrows) -> None:
        """Get ready.

        Args:
            process: What is exported.
            dialect: How the format tells of ops.
            clock: What is to be added to a recorded time for one since 1970.
            arrows: Between ops.
        """
        self._trace = process.trace
        self._status = None if process.comparison is None else process.comparison.status
        self._partner = None if process.comparison is None else _partners(process)
        self._dialect = dialect
        self._clock = clock
        self._arrows = arrows
        self._picks = looked_up(process)
        self._known: dict[_Alike, tuple[str, str, Facts]] = {}

    def of(self, ops: Ints, tracks: Ints) -> Iterator[Slice]:
        """Slices of these ops, in this order, each on its track."""
        for at in range(0, len(ops), CHUNK):
            yield from self._chunk(ops[at : at + CHUNK], tracks[at : at + CHUNK])

    def _chunk(self, ops: Ints, tracks: Ints) -> Iterator[Slice]:
        trace, columns = self._trace, self._trace.ops
        paths = trace.call_columns.path[columns.call[ops]]
        states = columns.flags[ops] * 2 + columns.phase[ops]
        statuses = np.zeros(len(ops), np.int64) if self._status is None else self._status[ops]
        rows = zip(
            ops.tolist(), tracks.tolist(), columns.seq[ops].tolist(), columns.node[ops].tolist(),
            (columns.start[ops] + self._clock).tolist(), columns.duration[ops].tolist(),
            columns.signature[ops].tolist(), paths.tolist(), columns.source[ops].tolist(),
            states.tolist(), statuses.tolist(), self._outputs(ops), strict=True,
        )  # fmt: skip
        picks, out, into = self._picks, self._arrows.out, self._arrows.into
        for (
            index, track, seq, node, start, duration, signature, path, source, state, status, (metas, digests),
        ) in rows:  # fmt: skip
            pick = picks.get(index)
            key = (
                signature,
                path,
                source,
                state,
                status,
                metas,
                None if pick is None else repr(pick),
            )
            known = self._known.get(key)
            if known is None:
                known = self._learn(key, pick)
            own = self._dialect.own(index, seq, node, state & 1)
            if digests:
                own += (("digest", digests[0] if len(digests) == 1 else digests),)
            if status and self._partner is not None and self._partner[index]:
                own += (("counterpart", self._partner[index]),)
            yield Slice(
                track, known[0], known[1], start, duration, known[2], own, out.get(index, ()), into.get(index, ()),
            )  # fmt: skip

    def _outputs(self, ops: Ints) -> Iterator[tuple[tuple[int, ...], list[str]]]:
        """Layout ids of each op's outputs, and the digests of those that have one."""
        outputs, values = self._trace.ops.outputs, self._trace.values
        counts = outputs.offsets[ops + 1] - outputs.offsets[ops]
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        within = np.arange(ends[-1]) - np.repeat(ends[:-1], counts)
        flat = outputs.values[np.repeat(outputs.offsets[ops], counts) + within]
        metas = values.meta[flat].tolist()
        rows = values.fingerprint[flat]
        raw = np.where(rows >= 0, self._trace.fingerprints.raw[rows], 0).tolist()
        told = (rows >= 0).tolist()
        for start, end in pairwise(ends.tolist()):
            yield (
                tuple(metas[start:end]),
                [f"{raw[i]:016x}" for i in range(start, end) if told[i]],
            )

    def _learn(self, key: _Alike, pick: Pick | None) -> tuple[str, str, Facts]:
        """Name, category and arguments of ops that are alike."""
        if len(self._known) >= _REMEMBERED:
            self._known.clear()
        signature, path, source, state, status, metas, _ = key
        op = self._trace.signature(signature)
        items: list[tuple[str, Value]] = list(self._dialect.layouts(op))
        layouts = [str(self._trace.meta_of(meta)) for meta in metas if meta]
        if layouts:
            items.append(("outputs", layouts[0] if len(layouts) == 1 else layouts))
        module, type_ = self._trace.call_name(path)
        if path:
            items += [("module", module or "(root)"), ("type", type_)]
        line = self._trace.source(source)
        if line is not None:
            items.append(("source", str(line)))
        if pick is not None:
            items.append(("kernel", pick_fact(pick)))
        phase = "backward" if state & 1 else "forward"
        items.append(("phase", phase))
        if flags := flag_words(state >> 1):
            items.append(("flags", flags))
        category = phase
        if self._status is not None:
            category = OP_STATUSES[status]
            items.append(("compared", STATUS_WORDS[OP_STATUSES[status]]))
        shown = name(self._dialect.name(op.op))
        found = (shown, self._dialect.category or category, Facts(tuple(items)))
        self._known[key] = found
        return found


def looked_up(process: Process) -> dict[int, Pick]:
    """Op index -> which implementation ran, where that is known and was looked up."""
    ops, comparison = process.ops, process.comparison
    chosen = ops[:LOOKED_UP]
    if len(ops) > LOOKED_UP and comparison is not None and comparison.first is not None:
        at = int(np.searchsorted(ops, comparison.first))
        chosen = np.union1d(chosen, ops[max(0, at - _AROUND) : at + _AROUND + 1])
    return Picks(process.trace).among(chosen.tolist())


def pick_fact(pick: Pick) -> dict[str, Value]:
    """What ran, and why, as arguments; what is not known is left out."""
    told: dict[str, Value] = {
        "name": pick.name,
        "library": pick.library,
        "backend": pick.backend,
        "reason": pick.reason,
        "refused": dict(pick.refused),
        "observed": list(pick.observed),
        "source": pick.source,
    }
    return {key: value for key, value in told.items() if value}


def argument_value(argument: Argument) -> Value:
    """An argument as JSON; a tensor as its dtype and shape."""
    if isinstance(argument, TensorArgument):
        return str(argument.meta)
    if isinstance(argument, tuple):
        return [argument_value(each) for each in argument]
    return argument


def _partners(process: Process) -> list[int]:
    """Per op the number of the other run's op that it is paired with; 0 if there is none."""
    comparison = process.comparison
    assert comparison is not None
    paired = comparison.counterpart
    seqs = np.append(comparison.baseline.ops.seq, 0)  # -1 is the last
    found: list[int] = seqs[paired].tolist()
    return found
