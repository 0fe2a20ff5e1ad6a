"""Ranks of one run that are built by hand, in the words of the tests of what they show together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from opdrift.findings import findings
from opdrift.testing import Builder, collective
from opdrift.tracefile.reader import Trace


def vector(text: str, size: int = 256) -> np.ndarray:
    return (
        np.random.default_rng(len(text) * 1000 + sum(text.encode()))
        .standard_normal(size)
        .astype(np.float32)
    )


TOTAL = vector("rank 0") + vector("rank 1")
CLOSED = {"exception": "RuntimeError: Connection closed by peer", "raised_at": "train.py:9 in main"}


def world(*ranks: Callable[[Builder], object]) -> list[Trace]:
    """One trace a rank, each built by a function."""
    builders = [Builder(rank=rank, world_size=len(ranks)) for rank in range(len(ranks))]
    for build, body in zip(builders, ranks, strict=True):
        body(build)
    return [build.build() for build in builders]


def said(traces: Sequence[Trace]) -> list[tuple[str, str, int | None]]:
    return [(f.kind, f.cause.slug, f.rank) for f in findings(traces)]


def issues(*calls: dict[str, object]) -> Callable[[Builder], None]:
    """A rank that issues these collectives, whatever comes of it."""

    def body(build: Builder) -> None:
        for call in calls:
            build.op("relu", build.leaf("x", kind="input"))
            fields = {
                "op": "c10d.allreduce_.default",
                "what": "all_reduce",
                "group": "0",
                "ranks": [0, 1],
            }
            given = {
                "given": [["float32", 8]],
                "got": [["float32", 8]],
                "reduction": "SUM",
                "root": None,
            }
            build.mark("collective", **{**fields, **given, **call})

    return body


def run_of(*ranks: tuple[Callable[[Builder], None], dict[str, Any]]) -> list[Trace]:
    """One trace a rank, each with how it ended."""
    builders = [Builder(rank=r, world_size=len(ranks), **end) for r, (_, end) in enumerate(ranks)]
    for build, (body, _) in zip(builders, ranks, strict=True):
        body(build)
    return [build.build() for build in builders]


def trained(
    *,
    weight: str = "w",
    own: str = "own",
    result: str = "sum",
    reduced: bool = True,
    poke: str = "",
) -> Callable[[Builder], None]:
    """A rank that makes a gradient of its own, reduces it, and updates a parameter with it."""

    def body(build: Builder) -> None:
        rank = build.build().header.rank or 0
        w = build.leaf("fc.weight", content=vector(weight))
        x = build.leaf("x", kind="input", content=vector(f"{own} {rank}"))
        grad = build.op("threshold_backward", x)
        if reduced:
            ranks = range(build.build().header.world_size or 1)
            grad = collective(build, "all_reduce", grad, result=vector(result), ranks=ranks)
        if poke and rank == 1:
            grad = build.op(poke, grad)
        w = build.op("add_", w, grad)
        build.name(w, "fc.weight", when="exit")
        build.name(grad, "fc.weight", kind="gradient", when="exit")

    return body
