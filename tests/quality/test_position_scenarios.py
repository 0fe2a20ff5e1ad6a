"""Positions that count the padding on the left of a sample: harmless where only distances matter, at every layer.

Also what is said beside a verdict of rounding, and what is not taken for positions.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import opdrift

LENGTHS = (9, 5)
SAMPLE = 1
WIDTH = 16
#: Causes that say that something is wrong, or was called otherwise, because of the batch.
BLAME = {"mask", "position-ids", "padding", "batch-mixing", "nan", "op-args"}


def tokens(side: str) -> tuple[Tensor, Tensor, Tensor]:
    """The sample alone; the batch, padded with 0; the batch's mask."""
    generator = torch.Generator().manual_seed(4)
    each = [torch.randint(2, 40, (n,), generator=generator) for n in LENGTHS]
    ids = torch.zeros(2, max(LENGTHS), dtype=torch.long)
    for row, one in zip(ids, each, strict=True):
        start = len(row) - len(one) if side == "left" else 0
        row[start : start + len(one)] = one
    return each[SAMPLE][None], ids, ids != 0


class Turning(nn.Module):
    """Rotary positions 0, 1, 2, ... that all samples share, and causal attention."""

    def __init__(self, layers: int, fault: str = "") -> None:
        super().__init__()
        self.tokens = nn.Embedding(40, WIDTH)
        self.layers = nn.ModuleList(
            TurningLayer(fault if number == 1 else "") for number in range(layers)
        )
        self.head = nn.Linear(WIDTH, 5)
        self.register_buffer("speed", 100.0 ** -(torch.arange(4) / 4))

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        t = ids.shape[1]
        cos, sin = angles(self.speed, t)
        keep = torch.ones(t, t, dtype=torch.bool).tril() & mask[:, None, :]
        # as libraries do: a mask that hides nothing is dropped
        every = bool(mask.all())
        keep = None if every else (keep | torch.eye(t, dtype=torch.bool))[:, None]
        x = self.tokens(ids)
        for layer in self.layers:
            x = layer(x, cos, sin, keep)
        return self.head(x)


class TurningLayer(nn.Module):
    """One layer, which may make a mistake with its queries and keys or with its mask."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault
        self.norm = nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, keep: Tensor | None) -> Tensor:
        b, t, e = x.shape
        h = self.norm(x)
        q, k, v = (m(h).view(b, t, 2, 8).transpose(1, 2) for m in (self.q, self.k, self.v))
        q = turned(q, cos, sin)
        if self.fault != "keys are not turned":
            k = turned(k, cos, sin)
        if self.fault == "values are turned":
            v = turned(v, cos, sin)
        bare = keep is None or self.fault == "mask is left out"
        y = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=None if bare else keep, is_causal=bare
        )
        return x + self.out(y.transpose(1, 2).reshape(b, t, e))


def angles(speed: Tensor, t: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions 0 to t - 1, made as transformers makes them."""
    angle = (speed[None, :, None] @ torch.arange(t)[None, None].float()).transpose(1, 2)
    turn = torch.cat((angle, angle), -1)
    return (turn.cos() * 1.0).unsqueeze(1), (turn.sin() * 1.0).unsqueeze(1)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Both halves of each head turned by an angle, as in LLaMA."""
    return x * cos + torch.cat((-x[..., 4:], x[..., :4]), -1) * sin


class Convolved(nn.Module):
    """Tokens and learned positions, which do not count padding on the right, and a convolution that reads padding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(40, WIDTH), nn.Embedding(16, WIDTH)
        self.convolution, self.head = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.Linear(WIDTH, 3)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        return self.head(self.convolution(x.transpose(1, 2)).transpose(1, 2))


class Pooled(nn.Module):
    """Returns all positions, and what a layer makes of one; only a product may round before, or nothing."""

    def __init__(self, place: int, *, rounds: bool) -> None:
        super().__init__()
        self.place = place
        self.tokens, self.pool = nn.Embedding(40, WIDTH), nn.Linear(WIDTH, 3)
        self.turning = TurningLayer("") if rounds else None
        self.register_buffer("speed", 100.0 ** -(torch.arange(4) / 4))

    def forward(self, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        x = self.tokens(ids)
        if self.turning is not None:
            keep = (mask[:, None, :] | torch.eye(ids.shape[1], dtype=torch.bool))[:, None]
            x = self.turning(x, *angles(self.speed, ids.shape[1]), keep)
        return x, self.pool(x[:, self.place])


class Marked(Turning):
    """Looks at the first token, which may be padding, and adds so much of its number."""

    def __init__(self, weight: float) -> None:
        super().__init__(layers=1)
        self.weight = weight

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return super().forward(ids, mask) + ids[:, :1, None] * self.weight


def compared(model: nn.Module, side: str, folder: Path, *, flipped: bool) -> opdrift.Diagnosis:
    """The sample alone against the same sample in the batch, or the other way round."""
    model.eval()
    one, ids, mask = tokens(side)
    alone, among = folder / "alone.trace", folder / "among.trace"
    with torch.no_grad():
        with opdrift.record(alone, model=model, batch=opdrift.Batch(1)):
            model(one, torch.ones_like(one, dtype=torch.bool))
        with opdrift.record(among, model=model, batch=opdrift.Batch(2, LENGTHS, side)):
            model(ids, mask)
    if flipped:
        return opdrift.diff(among, alone, samples=(SAMPLE, 0))
    return opdrift.diff(alone, among, samples=(0, SAMPLE))


flips = pytest.mark.parametrize("flipped", [False, True], ids=["alone first", "batch first"])


@flips
@pytest.mark.parametrize("layers", [1, 2, 4])
def test_positions_shifted_by_padding_are_rounding_in_every_layer(
    layers: int, flipped: bool, tmp_path: Path
):
    torch.manual_seed(0)

    found = compared(Turning(layers), "left", tmp_path, flipped=flipped)

    assert found.verdict == "rounding", found.first
    assert not BLAME & {each.slug for each in found.causes}


@flips
@pytest.mark.parametrize("fault", ["keys are not turned", "values are turned"])
def test_positions_whose_shift_does_not_cancel_are_found_behind_the_first_layer(
    fault: str, flipped: bool, tmp_path: Path
):
    torch.manual_seed(0)

    found = compared(Turning(3, fault), "left", tmp_path, flipped=flipped)

    assert found.verdict == "diverged"
    assert found.first is not None
    assert (found.first.module, found.first.cause.slug) == ("layers.1", "position-ids")


@flips
def test_a_mask_left_out_behind_shifted_positions_is_the_mask(flipped: bool, tmp_path: Path):
    torch.manual_seed(0)

    found = compared(Turning(3, "mask is left out"), "left", tmp_path, flipped=flipped)

    assert found.verdict == "diverged"
    assert found.first is not None
    assert (found.first.module, found.first.cause.slug) == ("layers.1", "mask")


@flips
def test_tokens_with_positions_added_are_not_taken_for_positions(flipped: bool, tmp_path: Path):
    """In the run of one sample nothing but the input that they are made of tells them apart."""
    torch.manual_seed(0)

    found = compared(Convolved(), "right", tmp_path, flipped=flipped)

    assert found.verdict == "diverged"
    assert found.first is not None
    assert found.first.op == "aten.convolution.default"
    assert found.causes[0].slug == "padding"
    assert "position-ids" not in {each.slug for each in found.causes}


FIRST = "the first valid position of each sample, x[torch.arange(len(x)), mask"
LAST = "the last valid position of each sample, x[torch.arange(len(x)), lengths"


@pytest.mark.parametrize(
    ("side", "place", "rounds", "remedy"),
    [("left", 0, True, FIRST), ("left", 0, False, FIRST), ("right", -1, False, LAST)],
    ids=["left, behind rounding", "left", "right"],
)
def test_a_position_taken_from_padding_is_told_by_its_own_facts(
    side: str, place: int, rounds: bool, remedy: str, tmp_path: Path
):
    """Whether its input is equal, what becomes of it, and on which side to pad instead."""
    torch.manual_seed(0)

    found = compared(Pooled(place, rounds=rounds), side, tmp_path, flipped=False)

    assert found.verdict == "diverged"
    first = found.first
    assert first is not None
    assert (first.op, first.cause.slug) == ("aten.select.int", "padding")
    assert first.inputs_match is not rounds
    # what one run returns of all positions differs by rounding only
    assert first.final_relative_difference is not None
    assert first.final_relative_difference > 0.01
    assert remedy in first.cause.try_
    assert f"pad on the {side}" not in first.cause.try_


@flips
@pytest.mark.parametrize(("weight", "verdict"), [(0.0, "rounding"), (0.5, "diverged")])
def test_a_token_taken_from_padding_counts_by_what_becomes_of_it(
    weight: float, verdict: str, flipped: bool, tmp_path: Path
):
    """Libraries look at the first position for packed sequences, and use it for nothing where there are none."""
    torch.manual_seed(0)

    found = compared(Marked(weight), "left", tmp_path, flipped=flipped)

    assert found.verdict == verdict
    assert ("padding" in {each.slug for each in found.causes}) is (verdict == "diverged")


def test_an_argument_that_was_allowed_to_matter_little_is_still_named_beside_rounding(
    tmp_path: Path,
):
    """Whole batches that a tolerance lets pass were called otherwise all the same."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
    traces = []
    for number, eps in enumerate((1e-5, 1e-6)):
        model = nn.LayerNorm(8, eps=eps)
        traces.append(tmp_path / f"{number}.trace")
        with torch.no_grad(), opdrift.record(traces[-1], model=model):
            model(x)

    found = opdrift.diff(*traces, tolerance=(1e-2, 1e-2))

    assert found.verdict == "rounding"
    assert {each.slug for each in found.causes} >= {"rounding", "op-args"}
