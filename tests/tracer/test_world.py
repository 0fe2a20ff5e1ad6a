"""What collectives must give, on the traces of ranks that are built by hand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from worlds import TOTAL, issues, said, vector, world

from opdrift import tfp1
from opdrift.findings import findings
from opdrift.testing import Builder, collective
from opdrift.world import World
from opdrift.world.results import minority, wrong_results


def summed(
    result: np.ndarray, *, size: int = 256, what: str = "all_reduce", reduction: str | None = "SUM"
):
    """A rank that gives a vector of its own to a reduction, and gets `result`."""

    def body(build: Builder) -> None:
        rank = build.build().header.rank or 0
        value = build.leaf("x", kind="input", content=vector(f"rank {rank}", size))
        collective(
            build, what, value, result=result, reduction=reduction, source="train.py:7 in main"
        )

    return body


@pytest.mark.parametrize(
    ("reduction", "result"),
    [("SUM", TOTAL), ("AVG", TOTAL / 2), (None, TOTAL), (None, TOTAL / 2), ("another", TOTAL * 3)],
)
def test_a_right_reduction_is_no_finding(reduction: str | None, result: np.ndarray):
    """Where nothing told the reduction, a sum and a mean are both right; one with a factor is not judged."""
    assert said(world(*[summed(result, reduction=reduction)] * 2)) == []


@pytest.mark.parametrize("size", [256, 8])
def test_a_sum_that_is_off_by_a_thousandth_is_found_by_its_sketch(size: int):
    """The sketch of a sum is the sum of the sketches; small tensors are held whole by their fingerprints."""
    result = (vector("rank 0", size) + vector("rank 1", size) * np.float32(1.001)).astype(
        np.float32
    )

    (found,) = findings(world(*[summed(result, size=size)] * 2))

    assert (found.kind, found.cause.slug, found.op) == (
        "collective",
        "collective",
        "c10d.allreduce_.default",
    )
    assert "away from the sum of the 2 ranks' parts" in found.cause.evidence[0]
    assert "train.py:7 in main" in found.cause.evidence[1]


def test_a_sum_that_is_wrong_at_every_step_is_told_once():
    """At one line of the program; the last one is named with it."""

    def body(build: Builder) -> None:
        for _ in range(3):
            summed(TOTAL * 2)(build)

    (found,) = findings(world(body, body))

    assert found.seq == 1
    assert found.cause.evidence[-1] == (
        "the same is wrong 2 times more, last with all_reduce 3 of group 0 (op 3)"
    )


def test_rounding_of_a_sum_is_no_finding():
    """Each element may be off by some units in the last place."""
    assert said(world(*[summed(np.nextafter(TOTAL, np.float32(9)))] * 2)) == []


def test_a_maximum_is_that_of_the_ranks():
    right = np.maximum(vector("rank 0"), vector("rank 1"))

    assert said(world(*[summed(right, reduction="MAX")] * 2)) == []
    assert said(world(*[summed(right + 1, reduction="MAX")] * 2)) == [
        ("collective", "collective", 0)
    ]


def test_ranks_that_got_different_sums_are_told_by_the_majority():
    """Two of three agree: the third is named."""
    total = sum(vector(f"rank {rank}") for rank in range(3))

    traces = world(summed(total), summed(total * 2), summed(total))

    assert [(w.kind, w.ranks) for w in wrong_results(World(traces))] == [("unequal", (1,))]


@pytest.mark.parametrize(("factor", "wrong"), [(1.0, 0), (1.01, 1)])
def test_a_reduce_scatter_is_checked_by_the_sums_of_its_parts(factor: float, wrong: int):
    halves = np.split(np.abs(vector("rank 0")) * np.float32(factor) + np.abs(vector("rank 1")), 2)

    def rank(number: int) -> Callable[[Builder], None]:
        def body(build: Builder) -> None:
            x = build.leaf("x", kind="input", content=np.abs(vector(f"rank {number}")))
            collective(build, "reduce_scatter", x, result=halves[number], reduction="SUM")

        return body

    assert len(said(world(rank(0), rank(1)))) == wrong


def gathered(build: Builder, *, swapped: bool = False) -> None:
    rank = build.build().header.rank or 0
    parts = [vector("rank 0"), vector("rank 1")]
    value = build.leaf("x", kind="input", content=parts[rank])
    result = np.concatenate(parts[::-1] if swapped else parts)
    collective(build, "all_gather", value, result=result)


def test_gathered_parts_stand_in_the_order_of_the_ranks():
    """The digest of what was gathered follows from those of the parts; exchanged segments are found."""
    assert said(world(gathered, gathered)) == []
    (found,) = findings(world(*[lambda build: gathered(build, swapped=True)] * 2))
    assert "laid end to end" in found.cause.evidence[0]


@pytest.mark.parametrize("seen", [True, False])
def test_what_an_integration_read_anew_where_it_was_sent_counts(seen: bool):
    """A shard was written past the dispatcher: the recorder's last content of it is not what rank 1 gave."""

    def body(build: Builder) -> None:
        rank = build.build().header.rank or 0
        parts = [vector("rank 0"), vector("poked")]
        value = build.leaf("x", kind="input", content=vector(f"rank {rank}"))
        collective(build, "all_gather", value, result=np.concatenate(parts))
        if seen:
            raw = tfp1.raw_of(parts[rank].view(np.uint32).tolist(), 4)
            shard = {"raw": f"{raw:016x}", "n": parts[rank].size, "code": int(tfp1.Code.F32)}
            build.mark("gather", library="torch_fsdp", shard=shard)

    assert [kind for kind, _, _ in said(world(body, body))] == ([] if seen else ["collective"])


def test_a_gather_that_is_waited_for_without_what_pads_it_is_not_judged():
    """DTensor pads uneven shards, and waits for the part of the result that is no padding."""

    def body(build: Builder) -> None:
        value = build.leaf("x", kind="input", content=vector("rank 0"))
        collective(build, "all_gather", value, result=np.concatenate([vector("rank 0")] * 2)[:-10])

    assert said(world(body, body)) == []


@pytest.mark.parametrize("sent", [True, False])
def test_a_broadcast_is_what_its_root_sent(sent: bool):
    def body(build: Builder) -> None:
        rank = build.build().header.rank or 0
        value = build.leaf("x", kind="input", content=vector(f"rank {rank}"))
        collective(build, "broadcast", value, result=vector("rank 0" if sent else "rank 1"), root=0)

    assert said(world(body, body)) == ([] if sent else [("collective", "collective", 0)])


def test_a_reduce_scatter_whose_op_was_lost_with_a_rank_is_not_summed_up():
    """A killed rank's last collectives are known by their announcements only: their contents are not."""

    def whole(build: Builder) -> None:
        x = build.leaf("x", kind="input", content=vector("rank 0"))
        collective(build, "reduce_scatter", x, result=TOTAL[:128], reduction="SUM")

    left, right = Builder(rank=0), Builder(rank=1, complete=False)
    whole(left)
    tensors = {"given": [["float32", 256]], "got": [["float32", 256]]}
    issues({"what": "reduce_scatter", "op": "c10d._reduce_scatter_base_.default", **tensors})(right)

    assert list(wrong_results(World([left.build(), right.build()]))) == []


def test_an_infinity_that_a_rank_was_handed_is_told_of_the_rank_that_has_it():
    """On the others it first appears in the sum, whose inputs are not theirs alone."""
    result = vector("rank 0")
    result[0] = np.inf

    def body(build: Builder) -> None:
        rank = build.build().header.rank or 0
        x = build.leaf("x", kind="input", content=vector(f"rank {rank}"))
        if rank == 0:
            x = build.op("div", x, content=result)
        collective(build, "all_reduce", x, result=result)

    assert said(world(body, body)) == [("nan", "nan", 0)]


def test_one_rank_by_itself_tells_nothing_of_others():
    assert said(world(issues({}, {}))) == []


def test_the_minority_is_what_is_not_with_most():
    assert minority({0: "a", 1: "a"}) == ((), 0)
    assert minority({0: "b", 1: "a", 2: "a"}) == ((0,), 1)
    assert minority({0: "a", 1: "b"}) == ((1,), 0)


def gathers_and_issues(*parameters: list[object], size: int = 8) -> Callable[[Builder], None]:
    """A rank that has gathered these parameters, and issues a collective."""

    def body(build: Builder) -> None:
        fields = {"library": "torch_fsdp", "unit": "fc", "buffer": "fc", "layout": "each", "ranks": [0, 1]}  # fmt: skip
        rank = build.build().header.rank
        build.mark("gather", **fields, rank=rank, parameters=list(parameters), intact=True)
        issues({"given": [["float32", size]], "got": [["float32", size]]})(build)

    return body


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ([["fc.weight", 0, [8, 8]]], None),
        (
            [["fc.weight", 0, [9, 8]]],
            "fc.weight is [8, 8] on rank 0 and [9, 8] on rank 1: their models differ",
        ),
        (
            [["fc.weight", 0, [8, 8]], ["last.weight", 64, [8]]],
            "rank 1 has gathered last.weight, rank 0 has not: look whether they built the same model",
        ),
    ],
    ids=["the same", "another shape", "one more"],
)
def test_models_that_differ_are_told_where_ranks_do_not_agree_about_a_collective(theirs, words):
    (found,) = findings(
        world(gathers_and_issues(["fc.weight", 0, [8, 8]]), gathers_and_issues(*theirs, size=9))
    )

    told = [line for line in found.cause.evidence if "model" in line]
    assert told == ([] if words is None else [words])
