"""How the facts of a compiled graph stand in the text of an op."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from opdrift.records import CompiledGraph


def facts_of(graph: CompiledGraph) -> dict[str, Any]:
    """What is known of a graph as JSON; what is not known is left out."""
    return {name: value for name, value in asdict(graph).items() if value is not None}


def graph_of(facts: Mapping[str, Any] | None) -> CompiledGraph | None:
    """The graph of an op's text; None for an op of the dispatcher. What a later version added is passed over."""
    if facts is None:
        return None
    known = {f.name for f in fields(CompiledGraph)}
    lists = {name: tuple(facts.get(name, ())) for name in ("kernels", "extern")}
    return CompiledGraph(**{n: v for n, v in facts.items() if n in known} | lists)
