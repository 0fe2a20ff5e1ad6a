"""Models that are spread in two dimensions, over four ranks: sharded replicas, tensor parallelism, pipelines."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import opdrift
from opdrift.diagnose.across_ranks import across_ranks
from opdrift.findings import findings
from opdrift.records import Finding

pytestmark = pytest.mark.slow

RANKS = range(4)
LATER = "layers.1.fc2.weight"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, four_processes: Callable[..., None]) -> Path:
    """All runs of topologies_world.py."""
    found = tmp_path_factory.mktemp("topologies")
    four_processes("topologies_world.py", found)
    return found


def found_in(trace: Path) -> tuple[Finding, ...]:
    return findings([opdrift.load(trace, rank=rank) for rank in RANKS])


def test_recording_changes_nothing(folder):
    for rank in RANKS:
        said = json.loads((folder / f"said-{rank}.json").read_text())
        assert set(said.values()) == {True}, said


@pytest.mark.parametrize(
    "case", ["plain", "hybrid1", "hybrid2", "compressed", "tensor", "uneven", "nothing"]
)
def test_right_runs_have_no_findings(folder, case):
    """Ranks with fewer batches than others, and memory that is filled after it was sharded, among them."""
    assert found_in(folder / case) == ()
    assert across_ranks(folder / case).verdict == "identical"


@pytest.mark.parametrize(
    ("left", "right", "verdict"),
    [
        ("plain", "hybrid1", "identical"),
        ("plain", "hybrid2", "identical"),
        ("hybrid1", "hybrid2", "identical"),
        ("split-plain", "tensor", "rounding"),
    ],
)
def test_right_runs_compute_the_same(folder, left, right, verdict):
    found = opdrift.diff(folder / left, folder / right)

    assert {rank: one.verdict for rank, one in found.ranks.items()} == dict.fromkeys(RANKS, verdict)


def test_what_tensor_parallelism_leaves_on_a_rank_is_not_held_against_the_whole(folder):
    """FSDP gathers it, and it is a part still."""
    found = opdrift.diff(folder / "split-plain", folder / "tensor")

    assert found.first is not None
    assert found.first.module == "layers.0.fc1"
    (note,) = [note for note in found.notes if "only this rank's part" in note]
    assert note.startswith("layers.0.fc1.weight, layers.0.fc1.bias and 4 more: ")


def test_a_shard_that_was_written_past_the_dispatcher_is_named_with_its_rank(folder):
    finding, *again = found_in(folder / "poked")

    assert (finding.kind, finding.name, finding.rank, finding.step) == (
        "hidden-write",
        LATER,
        3,
        1,
    )
    assert {each.name for each in again} <= {LATER}


@pytest.mark.parametrize("case", ["added", "added-flat"])
def test_a_part_that_a_rank_changes_and_its_replica_does_not_is_found(folder, case):
    """Ranks 1 and 3 hold the same part, and rank 3 adds to its own after the first step."""
    update, finding = found_in(folder / case)

    assert (update.kind, update.name, update.op, update.rank) == (
        "update",
        LATER,
        "aten.add_.Tensor",
        3,
    )

    assert (finding.kind, finding.name, finding.rank, finding.step) == ("replica", LATER, 3, 1)
    said = f"{LATER} differs between ranks 1 and 3, which hold the same part"
    assert (finding.cause.slug, finding.cause.summary) == ("replica", said)


class TestPipeline:
    def test_the_trial_run_of_a_stage_is_not_recorded(self, folder):
        """Its inputs are memory that nothing wrote, and what it computes is thrown away."""
        trace = opdrift.load(folder / "pipeline", rank=2)

        marks = [mark.fields for mark in trace.marks if mark.kind == "trial"]
        assert [(m["phase"], m["unwritten"]) for m in marks] == [
            ("forward", True),
            ("backward", True),
        ]
        names = [trace.op(index).name for index in range(len(trace.ops))]
        assert names.count("aten.addmm.default") == 2 * 4  # steps, micro-batches

    def test_statistics_that_a_trial_run_spoils_are_a_finding(self, folder):
        """Nothing else is: the first stage has none. Both ranks of the second one show it, which is told once."""
        (found,) = found_in(folder / "pipeline")

        assert (found.kind, found.name, found.rank, found.cause.slug) == (
            "trial",
            "norm.running_mean",
            2,
            "uninitialised",
        )
        assert found.cause.evidence[-1] == "the same on rank 3"
