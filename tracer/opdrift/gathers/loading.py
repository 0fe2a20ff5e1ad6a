"""Ranks that never loaded what others did."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from opdrift.gathers.words import some
from opdrift.provenance import Lineage
from opdrift.records import Cause, Finding, Leaf
from opdrift.steps import Steps
from opdrift.tracefile.reader import Trace


def loaded_on_some(traces: Sequence[Trace]) -> Iterator[Finding]:
    """Parts of one parameter that came from a copy on some ranks, and are drawn at random on others."""
    made: dict[str, dict[int, tuple[str, Leaf]]] = defaultdict(dict)
    for number, trace in enumerate(traces):
        lineage = None
        for leaf in trace.leaves:
            if leaf.kind == "shard" and leaf.when == "gather" and number not in made[leaf.name]:
                lineage = lineage or Lineage(trace)
                made[leaf.name][number] = lineage.of(leaf.value).kind, leaf
    odd: set[int] = set()
    for by_rank in made.values():
        kinds = {kind for kind, _ in by_rank.values()}
        if {"drawn", "copied"} <= kinds:
            odd |= {number for number, (kind, _) in by_rank.items() if kind == "drawn"}
    for number in sorted(odd):
        trace = traces[number]
        rows = [
            (name, by_rank[number][1])
            for name, by_rank in made.items()
            if number in by_rank and by_rank[number][0] == "drawn"
        ]
        names = [name for name, _ in rows]
        others = [str(t.header.rank) for t in traces if t is not trace]
        cause = Cause(
            "weights",
            "certain",
            f"rank {trace.header.rank} never loaded {some(names)}",
            (
                f"its parts of {len(names)} parameters were last written by a random initialisation",
                f"rank {', '.join(others)} has parts that were copied: what is gathered is loaded in part, and random in part",
            ),
            "Load the checkpoint on every rank before the model is sharded, or broadcast it from one rank"
            " (sync_module_states=True; broadcast_from_rank0 with set_model_state_dict).",
        )
        first = rows[0][1]
        yield Finding(
            "weights", cause, names[0], None, names[0].rpartition(".")[0], first.seq or None,
            Steps(trace).at(first.seq), trace.header.rank,
        )  # fmt: skip
