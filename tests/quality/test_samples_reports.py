"""What is said of samples beside the diagnosis: the views, the next command, which sample was meant, what cannot be read."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import opdrift
from opdrift.batch import Batch
from opdrift.commands.main import diff_trace
from opdrift.errors import IncomparableTracesError, InvalidOptionError

LENGTHS = (5, 9, 7)


class Pooled(nn.Module):
    """Embeds tokens, works on each place by itself, and takes the mean over all places, padding among them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.layer = nn.Embedding(20, 8), nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return self.layer(self.words(ids)).mean(1)


def padded(side: str = "right") -> Tensor:
    torch.manual_seed(1)
    ids = torch.zeros(len(LENGTHS), max(LENGTHS), dtype=torch.long)
    for row, length in zip(ids, LENGTHS, strict=True):
        start = len(row) - length if side == "left" else 0
        row[start : start + length] = torch.randint(1, 20, (length,))
    return ids


def record(path: Path, model: nn.Module, ids: Tensor, batch: Batch) -> None:
    with torch.no_grad(), opdrift.record(path, model=model, batch=batch):
        model(ids)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sample 0 alone, `left`, and in a batch of three, `right`; work happens in their folder."""
    model, ids = Pooled(), padded()
    record(tmp_path / "left", model, ids[:1, :5].clone(), Batch(1))
    record(tmp_path / "right", model, ids, Batch(3, LENGTHS))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


# ---- views and the next command -------------------------------------------------------------------------------


def test_the_views_judge_ops_by_the_sample(runs: Path, capsys: pytest.CaptureFixture[str]):
    """What agrees for the sample is equal in them; without --samples everything differs from the inputs on."""
    assert diff_trace(["left", "right", "--samples", "0:0", "--tree", "--side-by-side"]) == 1
    seen = capsys.readouterr().out
    around, tree = seen.split("ops around the first divergence\n")[1].split("\nmodules\n")
    marks = [line.split()[-2:] for line in around.splitlines() if "aten.mean" in line]

    assert "= words" in tree
    assert "x op" in next(line for line in tree.splitlines() if "aten.mean" in line)
    assert len(marks) == 1
    assert all(" ~ " not in line for line in around.splitlines() if "aten.embedding" in line)

    assert diff_trace(["left", "right", "--tree"]) == 1
    assert "= words" not in capsys.readouterr().out.split("\nmodules\n")[1]


def test_the_next_command_compares_what_this_one_did(
    runs: Path, capsys: pytest.CaptureFixture[str]
):
    diff_trace(["left", "right", "--samples", "0:0", "--map", "layer=layer"])
    chosen = capsys.readouterr().out
    diff_trace(["left", "right"])
    whole = capsys.readouterr().out

    assert "diff-trace left right --samples 0:0 --map layer=layer --side-by-side" in chosen
    assert "diff-trace left right --side-by-side" in whole


def test_batches_of_other_sizes_with_a_sample_in_common_suggest_samples(runs: Path):
    """Only if a sample is in both, and none is chosen yet."""
    record(runs / "others", Pooled(), padded().flip(0)[:2], Batch(2, LENGTHS[:0:-1]))
    said = (
        "the batches hold 1 and 3 samples, and sample 0 of the left one is sample 0 of the right one:"
        " compare that with --samples 0:0"
    )

    assert said in opdrift.diff("left", "right").notes
    assert not any("--samples" in n for n in opdrift.diff("left", "right", samples="0:0").notes)
    assert not any("--samples" in n for n in opdrift.diff("left", "others").notes)
    assert not any("--samples" in n for n in opdrift.diff("right", "right").notes)


# ---- which sample was meant -----------------------------------------------------------------------------------


def test_the_sample_that_matches_is_named(tmp_path: Path):
    """The shapes that the batch gives are no difference of the sample."""
    model = nn.Sequential(nn.Linear(8, 4))
    rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    record(tmp_path / "left", model, rows[2:3].clone(), Batch(1))
    record(tmp_path / "right", model, rows, Batch(4))

    found = opdrift.diff(tmp_path / "left", tmp_path / "right", samples=(0, 1)).causes[0]
    sound = opdrift.diff(tmp_path / "left", tmp_path / "right", samples=(0, 2))

    assert found.summary == "input differs before the first op that reads it"
    assert "left float32[1, 8], right float32[1, 8], of the sample" in found.evidence
    assert (
        "sample 0 of the left run and sample 2 of the right one have equal inputs" in found.evidence
    )
    assert found.try_ == "Compare the samples that are the same: --samples 0:2."
    assert sound.verdict != "diverged"


def test_where_no_sample_matches_lengths_and_pad_side_are_asked_for(tmp_path: Path):
    """Padding on the other side than was said: no sample of the right run is that of the left."""
    model, ids = Pooled(), padded("left")
    record(tmp_path / "left", model, ids[:1, -5:].clone(), Batch(1))
    record(tmp_path / "right", model, ids, Batch(3, LENGTHS))

    found = opdrift.diff(tmp_path / "left", tmp_path / "right", samples=(0, 0)).causes[0]

    assert found.slug == "input"
    assert any(e.startswith("no recorded sample of the right run") for e in found.evidence)
    assert "pad_side" in found.try_


def test_an_input_that_differs_in_whole_batches_gets_no_word_of_samples(tmp_path: Path):
    model, ids = nn.Sequential(nn.Linear(8, 4)), torch.randn(4, 8)
    record(tmp_path / "left", model, ids, Batch(4))
    record(tmp_path / "right", model, ids + 1, Batch(4))

    found = opdrift.diff(tmp_path / "left", tmp_path / "right").causes[0]

    assert (found.slug, "sample" in found.try_) == ("input", False)
    assert "left float32[4, 8], right float32[4, 8]" in found.evidence


# ---- what cannot be compared ----------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(9, 5, 7), None])
def test_lengths_that_are_not_those_of_the_samples_are_told(
    tmp_path: Path, lengths: tuple[int, ...] | None
):
    """What was given is said where something was given."""
    model, ids = nn.Embedding(20, 8), padded()
    record(tmp_path / "left", model, ids[:1, :5].clone(), Batch(1))
    record(tmp_path / "right", model, ids, Batch(3, lengths))

    with pytest.raises(IncomparableTracesError) as caught:
        opdrift.diff(tmp_path / "left", tmp_path / "right", samples=(0, 0))

    said = "was recorded with 9 as the length of sample 0: look whether lengths= is in the order"
    assert "holds 5 elements of the sample on the left and 9 on the right" in str(caught.value)
    assert (said in str(caught.value)) == (lengths is not None)


def test_a_padded_dim_that_could_be_two_is_told(tmp_path: Path):
    model = nn.Linear(4, 4)
    x = torch.randn(3, 4, 4)
    record(tmp_path / "left", model, x[:1, :2].clone(), Batch(1))
    record(tmp_path / "right", model, x, Batch(3, (2, 4, 4)))

    with pytest.raises(IncomparableTracesError, match="which dim of its inputs is the padded one"):
        opdrift.diff(tmp_path / "left", tmp_path / "right", samples=(0, 0))


def test_records_that_are_cut_off_are_called_that(runs: Path):
    """No input lacks a dim of the batch's size: what was recorded of it is gone."""
    records = runs / "right" / "samples.arrows"
    os.truncate(records, records.stat().st_size // 3)

    with pytest.raises(IncomparableTracesError) as caught:
        opdrift.diff("left", "right", samples=(0, 0))

    assert "right has no records of its samples: it is incomplete" in str(caught.value)
    assert "leading dim" not in str(caught.value)


def test_a_batch_that_no_input_carries_is_called_that(tmp_path: Path):
    model, ids = Pooled(), padded()
    record(tmp_path / "left", model, ids[:1, :5].clone(), Batch(1))
    record(tmp_path / "right", model, ids, Batch(5))

    with pytest.raises(
        IncomparableTracesError, match="no input was found to have a leading dim of 5"
    ):
        opdrift.diff(tmp_path / "left", tmp_path / "right", samples=(0, 0))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"size": 2.5}, "Batch(size=2.5): the number of samples is a whole number"),
        ({"size": "2"}, "Batch(size='2'): the number of samples is a whole number"),
        ({"size": 0}, "holds at least one sample"),
        ({"size": 2, "lengths": [1, -2]}, "Batch(lengths=...) holds -2"),
        ({"size": 2, "lengths": [1, 1.5]}, "Batch(lengths=...) holds 1.5"),
    ],
)
def test_sizes_and_lengths_that_are_none_are_refused(given: dict[str, object], said: str):
    with pytest.raises(InvalidOptionError) as caught:
        Batch(**given)  # type: ignore[arg-type]

    assert said in str(caught.value)


@pytest.mark.parametrize("lengths", [[0, 3], np.array([0, 3]), torch.tensor([0, 3])])
def test_whole_numbers_of_any_kind_are_taken(lengths: object):
    batch = Batch(np.int64(2), lengths)  # type: ignore[arg-type]

    assert (batch.size, batch.lengths) == (2, (0, 3))
    assert {type(batch.size), *map(type, batch.lengths)} == {int}
