"""The processes of a run that is exported: read one at a time, cut to what is asked for, compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload

import numpy as np
import numpy.typing as npt

from opdrift.align import Maps
from opdrift.diagnose import diff
from opdrift.errors import InvalidOptionError
from opdrift.export.selection import in_scope, in_steps
from opdrift.picks import Picks
from opdrift.plugins import OP_STATUSES, Comparison, OpStatus, Process
from opdrift.records import Diagnosis
from opdrift.render.rows import MARKS, Rows, rows_of
from opdrift.tracefile.columns import Ints
from opdrift.tracefile.opening import load, rank_folders
from opdrift.tracefile.reader import Trace


@dataclass(frozen=True, slots=True)
class Selection:
    """What of a run is exported.

    Attributes:
        rank: Of a distributed trace only this rank.
        scope: Only the ops of modules that match.
        steps: Only the ops of these steps, both ends included.
    """

    rank: int | None = None
    scope: str | None = None
    steps: tuple[int, int] | None = None

    def of(self, trace: Trace) -> Ints:
        """Indices of a trace's ops that are asked for."""
        found = np.arange(len(trace.ops), dtype=np.int64)
        if self.scope is not None:
            found = in_scope(trace, self.scope)
        if self.steps is not None:
            found = np.intersect1d(found, in_steps(trace, *self.steps), assume_unique=True)
            if not len(found):
                raise InvalidOptionError(
                    f"No op of {trace.path} ran in {self.scope!r} in these steps."
                )
        return found


class Processes(Sequence[Process]):
    """The processes of a run; each is read when it is asked for, because all of them may not fit into memory."""

    def __init__(
        self,
        run: Path | Sequence[Trace],
        selection: Selection,
        *,
        warn: Callable[[str], None],
        against: Path | Trace | None = None,
        maps: Maps = (),
    ) -> None:
        self._selection = selection
        self._warn = warn
        self._sources = _sources(run, selection.rank)
        self._baseline = against
        self._maps = maps
        self._diagnoses: dict[int, Diagnosis] = {}
        if against is not None:
            self._diagnoses = self._compare(run, against)

    def __len__(self) -> int:
        return len(self._sources)

    @overload
    def __getitem__(self, index: int) -> Process: ...
    @overload
    def __getitem__(self, index: slice) -> list[Process]: ...
    def __getitem__(self, index: int | slice) -> Process | list[Process]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        source = self._sources[index]
        trace = source if isinstance(source, Trace) else load(source)
        if not trace.complete:
            self._warn(f"{trace.path} is {trace.incomplete}. What is there is exported.")
        ops = self._selection.of(trace)
        whole = len(ops) == len(trace.ops)
        return Process(
            trace, ops, whole, self._comparison(trace), lambda asked: Picks(trace).among(asked)
        )

    def _compare(self, run: Path | Sequence[Trace], against: Path | Trace) -> dict[int, Diagnosis]:
        """Rank -> the answer for it; of a rank that cannot be compared there is none."""
        exported = run if isinstance(run, Path) else run[0]
        found = diff(against, exported, rank=self._selection.rank, maps=self._maps)
        return dict(found.ranks) or {found.right.rank or 0: found}

    def _comparison(self, trace: Trace) -> Comparison | None:
        if self._baseline is None:
            return None
        rank = trace.header.rank or 0
        diagnosis = self._diagnoses.get(rank)
        if diagnosis is None:
            self._warn(f"rank {rank} could not be compared; it is exported without marks.")
            return None
        left = self._baseline
        baseline = left if isinstance(left, Trace) else load(left, rank=diagnosis.left.rank)
        rows = rows_of(baseline, trace, diagnosis, maps=self._maps)
        return _comparison(rows, baseline, diagnosis, len(trace.ops))


def _sources(run: Path | Sequence[Trace], rank: int | None) -> Sequence[Path | Trace]:
    if not isinstance(run, Path):
        return run
    ranks = rank_folders(run) if run.is_dir() else {}
    if rank is None and ranks:
        return list(ranks.values())
    return [load(run, rank=rank)]


#: How the views' marks are called in an export; the right run is the exported one.
_STATUS_OF_MARK: dict[str, OpStatus] = {
    "=": "equal", "x": "origin", "~": "receiver", "-": "unpaired", "+": "unpaired", "?": "unknown",
}  # fmt: skip


def _comparison(rows: Rows, baseline: Trace, diagnosis: Diagnosis, ops: int) -> Comparison:
    own = np.flatnonzero(rows.right >= 0)
    place = np.array([OP_STATUSES.index(_STATUS_OF_MARK[mark]) for mark in MARKS], np.int8)
    status: npt.NDArray[np.int8] = np.zeros(ops, np.int8)
    status[rows.right[own]] = place[rows.codes[own]]
    counterpart = np.full(ops, -1, np.int64)
    counterpart[rows.right[own]] = rows.left[own]
    first = -1 if rows.focus is None else int(rows.right[rows.focus])
    return Comparison(baseline, diagnosis, status, counterpart, None if first < 0 else first)
