"""One model loaded before its recording, in it, in part or never, as it is and sharded: what the first line says is so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import opdrift
from opdrift.findings import findings
from opdrift.records import Cause, Diagnosis, Finding
from opdrift.tracefile.opening import load

pytestmark = pytest.mark.slow

SHARDED = ("fsdp1", "fsdp2", "bfloat16")
#: Runs that start from the same weights.
ALIKE = [
    *(("plain-before", f"{wrap}-{when}") for wrap in SHARDED for when in ("before", "built")),
    *(("plain-inside", f"{wrap}-{when}") for wrap in SHARDED for when in ("before", "inside")),
    *(("plain-never-built", f"{wrap}-never") for wrap in SHARDED),
    *(("plain-never", f"{wrap}-never-built") for wrap in SHARDED),
    *(("plain-part", f"{wrap}-part") for wrap in SHARDED),
    ("plain-before", "plain-inside"),
    ("plain-inside", "plain-built"),
    ("plain-inside", "ddp-before"),
    ("plain-never-built", "ddp-never"),
    # the wrapper is gone when the recording ends, and the names with it
    ("plain-built", "ddp-built"),
    ("plain-never-built", "ddp-never-built"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, two_processes: Callable[..., None]) -> Path:
    found = tmp_path_factory.mktemp("loads")
    two_processes("loads_world.py", found)
    return found


def both_ways(folder: Path, left: str, right: str) -> tuple[Diagnosis, Diagnosis]:
    one, other = folder / left, folder / right
    return opdrift.diff(one, other, rank=0), opdrift.diff(other, one, rank=0)


def findings_of(folder: Path) -> tuple[Finding, ...]:
    return findings([load(folder, rank=rank) for rank in (0, 1)])


def named(cause: Cause) -> str:
    """A cause's summary with the sides of the other order."""
    swapped = cause.summary.replace("left", "?").replace("right", "left")
    return swapped.replace("?", "right")


@pytest.mark.parametrize(("left", "right"), ALIKE)
def test_runs_that_start_from_the_same_have_no_other_weights(folder: Path, left: str, right: str):
    """However they came to it: only bfloat16 is told, as what it is."""
    for found in both_ways(folder, left, right):
        if right.startswith("bfloat16"):
            assert found.verdict in ("rounding", "diverged")
            assert {cause.slug for cause in found.causes} <= {"dtype", "rounding", "structure"}
            assert found.causes[0].slug in ("dtype", "rounding")
        else:
            assert found.verdict == "identical"


KEPT = "run kept what both had before"
#: When the left run loads, when the right one does, how many of the 7 tensors differ, and what is said of them.
OTHERWISE = [
    ("inside", "never", 7, f"the left run loaded them, the right {KEPT}"),
    ("inside", "part", 2, f"the left run loaded them, the right {KEPT}"),
    ("part", "never", 5, f"the left run loaded them, the right {KEPT}"),
    ("built", "never", 7, "the left run loaded them in its recording, the right run did not"),
    ("before", "never", 7, "the runs were given different weights"),
    ("before", "part", 2, "the runs were given different weights"),
    ("before", "never-built", 7, "in the right run each was last drawn at random or filled"),
    ("inside", "never-built", 7, "in the right run each was last drawn at random or filled"),
]


@pytest.mark.parametrize("wrap", ["plain", *SHARDED])
@pytest.mark.parametrize(("left", "right", "differ", "said"), OTHERWISE)
def test_who_loaded_is_told_where_it_is_recorded_and_no_more(
    folder: Path, wrap: str, left: str, right: str, differ: int, said: str
):
    """A run that loaded before its recording began is not said to have loaded nothing."""
    there, back = both_ways(folder, f"plain-{left}", f"{wrap}-{right}")

    assert there.first is not None
    assert back.first is not None
    assert there.first.cause.slug == "weights"
    assert there.first.cause.summary.startswith(f"{differ} of 7 tensors of the model differ")
    if not (wrap == "fsdp1" and right == "never-built"):  # rank 0 holds no part of what is filled
        assert said in there.first.cause.summary
    assert back.first.cause.summary == named(there.first.cause)


@pytest.mark.parametrize("wrap", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("one", "rank 1 did not load 0.weight, "),
        ("older", "rank 1 loaded 0.weight, "),
    ],
)
def test_ranks_that_cut_their_parts_from_other_wholes_are_found_in_one_run(
    folder: Path, wrap: str, how: str, said: str
):
    """What is gathered is put together of both: neither rank shows that by itself."""
    (found,) = findings_of(folder / f"{wrap}-{how}")

    assert (found.cause.slug, found.cause.confidence, found.rank) == ("weights", "certain", 1)
    assert found.cause.summary.startswith(said)


@pytest.mark.parametrize(
    "run",
    [
        *(f"{wrap}-{when}" for wrap in ("ddp", *SHARDED) for when in ("before", "inside", "part")),
        # DDP hands what rank 0 has to the others
        "ddp-one",
        "ddp-older",
        "ddp-broadcast",
    ],
)
def test_ranks_that_load_alike_or_are_handed_it_have_no_finding(folder: Path, run: str):
    assert not findings_of(folder / run)


@pytest.mark.parametrize("wrap", ["ddp", "fsdp1", "fsdp2"])
def test_statistics_that_one_rank_starts_with_are_found_where_the_model_is_built_in_the_recording(
    folder: Path, wrap: str
):
    """And those that come apart since each rank has samples of its own are none."""
    (found,) = findings_of(folder / f"{wrap}-own-statistics")

    assert (found.cause.slug, found.name) == ("replica", "1.running_mean")
    assert found.cause.summary.endswith(
        "differs between ranks 0 and 1, when a module first read it"
    )
    assert not findings_of(folder / f"{wrap}-statistics")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_flat_parameter_is_no_other_result_than_the_parts_of_it(folder: Path, rank: int):
    """With `use_orig_params` FSDP1 leaves parts under the parameters' names, and without a flat parameter."""
    flat, parts, never = (
        folder / f"{name}" for name in ("flat-inside", "fsdp1-inside", "fsdp1-never")
    )

    assert opdrift.diff(flat, parts, rank=rank).verdict == "identical"
    assert opdrift.diff(parts, flat, rank=rank).verdict == "identical"
    found = opdrift.diff(flat, never, rank=rank)
    assert found.first is not None
    assert found.first.cause.slug == "weights"


@pytest.mark.parametrize("wrap", ["fsdp1", "fsdp2"])
def test_a_rank_that_loaded_something_else_is_named_where_its_run_is_compared(
    folder: Path, wrap: str
):
    """In either order of the runs; and of runs that load alike no rank is."""
    plain, one, never = (folder / name for name in ("plain-inside", f"{wrap}-one", f"{wrap}-never"))

    there, back = opdrift.diff(plain, one), opdrift.diff(one, plain)

    said = "run, rank 1 did not load 0.weight, "
    assert any(note.startswith(f"in the right {said}") for note in there.notes)
    assert any(note.startswith(f"in the left {said}") for note in back.notes)
    assert there.first is not None
    assert "each from something else" not in there.first.cause.summary
    assert not any("did not load" in note for note in opdrift.diff(plain, never).notes)
