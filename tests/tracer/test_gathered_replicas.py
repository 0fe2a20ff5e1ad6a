"""Hybrid sharding: ranks that give the same part to a gather, held against each other."""

from __future__ import annotations

from typing import Any

import pytest

from opdrift import tfp1
from opdrift.findings import findings
from opdrift.records import Finding
from opdrift.testing import Builder
from opdrift.tracefile.reader import Trace

NAMES = ("fc.weight", "fc.bias")


def rank(number: int, *gathers: str, reduced: str = "", **marks: Any) -> Trace:
    """One of two replicas that gives these contents of `fc.weight` to gathers, an op apart.

    Args:
        number: Which.
        gathers: A content of each gather; `fc.bias` is always the same.
        reduced: "before": its gradient is reduced before each gather, with no op between; "between": after the first.
        marks: Kinds of marks that come first, and their fields.
    """
    build = Builder(rank=number, world_size=2)
    for kind, fields in marks.items():
        build.mark(kind.replace("_", "-"), **fields)
    for nth, content in enumerate(gathers, 1):
        if reduced != "before":
            build.op("relu", build.leaf("x", kind="input"))
        if reduced == "before" or (reduced == "between" and nth > 1):
            build.mark(
                "collective",
                what="all_reduce",
                op="c10d.allreduce_.default",
                group="0",
                ranks=[0, 1],
            )
        own = [
            [part, 0, len(each), f"{tfp1.raw_of(map(ord, each), 4):016x}"]
            for part, each in enumerate((content, "same"))
        ]
        build.mark(
            "gather", library="torch_fsdp", unit="fc", buffer="fc", nth=nth, ranks=[number], rank=0, own=own,
            parameters=[[name, 0, [4]] for name in NAMES], replicas=[0, 1], intact=True,
        )  # fmt: skip
    return build.build()


def found(*traces: Trace) -> list[Finding]:
    return [each for each in findings(traces) if each.kind == "replica"]


def test_replicas_whose_gradient_is_reduced_must_give_the_same_part():
    (one,) = found(
        rank(0, "abcd", "efgh", "ijkl", reduced="between"),
        rank(1, "abcd", "efgx", "ijkx", reduced="between"),
    )

    assert (one.name, one.rank, one.module, one.cause.confidence) == (
        "fc.weight",
        1,
        "fc",
        "certain",
    )
    assert one.cause.summary == (
        "fc.weight differs between ranks 0 and 1, which hold the same part"
    )
    assert one.cause.evidence[0] == "at gather 2 of fc"


def test_equal_parts_are_no_finding():
    parts = ("abcd", "efgh")

    assert found(rank(0, *parts, reduced="between"), rank(1, *parts, reduced="between")) == []


@pytest.mark.parametrize("reduced", ["", "before"])
def test_replicas_may_differ_where_nothing_was_reduced_since_the_gather_before(reduced: str):
    """Ranks that average their parameters now and then; a reduction that came before both gathers is none between them."""
    contents = ("abcd", "efgh") if not reduced else ("abcd",)
    others = ("abcd", "efgx") if not reduced else ("abcx",)

    assert found(rank(0, *contents, reduced=reduced), rank(1, *others, reduced=reduced)) == []


def test_a_part_that_is_told_as_a_hidden_write_is_not_told_again():
    digest = {"raw": "1", "n": 4, "code": 0}
    wrong = {
        "mismatch": [{"parameter": "fc.weight", "before": digest, "found": digest | {"raw": "2"}}]
    }

    assert (
        found(
            rank(0, "abcd", "efgh", reduced="between"),
            rank(
                1,
                "abcd",
                "efgx",
                reduced="between",
                shard_changed={"library": "torch_fsdp", **wrong},
            ),
        )
        == []
    )
