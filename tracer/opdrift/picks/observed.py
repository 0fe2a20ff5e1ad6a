"""What was observed of ops while they ran, as the marks of kind `kernels` tell (`kernels="full"`)."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal

from opdrift.tracefile.reader import Trace

Source = Literal["verbose", "profiler"]
SOURCES: Final[tuple[Source, ...]] = ("verbose", "profiler")


@dataclass(frozen=True, slots=True)
class Seen:
    """What one op was seen to run.

    Attributes:
        source: Who tells: the libraries' verbose output, or a profiler.
        names: In order, one for each call of a library or kernel; none if it ran none.
        raw: What else was said, and was not understood when it was recorded.
        ambiguous: Other ops ran at the same time, or a thread that was not recorded, so nothing is known.
    """

    source: Source
    names: tuple[str, ...] = ()
    raw: tuple[str, ...] = ()
    ambiguous: bool = False


class Observed:
    """What a trace says of ops that were watched, by the op's number and by who tells."""

    def __init__(self, trace: Trace) -> None:
        #: a program may write marks of any kind: these are the recorder's
        self._marks = [
            mark
            for mark in trace.marks
            if mark.kind == "kernels" and mark.fields.get("source") in SOURCES
        ]

    @cached_property
    def refused(self) -> list[str]:
        """Why something was not observed, or not to the end, in order."""
        return [str(m.fields["refused"]) for m in self._marks if "refused" in m.fields]

    def of(self, seq: int, source: Source) -> Seen | None:
        """What the op with this number was seen to run; None if it was not watched."""
        names = self._names.get((source, seq), ())
        raw = self._raw.get((source, seq), ())
        if (source, seq) in self._ambiguous or (
            source in self._foreign and self._was_watched(seq, source)
        ):
            return Seen(source, names, raw, ambiguous=True)
        if names or raw or self._was_watched(seq, source):
            return Seen(source, names, raw)
        return None

    @cached_property
    def _names(self) -> dict[tuple[str, int], tuple[str, ...]]:
        found = {}
        for mark in self._marks:
            texts, source = mark.fields.get("names", ()), mark.fields["source"]
            for seq, indices in mark.fields.get("ops", ()):
                found[source, seq] = tuple(texts[i] for i in indices)
        return found

    @cached_property
    def _raw(self) -> dict[tuple[str, int], tuple[str, ...]]:
        found: dict[tuple[str, int], tuple[str, ...]] = {}
        for mark in self._marks:
            for seq, text in mark.fields.get("raw", ()):
                key = (mark.fields["source"], seq)
                found[key] = (*found.get(key, ()), text)
        return found

    @cached_property
    def _ambiguous(self) -> set[tuple[str, int]]:
        return {
            (mark.fields["source"], seq)
            for mark in self._marks
            for seq in mark.fields.get("ambiguous", ())
        }

    @cached_property
    def _foreign(self) -> set[str]:
        """Sources that turned out to tell of threads that were not recorded, too."""
        return {mark.fields["source"] for mark in self._marks if mark.fields.get("foreign") is True}

    def _was_watched(self, seq: int, source: Source) -> bool:
        """Whether a mark spans this op. Ops of several threads may be in the next mark, with what they ran."""
        spans = self._spans.get(source, [])
        at = bisect_right(spans, seq, key=lambda span: span[0])
        return at > 0 and spans[at - 1][1] >= seq

    @cached_property
    def _spans(self) -> dict[str, list[tuple[int, int]]]:
        """By source: first and last op of each mark, in order; a last one is that of all marks so far."""
        found: dict[str, list[tuple[int, int]]] = {}
        spans = [
            (int(m.fields["first"]), int(m.fields["last"]), str(m.fields["source"]))
            for m in self._marks
            if "first" in m.fields
        ]
        for first, last, source in sorted(spans):
            mine = found.setdefault(source, [])
            mine.append((first, max(last, mine[-1][1]) if mine else last))
        return found


def counted(texts: Iterable[str]) -> tuple[str, ...]:
    """Calls for people, each once: `4 x SGEMM(N,N,64,16,16), 1 thread`."""
    counts = Counter(texts)
    return tuple(f"{count} x {text}" if count > 1 else text for text, count in counts.items())
