"""Sharded runs, compared: the rank that goes wrong is named, and what it did; the others receive it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import opdrift
from opdrift.findings import findings
from opdrift.records import Diagnosis

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, two_processes: Callable[..., None]) -> Path:
    """All runs of fsdp_faults.py, recorded by two processes."""
    found = tmp_path_factory.mktemp("faults")
    two_processes("fsdp_faults.py", found)
    return found


Place = tuple[str | None, str, str]


def first(diagnosis: Diagnosis) -> Place:
    """Op (or name of a leaf), module and cause of the first difference."""
    assert diagnosis.first is not None
    return (
        diagnosis.first.name or diagnosis.first.op,
        diagnosis.first.module,
        diagnosis.first.cause.slug,
    )


def by_rank(diagnosis: Diagnosis) -> dict[int, str]:
    """What each rank's first difference is put down to."""
    return {r: one.first.cause.slug for r, one in diagnosis.ranks.items() if one.first is not None}


FC2 = "layers.1.fc2"
LATER = f"{FC2}.weight"
ADDMM = "aten.addmm.default"
MUL = "aten.mul.Tensor"
#: left, right -> what rank 1 is found to have done, and through which collective rank 0 gets it.
FAULTS: dict[tuple[str, str], tuple[Place, str]] = {
    ("fsdp1", "fsdp1-forward"): ((MUL, FC2, "structure"), "reduce_scatter"),
    ("fsdp2", "fsdp2-forward"): ((MUL, FC2, "structure"), "reduce_scatter"),
    ("fsdp2", "fsdp2-poked"): (
        ("fsdp.all_gather_copy_in.default", "layers.1", "race"),
        "all_gather",
    ),
    ("fsdp2", "fsdp2-added"): (("aten.add_.Tensor", "", "inplace"), "all_gather"),
    ("fsdp2", "fsdp2-gradients"): (("aten.mul_.Tensor", "", "inplace"), "all_gather"),
    ("plain", "fsdp1-forward"): ((MUL, FC2, "structure"), "reduce_scatter"),
    ("plain", "fsdp2-forward"): ((MUL, FC2, "structure"), "reduce_scatter"),
}


@pytest.mark.parametrize(("left", "right"), FAULTS)
def test_a_rank_that_goes_wrong_is_named_and_the_other_receives_it(folder, left, right):
    found = opdrift.diff(folder / left, folder / right)

    place, through = FAULTS[left, right]
    assert found.left.rank == 1
    assert first(found) == place
    assert by_rank(found) == {0: "other-rank", 1: place[2]}
    assert found.notes[-1].startswith(
        f"rank 1 originates the difference; rank 0 receives it through {through} "
    )


def test_a_shard_that_was_written_past_the_dispatcher_is_named_with_the_element(folder):
    cause = opdrift.diff(folder / "fsdp2", folder / "fsdp2-poked").causes[0]

    assert cause.summary.startswith("in the right run, layers.1.fc2.weight: this rank's shard")
    assert any(line.startswith("one element differs: ") for line in cause.evidence)


@pytest.mark.parametrize("left", ["same", "plain"])
@pytest.mark.parametrize("wrapped", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize(
    ("fault", "slug", "words"),
    [
        ("replaced", "fsdp-gather", "the module's tensor was exchanged for another while"),
        ("torn", "race", "the gathered content changed before it was given back, and no recorded"),
    ],
)
def test_what_happened_while_gathered_is_the_cause_though_it_shows_only_as_it_is_given_back(
    folder, left, wrapped, fault, slug, words
):
    """The op that reads the weight runs before anything looks at it again."""
    found = opdrift.diff(
        folder / (wrapped if left == "same" else left), folder / f"{wrapped}-{fault}"
    )

    what, module, told = first(found)
    assert (found.left.rank, told) == (1, slug)
    if left == "same":
        assert (what, module) in {(ADDMM, FC2), (MUL, FC2)} or what == LATER
    assert found.causes[0].summary.startswith(f"in the right run, {LATER}: {words}")


@pytest.mark.parametrize("right", ["fsdp2-poked", "fsdp2-added"])
def test_a_shard_that_was_changed_shows_against_a_plain_run_at_the_use_of_its_parameter(
    folder, right
):
    """The rank whose own marks, or whose own ops, tell what was done to its part; the other one only gathers it."""
    found = opdrift.diff(folder / "plain", folder / right)

    cause = "race" if right == "fsdp2-poked" else "structure"
    assert (found.left.rank, first(found)) == (1, (LATER, FC2, cause))


def test_a_shard_that_was_exchanged_is_a_finding_and_the_cause_of_what_differs(folder):
    """FSDP2 gathers the tensor that it made: what is put in its place never reaches the forward."""
    name = "fsdp2-exchanged"

    made, finding = findings([opdrift.load(folder / name, rank=rank) for rank in (0, 1)])
    cause = opdrift.diff(folder / "fsdp2", folder / name).causes[0]

    # what it is exchanged for, only this rank computes
    assert (made.kind, made.name, made.rank) == ("update", LATER, 1)

    assert (finding.name, finding.rank, finding.step) == (LATER, 1, 1)
    said = f"{LATER}: this rank's shard in the model was exchanged for another tensor, and the old one is gathered"
    assert (finding.cause.slug, finding.cause.summary) == ("fsdp-gather", said)
    assert (cause.slug, cause.summary) == ("fsdp-gather", f"in the right run, {said}")


@pytest.mark.parametrize(
    ("left", "case"),
    [
        ("plain", "fsdp1-alone"),
        ("plain", "fsdp1-flat-alone"),
        ("plain", "fsdp2-alone"),
        # what is padded, a mark names without its padding
        ("fsdp2", "fsdp2-alone"),
    ],
)
def test_parts_that_no_integration_followed_are_not_held_against_wholes(folder, left, case):
    found = opdrift.diff(folder / left, folder / case)

    assert (found.verdict, found.first) == ("identical", None)
    assert any(
        "the right trace holds only this rank's part of each" in note for note in found.notes
    )


def test_mixed_precision_over_several_steps_is_the_rounding_of_its_casts(folder):
    """Parameters that are gathered once more for the backward pass are those that were reported."""
    found = opdrift.diff(folder / "plain", folder / "fsdp2-bf16")

    assert (found.verdict, first(found)[2]) == ("rounding", "rounding")
    assert "dtype" in {cause.slug for cause in found.causes}


@pytest.mark.parametrize("wrapped", ["fsdp1", "fsdp2"])
def test_mixed_precision_against_full_of_the_same_wrapper_is_one_difference(folder, wrapped):
    """Shards that are cast before they are gathered are not paired op by op with others: padding and types differ."""
    found = opdrift.diff(folder / wrapped, folder / f"{wrapped}-bf16")

    for one in found.ranks.values():
        assert (one.verdict, len(one.origins)) == ("rounding", 1)
        assert one.first.name == "embed.weight"


UPDATED = "aten.add_.Tensor in an optimizer step of embed.weight was called with other arguments:"


@pytest.mark.parametrize(
    ("left", "right", "rates"),
    [
        ("plain", "fsdp2-rate", "-0.01 against -0.012"),
        ("plain", "fsdp1-rate", "-0.01 against -0.012"),
        # so small an update of a weight that rounding would explain any change of it
        ("plain-slow", "fsdp2-slow", "-1e-06 against -1.2e-06"),
    ],
)
def test_another_learning_rate_of_the_sharded_run_is_named_with_both(folder, left, right, rates):
    found = opdrift.diff(folder / left, folder / right)

    assert (found.verdict, first(found)) == ("diverged", ("embed.weight", "embed", "op-args"))
    assert found.causes[0].summary == f"{UPDATED} alpha: {rates}"


@pytest.mark.parametrize("left", ["plain", "fsdp2"])
@pytest.mark.parametrize(
    ("right", "slug", "words"),
    [
        ("rate", "op-args", "alpha: -0.01 against -0.012"),
        ("decay", "structure", "alpha: 0.1) more"),
    ],
)
def test_an_update_that_mixed_precision_hides_is_found_by_what_is_called(
    folder, left, right, slug, words
):
    """Rounding to bfloat16 explains more than one step changes: the calls of the optimizer tell, sizes do not."""
    found = opdrift.diff(folder / left, folder / f"fsdp2-bf16-{right}")

    assert (found.verdict, first(found)) == ("diverged", ("embed.weight", "embed", slug))
    assert words in found.first.cause.summary


def test_another_weight_decay_of_the_sharded_run_is_named(folder):
    """AdamW multiplies a weight with 1 - lr * weight_decay, its second moment with beta2: here the same number."""
    found = opdrift.diff(folder / "plain-adam", folder / "fsdp2-adam-decay")

    assert first(found) == ("embed.weight", "embed", "op-args")
    assert found.causes[0].summary.endswith("other: 0.9999 against 0.999")


@pytest.mark.parametrize("wrapped", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize("good", ["plain", "sharded"])
@pytest.mark.parametrize("swapped", [False, True])
def test_gradients_that_are_never_zeroed_are_told(folder, wrapped, good, swapped):
    runs = folder / f"{'plain' if good == 'plain' else wrapped}-adam", folder / f"{wrapped}-kept"
    found = opdrift.diff(*(runs[::-1] if swapped else runs))

    assert (found.verdict, first(found)[2]) == ("diverged", "structure")
    assert found.causes[0].summary.startswith(
        f"in the {'left' if swapped else 'right'} run, a backward pass adds to the gradient"
    )


@pytest.mark.parametrize("wrapped", ["fsdp1", "fsdp2"])
@pytest.mark.parametrize("good", ["plain", "sharded"])
@pytest.mark.parametrize("swapped", [False, True])
def test_a_step_that_one_rank_leaves_out_is_told_with_that_rank(folder, wrapped, good, swapped):
    runs = folder / f"{'plain' if good == 'plain' else wrapped}-adam", folder / f"{wrapped}-skipped"
    found = opdrift.diff(*(runs[::-1] if swapped else runs))
    one, other = ("right", "left") if swapped else ("left", "right")

    assert found.causes[0].summary.startswith(
        f"in the {other} run, rank 1 makes no optimizer step where AdamW.step number 2 is in the {one} run"
    )


@pytest.mark.parametrize("wrapped", ["fsdp1", "fsdp2"])
def test_a_step_that_one_rank_leaves_out_shows_in_the_run_alone(folder, wrapped):
    ranks = [opdrift.load(folder / f"{wrapped}-skipped", rank=rank) for rank in (0, 1)]
    found = [each.cause.summary for each in findings(ranks) if each.kind == "update"]

    assert found == ["rank 1 makes no optimizer step where rank 0 makes AdamW.step number 2"]


def test_gradients_that_are_reduced_in_another_type_are_the_rounding_of_that_type(folder):
    found = opdrift.diff(folder / "plain", folder / "fsdp2-reduced")

    assert (found.verdict, first(found)[2]) == ("rounding", "rounding")
    assert {cause.slug for cause in found.causes} == {"rounding", "dtype"}
    assert "right: its gradient comes from a reduce_scatter of bfloat16 by AVG over ranks 0, 1" in (
        found.causes[0].evidence
    )


def test_a_weight_that_differs_is_no_rounding_although_what_reads_it_hardly_shows_it(folder):
    found = opdrift.diff(folder / "plain", folder / "fsdp2-shifted")

    assert found.verdict == "diverged"
    assert found.first.name == "layers.1.fc1.weight"
    assert found.first is found.ranks[1].first  # the rank that did it, not the one that gathers it
    assert found.causes[0].summary == (
        "the right run's update of layers.1.fc1.weight has aten.add_.Tensor (other: 0.01) more"
    )


#: Runs without a fault that a single run would show.
RIGHT = ("plain", "fsdp1", "fsdp2", "fsdp1-adam", "fsdp2-adam", "fsdp2-bf16")


@pytest.mark.parametrize("case", RIGHT)
def test_right_runs_have_no_findings(folder, case):
    assert list(findings([opdrift.load(folder / case, rank=rank) for rank in (0, 1)])) == []


SAME = (
    ("plain", "fsdp1"),
    ("plain", "fsdp2"),
    ("fsdp1", "fsdp2"),
    ("plain-adam", "fsdp1-adam"),
    ("plain-adam", "fsdp2-adam"),
)


@pytest.mark.parametrize(("left", "right"), SAME)
def test_right_runs_are_identical(folder, left, right):
    found = opdrift.diff(folder / left, folder / right)

    assert {rank: one.verdict for rank, one in found.ranks.items()} == {
        0: "identical",
        1: "identical",
    }
