"""What ranks must agree about, and how they end, on traces that are built by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from worlds import CLOSED, issues, run_of, said, trained, world

from opdrift.findings import findings
from opdrift.testing import Builder
from opdrift.world import World
from opdrift.world.ends import first_ends


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
