"""What the ranks of one run show to be wrong between them, on traces that are built by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from opdrift import tfp1
from opdrift.findings import findings
from opdrift.testing import Builder, collective
from opdrift.tracefile.reader import Trace
from opdrift.world import World
from opdrift.world.ends import first_ends
from opdrift.world.results import minority, wrong_results


def vector(text: str, size: int = 256) -> np.ndarray:
    return (
        np.random.default_rng(len(text) * 1000 + sum(text.encode()))
        .standard_normal(size)
        .astype(np.float32)
    )


def world(*ranks: Callable[[Builder], object]) -> list[Trace]:
    """One trace a rank, each built by a function."""
    builders = [Builder(rank=rank, world_size=len(ranks)) for rank in range(len(ranks))]
    for build, body in zip(builders, ranks, strict=True):
        body(build)
    return [build.build() for build in builders]


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


def said(traces: Sequence[Trace]) -> list[tuple[str, str, int | None]]:
    return [(f.kind, f.cause.slug, f.rank) for f in findings(traces)]


TOTAL = vector("rank 0") + vector("rank 1")

# ---- what collectives must give ------------------------------------------------------------------------


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


# ---- what ranks must agree about -----------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("other", "about"),
    [
        ({"what": "broadcast", "root": 0, "reduction": None}, "operation"),
        ({"given": [["int32", 8]]}, "dtype"),
        ({"given": [["float32", 9]]}, "size"),
        ({"given": [["float32", 4], ["float32", 4]]}, "size"),
        ({"reduction": "MAX"}, "reduction"),
        ({"root": 1}, "root"),
    ],
)
def test_the_first_collective_that_ranks_disagree_about_is_found(
    other: dict[str, object], about: str
):
    """What follows in the group is not matched: it follows from the first."""
    traces = world(issues({}, {}, {}), issues({}, other, {}))

    found = World(traces).disagreements

    assert [(d.number, d.about) for d in found] == [(2, about)]
    assert len(World(traces).meetings) == 1
    (finding,) = findings(traces)
    assert (finding.cause.slug, finding.seq) == ("collective", 2)


def test_a_reduction_that_one_rank_does_not_tell_is_no_disagreement():
    assert said(world(issues({"reduction": None}), issues({}))) == []


def test_groups_are_matched_by_themselves():
    """The order between two groups is free; within one it is not."""
    a, b = {"group": "1"}, {"group": "2", "given": [["int64", 3]]}

    assert said(world(issues(a, b, {}), issues(b, {}, a))) == []


def test_a_collective_that_a_rank_never_issued_is_found():
    (found,) = findings(world(issues({}, {}), issues({})))

    assert found.rank == 1
    assert found.cause.summary == (
        "rank 1 never issued collective 2 of group 0: rank 0 issued all_reduce of float32[8] by SUM"
    )


def test_a_rank_that_was_not_recorded_is_not_missed():
    """Of three ranks the third has no trace: the others are held against each other."""
    fields = {"ranks": [0, 1, 2]}

    assert said(world(issues(fields), issues(fields))) == []


def test_a_rank_that_ended_is_told_with_what_the_others_waited_in():
    """Its trace has no footer; what it never issued is no disagreement of its own."""
    left, right = Builder(rank=0), Builder(rank=1, complete=False)
    issues({}, {})(left)
    issues({})(right)

    (found,) = findings([left.build(), right.build()])

    assert (found.kind, found.cause.slug, found.rank) == ("rank-ended", "rank-ended", 1)
    assert any("rank 0 waited in all_reduce 2 of group 0" in line for line in found.cause.evidence)


def test_without_marks_of_steps_gathers_tell_in_which_step_a_rank_ended():
    """How many steps of an optimizer were done; what was lost with the rank, the other one tells."""
    left, right = Builder(rank=0), Builder(rank=1, complete=False)
    for build, calls in ((left, 2), (right, 1)):
        build.mark("gather", intact=True, step=4)
        issues({})(build)
        build.mark("reshard", intact=True, step=4)
        issues(*[{}] * (calls - 1))(build)

    assert [found.step for found in findings([left.build(), right.build()])] == [4]

    left, right = Builder(rank=0), Builder(rank=1, complete=False)
    left.mark("gather", intact=True, step=5)
    issues({}, {})(left)
    right.mark("gather", intact=True, step=4)
    issues({})(right)

    assert [found.step for found in findings([left.build(), right.build()])] == [5]


def test_a_collective_that_ranks_disagree_about_is_told_with_its_step():
    def body(size: int) -> Callable[[Builder], None]:
        def inner(build: Builder) -> None:
            build.mark("use", intact=True, step=2)
            issues({"given": [["float32", size]]})(build)

        return inner

    assert [found.step for found in findings(world(body(8), body(9)))] == [2]


A, B = {"group": "a", "ranks": [0, 1]}, {"group": "b", "ranks": [1, 2]}
CLOSED = {"exception": "RuntimeError: Connection closed by peer", "raised_at": "train.py:9 in main"}


def run_of(*ranks: tuple[Callable[[Builder], None], dict[str, Any]]) -> list[Trace]:
    """One trace a rank, each with how it ended."""
    builders = [Builder(rank=r, world_size=len(ranks), **end) for r, (_, end) in enumerate(ranks)]
    for build, (body, _) in zip(builders, ranks, strict=True):
        body(build)
    return [build.build() for build in builders]


def test_a_rank_that_raised_is_told_with_its_exception_and_line():
    """What the other rank raised, as its neighbour was gone, is a consequence, and told as one."""
    mine = {"exception": "ValueError: no batch left", "raised_at": "data.py:7 in load"}

    (found,) = findings(run_of((issues({}, {}), CLOSED), (issues({}), mine)))

    assert (found.kind, found.rank, found.cause.confidence) == ("rank-ended", 1, "certain")
    assert found.cause.summary == "rank 1 ended with ValueError at data.py:7 in load: no batch left"
    assert found.cause.evidence == (
        "its last op is aten.relu.default (op 1)",
        "the last collective that it issued is all_reduce of float32[8] by SUM, op 1",
        "rank 0 waited in all_reduce 2 of group 0 (op 2), which rank 1 never issued, and raised"
        " RuntimeError: Connection closed by peer",
    )
    assert found.cause.try_ == (
        "Look at what rank 1 raised at data.py:7 in load: what the others ended with follows from it."
    )


def test_a_rank_that_its_launcher_killed_follows_from_the_one_that_raised():
    """It waited for that one; its own trace was not closed either."""
    mine = {"exception": "ValueError: no batch left"}
    traces = run_of((issues({}, {}), {"complete": False}), (issues({}), mine))

    assert said(traces) == [("rank-ended", "rank-ended", 1)]


def test_the_end_at_the_bottom_of_a_chain_is_told():
    """Rank 0 waits for 1 in one group, 1 for 2 in another: rank 2 was killed."""
    traces = run_of((issues(A), CLOSED), (issues(B), CLOSED), (issues(), {"complete": False}))

    assert said(traces) == [("rank-ended", "rank-ended", 2)]


def test_ranks_that_wait_for_each_other_disagree_about_the_order():
    """Each ends in its own collective: no end comes first."""
    other = {"group": "1"}
    traces = run_of((issues({}), CLOSED), (issues(other), CLOSED))

    assert {kind for kind, *_ in said(traces)} == {"collective"}


def test_a_rank_that_raised_comes_before_those_that_were_killed_with_it():
    """Nobody had come to wait for anyone when the launcher ended the others."""
    mine = {"exception": "ValueError: no batch left"}
    traces = run_of((issues({}), {"complete": False}), (issues({}), mine))

    found = [end.rank for end in first_ends(World(traces))]

    assert found == [1, 0]


def test_ranks_that_all_leave_by_an_exception_are_no_finding():
    """`sys.exit(0)` at the end of a program: nobody waits for anybody."""
    end = {"exception": "SystemExit: 0"}

    assert said(run_of((issues({}), end), (issues({}), end))) == []


@pytest.mark.parametrize("end", [{}, {"exception": "SystemExit: 0"}])
def test_a_rank_that_left_by_itself_is_asked_to_end_with_the_others(end: dict[str, Any]):
    """It had fewer batches, and broke out of its loop or left the program."""
    (found,) = findings(run_of((issues({}, {}), CLOSED), (issues({}), end)))

    assert found.rank == 1
    assert "give every rank as many steps" in found.cause.try_


def test_a_rank_that_raised_after_it_went_on_from_a_collective_did_not_wait_in_it():
    """It issued the collective without waiting; the other rank was killed before it came to that."""

    def ahead(build: Builder) -> None:
        issues({}, {})(build)
        build.op("cos", build.leaf("y", kind="input"))

    mine = {"exception": "ValueError: no batch left"}
    traces = run_of((ahead, mine), (issues({}), {"complete": False}))

    assert [end.rank for end in first_ends(World(traces))] == [0, 1]


@pytest.mark.parametrize(
    ("header", "why"),
    [
        (
            {"launch": "other"},
            "they were launched apart, the one began at 2026-01-01 00:00:00, the other at",
        ),
        ({"world_size": 4}, "the one had 2 ranks, the other 4"),
    ],
)
def test_a_rank_s_trace_of_another_run_is_told_and_compared_with_nothing(
    header: dict[str, Any], why: str
):
    """Rank 1 did not record this time, and its folder is of the run before: what differs means nothing."""
    left, right = Builder(rank=0, launch="this"), Builder(rank=1, **{"launch": "this"} | header)
    trained()(left)
    trained(weight="other")(right)

    (found,) = findings([left.build(), right.build()])

    assert (found.kind, found.cause.slug, found.rank) == ("other-run", "other-run", 1)
    assert found.cause.summary.startswith(f"ranks 0 and 1 are not of one run: {why}")


def test_ranks_of_which_one_does_not_know_its_launch_may_be_of_one_run():
    left, right = Builder(rank=0, launch="this"), Builder(rank=1)
    for build in (left, right):
        trained(result="sum")(build)

    assert [f for f in findings([left.build(), right.build()]) if f.kind == "other-run"] == []


# ---- messages between two ranks ------------------------------------------------------------------------

SEND: dict[str, Any] = {"op": "c10d.send.default", "what": "send", "peer": 1, "tag": 0, "got": None}
RECEIVE: dict[str, Any] = {
    "op": "c10d.recv_.default", "what": "recv", "peer": 0, "tag": 0, "given": None,
    "got": [["float32", 8]],
}  # fmt: skip


def test_messages_of_one_tag_meet_in_their_order_and_others_overtake_them():
    other = {"tag": 3, "given": [["int64", 2]], "got": [["int64", 2]]}
    sends = issues(SEND, SEND | other | {"got": None}, SEND)
    receives = issues(RECEIVE | other | {"given": None}, RECEIVE, RECEIVE)
    traces = world(sends, receives)

    met = [(sent.seq, received.seq) for sent, received in World(traces).messages.met]

    assert met == [(1, 2), (3, 3), (2, 1)]
    assert said(traces) == []


@pytest.mark.parametrize("room", [["int32", 8], ["float32", 4]])
def test_a_message_that_its_receiver_takes_for_something_else_is_found(room: list[object]):
    """What follows on the line is not told: it follows from the first."""
    receive = RECEIVE | {"got": [room]}

    (found,) = findings(world(issues(SEND, SEND), issues(receive, receive)))

    assert (found.kind, found.cause.slug, found.rank, found.seq) == (
        "collective",
        "collective",
        1,
        1,
    )
    assert "do not agree about a message: send 1 to rank 1 in group 0" in found.cause.summary


def test_what_comes_from_any_rank_is_not_matched():
    """Nothing tells whose message it was."""
    anything = RECEIVE | {"peer": None, "got": [["int32", 1]]}

    assert said(world(issues(SEND, SEND), issues(anything, RECEIVE))) == []


def test_a_message_that_both_ranks_passed_is_no_finding():
    """Its other part may lie before or after the recording."""
    assert said(world(issues(SEND), issues())) == []


def test_ranks_that_wait_with_different_tags_are_found():
    """Neither sends what the other one receives, until both run into the timeout."""
    timeout = {"exception": "RuntimeError: Timed out"}
    traces = run_of((issues(SEND), timeout), (issues(RECEIVE | {"tag": 2}), timeout))

    (found,) = findings(traces)

    assert found.cause.summary == (
        "rank 0 waited in send 1 to rank 1 in group 0, which rank 1 had no part in"
    )
    assert "rank 1: recv 1 from rank 0 in group 0 (tag 2) (op 1) met nothing, either" in (
        found.cause.evidence
    )


def test_a_rank_that_waits_for_a_message_of_one_that_was_killed_follows_from_it():
    traces = run_of((issues(SEND), CLOSED), (issues(), {"complete": False}))

    (found,) = findings(traces)

    assert (found.kind, found.rank) == ("rank-ended", 1)
    assert any("rank 0 waited in send 1 to rank 1" in line for line in found.cause.evidence)


def test_a_rank_that_was_killed_after_a_message_that_met_nothing_was_not_waiting_in_it():
    """What it sent may have been received before the recording of the other one began."""

    def goes_on(build: Builder) -> None:
        issues(SEND)(build)
        build.op("relu", build.leaf("y", kind="input"))

    (end,) = first_ends(World(run_of((goes_on, {"complete": False}), (issues(), CLOSED))))

    assert (end.rank, end.how, end.follows) == (0, "lost", False)


def test_one_rank_by_itself_tells_nothing_of_others():
    assert said(world(issues({}, {}))) == []


def test_the_minority_is_what_is_not_with_most():
    assert minority({0: "a", 1: "a"}) == ((), 0)
    assert minority({0: "b", 1: "a", 2: "a"}) == ((0,), 1)
    assert minority({0: "a", 1: "b"}) == ((1,), 0)


# ---- replicas ------------------------------------------------------------------------------------------


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


def test_replicas_that_are_trained_alike_are_no_finding():
    """Inputs, activations and gradients before the reduction differ by right."""
    assert [k for k, _, _ in said(world(trained(), trained())) if k == "replica"] == []


def test_a_parameter_that_differs_from_the_start_is_found_by_its_reduced_gradient():
    traces = world(trained(), trained(weight="other"))

    found = [f for f in findings(traces) if f.kind == "replica"]

    assert [(f.name, f.cause.slug, f.cause.confidence) for f in found] == [
        ("fc.weight", "replica", "certain")
    ]
    assert "between ranks 0 and 1, when the run began" in found[0].cause.summary


def test_a_gradient_that_one_rank_changes_after_the_reduction_is_named():
    found = [
        f for f in findings(world(trained(), trained(poke="_foreach_mul_"))) if f.kind == "replica"
    ]

    assert ["after its write 1" in f.cause.summary for f in found] == [True]
    assert any(
        "last written by aten._foreach_mul_.default" in line for line in found[0].cause.evidence
    )


def test_parameters_without_a_reduction_may_differ():
    """Tensor parallelism splits weights of one shape over the ranks; nothing says that these are replicas."""
    traces = world(trained(reduced=False), trained(reduced=False, weight="other"))

    assert said(traces) == []


def test_a_norm_that_is_reduced_for_clipping_makes_no_replica():
    """The reduced number is smaller than the gradient that it is multiplied into."""

    def body(build: Builder) -> None:
        rank = build.build().header.rank or 0
        w = build.leaf("fc.weight", content=vector(f"w {rank}"))
        grad = build.op("mm", build.leaf("x", kind="input", content=vector(f"x {rank}")), w)
        norm = build.op("sum", grad, shape=(1,), content=np.float32([rank + 1.0]))
        norm = collective(build, "all_reduce", norm, result=np.float32([3.0]), reduction="SUM")
        # as clip_grad_norm_ does; the reduced norm is followed through it
        grad = build.op("_foreach_mul_", grad, norm)
        build.name(build.op("add_", w, grad), "fc.weight", when="exit")
        build.name(grad, "fc.weight", kind="gradient", when="exit")

    assert said(world(body, body)) == []


def test_sharded_parameters_are_no_replicas():
    def body(build: Builder) -> None:
        build.mark("model", sharded=["fc.weight"])
        trained(weight=f"rank {build.build().header.rank}")(build)

    assert [k for k, _, _ in said(world(body, body)) if k == "replica"] == []


def test_one_parameter_among_equal_ones_is_likely_a_replica():
    """Inference: no gradient tells, but all else is equal on all ranks."""

    def body(build: Builder) -> None:
        rank = build.build().header.rank or 0
        build.leaf("big.weight", content=vector("big", 4096))
        build.leaf("small.weight", content=vector(f"small {rank}", 64))

    (found,) = findings(world(body, body))

    assert (found.name, found.cause.confidence) == ("small.weight", "likely")


def drawn(*does: str, only: int | None = None) -> Callable[[Builder], None]:
    """A rank that draws a buffer of its own, and then loads or reads it; rank `only` alone loads it."""

    def body(build: Builder) -> None:
        rank = build.build().header.rank or 0
        build.leaf("big.weight", content=vector("big", 4096))
        pos = build.leaf("pos", kind="buffer", content=vector(f"draw {rank}"))
        for what in does:
            if what == "reads":
                with build.scope("net"):
                    build.op("exp", pos)
            elif only in (None, rank):
                pos = build.op("copy_", pos, content=vector("checkpoint"))

    return body


@pytest.mark.parametrize("does", [("loads", "reads"), ("loads",)])
def test_what_a_load_overwrites_before_a_module_reads_it_does_not_count(does: Sequence[str]):
    """Each rank seeds differently, builds its model, and loads the same checkpoint."""
    assert said(world(drawn(*does), drawn(*does))) == []


@pytest.mark.parametrize(
    ("does", "only", "when"),
    [
        ((), None, "when the run began"),
        (("reads",), None, "when the run began"),
        (("reads", "loads"), None, "when the run began"),
        (("loads",), 0, "when the run began"),
        (("loads", "reads"), 0, "when a module first read it"),
    ],
)
def test_a_buffer_that_differs_when_it_is_first_read_is_found(
    does: Sequence[str], only: int | None, when: str
):
    (found,) = findings(world(drawn(*does, only=only), drawn(*does, only=only)))

    assert (found.name, found.cause.slug, found.cause.confidence) == ("pos", "replica", "likely")
    assert found.cause.summary == f"pos differs between ranks 0 and 1, {when}"
    assert found.cause.try_.startswith("Seed or load all ranks alike")


def test_what_is_broadcast_over_does_not_count():
    """Each rank draws its own weights, and takes rank 0's before anything is computed."""

    def body(build: Builder) -> None:
        rank = build.build().header.rank or 0
        w = build.leaf("fc.weight", content=vector(f"draw {rank}"))
        w = collective(build, "broadcast", w, result=vector("draw 0"), root=0)
        x = build.leaf("x", kind="input", content=vector(f"x {rank}"))
        grad = collective(build, "all_reduce", build.op("mm", x, w), result=vector("sum"))
        build.name(build.op("_foreach_add_", w, grad), "fc.weight", when="exit")

    assert [k for k, _, _ in said(world(body, body)) if k == "replica"] == []


def stepping(
    *, steps: int, stops_before_update: bool = False, skips: int | None = None, marked: bool = False
):
    """A rank that trains for some steps, and does not come to the update of its last one, or leaves one out."""

    def body(build: Builder) -> None:
        rank = build.build().header.rank or 0
        w = build.leaf("fc.weight", content=vector("w"))
        for step in range(steps):
            if marked:
                build.mark("step", step=step)
            x = build.leaf("x", kind="input", content=vector(f"x {rank} {step}"))
            grad = collective(
                build, "all_reduce", build.op("mm", x, w), result=vector(f"sum {step}")
            )
            if step != skips and not (stops_before_update and step == steps - 1):
                w = build.op("_foreach_add_", w, grad, content=vector(f"w {step}"))
                build.name(w, "fc.weight", when="exit")

    return body


@pytest.mark.parametrize("end", [{"exception": "ValueError: empty"}, {"complete": False}, {}])
def test_a_rank_that_stops_before_its_update_is_not_held_against_the_others_next_one(
    end: dict[str, Any],
):
    """It raised, was killed, or left its loop; the others went on to their next collective."""
    left, right = Builder(rank=0, exception="RuntimeError: closed by peer"), Builder(rank=1, **end)
    stepping(steps=3)(left)
    stepping(steps=2, stops_before_update=True)(right)

    found = findings([left.build(), right.build()])

    assert [f.kind for f in found if f.kind == "replica"] == []


def test_a_rank_that_goes_on_without_an_update_is_found():
    """It reduces the next gradient: the moment of the update has passed on all ranks."""
    found = findings(world(stepping(steps=3), stepping(steps=3, skips=1)))

    assert [f.cause.summary for f in found if f.kind == "replica"] == [
        "fc.weight differs between ranks 0 and 1, after its write 2"
    ]


def test_an_update_that_a_rank_leaves_out_at_the_end_is_found():
    """Both ranks ended by themselves, and issued as many collectives."""
    found = findings(world(stepping(steps=2), stepping(steps=2, stops_before_update=True)))

    assert [f.cause.summary for f in found if f.kind == "replica"] == [
        "fc.weight differs between ranks 0 and 1, after its write 2"
    ]


def test_a_rank_that_leaves_out_an_update_is_told_with_the_writes_of_both():
    """What the two wrote last is no pair: one of them has no counterpart."""
    found = findings(world(stepping(steps=3, marked=True), stepping(steps=3, marked=True, skips=1)))

    (split,) = [f for f in found if f.kind == "replica"]

    assert (split.rank, split.step) == (1, 1)
    assert split.cause.evidence[2:] == (
        "until then fc.weight had been written twice on rank 0 and once on rank 1",
        "on rank 0, it was last written by aten._foreach_add_.default (op 6), in step 1",
        "on rank 1, it was last written by aten._foreach_add_.default (op 3), in step 0",
    )
    assert "an optimizer step that a rank leaves out" in split.cause.try_


def test_a_rank_that_loaded_another_checkpoint_is_told_so():
    """No op made what was copied in, on any rank."""

    def body(build: Builder) -> None:
        rank = build.build().header.rank or 0
        w = build.leaf("fc.weight", content=vector("drawn"))
        held = build.leaf("", kind="constant", when="use", content=vector(f"file {rank}"))
        w = build.op("copy_", w, held, content=vector(f"file {rank}"))
        build.name(used(build, w, 0), "fc.weight", kind="gradient", when="exit")

    (split,) = [f for f in findings(world(body, body)) if f.kind == "replica"]

    assert split.cause.summary.startswith(
        "fc.weight differs between ranks 0 and 1, after its write 1"
    )
    assert split.cause.evidence[2:] == tuple(
        f"on rank {rank}, aten.copy_.default (op 1) copied what no recorded op made into it, as from a file"
        for rank in (0, 1)
    )
    assert split.cause.try_.startswith("Load the same checkpoint on all ranks")


def used(build: Builder, weight: int, step: int) -> int:
    """A module reads a parameter; a gradient of it is reduced."""
    rank = build.build().header.rank or 0
    x = build.leaf("x", kind="input", content=vector(f"x {rank} {step}"))
    with build.scope("fc"):
        grad = build.op("mm", x, weight)
    return collective(build, "all_reduce", grad, result=vector(f"sum {step}"))


@pytest.mark.parametrize("right", [True, False])
def test_an_optimizer_that_shares_out_its_work_writes_as_often_as_it_likes(right: bool):
    """Rank 0 computes the update and broadcasts it (ZeRO): what counts is what the next forward reads."""

    def body(build: Builder) -> None:
        w = build.leaf("fc.weight", content=vector("w"))
        for step in range(3):
            grad = used(build, w, step)
            if build.build().header.rank == 0:
                w = build.op("_foreach_add_", w, grad, content=vector(f"w {step}"))
            fault = "" if right or build.build().header.rank == 0 or step != 1 else "other"
            w = collective(build, "broadcast", w, result=vector(f"w {step}{fault}"), root=0)
        build.name(grad, "fc.weight", kind="gradient", when="exit")

    found = [f.cause.summary for f in findings(world(body, body)) if f.kind == "replica"]

    assert found == (
        [] if right else ["fc.weight differs between ranks 0 and 1, after its write 4"]
    )


def test_other_weights_that_one_rank_reads_for_a_while_are_no_finding():
    """Rank 0 evaluates with averaged weights, and puts its own back."""

    def body(build: Builder) -> None:
        w = build.leaf("fc.weight", content=vector("w"))
        for step in range(2):
            grad = used(build, w, step)
            w = build.op("_foreach_add_", w, grad, content=vector(f"w {step}"))
            if build.build().header.rank == 0:
                w = build.op("copy_", w, build.leaf("ema"), content=vector("ema"))
                with build.scope("fc"):
                    build.op("mm", w, w)
                w = build.op("copy_", w, build.leaf("own"), content=vector(f"w {step}"))
        build.name(w, "fc.weight", when="exit")

    assert [f for f in findings(world(body, body)) if f.kind == "replica"] == []


@pytest.mark.parametrize("joined", [False, True])
def test_parameters_that_are_averaged_now_and_then_may_differ_in_between(joined: bool):
    """Local training: each rank steps with its own gradients, and all average their parameters at the end."""
    mean = (vector("step 0") + vector("step 1")) / 2

    def body(build: Builder) -> None:
        rank = build.build().header.rank or 0
        w = build.leaf("fc.weight", content=vector("w"))
        for _ in range(2):
            with build.scope("fc"):
                grad = build.op("mm", build.leaf("x", content=vector(f"x {rank}")), w)
            w = build.op("_foreach_add_", w, grad, content=vector(f"step {rank}"))
            given = build.op("cat", w, content=build.content(w)) if joined else w
            total = collective(build, "all_reduce", given, result=mean * 2, reduction="SUM")
            w = build.op("copy_", w, total) if joined else total
            w = build.op("div_", w, content=mean)
        build.name(w, "fc.weight", when="exit")

    assert said(world(body, body)) == []


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


def test_ranks_no_two_of_which_agree_are_all_named():
    (found,) = [
        f for f in findings(world(*[trained(weight=text) for text in "abc"])) if f.kind == "replica"
    ]

    assert "differs between ranks 0, 1 and 2, when the run began" in found.cause.summary
