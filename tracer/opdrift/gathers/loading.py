"""Ranks that never loaded what others did, and random parts that are put together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from opdrift.gathers.words import LISTED
from opdrift.provenance import Lineage, Provenance
from opdrift.records import Cause, Finding, Leaf
from opdrift.steps import Steps
from opdrift.tracefile.reader import Trace
from opdrift.wording import listed, some


@dataclass(frozen=True, slots=True)
class _Part:
    """A rank's part of a parameter when it was first gathered."""

    leaf: Leaf
    made: Provenance


def _parts(traces: Sequence[Trace]) -> Mapping[str, Mapping[int, _Part]]:
    """Name of each parameter that is kept in parts -> number of the trace -> its part."""
    found: dict[str, dict[int, _Part]] = defaultdict(dict)
    for number, trace in enumerate(traces):
        lineage = None
        for leaf in trace.leaves:
            if leaf.kind == "shard" and leaf.when == "gather" and number not in found[leaf.name]:
                lineage = lineage or Lineage(trace)
                found[leaf.name][number] = _Part(leaf, lineage.of(leaf.value))
    return found


def random_parts(traces: Sequence[Trace]) -> str | None:
    """What was gathered from parts that ranks drew apart, in words; None if nothing was.

    Ranks that are seeded alike draw the same parameters, and each keeps its part of them: that is one draw.
    """
    drawn = {
        name: by_rank
        for name, parts in _parts(traces).items()
        if (by_rank := {n: part.made for n, part in parts.items() if part.made.kind == "drawn"})
    }
    ranks = sorted({number for by_rank in drawn.values() for number in by_rank})
    shared = [by_rank for by_rank in drawn.values() if len(by_rank) > 1]
    # flat parameters may be cut so that no two ranks hold a part of one
    states = [{made.rng for made in by_rank.values()} for by_rank in shared] or [
        {made.seed or 0 for by_rank in drawn.values() for made in by_rank.values()}
    ]
    if len(ranks) < 2 or all(len(each) == 1 for each in states):
        return None
    listed = [
        (f"rank {traces[number].header.rank}", sum(number in each for each in drawn.values()))
        for number in ranks[:LISTED]
    ]
    (first, count), *others = listed
    whose = " and ".join(f"{who}'s" for who, _ in listed)
    if len(ranks) > LISTED:
        whose += f" and {len(ranks) - LISTED} more ranks'"
    counts = [
        f"{first} drew its part of {count} parameters",
        *(f"{who} of {n}" for who, n in others),
    ]
    return (
        f"what was gathered are {whose} random {'halves' if len(ranks) == 2 else 'parts'}: {', '.join(counts)},"
        f" each from another state of its generator ({some(list(drawn))})"
    )


def loaded_on_some(traces: Sequence[Trace]) -> Iterator[Finding]:
    """Parts of one parameter that came from a copy on some ranks, and are drawn at random on others."""
    made = _parts(traces)
    odd: set[int] = set()
    for by_rank in made.values():
        kinds = {part.made.kind for part in by_rank.values()}
        if {"drawn", "copied"} <= kinds:
            odd |= {number for number, part in by_rank.items() if part.made.kind == "drawn"}
    for number in sorted(odd):
        trace = traces[number]
        rows = [
            (name, by_rank[number].leaf)
            for name, by_rank in made.items()
            if number in by_rank and by_rank[number].made.kind == "drawn"
        ]
        names = [name for name, _ in rows]
        copied = {n for name in names for n, p in made[name].items() if p.made.kind == "copied"}
        others = [traces[n].header.rank or 0 for n in sorted(copied)]
        cause = Cause(
            "weights",
            "certain",
            f"rank {trace.header.rank} never loaded {some(names)}",
            (
                f"its parts of {len(names)} parameters were last written by a random initialisation",
                f"{listed(others)} {'has' if len(others) == 1 else 'have'} parts of them that were copied: what is gathered is"
                " loaded in part, and random in part",
            ),
            "Load the checkpoint on every rank before the model is sharded, or broadcast it from one rank"
            " (sync_module_states=True; broadcast_from_rank0 with set_model_state_dict).",
        )
        first = rows[0][1]
        yield Finding(
            "weights", cause, names[0], None, names[0].rpartition(".")[0], first.seq or None,
            Steps(trace).at(first.seq), trace.header.rank,
        )  # fmt: skip
