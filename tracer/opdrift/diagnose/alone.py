"""What one of two runs shows to be wrong by itself, where their comparison calls nothing wrong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from opdrift.findings import told_by_ranks
from opdrift.gathers import gather_findings
from opdrift.moves import moves
from opdrift.records import Diagnosis, Finding, Sides
from opdrift.steps import Steps
from opdrift.tracefile.reader import Trace
from opdrift.wording import counted
from opdrift.world.collectives import World
from opdrift.world.findings import world_findings


def with_findings(
    one: Diagnosis, traces: Sides[Mapping[int, Trace]], paths: Sides[str]
) -> Diagnosis:
    """The same, with a note of what one run only shows to be wrong by itself, if nothing material differs.

    That is what went wrong on the way to a parameter, and between the ranks of the run.

    In bfloat16 rounding explains more than a damaged weight may change.

    Args:
        one: What was found between the runs.
        traces: All ranks of each.
        paths: Where they are.
    """
    if one.verdict == "diverged":
        return one
    left, right = _wrong(traces.left.values()), _wrong(traces.right.values())
    if bool(left) == bool(right):
        return one
    name, path, found = ("left", paths.left, left) if left else ("right", paths.right, right)
    came = (
        "Rounding hides here what came of it, or it was not compared"
        if one.verdict == "rounding"
        else "No result differs for it"
    )
    shown = f"{counted(len(found), 'finding')}: {found[0].cause.summary}"
    note = f"the {name} run alone shows {shown} (opdrift show {path} --findings). {came}"
    return replace(one, notes=(note, *one.notes))


def _wrong(traces: Iterable[Trace]) -> list[Finding]:
    ranks = list(traces)
    moved = [each for trace in ranks for each in moves(trace, Steps(trace).known_at)]
    found = list(gather_findings(ranks))
    between = world_findings(World(ranks), found) if len(ranks) > 1 else ()
    return told_by_ranks([*found, *moved, *between])
