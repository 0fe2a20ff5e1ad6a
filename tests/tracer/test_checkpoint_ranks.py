"""A checkpoint held against all ranks of a run: copies of a model, and parts that are spread over the ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.tracer.test_checkpoints import WEIGHTS, Builder, noise, stored, traced
from torch import nn

import opdrift
from opdrift.checkpoints import check_ranks, sentence
from opdrift.commands import main
from opdrift.errors import CheckpointError
from opdrift.render.checkpoint_text import checkpoint_report
from opdrift.render.page import Screen
from opdrift.wording import listed

FIRST = {name: each for name, each in WEIGHTS.items() if name.startswith("layers.0")}
SECOND = {name: each for name, each in WEIGHTS.items() if name not in FIRST}


def other(contents: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: noise(*each.shape) for name, each in contents.items()}


def over(*models: dict[str, np.ndarray]) -> dict:
    return {
        rank: traced(model).build(f"rank-{rank:05d}.trace") for rank, model in enumerate(models)
    }


def test_copies_that_all_hold_the_checkpoint_are_whole():
    found = check_ranks(over(WEIGHTS, WEIGHTS), stored(WEIGHTS))

    assert found.whole
    assert found.ranks == (0, 1)
    assert sentence(found) == "5 of 5 tensors of file.pt are in the model"


@pytest.mark.parametrize(("good", "bad"), [(0, 1), (1, 0)])
def test_a_rank_that_holds_something_else_is_named(good: int, bad: int):
    models = [WEIGHTS, WEIGHTS]
    models[bad] = {**WEIGHTS, "layers.1.fc.bias": noise(4)}

    found = check_ranks(over(*models), stored(WEIGHTS))

    assert sentence(found) == (
        f"1 of 5 tensors of file.pt reached the model on rank {good}, not on rank {bad}: layers.1.fc.bias"
    )
    assert not found.whole
    page = checkpoint_report(found, Screen(100))
    assert f"layers.1.fc.bias: on rank {bad}, the model holds something else" in page
    assert "ranks      judged on ranks 0 and 1" in page


def test_what_no_rank_holds_is_told_apart_from_what_some_lack():
    left = {**WEIGHTS, "layers.0.fc.bias": noise(4)}
    right = {**left, "layers.0.fc.weight": noise(4, 4)}

    found = check_ranks(over(left, right), stored(WEIGHTS))

    assert sentence(found) == (
        "1 of 5 tensors of file.pt never reached the model: layers.0.fc.bias;"
        " 1 reached the model on rank 0, not on rank 1: layers.0.fc.weight"
    )


def test_stages_of_a_pipeline_hold_the_checkpoint_together():
    assert check_ranks(over(FIRST, SECOND), stored(WEIGHTS)).whole


def test_a_stage_that_counts_its_layers_from_0_lacks_nothing():
    """Its layer 0 is another tensor than the checkpoint's, and than that of rank 0."""
    second = {name.replace("layers.1", "layers.0"): each for name, each in SECOND.items()}

    assert check_ranks(over(FIRST, second), stored(WEIGHTS)).whole


def test_the_file_of_one_stage_is_of_this_architecture_and_not_the_whole_model():
    found = check_ranks(over(FIRST, SECOND), stored(SECOND))

    assert found.missing == ()
    assert set(found.extra) == set(FIRST)
    assert len(found.arrived) == len(SECOND)


def test_a_stage_that_was_not_loaded_never_reached_the_model():
    found = check_ranks(over(FIRST, other(SECOND)), stored(WEIGHTS))

    assert {missing.name for missing in found.missing} == set(SECOND)
    assert all(not missing.reached for missing in found.missing)


def test_a_smaller_tensor_is_a_part_of_what_another_rank_holds():
    part = {**WEIGHTS, "layers.0.fc.weight": WEIGHTS["layers.0.fc.weight"][:1]}

    assert check_ranks(over(WEIGHTS, part), stored(WEIGHTS)).whole


def test_a_rank_that_names_no_parameters_is_said_not_to_be_judged():
    found = check_ranks(over(WEIGHTS, {}), stored(WEIGHTS))

    assert found.unjudged == (1,)
    assert "rank 1 names no parameters: not judged" in checkpoint_report(found, Screen(100))


def test_a_checkpoint_that_fits_no_rank_is_of_another_architecture():
    with pytest.raises(CheckpointError, match="another architecture"):
        check_ranks(over(FIRST, SECOND), stored({"head.weight": noise(7, 7)}))
    with pytest.raises(CheckpointError, match="names no parameters"):
        check_ranks({0: Builder().build(), 1: Builder().build()}, stored(WEIGHTS))


def test_a_checkpoint_is_of_another_architecture_although_all_of_a_small_stage_fits():
    """What does not fit is told of a rank that has such a tensor."""
    head = {"head.bias": noise(4)}
    stages = over(head, {f"blocks.{i}.weight": noise(6, 6) for i in range(8)})
    file = {"head.bias": noise(4)} | {f"layers.{i}.fc.weight": noise(5, 5) for i in range(8)}

    with pytest.raises(CheckpointError, match="another architecture") as error:
        check_ranks(stages, stored(file))

    assert "1 of its 9 tensors fits one of the model's 9" in str(error.value)
    assert "the checkpoint has layers.0.fc.weight [5, 5], the trace blocks.0.weight" in str(
        error.value
    )


def test_ranks_in_words():
    assert [listed(each) for each in ((3,), (0, 1), (1, 2, 3, 4), (0, 1, 2), (0, 2, 5, 6))] == [
        "rank 3",
        "ranks 0 and 1",
        "ranks 1 to 4",
        "ranks 0, 1 and 2",
        "ranks 0, 2, 5 and 6",
    ]


def test_show_reads_all_ranks_of_a_run(tmp_path, capsys):
    loaded, random = nn.Linear(4, 4), nn.Linear(4, 4)
    torch.save(loaded.state_dict(), tmp_path / "file.pt")
    for rank, model in enumerate((loaded, random)):
        with opdrift.record(tmp_path / "run" / f"rank-{rank:05d}", model=model), torch.no_grad():
            model(torch.ones(1, 4))

    ask = ["--checkpoint", str(tmp_path / "file.pt")]
    assert main.opdrift(["show", str(tmp_path / "run"), *ask]) == 1
    assert "on rank 0, not on rank 1: weight, bias" in capsys.readouterr().out
    assert main.opdrift(["show", str(tmp_path / "run" / "rank-00000"), *ask]) == 0
