"""Padding through ops: the valid part of a padded batch has the shape, and mostly the content, of the sample alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import numpy as np
import pytest
import torch
from following import Follow, Result
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from opdrift.batch import Batch
from opdrift.batches.lengths import Lengths
from opdrift.tracefile.axes import LENGTH_UNKNOWN, UNKNOWN, Extents, factor, valid_part

Side = Literal["left", "right"]


@pytest.fixture
def lengths() -> Lengths:
    return Lengths(lambda axis, extents: None)


def test_an_axis_is_padded_on_one_side(lengths: Lengths):
    right, left = lengths.seed(8, [8, 3], left=False), lengths.seed(8, [8, 3], left=True)

    assert lengths[right] == Extents(8, ((0, 8), (0, 3)))
    assert lengths[left] == Extents(8, ((0, 8), (5, 3)))
    assert [lengths[left].is_padded(sample) for sample in (0, 1)] == [False, True]


def test_equal_extents_have_one_number_and_are_told_once():
    told = []
    lengths = Lengths(lambda axis, extents: told.append((axis, extents)))

    assert lengths.seed(8, [8, 3], left=False) == lengths.axis(8, ((0, 8), (0, 3))) == 1
    assert lengths.axis(9, ((0, 9), None)) == 2
    assert [axis for axis, _ in told] == [1, 2]


def test_a_sample_longer_than_the_axis_is_not_known(lengths: Lengths):
    assert lengths[lengths.seed(8, [9, 3], left=False)].valid == (None, (0, 3))
    assert lengths.seed(8, [9, 9], left=False) is None


def test_a_cache_grows_at_the_end_of_left_padding(lengths: Lengths):
    left = lengths.seed(8, [8, 3], left=True)

    grown = lengths.joined([(8, left), (1, None)])

    assert lengths[grown] == Extents(9, ((0, 9), (5, 4)))


def test_at_the_end_of_right_padding_only_a_full_sample_is_known(lengths: Lengths):
    right = lengths.seed(8, [8, 3], left=False)

    assert lengths[lengths.joined([(8, right), (1, None)])].valid == ((0, 9), None)


def test_a_token_in_front_of_right_padding_is_valid(lengths: Lengths):
    right = lengths.seed(8, [8, 3], left=False)

    assert lengths[lengths.joined([(1, None), (8, right)])].valid == ((0, 9), (0, 4))


def test_two_padded_parts_do_not_join(lengths: Lengths):
    right = lengths.seed(8, [8, 3], left=False)

    assert lengths[lengths.joined([(8, right), (8, right)])].valid == ((0, 16), None)


@settings(deadline=None)
@given(
    st.integers(1, 5), st.integers(1, 4), st.integers(0, 2), st.integers(1, 3),
    st.lists(st.integers(1, 30), min_size=2, max_size=4), st.booleans(),
)  # fmt: skip
def test_windows_give_what_the_sample_alone_gives(
    kernel: int, stride: int, padding: int, dilation: int, sizes: list[int], left: bool
):
    """Held against torch's convolution of each sample alone."""
    size, batch = max(sizes) + 3, len(sizes)
    side: Side = "left" if left else "right"
    x = torch.zeros(batch, 1, size)
    reach = dilation * (kernel - 1)
    if size + 2 * padding <= reach:
        return
    with Follow(Batch(batch, sizes, side), {"x": x}, padded=size) as follow, torch.no_grad():
        y = functional.conv1d(
            x, torch.ones(1, 1, kernel), stride=stride, padding=padding, dilation=dilation
        )

    positions, flags = follow.where(y)

    axis = [p.axis for p in positions if p.axis > 0]
    if not axis:
        assert flags == LENGTH_UNKNOWN or y.shape[2] == 1
        return
    for sample, length in enumerate(sizes):
        valid = follow.batches._lengths[axis[0]].valid[sample]
        alone = max((length + 2 * padding - reach - 1) // stride + 1, 0)
        if valid is None:
            assert left
            assert (size - length) % stride  # only where windows begin elsewhere
            continue
        assert valid == ((size - length) // stride if left and alone else 0, alone)
        assert sum(valid) <= y.shape[2]


# ---- whole models --------------------------------------------------------------------------------------------


def held_against_alone(
    run: Callable[..., object],
    inputs: Mapping[str, Tensor],
    dims: Mapping[str, int],
    lengths: Sequence[int],
    side: Side = "right",
) -> tuple[int, int, list[str]]:
    """Run a padded batch, then each sample alone, and hold the results against each other in order.

    Args:
        run: Takes the inputs by name.
        inputs: The padded batch; the batch is dim 0.
        dims: The padded dim of each input.
        lengths: Of each sample.
        side: Where padding stands.

    Returns:
        How many results could be compared, how many could not, and those whose valid part has another content.
    """
    compared, left_out, different = 0, 0, []
    batch = _followed(run, inputs, Batch(len(lengths), lengths, side))
    for sample, length in enumerate(lengths):
        alone = {}
        for name, tensor in inputs.items():
            size = tensor.shape[dims[name]]
            start = size - length if side == "left" else 0
            alone[name] = tensor[sample : sample + 1].narrow(dims[name], start, length).clone()
        single = _followed(run, alone, Batch(1, [length], side))
        assert [r.op for r in single[0]] == [r.op for r in batch[0]]
        for i, (a, b) in enumerate(zip(batch[0], single[0], strict=True)):
            part = _part(a, sample, batch[1])
            if part is None or part.size != b.content.numel():
                left_out += 1
                continue
            compared += 1
            wanted = b.content.numpy().reshape(-1)
            if not np.allclose(part, wanted, rtol=1e-4, atol=1e-5, equal_nan=True):
                different.append(f"{i} {a.op} {tuple(a.content.shape)}, sample {sample}")
    return compared, left_out, different


def _followed(
    run: Callable[..., object], inputs: Mapping[str, Tensor], batch: Batch
) -> tuple[list[Result], Sequence[Extents]]:
    torch.manual_seed(0)
    with torch.no_grad(), Follow(batch, inputs) as follow:
        run(**inputs)
    assert follow.failures == []
    return follow.results, follow.batches._lengths.known


def _part(result: Result, sample: int, extents: Sequence[Extents]) -> np.ndarray | None:
    if result.flags & (UNKNOWN | LENGTH_UNKNOWN):
        return None
    data = result.content.contiguous().numpy()
    if not result.positions:
        return data.reshape(-1)
    factors = factor(data.shape, result.positions)
    part = None if factors is None else valid_part(data, factors, sample, extents)
    return None if part is None else part.reshape(-1)


class Encoder(nn.Module):
    """Self-attention that masks its padding, or forgets to."""

    def __init__(self, *, masks: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.masks = masks
        self.words, self.norm = nn.Embedding(50, 16), nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        x = self.norm(self.words(tokens))
        q, k, v = (p.unflatten(-1, (2, 8)).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
        seen = mask[:, None, None].expand(-1, 1, x.shape[1], -1) if self.masks else None
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.out(y.transpose(1, 2).flatten(2)) + x


def tokens(lengths: Sequence[int], side: Side) -> dict[str, Tensor]:
    torch.manual_seed(1)
    size = max(lengths)
    mask = torch.stack([torch.arange(size) < n for n in lengths])
    if side == "left":
        mask = mask.flip(1)
    return {"tokens": torch.randint(1, 50, (len(lengths), size)) * mask, "mask": mask}


@pytest.mark.parametrize("side", ["left", "right"])
def test_every_result_of_a_masked_encoder_is_comparable_and_equal(side: Side):
    sizes = [7, 4, 2]

    compared, left_out, different = held_against_alone(
        Encoder().eval(), tokens(sizes, side), {"tokens": 1, "mask": 1}, sizes, side
    )

    assert different == []
    assert (
        left_out == 2
    )  # the mask is spread over queries that do not say which of them are padding
    assert compared > 30


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_mask_that_never_arrives_shows_first_in_attention(side: Side):
    sizes = [7, 4, 2]

    _, _, different = held_against_alone(
        Encoder(masks=False).eval(), tokens(sizes, side), {"tokens": 1, "mask": 1}, sizes, side
    )

    assert "_scaled_dot_product_flash_attention_for_cpu" in different[0]
    assert not any("sample 0" in each for each in different)  # it has no padding


def test_a_norm_over_padding_shows_first_in_the_norm():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv1d(1, 8, 10, stride=5), nn.GroupNorm(8, 8), nn.GELU(), nn.Conv1d(8, 8, 3, stride=2)
    )
    sizes = [90, 60]
    x = torch.randn(2, 1, 90)
    x[1, :, 60:] = 0

    compared, left_out, different = held_against_alone(
        model.forward, {"input": x}, {"input": 2}, sizes
    )

    assert left_out == 0
    assert compared == 12
    assert "native_group_norm" in different[0]


def test_pooling_and_transposed_windows_keep_the_length():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv1d(1, 4, 4, stride=2),
        nn.MaxPool1d(2),
        nn.AvgPool1d(2, 1),
        nn.Upsample(scale_factor=2),
    )
    sizes = [40, 24, 16]
    x = torch.randn(3, 1, 40)

    compared, left_out, different = held_against_alone(
        model.forward, {"input": x}, {"input": 2}, sizes
    )

    assert (left_out, different) == (0, [])
    assert compared == 3 * 5  # the indices of the maxima are a result, too


def test_a_table_of_positions_is_recorded_where_it_is_used():
    """Positions that count from the padding on: the table carries nothing, but meets padded words."""
    table = nn.Embedding(20, 16)
    embed = nn.Embedding(50, 16)
    given = tokens([6, 3], "left")
    learned = []
    with torch.no_grad(), Follow(Batch(2, [6, 3], "left"), given) as follow:
        follow.batches._learn = lambda tensor, positions: learned.append(  # type: ignore[method-assign]
            (tuple(tensor.shape), [p.dim for p in positions], {p.axis for p in positions})
        )
        embed(given["tokens"]) + table(torch.arange(6)[None])

    assert learned == [((1, 6, 16), [1], {1})]
