"""fairscale over two ranks: right runs have no findings, planted faults have, and sharding changes no bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import opdrift
from opdrift.findings import findings
from opdrift.records import Finding
from opdrift.tracefile.reader import Trace

pytestmark = [
    pytest.mark.slow,
    # the group's file store is closed by the group, not by Python
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

SAME_AS_PLAIN = ("flat", "buckets", "kept", "each", "offload", "state")
RIGHT = (*SAME_AS_PLAIN, "plain", "half", "summon", "half-summon", "accumulate", "loaded")
WEIGHT = "layers.0.fc1.weight"

#: (kind, rank, name, cause, step)
Place = tuple[str, int | None, str | None, str, int | None]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, two_processes) -> Path:
    """All cases of fairscale_world.py, recorded by two processes."""
    folder = tmp_path_factory.mktemp("world")
    two_processes("fairscale_world.py", folder)
    return folder


def traces(world: Path, case: str) -> list[Trace]:
    return [opdrift.load(world / case, rank=rank) for rank in (0, 1)]


def found_in(world: Path, case: str) -> list[Finding]:
    return list(findings(traces(world, case)))


def place(finding: Finding) -> Place:
    return finding.kind, finding.rank, finding.name, finding.cause.slug, finding.step


@pytest.mark.parametrize("case", RIGHT)
def test_right_runs_have_no_findings_and_are_followed(world, case):
    assert found_in(world, case) == []
    for trace in traces(world, case):
        assert trace.footer is not None
        assert trace.footer.failures == ()
        kinds = {mark.kind for mark in trace.marks}
        assert "integration-failed" not in kinds
        assert ("gather" in kinds) == (case != "plain")


def test_recording_changes_nothing(world):
    """Outputs, weights that training left and random state are the same with and without a recorder."""
    for rank in range(2):
        same = json.loads((world / f"same-{rank}.json").read_text())
        assert same == dict.fromkeys(same, True)


@pytest.mark.parametrize("case", SAME_AS_PLAIN)
def test_a_sharded_run_is_identical_to_the_plain_one(world, case):
    """An inference, two training steps, and an inference with what was learnt; on both ranks."""
    found = opdrift.diff(world / "plain", world / case)

    assert (found.verdict, found.first) == ("identical", None)
    assert {rank: each.verdict for rank, each in found.ranks.items()} == {
        0: "identical",
        1: "identical",
    }


FOUND: dict[str, Place] = {
    "clamped": ("gather", 1, WEIGHT, "fsdp-gather", 1),
    "half-clamped": ("gather", 1, WEIGHT, "fsdp-gather", 1),
    "swapped": ("gather", 1, WEIGHT, "fsdp-gather", 1),
    "half-swapped": ("gather", 1, WEIGHT, "fsdp-gather", 1),
    "each-swapped": ("gather", 1, WEIGHT, "fsdp-gather", 1),
    "torn": ("gather", 1, WEIGHT, "race", 1),
    "half-torn": ("gather", 1, WEIGHT, "race", 1),
    "kept-torn": ("gather", 0, WEIGHT, "race", 1),
    "kept-hidden": ("hidden-write", 1, "layers.1.fc2.weight", "race", 1),
    "hidden": ("hidden-write", 1, "layers.1.fc2.weight", "race", 1),
    "half-hidden": ("hidden-write", 1, "layers.1.fc2.weight", "race", 1),
    "order": ("gather", 1, "layers.0.fc1.bias", "fsdp-gather", 0),
    "half-order": ("gather", 1, "layers.0.fc1.bias", "fsdp-gather", 0),
    "buffers": ("replica", 1, "layers.1.scale", "replica", None),
    "unloaded": ("weights", 1, "embed.weight", "weights", None),
}
SAID = {
    "clamped": "written by aten.clamp_.default",
    "swapped": "the shard takes its place: the other content is lost",
    "torn": "one element differs: 33 of the parameter",
    "hidden": "one element differs: 29 of the parameter",
    "order": "it is rank 1's shard",
    "buffers": "share out the parameters of its model",
    "unloaded": "were last written by a random initialisation",
}


@pytest.mark.parametrize("case", FOUND)
def test_a_fault_is_one_finding_with_parameter_rank_and_step(world, case):
    (found,) = found_in(world, case)

    assert place(found) == FOUND[case]
    assert any(SAID[case.rpartition("-")[2]] in line for line in found.cause.evidence)


@pytest.mark.parametrize("case", ["stale", "half-stale"])
def test_stale_parameters_are_found_at_their_use(world, case):
    """They were not given back, and the optimizer has made a step since."""
    found = found_in(world, case)

    assert {(each.rank, each.module) for each in found} == {
        (rank, unit) for rank in (0, 1) for unit in ("", "layers.0", "layers.1")
    }
    for each in found:
        assert (each.kind, each.cause.slug, each.step) == ("gather", "fsdp-gather", 1)
        assert any("that is what this shard held at" in line for line in each.cause.evidence)


def test_another_parameter_s_shard_is_found_on_both_ranks(world):
    """Rank 1 sends its part of norm.weight for that of norm.bias, and the other way round."""
    found = found_in(world, "exchanged")

    assert {place(each) for each in found} == {
        ("gather", rank, f"layers.0.norm.{name}", "fsdp-gather", 0)
        for rank in (0, 1)
        for name in ("weight", "bias")
    }
    said = [line for each in found for line in each.cause.evidence]
    assert "that is rank 1's part of layers.0.norm.weight, from element 5 on" in said


def test_another_unit_s_shard_is_found_on_both_ranks(world):
    """Rank 1 sends the second block's flat parameter for that of the first."""
    found = found_in(world, "flat-exchanged")

    assert [place(each) for each in found] == [
        ("gather", rank, "layers.0.fc1.bias", "fsdp-gather", 0) for rank in (0, 1)
    ]
    said = [line for each in found for line in each.cause.evidence]
    assert "that is rank 1's part of layers.1.fc2.weight, from element 0 on" in said


def test_a_copy_that_ended_too_early_is_found_where_it_was_made(world):
    """The gather is right: it brings what was sent."""
    (found,) = found_in(world, "half-moved")

    assert place(found) == ("move", 1, "layers.0.fc2.weight", "fsdp-gather", 0)
    assert (
        "layers.0.fc2.bias: 10 elements differ, from 0 to 9, all of them zero"
        in found.cause.evidence
    )
