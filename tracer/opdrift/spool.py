"""Rows on their way from the threads' buffers to disk."""

from __future__ import annotations

import itertools
import json
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import perf_counter_ns as now
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from opdrift.buffers import MakeColumns, ThreadBuffers
from opdrift.neutral import silent
from opdrift.tracefile.writer import fingerprint_columns

if TYPE_CHECKING:
    import numpy.typing as npt

    from opdrift.tracefile.writer import TraceWriter

log = logging.getLogger("opdrift")

#: A busy thread flushes after this time. With what a flush takes on a busy machine it stays within the second that a
#: killed process is said to lose.
FLUSH_NS: Final = 700_000_000
#: A thread that has not flushed by itself so long after that is idle, or in a long op: the watchdog flushes it.
_GRACE_NS: Final = 50_000_000
#: So often the watchdog looks at least, as a thread may have begun to wait meanwhile.
_WATCH_SECONDS: Final = 0.5
#: What announces that the process may end is preceded by a flush, if the last one is longer ago than this.
_SOON_NS: Final = 250_000_000
_LAST_THREAD: Final = 255


class Spool:
    """The buffers of all threads of one recording, and what empties them.

    Args:
        writer: The trace on disk.
        fingerprint_row: Layout of a fingerprint.
        columns: Makes columns of the table `tensors` from rows of that layout.
        failed: Notes a failure of the tracer itself.
        stopped: Called when nothing can be written any more: the disk is full, or this process was forked.
    """

    def __init__(
        self,
        writer: TraceWriter,
        fingerprint_row: np.dtype[Any],
        *,
        columns: MakeColumns = fingerprint_columns,
        failed: Callable[[str, BaseException], None],
        stopped: Callable[[], None],
    ) -> None:
        self._writer = writer
        self._fingerprint_row = fingerprint_row
        self._columns = columns
        self._failed = failed
        self._stopped = stopped
        #: called by a flush of the current thread's rows, before its lock is taken: fingerprints of devices
        self.arrived: Callable[[], Sequence[npt.NDArray[np.void]]] = tuple
        #: what else writes into the trace at each flush, under its lock
        self.others: list[Callable[[TraceWriter], None]] = []
        #: called after each flush, under its lock
        self.after_flush: Callable[[], None] = lambda: None
        #: whether anything is still written
        self.writing = True
        self.ops_written = 0
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._threads: dict[int, ThreadBuffers] = {}
        self._numbers = itertools.count()
        self._names: deque[tuple[str, int, str]] = deque()
        self._leaves: deque[tuple[str, str, str, int, int, int]] = deque()
        self._marks: deque[tuple[int, int, str, int, int, str | Callable[[], str]]] = deque()
        self._fingerprints: deque[npt.NDArray[np.void]] = deque()
        self._end = threading.Event()
        self._watchdog = threading.Thread(target=self._watch, name="opdrift watchdog", daemon=True)

    # ---- what is written ---------------------------------------------------------------------------

    def thread(self) -> ThreadBuffers:
        """The buffers of the current thread."""
        ident = threading.get_ident()
        found = self._threads.get(ident)
        if found is None:
            index = min(next(self._numbers), _LAST_THREAD)
            found = self._threads[ident] = ThreadBuffers(
                index, self._fingerprint_row, self._columns
            )
        return found

    def name(self, kind: str, ident: int, text: str) -> None:
        """Write what an id stands for."""
        self._names.append((kind, ident, text))

    def leaf(self, row: tuple[str, str, str, int, int, int]) -> None:
        """Write a row of the table `leaves`."""
        self._leaves.append(row)

    def mark(
        self, t: ThreadBuffers, kind: str, fields: Mapping[str, Any] | str | Callable[[], str]
    ) -> None:
        """Write a mark; its fields as a mapping of JSON types, as JSON already, or what makes that when it is flushed."""
        text = json.dumps(fields) if isinstance(fields, Mapping) else fields
        self._marks.append((t.seq, now(), kind, t.call, t.index, text))

    def announce(self, t: ThreadBuffers, kind: str, fields: Mapping[str, Any]) -> None:
        """Write a mark that is on disk when this returns: what it announces may end the process.

        So do the rows of the thread, unless they were written just before; only the thread itself may ask.
        """
        if now() > t.due - FLUSH_NS + _SOON_NS:
            self.flush(t)
        if not self.writing or not self.is_ours():
            return
        row = (t.seq, now(), kind, t.call, t.index, json.dumps(fields))
        with self._lock:
            self._marks.append(row)
            try:
                self._writer.announce(row)
            except OSError as error:
                self._disk_failed(error)

    # ---- writing it --------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to watch for rows that an idle program left."""
        self._watchdog.start()

    def stop(self) -> None:
        """End the watch."""
        self._end.set()

    def is_ours(self) -> bool:
        """Whether this is the process that began the trace; the files are not a forked child's."""
        return os.getpid() == self._pid

    def flush(self, t: ThreadBuffers, *, reset: bool = True) -> None:
        """Write a thread's rows; only the owning thread may reset its buffers."""
        t.due = now() + FLUSH_NS
        if self.writing and not self.is_ours():
            self._stop_writing()
        if not self.writing:
            self._discard(t, reset=reset)
            return
        if reset and t.ident == threading.get_ident():
            self._take_arrived()
        with self._lock, silent():
            try:
                # rows are counted before the names are taken, so that a row's names are on disk with it
                counts = t.counts()
                # also if they are lost: the reader counts
                self.ops_written += counts[0] - t.done[0]
                self._drain("names", self._names)
                t.write(self._writer, counts, reset=reset)
                self._drain_fingerprints()
                self._drain("leaves", self._leaves)
                self._drain_marks()
                for write in self.others:
                    write(self._writer)
                self._writer.check()
            except OSError as error:
                self._disk_failed(error)
            except Exception as error:
                self._failed("writing", error)
                if reset:
                    t.discard()
            except BaseException:
                # Ctrl-C: what is written by half must not be taken for whole, and rows that were taken are gone
                self._interrupted()
                raise
            self.after_flush()

    def finish(self) -> None:
        """Write what is left of all threads."""
        self._watchdog.join()
        for t in list(self._threads.values()):
            self.flush(t)

    def close(self, footer: Mapping[str, Any]) -> None:
        """Close the trace; without a footer if it is not whole."""
        if not self.writing:
            self._writer.abandon()
            return
        try:
            with silent():
                self._writer.close(footer)
        except Exception as error:
            self._disk_failed(error)

    def _take_arrived(self) -> None:
        """Take what devices have computed meanwhile; only a thread of the program may ask them."""
        try:
            self._fingerprints.extend(self.arrived())
        except Exception as error:
            self._failed("fingerprints of devices", error)

    def _drain_fingerprints(self) -> None:
        taken = [self._fingerprints.popleft() for _ in range(len(self._fingerprints))]
        if taken:
            self._writer.append("tensors", self._columns(np.concatenate(taken)))

    def _drain_marks(self) -> None:
        taken = [self._marks.popleft() for _ in range(len(self._marks))]
        if taken:
            *columns, texts = zip(*taken, strict=True)
            self._writer.append("marks", [*columns, tuple(map(as_text, texts))])

    def _drain(self, table: str, rows: deque[Any]) -> None:
        taken = [rows.popleft() for _ in range(len(rows))]
        if taken:
            self._writer.append(table, list(zip(*taken, strict=True)))

    def _discard(self, t: ThreadBuffers, *, reset: bool) -> None:
        for rows in (self._names, self._leaves, self._marks, self._fingerprints):
            rows.clear()
        if reset:
            t.discard()

    def _disk_failed(self, error: Exception) -> None:
        self._stop_writing()
        log.warning(
            "opdrift stopped recording %s: %s. The run goes on; the trace holds what was written before and reads as incomplete.",
            self._writer.folder,
            getattr(error, "strerror", None) or error,
        )

    def _interrupted(self) -> None:
        self._stop_writing()
        log.warning(
            "opdrift was interrupted while it wrote to %s, and stopped recording. The trace holds what was written before and"
            " reads as incomplete.",
            self._writer.folder,
        )

    def _stop_writing(self) -> None:
        self.writing = False
        self._stopped()

    def _watch(self) -> None:
        """Flush what idle threads left; busy threads flush themselves."""
        while not self._end.wait(self._until_due()):
            for t in self._waiting():
                if now() > t.due + _GRACE_NS:
                    self.flush(t, reset=False)

    def _until_due(self) -> float:
        """For how many seconds the watchdog need not look."""
        due = min((t.due for t in self._waiting()), default=None)
        if due is None:
            return _WATCH_SECONDS
        return min(_WATCH_SECONDS, max(0.0, (due + _GRACE_NS - now()) / 1e9))

    def _waiting(self) -> Iterator[ThreadBuffers]:
        """The threads whose rows are not all on disk; all of them while rows wait that are nobody's."""
        for t in list(self._threads.values()):
            if t.pending or self._marks or self._leaves:
                yield t


def as_text(fields: str | Callable[[], str]) -> str:
    """The fields of a mark that goes to disk."""
    return fields if isinstance(fields, str) else fields()
