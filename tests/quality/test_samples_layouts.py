"""One sample alone against a batch: what the batch and its padding add to shapes is no cause, and hides none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import opdrift
from opdrift.batch import Batch
from opdrift.records import Diagnosis

LENGTHS = (5, 9, 7)
#: Products over so many numbers are added in another order for other numbers of rows, on one thread as well.
ROUNDING = 1000


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Layouts are asked about here: on one thread products of few rows give the same bits for any batch."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def diffed(
    path: Path,
    models: Sequence[nn.Module],
    inputs: tuple[Sequence[Tensor], Sequence[Tensor]],
    batch: Batch,
    sample: int,
) -> Diagnosis:
    """Sample 0 of a batch of one on the left, `sample` of `batch` on the right."""
    sides = (("left", Batch(1)), ("right", batch))
    for (name, given), model, tensors in zip(sides, models, inputs, strict=True):
        with torch.no_grad(), opdrift.record(path / name, model=model, batch=given):
            model(*tensors)
    return opdrift.diff(path / "left", path / "right", samples=(0, sample))


def made(make: Callable[[], nn.Module]) -> nn.Module:
    """A model of always the same weights."""
    torch.manual_seed(0)
    return make().eval()


def tokens(side: str) -> tuple[list[Tensor], Tensor]:
    """Ids of each sample, and all of them padded with 0."""
    torch.manual_seed(1)
    each = [torch.randint(1, 20, (n,)) for n in LENGTHS]
    padded = torch.zeros(len(LENGTHS), max(LENGTHS), dtype=torch.long)
    for row, ids in zip(padded, each, strict=True):
        row[len(row) - len(ids) if side == "left" else 0 :][: len(ids)] = ids
    return each, padded


# ---- positions from a buffer ---------------------------------------------------------------------------------


class Positioned(nn.Module):
    """Embeddings as BERT has them: rows of a table, by a buffer of positions or by given ones."""

    def __init__(self, order: Tensor | None = None) -> None:
        super().__init__()
        self.words, self.table = nn.Embedding(20, 8), nn.Embedding(64, 8)
        self.register_buffer("position_ids", torch.arange(64)[None] if order is None else order)

    def forward(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        if positions is None:
            positions = self.position_ids[:, : ids.shape[1]]
        return self.words(ids) + self.table(positions)


def test_a_buffer_of_positions_that_counts_padding_is_named(tmp_path: Path):
    """Five positions are no twelve: nothing is read in another shape."""
    model = made(Positioned)
    each, padded = tokens("left")

    found = diffed(
        tmp_path, (model, model), ([each[0][None]], [padded]), Batch(3, LENGTHS, "left"), 0
    )

    assert found.verdict == "diverged"
    assert found.first is not None
    assert (found.first.op, found.first.cause.slug) == ("aten.embedding.default", "position-ids")
    assert found.first.cause.confidence == "certain"
    assert "both: the buffer position_ids counts the positions" in found.first.cause.evidence
    assert all(cause.slug != "structure" for cause in found.causes)


@pytest.mark.parametrize("side", ["right", "given"])
def test_positions_that_do_not_count_padding_are_no_difference(tmp_path: Path, side: str):
    """Padding on the right, and positions that are given, leave the sample's positions alone."""
    model = made(Positioned)
    each, padded = tokens("right" if side == "right" else "left")
    alone, together = [each[0][None]], [padded]
    if side == "given":
        together = [padded, ((padded != 0).cumsum(1) - 1).clamp(min=0)]
        alone = [*alone, torch.arange(5)[None]]
    batch = Batch(3, LENGTHS, "right" if side == "right" else "left")

    assert diffed(tmp_path, (model, model), (alone, together), batch, 0).verdict != "diverged"


def test_a_buffer_that_does_not_count_is_not_called_positions(tmp_path: Path):
    """It is read at other places, too, but what it holds is no count."""
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))[None]
    model = made(lambda: Positioned(order))
    each, padded = tokens("left")

    found = diffed(
        tmp_path, (model, model), ([each[0][None]], [padded]), Batch(3, LENGTHS, "left"), 0
    )

    assert found.verdict == "diverged"
    assert all(cause.slug not in ("position-ids", "structure") for cause in found.causes)


# ---- layers that have the length, or take the batch, in front -------------------------------------------------


class Stepping(nn.Module):
    """A recurrent layer with the length in front, perhaps behind a product that rounds by the number of its rows."""

    def __init__(self, both_ways: bool, rounds: bool = False) -> None:
        super().__init__()
        self.words = (
            nn.Sequential(nn.Embedding(20, ROUNDING), nn.Linear(ROUNDING, 8))
            if rounds
            else nn.Embedding(20, 8)
        )
        self.layer = nn.GRU(8, 8, bidirectional=both_ways)
        self.head = nn.Linear(16 if both_ways else 8, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layer(self.words(ids))[0])


@pytest.mark.parametrize("rounds", [False, True])
@pytest.mark.parametrize("both_ways", [True, False])
def test_steps_that_begin_in_the_padding_are_named(tmp_path: Path, both_ways: bool, rounds: bool):
    """Backwards the layer reads padding first; forwards it reads the sample first, and all is well."""
    model = made(lambda: Stepping(both_ways, rounds))
    each, padded = tokens("right")
    inputs = [each[0][:, None]], [padded.t().contiguous()]

    found = diffed(tmp_path, (model, model), inputs, Batch(3, LENGTHS), 0)

    assert (found.verdict == "diverged") == both_ways
    if both_ways:
        assert found.first is not None
        assert (found.first.module, found.first.cause.slug) == ("layer", "padding")
    assert all(cause.slug not in ("structure", "op-args") for cause in found.causes)


@pytest.mark.parametrize("batch_first", [False, True])
def test_attention_that_takes_the_batch_for_the_length_is_named(tmp_path: Path, batch_first: bool):
    """It is found where the samples meet, not at the views before."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.MultiheadAttention(32, 4, batch_first=batch_first)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x, x, x)[0]

    model = made(Attention)
    together = torch.randn(3, 7, 32, generator=torch.Generator().manual_seed(0))

    found = diffed(tmp_path, (model, model), ([together[:1].clone()], [together]), Batch(3), 0)

    assert (found.verdict == "diverged") == (not batch_first)
    if not batch_first:
        assert found.first is not None
        assert (found.first.op, found.first.cause.slug) == ("aten.bmm.default", "batch-mixing")
    assert all(cause.slug != "structure" for cause in found.causes)


class Experts(nn.Module):
    """Tokens of all samples go to four experts, of which each takes as many as it has room for."""

    def __init__(self, room: int | None) -> None:
        super().__init__()
        self.gate, self.room = nn.Linear(8, 4), room
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        chosen = self.gate(flat).argmax(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            if self.room is not None:
                rows = rows[: self.room]
            out[rows] = expert(flat[rows])
        return x + out.view_as(x)


@pytest.mark.parametrize("room", [2, None])
def test_room_that_samples_share_is_no_matter_of_shapes(tmp_path: Path, room: int | None):
    model = made(lambda: Experts(room))
    together = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))

    found = diffed(tmp_path, (model, model), ([together[3:].clone()], [together]), Batch(4), 3)

    assert all(cause.slug != "structure" for cause in found.causes)
    if room is not None:
        assert (found.verdict, found.causes[0].slug) == ("diverged", "batch-mixing")
    else:  # the experts' products round otherwise for other numbers of rows, where no sample is followed
        assert found.verdict in ("identical", "rounding")


# ---- shapes and constants that do differ ----------------------------------------------------------------------


class Cut(nn.Module):
    """The same numbers, cut into more or fewer heads."""

    def __init__(self, heads: int, size: int) -> None:
        super().__init__()
        self.layer, self.heads = nn.Linear(size, 32), heads

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).unflatten(-1, (self.heads, -1)).softmax(-1).flatten(-2)


@pytest.mark.parametrize("size", [32, ROUNDING])
@pytest.mark.parametrize("heads", [(4, 2), (4, 4)])
def test_another_shape_of_the_sample_itself_is_said(
    tmp_path: Path, heads: tuple[int, int], size: int
):
    """Also where the product before it rounds otherwise for a batch."""
    models = [made(lambda n=n: Cut(n, size)) for n in heads]
    together = torch.randn(3, 7, size, generator=torch.Generator().manual_seed(0))

    found = diffed(tmp_path, models, ([together[:1].clone()], [together]), Batch(3), 0)

    assert (found.verdict == "diverged") == (heads[0] != heads[1])
    if heads[0] != heads[1]:
        assert found.causes[0].slug == "structure"
        assert "float32[1, 7, 4, 8] against float32[1, 7, 2, 16]" in found.causes[0].summary


class Filled(nn.Module):
    """Adds a constant as long as the input."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.layer, self.number = nn.Linear(8, 8), number

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + torch.full(x.shape, self.number))


@pytest.mark.parametrize("numbers", [(0.5, 0.25), (0.5, 0.5)])
def test_a_constant_of_another_number_is_named_and_one_of_another_size_is_not(
    tmp_path: Path, numbers: tuple[float, float]
):
    models = [made(lambda n=n: Filled(n)) for n in numbers]
    together = torch.randn(3, 7, 8, generator=torch.Generator().manual_seed(0))

    found = diffed(tmp_path, models, ([together[:1].clone()], [together]), Batch(3), 0)

    assert (found.verdict == "diverged") == (numbers[0] != numbers[1])
    assert any(cause.slug == "op-args" for cause in found.causes) == (numbers[0] != numbers[1])
