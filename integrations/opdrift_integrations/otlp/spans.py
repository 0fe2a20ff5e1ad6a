"""A process of a run as encoded spans, one after the other, so that a long trace needs no memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from opdrift.plugins import Process
from opdrift_integrations.otlp import attributes
from opdrift_integrations.otlp.encoding import NO_EXTRAS, Encoder, Event, Extras
from opdrift_integrations.otlp.identity import Kind, span_id, trace_id
from opdrift_integrations.otlp.ops import OpSpans
from opdrift_integrations.otlp.tree import Tree
from opdrift_integrations.paths import with_class

#: Marks that are spans, or that say what other spans do.
_NO_EVENTS: Final = frozenset({"step", "gather", "move", "use", "collective", "scalar", "kernels"})
#: Events of a span that are made at all: OpenTelemetry's own limit. The rest is counted.
_MOST_EVENTS: Final = 128


@dataclass(frozen=True, slots=True)
class First:
    """Where the first divergence is told.

    Attributes:
        kind: Of the span: that of the op, if it is one, else of its module, else of the run.
        number: Index of the op, or id of the call.
        told: What the event says.
        error: What the span's status says; None where the runs differ by rounding only.
    """

    kind: Kind
    number: int
    told: attributes.Made
    error: str | None

    def extras(self, time: int) -> Extras:
        """The event at this time (since 1970), and the status."""
        return Extras((Event("torch.diff.first_divergence", time, self.told),), (), self.error)


class Spans:
    """The spans of one process.

    Args:
        process: What is exported.
        level: "module", "divergent" or "all".
        encoder: Makes the encoder of a trace id.
    """

    def __init__(self, process: Process, level: str, encoder: Callable[[bytes], Encoder]) -> None:
        self._process = process
        self._trace = process.trace
        self._tree = Tree(process, level)
        self._encoder = encoder(self._tree.trace_id)
        header = self._trace.header
        self._clock = header.start_unix_ns - header.start_ns
        self._first = _first(process, self._tree)

    def __len__(self) -> int:
        return len(self._tree)

    def __iter__(self) -> Iterator[bytes]:
        yield self._run()
        yield from self._steps()
        yield from self._calls()
        yield from self._marks()
        first = self._first
        extras = NO_EXTRAS
        if first is not None and first.kind == Kind.OP:
            extras = first.extras(int(self._trace.ops.start[first.number]) + self._clock)
        yield from OpSpans(
            self._process,
            self._tree,
            self._encoder,
            None if first is None else first.number,
            extras,
        )

    def request(self, spans: Sequence[bytes]) -> bytes:
        """A request with some of them."""
        return self._encoder.request(spans)

    def _span(
        self,
        ident: bytes,
        parent: bytes,
        name: str,
        times: tuple[int, int],
        said: attributes.Made,
        extras: Extras = NO_EXTRAS,
    ) -> bytes:
        encoded = self._encoder.attributes(said)
        return self._encoded(ident, parent, name, times, encoded, extras)

    def _encoded(
        self,
        ident: bytes,
        parent: bytes,
        name: str,
        times: tuple[int, int],
        encoded: tuple[bytes, ...],
        extras: Extras,
    ) -> bytes:
        start, end = times[0] + self._clock, times[1] + self._clock
        return self._encoder.span(ident, parent, name, start, end, encoded, extras)

    def _run(self) -> bytes:
        tree, footer, comparison = self._tree, self._trace.footer, self._process.comparison
        said: attributes.Made = {}
        error: str | None = None
        events, dropped = self._events()
        if comparison is not None:  # first what was asked: viewers keep the order
            said |= attributes.verdict(comparison, trace_id(comparison.baseline.header).hex())
            said |= attributes.differing(int(tree.differing[0]))
        said |= attributes.run(self._trace)
        if self._first is not None:
            error = self._first.error
            if self._first.kind == Kind.RUN:
                events = [*self._first.extras(tree.start + self._clock).events, *events]
        if footer is not None and footer.ended == "raised":
            raised = attributes.exception(footer.exception or "")
            events.append(Event("exception", tree.end + self._clock, raised))
            error = error or footer.exception
        extras = Extras(events, (), error, dropped)
        return self._span(tree.run, b"", "torch.run", (tree.start, tree.end), said, extras)

    def _events(self) -> tuple[list[Event], int]:
        """The marks that are no spans; of many the first ones, and how many more there are."""
        if not self._process.whole:
            return [], 0
        marks = [mark for mark in self._trace.marks if mark.kind not in _NO_EVENTS]
        kept = marks[:_MOST_EVENTS]
        events = [
            Event(f"torch.mark.{m.kind}", m.time_ns + self._clock, attributes.mark(m)) for m in kept
        ]
        return events, len(marks) - len(kept)

    def _steps(self) -> Iterator[bytes]:
        for step in self._tree.steps:
            said = attributes.step(step.number)
            yield self._span(step.ident, self._tree.run, "torch.step", (step.start, step.end), said)

    def _calls(self) -> Iterator[bytes]:
        tree, first, columns = self._tree, self._first, self._trace.call_columns
        known: dict[tuple[int, ...], tuple[bytes, ...]] = {}
        for number in tree.calls.tolist():
            # not `trace.calls`, which keeps what it makes: a long run has hundreds of thousands
            path = int(columns.path[number])
            key = (
                path,
                int(columns.source[number]),
                int(columns.training[number]),
            )
            shared = known.get(key)
            if shared is None:
                shared = known[key] = self._encoder.attributes(self._module(*key))
            own = attributes.call(int(columns.number[number]))
            if self._process.comparison is not None:
                own |= attributes.differing(int(tree.differing[number]))
            times = int(tree.call_starts[number]), int(tree.call_ends[number])
            extras = NO_EXTRAS
            if first is not None and (first.kind, first.number) == (Kind.CALL, number):
                extras = first.extras(times[0] + self._clock)
            ids = tree.call_id(number), tree.call_parent(number)
            name = with_class(*self._trace.call_name(path))
            encoded = shared + self._encoder.attributes(own)
            yield self._encoded(*ids, name, times, encoded, extras)

    def _module(self, path: int, source: int, training: int) -> attributes.Made:
        """What all calls of a module from one line say."""
        name, kind = self._trace.call_name(path)
        return attributes.module(name, kind, bool(training), self._trace.source(source))

    def _marks(self) -> Iterator[bytes]:
        for number, mark in enumerate(self._tree.marks):
            extras = NO_EXTRAS
            if mark.fields.get("intact") is False:
                extras = Extras(error=f"the {mark.kind} is not what its source held")
            ident = span_id(self._tree.trace_id, Kind.MARK, number)
            parent = self._tree.mark_parent(mark)
            times = mark.time_ns, mark.time_ns
            yield self._span(
                ident, parent, f"torch.{mark.kind}", times, attributes.mark(mark), extras
            )


def _one_line(text: str) -> str:
    """The names in it with line breaks and control characters escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _first(process: Process, tree: Tree) -> First | None:
    comparison = process.comparison
    if comparison is None:
        return None
    found = comparison.diagnosis.first or comparison.diagnosis.first_bitwise
    if found is None:
        return None
    error = None
    if comparison.diagnosis.verdict == "diverged":
        error = f"first divergence: {_one_line(found.cause.summary)}"
    told = attributes.divergence(found)
    op = comparison.first
    if op is None or found.kind == "leaf":  # of a leaf, `first` is merely the op that uses it first
        return First(Kind.RUN, 0, told, error)
    if op in tree.ops:
        return First(Kind.OP, op, told, error)
    call = int(process.trace.ops.call[op])
    if call in tree.calls:
        return First(Kind.CALL, call, told, error)
    return First(Kind.RUN, 0, told, error)
