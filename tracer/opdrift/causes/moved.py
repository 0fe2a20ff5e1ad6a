"""A weight that was moved or gathered, and arrived as another one or lost what was written into it, or whose shard changed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

from opdrift.case import Case, Side
from opdrift.causes.evidence import Evidence
from opdrift.gathers import gather_findings
from opdrift.moves import moves
from opdrift.records import Cause, Finding
from opdrift.shards import names_of
from opdrift.steps import Steps
from opdrift.tracefile.reader import Trace


def moved(e: Evidence) -> Cause | None:
    """What one run alone shows to be wrong with the moves of the weight that differs here."""
    return _told(e, e.shared.once(_moves), with_inputs=True) if e.size.material else None


def gathered(e: Evidence) -> Cause | None:
    """The same of its gathers, of the shard that this rank gave to them, and of an op that changed what was gathered."""
    if not e.size.material:
        return None
    # what equal inputs do not explain may have come with a gather, behind which nobody read them again
    alone = e.origin.story == "op" and e.origin.inputs_match is not False
    return _changed_here(e) or _told(e, e.shared.once(_gathers), with_inputs=alone)


def _changed_here(e: Evidence) -> Cause | None:
    """What is wrong with the gather that an op of the origin writes into, which only one of the runs does."""
    ops = [{side.seq(op) for op in e.ops_of(n)} for n, (_, side, _) in enumerate(e.sides)]
    wrong = [
        (label, finding)
        for (label, _, _), found, seqs in zip(e.sides, e.shared.once(_told_once), ops, strict=True)
        for finding in found
        if finding.op is not None and finding.seq in seqs
    ]
    return None if len({label for label, _ in wrong}) != 1 else _in_run(*wrong[0])


def _in_run(label: str, finding: Finding) -> Cause:
    return replace(finding.cause, summary=f"in the {label} run, {finding.cause.summary}")


Found = tuple[tuple[Finding, ...], tuple[Finding, ...]]


def _told(e: Evidence, found: Found, *, with_inputs: bool = False) -> Cause | None:
    """The first finding about what differs here, if it went wrong in one run only.

    Args:
        e: The evidence.
        found: The findings of each side.
        with_inputs: Those about what the op reads count, too: a move hands on memory that nobody may have read since.
    """
    shards = e.shared.once(_shards)
    values = (e.origin.values.left, e.origin.values.right)
    readers = (e.consumer().left, e.consumer().right)
    names = set(e.origin.names)
    for (_, side, _), value in zip(e.sides, values, strict=True):
        if value is not None:
            names.update(_names_of(side, value))
    wrong = []
    each_side = zip(e.sides, found, shards, readers, strict=True)
    for (label, side, op), findings, of_storage, reader in each_side:
        at = reader if reader is not None else op  # of a stretch of ops, what reads its result
        before = None if at is None else _told_by(side, at, of_storage)
        if at is not None:  # what is sent to be gathered has the names of its parameters
            read = side.trace.values.storage[side.trace.ops.inputs[at]].tolist()
            names.update(name for storage in read for name in of_storage.get(storage, ()))
            if with_inputs:
                names.update(_names_read(side, at))
        wrong += [(label, f) for f in findings if names & {*f.names} and _is_before(f, before)]
    if not wrong or len({label for label, _ in wrong}) > 1:
        return None  # it went wrong in both runs: that makes no difference
    return _in_run(*wrong[0])


def _names_of(side: Side, value: int) -> Iterator[str]:
    """Names of a value: as it is, or of the parameter whose place it is in, which a step has written since."""
    yield from (leaf.name for leaf in side.leaves.of(value) if leaf.name)
    held = side.leaves.of_storage(value)
    if held is not None and _place(side.trace, held.value) == _place(side.trace, value):
        yield held.name


def _place(trace: Trace, value: int) -> tuple[int, int]:
    """Where in its storage a value begins, and its elements: a transposed view has the same."""
    return int(trace.values.offset[value]), math.prod(trace.meta(value).shape)


def _names_read(side: Side, op: int) -> set[str]:
    values = side.trace.ops.inputs[op].tolist()
    return {leaf.name for value in values for leaf in side.leaves.of(value) if leaf.name}


def _told_by(side: Side, op: int, shards: Mapping[int, set[str]]) -> int:
    """The number of the op until which marks tell what an op was given: of a shard, until its gather is there."""
    seq = side.seq(op)
    read = side.trace.values.storage[side.trace.ops.inputs[op]].tolist()
    names = {name for storage in read for name in shards.get(storage, ())}
    for mark in side.trace.marks if names else ():
        if mark.kind == "gather" and mark.seq >= seq and names & set(names_of(mark.fields)):
            return mark.seq
    return seq


def _is_before(finding: Finding, seq: int | None) -> bool:
    """Whether what is wrong may have happened before an op, though it may have shown only after it."""
    since = finding.seq if finding.since is None else finding.since
    return seq is None or since is None or since <= seq


def _moves(case: Case) -> Found:
    left, right = case.left.trace, case.right.trace
    return tuple(moves(left, Steps(left).at)), tuple(moves(right, Steps(right).at))


def _gathers(case: Case) -> Found:
    left, right = ([trace] for trace in (case.left.trace, case.right.trace))
    return tuple(gather_findings(left, each=True)), tuple(gather_findings(right, each=True))


def _told_once(case: Case) -> Found:
    """The same, what one line does to many parameters told once."""
    return tuple(gather_findings([case.left.trace])), tuple(gather_findings([case.right.trace]))


def _shards(case: Case) -> tuple[Mapping[int, set[str]], Mapping[int, set[str]]]:
    """Names of the parameters of which a storage holds this rank's part, per side."""
    return _shards_of(case.left.trace), _shards_of(case.right.trace)


def _shards_of(trace: Trace) -> Mapping[int, set[str]]:
    found: dict[int, set[str]] = {}
    for leaf in trace.leaves:
        if leaf.kind == "shard" and leaf.name:
            found.setdefault(int(trace.values.storage[leaf.value]), set()).add(leaf.name)
    return found
