"""What one run alone shows to be wrong; nothing is compared with another run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from opdrift.checkpoints import dropped
from opdrift.copies import copies
from opdrift.gathers import gather_findings, random_parts, seen_changed
from opdrift.moves import moves
from opdrift.neighbours import Neighbours
from opdrift.overwritten import overwritten
from opdrift.races import races
from opdrift.records import READ_UNINITIALISED, Cause, Finding, Leaf, TensorArgument
from opdrift.steps import Steps
from opdrift.tracefile.columns import Ints
from opdrift.tracefile.fingerprints import Fingerprint
from opdrift.tracefile.reader import Trace
from opdrift.trials import trials, written_by_trials
from opdrift.wording import listed
from opdrift.world.collectives import World
from opdrift.world.findings import another_run, without_handed, world_findings
from opdrift.world.one_run import of_another_run

#: A chain of views is followed this often; each round doubles the length that is covered.
_VIEW_ROUNDS: Final = 6


def findings(traces: Iterable[Trace]) -> tuple[Finding, ...]:
    """Everything that is wrong within each of the traces (one a rank), and between the ranks."""
    ranks = list(traces)
    world = World(ranks)
    mixed = of_another_run(ranks)
    alone = told_by_ranks(each for trace in ranks for each in _of_one(trace))
    if mixed is not None:  # nothing between them means anything
        return _sorted([another_run(*mixed), *alone])
    gathered = list(gather_findings(ranks))
    found = [*without_handed(world, alone), *told_by_ranks(gathered)]
    found += world_findings(world, gathered)
    if any(each.kind == "checkpoint" for each in found):
        found = _with_random_parts(found, random_parts(ranks))
    return _sorted(found)


def _sorted(found: Sequence[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(found, key=lambda f: (f.seq or 0, f.rank or 0)))


def _with_random_parts(found: list[Finding], said: str | None) -> list[Finding]:
    """What the model holds in place of a checkpoint that was dropped, as only all ranks together tell."""
    return [
        replace(each, cause=replace(each.cause, evidence=(*each.cause.evidence, said)))
        if said and each.kind == "checkpoint"
        else each
        for each in found
    ]


def told_by_ranks(found: Iterable[Finding]) -> list[Finding]:
    """What several ranks show alike once, of the first of them."""
    alike: dict[Finding, list[int]] = {}
    for each in found:
        ranks = alike.setdefault(replace(each, rank=None), [])
        if each.rank is not None and each.rank not in ranks:
            ranks.append(each.rank)
    return [_told_of(each, ranks) for each, ranks in alike.items()]


def _told_of(finding: Finding, ranks: Sequence[int]) -> Finding:
    if len(ranks) < 2:
        return replace(finding, rank=ranks[0] if ranks else None)
    same = (*finding.cause.evidence, f"the same on {listed(ranks[1:])}")
    return replace(finding, cause=replace(finding.cause, evidence=same), rank=ranks[0])


def _of_one(trace: Trace) -> Iterator[Finding]:
    steps = Steps(trace)
    yield from _hidden_writes(trace, steps)
    yield from _uninitialised(trace, steps)
    yield from _nonfinite(trace, steps)
    yield from moves(trace, steps.known_at)
    yield from copies(trace, steps.known_at)
    yield from overwritten(trace, steps.known_at)
    yield from races(trace, steps.known_at)
    yield from trials(trace, steps.known_at)
    yield from dropped(trace, steps.known_at)


# ---- hidden writes -----------------------------------------------------------------------------------


def _hidden_writes(trace: Trace, steps: Steps) -> Iterator[Finding]:
    known = written_by_trials(trace)
    changed = [
        leaf
        for leaf in trace.leaves
        if leaf.when == "changed" and (leaf.name, leaf.seq) not in known
    ]
    by_value: dict[int, list[Leaf]] = {}
    for leaf in changed:  # a storage under several names has a row for each
        by_value.setdefault(leaf.value, []).append(leaf)
    storages = Neighbours(trace)
    for value, leaves in by_value.items():
        before = _content_before(trace, storages, value)
        now = trace.fingerprint(value)
        if before is None or now is None or before.key == now.key:
            continue
        if any(_is_told(trace, storages, leaf) for leaf in leaves):
            continue
        first = leaves[0]
        reader = trace.index_of(first.seq + 1)
        op = trace.op(reader) if reader is not None else None
        names = ", ".join(leaf.name or _nameless(trace, storages, leaf) for leaf in leaves)
        by = f"read by {op.name} (op {op.seq})" if op is not None else f"after op {first.seq}"
        evidence = [
            f"its digest was {before.raw:016x} when last known and is {now.raw:016x} {by}",
            "no op that was recorded wrote it in between",
        ]
        if len(leaves) > 1:
            evidence.append(f"one storage has the names {names}")
        yield Finding(
            "hidden-write",
            Cause(
                "race",
                "likely",
                f"{names}: the content changed, and no recorded op wrote it",
                tuple(evidence),
                "Look for a write that the dispatcher cannot see: another thread, a copy that nobody waited"
                " for, numpy, .data, a custom kernel. Wait for it before the tensor is read.",
            ),
            first.name or None,
            op.name if op is not None else None,
            op.call.path if op is not None else trace.calls[first.call].path,
            op.seq if op is not None else first.seq,
            steps.known_at(first.seq),
            trace.header.rank,
        )


def _is_told(trace: Trace, storages: Neighbours, leaf: Leaf) -> bool:
    """Whether marks of an integration show the same change: they say of which parameter of a flat one it is."""
    places = seen_changed(trace.marks, leaf)
    if not places:
        return False
    outputs, seq = trace.ops.outputs, trace.ops.seq
    into = np.unique(outputs.rows()[np.isin(outputs.values, storages.of(leaf.value))])
    written = [int(seq[row]) for row in into.tolist() if trace.op(row).mutated]
    # what an op wrote in between may have been changed once more
    return any(not any(first < w <= last for w in written) for first, last in places)


def _nameless(trace: Trace, storages: Neighbours, leaf: Leaf) -> str:
    """What a storage without a name is: what an op wrote last, before it was found changed, or a constant."""
    outputs = trace.ops.outputs
    wrote = outputs.rows()[np.isin(outputs.values, storages.of(leaf.value))]
    for index in sorted(wrote[trace.ops.seq[wrote] <= leaf.seq].tolist(), reverse=True):
        writer = trace.op(index)
        if writer.mutated or not writer.signature.op.view:
            return f"what {writer.name} (op {writer.seq}) wrote"
    return "a nameless constant"


def _content_before(trace: Trace, storages: Neighbours, value: int) -> Fingerprint | None:
    """The fingerprint that the same part of the same storage had when last known."""
    columns, same = trace.values, storages.of(value)
    known = (columns.offset[same] == columns.offset[value]) & (
        columns.meta[same] == columns.meta[value]
    )
    known &= (columns.write[same] < columns.write[value]) & (columns.fingerprint[same] >= 0)
    candidates = same[known]
    if not len(candidates):
        return None
    return trace.fingerprint(int(candidates[np.argmax(columns.write[candidates])]))


# ---- uninitialised reads -----------------------------------------------------------------------------


def _uninitialised(trace: Trace, steps: Steps) -> Iterator[Finding]:
    """The first op that reads each piece of unwritten memory; what follows from it is not said again."""
    seen: set[int] = set()
    storages = Neighbours(trace)
    for index in np.flatnonzero(trace.ops.flags & READ_UNINITIALISED).tolist():
        op = trace.op(index)
        made = _unwritten(trace, storages, op.inputs)
        if made in seen:
            continue
        seen.add(made)
        maker = trace.op(made) if made >= 0 else None
        evidence = [f"{op.name} (op {op.seq}) read it"]
        if maker is not None:
            where = f", {maker.source}" if maker.source is not None else ""
            evidence.insert(
                0,
                f"{maker.name} (op {maker.seq}{where}) handed out the memory, and nothing wrote it all",
            )
        yield Finding(
            "uninitialised",
            Cause(
                "uninitialised",
                "certain",
                f"{op.name} in {op.call.path or 'the root module'} read memory before it was written",
                tuple(evidence),
                "Write the whole tensor before it is read: zeros or full instead of empty, or load it;"
                " after to_empty(), load or reset every parameter and buffer, also non-persistent ones.",
            ),
            None,
            op.name,
            op.call.path,
            op.seq,
            steps.known_at(op.seq),
            trace.header.rank,
        )


def _unwritten(trace: Trace, storages: Neighbours, inputs: Sequence[int]) -> int:
    """The op that made the first unwritten input's storage; -1 if that is not known."""
    for value in inputs:
        makers = trace.producer[storages.of(value)] if value else np.zeros(0, np.int64)
        made = int(makers[makers >= 0].min(initial=len(trace.ops)))
        if made < len(trace.ops) and trace.op_info(int(trace.ops.signature[made])).uninitialised:
            return made
    return -1


# ---- non-finite values -------------------------------------------------------------------------------


def _nonfinite(trace: Trace, steps: Steps) -> Iterator[Finding]:
    """The first NaN, and the first infinity that nobody asked for: a leaf that holds it, or an op."""
    rows = _content_rows(trace)
    nan = _counts(trace, ("nan",))
    infinite = _counts(trace, ("pinf", "ninf"))
    told = written_by_trials(trace)
    leaf = next(
        (
            each
            for each in trace.leaves
            if each.kind in ("parameter", "buffer", "input")
            and (each.name, each.seq) not in told
            # what a recorded op wrote, as an optimizer does, is told where the NaN began
            and trace.producer[each.value] < 0
            and _at(nan, rows[each.value])
        ),
        None,
    )
    if leaf is not None:
        yield _bad_leaf(trace, leaf, _at(nan, rows[leaf.value]), steps)
    yield from _first_op(trace, rows, nan, nan, "NaN", steps)
    yield from _first_op(trace, rows, infinite, infinite + nan, "infinity", steps)


def _content_rows(trace: Trace) -> Ints:
    """Per value the row of the fingerprint that tells its content: its own, or that of what it views."""
    rows = trace.values.fingerprint.copy()
    producer = trace.producer
    starts = trace.ops.inputs.offsets
    parent = np.arange(len(rows), dtype=np.int64)
    viewed = np.flatnonzero((rows < 0) & (producer >= 0))
    viewed = viewed[starts[producer[viewed] + 1] > starts[producer[viewed]]]
    sources = trace.ops.inputs.values[starts[producer[viewed]]]
    # what was made of a content, and has none itself, tells nothing of it: a tensor on "meta"
    shared = trace.values.storage[viewed] == trace.values.storage[sources]
    parent[viewed[shared]] = sources[shared]
    for _ in range(_VIEW_ROUNDS):
        parent = parent[parent]
    return np.where(rows >= 0, rows, rows[parent])


def _counts(trace: Trace, names: Sequence[str]) -> Ints:
    total = np.zeros(len(trace.fingerprints), np.int64)
    for name in names:
        total += trace.fingerprints.number(name).astype(np.int64)
    return total


def _at(counts: Ints, row: Any) -> int:
    return int(counts[row]) if row >= 0 else 0


def _per_op(trace: Trace, rows: Ints, counts: Ints, *, inputs: bool) -> npt.NDArray[np.bool_]:
    """Whether any input, or any output, of each op counts more than zero."""
    lists = trace.ops.inputs if inputs else trace.ops.outputs
    padded = np.append(counts > 0, False)  # row -1: unknown
    hit = padded[rows[lists.values]]
    return np.bincount(lists.rows()[hit], minlength=len(trace.ops)) > 0


def _first_op(
    trace: Trace, rows: Ints, made: Ints, excused: Ints, what: str, steps: Steps
) -> Iterator[Finding]:
    fresh = _per_op(trace, rows, made, inputs=False) & ~_per_op(trace, rows, excused, inputs=True)
    for index in np.flatnonzero(fresh).tolist():
        signature = trace.signature(int(trace.ops.signature[index]))
        # a view makes none: what it is of is memory that others fill, and that was not looked at
        if signature.op.view or signature.op.uninitialised or _asked_for(signature.arguments):
            continue
        op = trace.op(index)
        output, number = next((v, n) for v in op.outputs if (n := _at(made, rows[v])))
        evidence = [
            f"{number:,} of {_size(trace, output):,} elements of its output {trace.meta(output)} are {what}",
            f"no input holds one; the largest magnitude among them is {_largest(trace, rows, op.inputs):.3g}",
        ]
        backward = " in the backward pass" if op.phase == "backward" else ""
        place = op.call.path or "the root module"
        yield Finding(
            "nan",
            Cause(
                "nan",
                "certain",
                f"{what} first appears in the output of {op.name} in {place}{backward}",
                tuple(evidence),
                "Look at this op's inputs: a sum or product beyond the dtype's range, 0/0, log or sqrt of a"
                " negative number, a softmax over a row that is masked everywhere. bfloat16 or float32 have range"
                " that float16 lacks.",
            ),
            None,
            op.name,
            op.call.path,
            op.seq,
            steps.known_at(op.seq),
            trace.header.rank,
        )
        return


def _asked_for(arguments: Iterable[tuple[str, Any]]) -> bool:
    """Whether the program passed the non-finite number itself, as causal masks do."""
    return any(_holds_nonfinite(argument) for _, argument in arguments)


def _holds_nonfinite(argument: Any) -> bool:
    if isinstance(argument, tuple):
        return any(_holds_nonfinite(a) for a in argument)
    return (
        isinstance(argument, float)
        and not np.isfinite(argument)
        and not isinstance(argument, TensorArgument)
    )


def _size(trace: Trace, value: int) -> int:
    return int(np.prod(trace.meta(value).shape, dtype=np.int64))


def _largest(trace: Trace, rows: Ints, values: Sequence[int]) -> float:
    known = [int(rows[v]) for v in values if v and rows[v] >= 0]
    return max((float(trace.fingerprints.number("absmax")[r]) for r in known), default=0.0)


def _bad_leaf(trace: Trace, leaf: Leaf, number: int, steps: Steps) -> Finding:
    return Finding(
        "nan",
        Cause(
            "nan",
            "certain",
            f"the {leaf.kind} {leaf.name} already holds NaN",
            (f"{number:,} of {_size(trace, leaf.value):,} elements are NaN when it is first seen",),
            "Look at where it comes from: the checkpoint, its initialisation, or the data.",
        ),
        leaf.name,
        None,
        leaf.name.rpartition(".")[0] if leaf.kind != "input" else trace.calls[leaf.call].path,
        leaf.seq or None,
        steps.known_at(leaf.seq),
        trace.header.rank,
    )
