"""Messages between two ranks, on traces that are built by hand."""

from __future__ import annotations

from typing import Any

import pytest
from worlds import CLOSED, issues, run_of, said, world

from opdrift.findings import findings
from opdrift.testing import Builder
from opdrift.world import World
from opdrift.world.ends import first_ends

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
