"""A weight that was moved, and arrived as another one or lost what was written into it."""

from __future__ import annotations

from dataclasses import replace

from opdrift.case import Case
from opdrift.causes.evidence import Evidence
from opdrift.moves import moves
from opdrift.records import Cause, Finding
from opdrift.steps import Steps


def moved(e: Evidence) -> Cause | None:
    """What one run alone shows to be wrong with the moves of the weight that differs here."""
    if not e.size.material:
        return None
    found = e.shared.once(_found)
    values = (e.origin.values.left, e.origin.values.right)
    readers = (e.consumer().left, e.consumer().right)
    names = set(e.origin.names)
    for (_, side, _), value in zip(e.sides, values, strict=True):
        if value is not None:
            names.update(leaf.name for leaf in side.leaves.of(value) if leaf.name)
    wrong = []
    for (label, side, op), findings, reader in zip(e.sides, found, readers, strict=True):
        at = op if op is not None else reader
        before = None if at is None else side.seq(at)
        wrong += [(label, f) for f in findings if f.name in names and _is_before(f, before)]
    if not wrong or len({label for label, _ in wrong}) > 1:
        return None  # it went wrong in both runs: that makes no difference
    label, finding = wrong[0]
    return replace(finding.cause, summary=f"in the {label} run, {finding.cause.summary}")


def _is_before(finding: Finding, seq: int | None) -> bool:
    return seq is None or finding.seq is None or finding.seq <= seq


def _found(case: Case) -> tuple[tuple[Finding, ...], tuple[Finding, ...]]:
    left, right = case.left.trace, case.right.trace
    return tuple(moves(left, Steps(left).at)), tuple(moves(right, Steps(right).at))
