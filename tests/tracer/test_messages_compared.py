"""Two runs whose ranks send each other messages: the rank that sent something else is named, not the one that got it."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import POKE, START, found_in, together

import opdrift
from opdrift.records import Diagnosis

pytestmark = pytest.mark.slow

#: Rank 0 computes two outputs and sends them; rank 1 reads them and sends back what it makes of each.
RUNS = (
    START
    + POKE
    + """
    def first(fault):
        layer = nn.Linear(6, 6)
        x = torch.randn(3, 6)
        y = layer(x * 1.5 if fault == "computed" else x).tanh()
        outputs = [y, y + 1]
        if fault == "unwaited":
            time.sleep(1)  # nothing comes before the other rank has read
        for each in reversed(outputs) if fault == "swapped" else outputs:
            dist.send(each, 1)
        back = torch.zeros(3, 6)
        for _ in outputs:
            dist.recv(back, 1)
            layer(back)

    def second(fault):
        got = [torch.zeros(3, 6), torch.zeros(3, 6)]
        works = [dist.irecv(each, 0) for each in got]
        for work in works if fault != "unwaited" else ():
            work.wait()
        if fault == "overwritten":
            poke(got[0])
        made = [each * 2 for each in got]
        for work in works if fault == "unwaited" else ():
            work.wait()
        for each in made:
            dist.send(each, 0)

    with torch.no_grad():
        for fault in ("right", "again", "computed", "swapped", "unwaited", "overwritten"):
            torch.manual_seed(0)
            dist.barrier()
            with opdrift.record(f"{fault}.trace"):
                (second if rank else first)(fault)
    dist.barrier()
"""
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("messages")
    done = together(RUNS, folder)
    assert [one.returncode for one in done] == [0, 0], done[0].stderr + done[1].stderr
    return folder


def compared(runs: Path, fault: str) -> Diagnosis:
    return opdrift.diff(runs / "right.trace", runs / f"{fault}.trace")


def test_the_same_twice_is_identical_and_has_no_findings(runs: Path):
    assert compared(runs, "again").verdict == "identical"
    assert found_in(runs / "right.trace") == []


def test_what_a_rank_computes_otherwise_is_told_of_it_and_the_receiver_receives_it(runs: Path):
    found = compared(runs, "computed")

    assert found.first is not None
    assert (found.left.rank, found.first.op) == (0, "aten.mul.Tensor")
    assert found.first.cause.slug == "structure"
    received = found.ranks[1].first
    assert received is not None
    assert (received.cause.slug, received.inputs_match) == ("other-rank", False)
    assert received.cause.summary == "recv 1 from rank 0 in group 0 hands on what differs on rank 0"
    assert found.notes[-1].startswith(
        "rank 0 originates the difference; rank 1 receives it through recv 1 from"
    )


def test_messages_that_are_sent_in_another_order_are_told_where_they_are_sent(runs: Path):
    """Each rank hands the other what differs, but only one of them sends other tensors than it made."""
    found = compared(runs, "swapped")

    assert found.first is not None
    assert (found.left.rank, found.first.op) == (0, "c10d.send.default")
    assert found.first.cause.summary.startswith("c10d.send.default reads what op ")
    assert found.ranks[1].first is not None
    assert found.ranks[1].first.cause.slug == "other-rank"
    # each further message brings more of the same
    assert [c.slug for c in found.causes].count("other-rank") <= 1


def test_what_is_read_before_its_wait_is_a_race_whatever_has_come_by_then(runs: Path):
    """On gloo a message has no future: that the program has not waited is what its work says."""
    found = [each for each in found_in(runs / "unwaited.trace") if each.kind == "race"]

    assert {(each.rank, each.op) for each in found} == {(1, "aten.mul.Tensor")}
    first = compared(runs, "unwaited").first
    assert first is not None
    assert (first.op, first.cause.slug, first.cause.confidence) == (
        "aten.mul.Tensor",
        "race",
        "certain",
    )


def test_a_message_that_did_not_arrive_as_it_was_sent_is_the_cause(runs: Path):
    found = compared(runs, "overwritten")

    assert found.first is not None
    assert found.left.rank == 1
    assert found.first.cause.slug == "collective"
    assert found.first.cause.summary.startswith("in the right run, what rank 1 got by recv 1 from")
    assert found.first.cause.evidence[0].startswith("rank 0 sent the same in both runs")
