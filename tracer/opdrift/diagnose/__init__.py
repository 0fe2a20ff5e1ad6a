"""Compare two traces: do they agree, where do they come apart first, how far, and why."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from opdrift.align import Maps
from opdrift.align.maps import check_maps
from opdrift.diagnose.alone import with_findings
from opdrift.diagnose.answer import diagnose, untold
from opdrift.diagnose.by_rank import of_one_rank, of_ranks
from opdrift.diagnose.one_process import is_alone, with_each
from opdrift.diagnose.portions import NO_FELLOWS
from opdrift.diagnose.random_parts import with_random_parts
from opdrift.errors import IncomparableTracesError, InvalidOptionError
from opdrift.foreign import diff_logs, read_log
from opdrift.records import Diagnosis, Sides
from opdrift.sizes import Tolerance
from opdrift.tracefile.opening import load, rank_folders
from opdrift.tracefile.reader import Trace
from opdrift.wording import listed

__all__ = ["Tolerance", "diff"]

Samples = str | tuple[int, int]
PathLike = str | os.PathLike[str]


def diff(
    left: Trace | PathLike,
    right: Trace | PathLike,
    *,
    samples: Samples | None = None,
    tolerance: Tolerance | tuple[float, float] | None = None,
    rank: int | None = None,
    maps: Maps | Sequence[str] = (),
    progress: Callable[[str], object] = untold,
) -> Diagnosis:
    """Find where two runs come apart first, and why.

    Distributed traces are compared rank by rank; the answer is that of the rank with the earliest
    origin, and holds those of all ranks in `ranks`.

    Args:
        left: The run taken as reference: a trace, or the path of one, or a log that `DebugMode.save_logs` or
            torchtitan's numerics debugger wrote (both sides then; docs/foreign-logs.md).
        right: The run to explain.
        samples: "L:R": compare sample L of the left run's batch with sample R of the right one's.
        tolerance: Allowed difference (rtol, atol); None means what rounding explains at each op.
        rank: Compare only this rank of distributed traces.
        maps: Renamed modules: pairs of the left path and the right one, or texts `LEFT=RIGHT`.
        progress: Told in a few words what is being done, whenever that changes.

    Raises:
        IncomparableTracesError: The fingerprints are of different kinds, no rank is in both, or nothing
            differs in what both have but one trace is incomplete.
        InvalidOptionError: `samples` or `maps` cannot be understood, or a run has no module of a map's name.
        NotATraceError: A path holds no trace.
    """
    chosen = _samples(samples)
    renames = _maps(maps)
    allowed = Tolerance(*tolerance) if isinstance(tolerance, tuple) else tolerance
    files = [t for t in (left, right) if not isinstance(t, Trace) and Path(t).is_file()]
    if files:
        return _of_logs(
            left, right, files, renames, plain=(samples, tolerance, rank) == (None, None, None)
        )
    a, b = _ranks(left, rank), _ranks(right, rank)
    check_maps(renames, a.values(), b.values())
    recorded, paths = Sides(a, b), Sides(_path(left), _path(right))
    a, b = with_each(a, b), with_each(b, a)
    shared = sorted(a.keys() & b.keys())
    if rank is not None and shared and rank not in shared:
        load(_path(left), rank=rank)  # tells that it has no such rank
    if not shared:
        raise IncomparableTracesError(
            f"{_path(left)} has {listed(sorted(a))}, {_path(right)} has {listed(sorted(b))}: no rank is in both."
            " Compare traces of runs with the same ranks, or name one with rank=."
        )

    def fellows(number: int) -> Sides[Sequence[Trace]]:
        if len(recorded.left) == len(recorded.right):
            return NO_FELLOWS
        others = (
            [t for rank, t in each.items() if rank != number] if len(each) > 1 else []
            for each in (recorded.left, recorded.right)
        )
        return Sides(*others)

    def compare(number: int, *, unfinished: bool = True, where: str = "") -> Diagnosis:
        return diagnose(
            a[number],
            b[number],
            samples=chosen,
            tolerance=allowed,
            maps=renames,
            unfinished=unfinished,
            fellows=fellows(number),
            progress=_told_with(where, progress),
        )

    found: dict[int, Diagnosis] = {}
    failed: dict[int, IncomparableTracesError] = {}
    for place, number in enumerate(shared, 1):
        where = f"rank {place} of {len(shared)}, " if len(shared) > 1 else ""
        try:
            found[number] = compare(number, unfinished=False, where=where)
        except IncomparableTracesError as error:
            failed[number] = error
    if len(a) > 1 or len(b) > 1:
        whole = with_random_parts(of_ranks(found, failed, a, b, compare=compare), a, b)
        return with_findings(whole, recorded, paths)
    only = found.get(shared[0]) or failed[shared[0]]
    if rank is None and isinstance(only, IncomparableTracesError):
        raise only
    if isinstance(only, Diagnosis) and (
        rank is None or all(o.kind == "leaf" for o in only.origins)
    ):
        return with_findings(only, recorded, paths)
    # what this rank was handed by others is not its own
    a, b = _ranks(left, None), _ranks(right, None)
    a, b = with_each(a, b), with_each(b, a)
    return of_one_rank(shared[0], only, a, b, compare=compare)


def _told_with(where: str, progress: Callable[[str], object]) -> Callable[[str], object]:
    return lambda stage: progress(f"{where}{stage}")


def _of_logs(
    left: Trace | PathLike,
    right: Trace | PathLike,
    files: Sequence[PathLike],
    maps: Maps,
    *,
    plain: bool,
) -> Diagnosis:
    """Compare two files, which are logs of other tools: a trace is a folder."""
    if isinstance(left, Trace) or isinstance(right, Trace) or len(files) < 2:
        other = right if files[0] is left else left
        read_log(os.fspath(files[0]))  # a file that is no log at all is told first
        if not isinstance(other, Trace):
            load(os.fspath(other))  # and likewise a path that holds nothing
        raise IncomparableTracesError(
            f"{os.fspath(files[0])} is a log of another tool, {_path(other)} is a trace. Compare two logs of the same tool,"
            " or two traces of opdrift.record()."
        )
    if not plain:
        raise InvalidOptionError(
            "Samples, ranks and tolerances need traces of opdrift.record(); a log holds one number a tensor. Leave them out."
        )
    return diff_logs(os.fspath(left), os.fspath(right), maps=maps)


def _ranks(trace: Trace | PathLike, rank: int | None) -> Mapping[int, Trace]:
    if isinstance(trace, Trace):
        return {trace.header.rank or 0: trace}
    folder = Path(trace)
    ranks = rank_folders(folder) if folder.is_dir() else {}
    if not ranks:
        loaded = load(folder)
        return {loaded.header.rank or 0: loaded}
    if rank is not None and len(ranks) > 1:
        return {rank: load(folder, rank=rank)}
    found = {number: load(path) for number, path in ranks.items()}
    if rank is not None and not is_alone(found):
        load(folder, rank=rank)  # tells where it has no such rank
    return found


def _path(trace: Trace | PathLike) -> str:
    return str(trace.path) if isinstance(trace, Trace) else os.fspath(trace)


def _samples(samples: Samples | None) -> tuple[int, int] | None:
    if samples is None or isinstance(samples, tuple):
        return samples
    left, colon, right = samples.partition(":")
    if colon and left.strip().isdecimal() and right.strip().isdecimal():
        return int(left), int(right)
    raise InvalidOptionError(
        f"samples={samples!r} is not of the form L:R. Give two sample numbers from 0, such as '0:2'."
    )


def _maps(maps: Maps | Sequence[str]) -> list[tuple[str, str]]:
    found = []
    for each in maps:
        if not isinstance(each, str):
            found.append((each[0], each[1]))
            continue
        left, equals, right = each.partition("=")
        if not equals or not (left.strip() or right.strip()):
            raise InvalidOptionError(
                f"maps={each!r} is not of the form LEFT=RIGHT. Give two module paths, such as 'encoder=model.encoder';"
                " an empty one is the root module."
            )
        found.append((left.strip(), right.strip()))
    return found
