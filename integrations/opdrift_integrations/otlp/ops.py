"""Ops as encoded spans, in bulk: what many of them share is encoded once."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from opdrift.plugins import Process
from opdrift.records import RAISED, Pick
from opdrift.tracefile.columns import Ints, Ragged
from opdrift_integrations.otlp import attributes
from opdrift_integrations.otlp.attributes import Made
from opdrift_integrations.otlp.encoding import NO_EXTRAS, Encoder, Extras, Link
from opdrift_integrations.otlp.identity import Kind, span_ids, trace_id
from opdrift_integrations.otlp.tree import Tree

#: Ops that are turned from columns into Python's numbers at a time.
_CHUNK: Final = 4096
#: Ops whose kernels are looked up: that takes longer than the rest of a span.
_LOOKED_UP: Final = 20_000
#: Sets of attributes that are kept, a kilobyte each: a run whose shapes grow has as many as ops.
_REMEMBERED: Final = 20_000


@dataclass(frozen=True, slots=True)
class _Values:
    """The inputs or outputs of a chunk of ops.

    Attributes:
        ends: Per op, where its values end; they begin where those of the op before end.
        ids: Value ids.
        digests: In hexadecimal, "" for what has no fingerprint.
    """

    ends: list[int]
    ids: list[int]
    digests: list[str]
    absmax: list[float]
    nonfinite: list[int]


class OpSpans:
    """The ops of a process that are spans.

    Args:
        process: What is exported.
        tree: Where the ops belong.
        encoder: What makes bytes.
        first: Index of the op that has `extras`.
        extras: The event and status of the first divergence.
    """

    def __init__(
        self, process: Process, tree: Tree, encoder: Encoder, first: int | None, extras: Extras
    ) -> None:
        self._process = process
        self._trace = process.trace
        self._tree = tree
        self._encoder = encoder
        self._first = (first, extras) if extras is not NO_EXTRAS else (None, extras)
        header = process.trace.header
        self._clock = header.start_unix_ns - header.start_ns
        self._known: dict[Hashable, tuple[bytes, ...]] = {}

    def __iter__(self) -> Iterator[bytes]:
        ops = self._tree.ops
        picks = self._process.kernels(ops[:_LOOKED_UP].tolist()) if len(ops) else {}
        for at in range(0, len(ops), _CHUNK):
            yield from self._some(ops[at : at + _CHUNK], picks)

    def _some(self, chosen: Ints, picks: Mapping[int, Pick]) -> Iterator[bytes]:
        trace, columns, span = self._trace, self._trace.ops, self._encoder.span
        seqs = columns.seq[chosen]
        calls = columns.call[chosen].tolist()
        times = (columns.start[chosen] + self._clock).tolist()
        durations = columns.duration[chosen].tolist()
        signatures = columns.signature[chosen].tolist()
        parents = self._tree.parents(calls, seqs)
        inputs, outputs = (
            self._values(columns.inputs, chosen),
            self._values(columns.outputs, chosen),
        )
        links = self._links(chosen)
        ids = span_ids(self._tree.trace_id, Kind.OP, seqs)
        begin_in = begin_out = 0
        for i, (index, seq) in enumerate(zip(chosen.tolist(), seqs.tolist(), strict=True)):
            end_in, end_out = inputs.ends[i], outputs.ends[i]
            own: Made = {"torch.op.seq": seq}
            if end_in > begin_in:
                own |= attributes.inputs_held(inputs.digests[begin_in:end_in])
            if end_out > begin_out:
                own |= attributes.outputs_held(
                    outputs.digests[begin_out:end_out],
                    outputs.absmax[begin_out:end_out],
                    outputs.nonfinite[begin_out:end_out],
                )
            shared = self._shared(index, signatures[i], calls[i], outputs.ids[begin_out:end_out])
            encoded = (*shared, *self._encoder.attributes(own), *self._kernel(picks.get(index)))
            name = trace.op_info(signatures[i]).name
            yield span(
                ids[i], parents[i], name, times[i], times[i] + durations[i], encoded,
                self._extras(index, links.get(index)),
            )  # fmt: skip
            begin_in, begin_out = end_in, end_out

    # ---- what ops share ------------------------------------------------------------------------------

    def _kernel(self, pick: Pick | None) -> tuple[bytes, ...]:
        if pick is None:
            return ()
        key = repr(pick)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._encoder.attributes(attributes.kernel(pick))
        return found

    def _shared(
        self, index: int, signature: int, call: int, outputs: list[int]
    ) -> tuple[bytes, ...]:
        """The attributes that do not follow from what the tensors hold."""
        trace, columns = self._trace, self._trace.ops
        metas = tuple(trace.values.meta[outputs].tolist()) if outputs else ()
        path = int(trace.call_columns.path[call])
        source, flags = int(columns.source[index]), int(columns.flags[index])
        phase, thread = int(columns.phase[index]), int(columns.thread[index])
        status = -1
        if self._process.comparison is not None:
            status = int(self._process.comparison.status[index])
        key = (signature, metas, path, source, flags, phase, thread, status)
        found = self._known.get(key)
        if found is None:
            made = attributes.signature(trace.signature(signature))
            made |= attributes.outputs([trace.meta_of(meta) for meta in metas])
            made |= attributes.place(trace.call_name(path)[0], bool(phase), thread)
            made |= attributes.source(trace.source(source))
            made |= attributes.op_flags(flags)
            if status >= 0:
                made |= attributes.status(status)
            if len(self._known) >= _REMEMBERED:
                self._known.clear()
            found = self._known[key] = self._encoder.attributes(made)
        return found

    # ---- what each has of its own --------------------------------------------------------------------

    def _values(self, ragged: Ragged, chosen: Ints) -> _Values:
        lengths = ragged.offsets[chosen + 1] - ragged.offsets[chosen]
        ends = np.cumsum(lengths)
        within = np.arange(int(ends[-1])) - np.repeat(ends - lengths, lengths)
        ids = ragged.values[np.repeat(ragged.offsets[chosen], lengths) + within]
        rows = self._trace.values.fingerprint[ids]
        known = rows >= 0
        columns = self._trace.fingerprints
        digests = [""] * len(rows)
        for place, raw in zip(
            np.flatnonzero(known).tolist(), columns.raw[rows[known]].tolist(), strict=True
        ):
            digests[place] = f"{raw:016x}"
        absmax = np.full(len(rows), np.nan)
        absmax[known] = columns.number("absmax")[rows[known]]
        nonfinite = np.zeros(len(rows), np.int64)
        for name in ("nan", "pinf", "ninf"):
            nonfinite[known] += columns.number(name)[rows[known]]
        return _Values(ends.tolist(), ids.tolist(), digests, absmax.tolist(), nonfinite.tolist())

    def _links(self, chosen: Ints) -> dict[int, Link]:
        """Index -> the same op of the other run, for ops that differ from it."""
        found = self._process.comparison
        if found is None:
            return {}
        there = found.counterpart[chosen]
        differ = (there >= 0) & self._tree.differs(chosen)
        seqs = found.baseline.ops.seq[there[differ]]
        baseline = trace_id(found.baseline.header)
        ids = span_ids(baseline, Kind.OP, seqs)
        return {
            index: Link(baseline, ident, attributes.link(seq))
            for index, ident, seq in zip(chosen[differ].tolist(), ids, seqs.tolist(), strict=True)
        }

    def _extras(self, index: int, link: Link | None) -> Extras:
        first, extras = self._first
        found = extras if index == first else NO_EXTRAS
        if link is not None:
            found = replace(found, links=(link,))
        if self._trace.ops.flags[index] & RAISED:
            found = replace(found, error=found.error or "the op raised an exception")
        return found
