"""An op reads another tensor in one run, or hides elements in one run only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import opdrift
from opdrift.records import Divergence

NOTHING = torch.zeros(5, 5)
NOWHERE, EVERYWHERE = torch.zeros(5, 5, dtype=torch.bool), torch.ones(5, 5, dtype=torch.bool)
Body = Callable[[Tensor, Tensor], object]


def first_of(folder: Path, left: Body, right: Body) -> Divergence:
    scores = torch.randn(5, 5, generator=torch.Generator().manual_seed(0))
    for name, body in (("left", left), ("right", right)):
        with opdrift.record(folder / name), torch.no_grad():
            body(scores.exp(), scores.sin() > 0.3)
    first = opdrift.diff(folder / "left", folder / "right").first
    assert first is not None
    return first


def added(hidden: Tensor) -> Tensor:
    return torch.zeros(5, 5).masked_fill(hidden, float("-inf"))


@pytest.mark.parametrize(
    ("left", "right", "op"),
    [
        (
            lambda x, hidden: x.masked_fill(hidden, float("-inf")).softmax(-1),
            lambda x, hidden: x.masked_fill(NOWHERE, float("-inf")).softmax(-1),
            "aten.masked_fill.Scalar",
        ),
        (
            lambda x, hidden: torch.where(hidden, x, 0.0).softmax(-1),
            lambda x, hidden: torch.where(EVERYWHERE, x, 0.0).softmax(-1),
            "aten.where.self",
        ),
        (
            lambda x, hidden: (x + added(hidden)).softmax(-1),
            lambda x, hidden: (added(hidden), (x + NOTHING).softmax(-1))[1],
            "aten.add.Tensor",
        ),
        (
            lambda x, hidden: x.masked_fill(hidden, float("-inf")).softmax(-1),
            lambda x, hidden: x.softmax(-1),
            "aten.masked_fill.Scalar",
        ),
        (
            lambda x, hidden: x.masked_fill_(hidden, float("-inf")).softmax(-1),
            lambda x, hidden: x.softmax(-1),
            "aten.masked_fill_.Scalar",
        ),
    ],
    ids=["masked_fill", "where", "added", "left out", "left out in place"],
)
def test_a_mask_that_hides_in_one_run_only_is_named_at_the_op_that_hides(
    tmp_path: Path, left: Body, right: Body, op: str
):
    """Whether the other run hands it a mask that hides nothing, or leaves it out."""
    first = first_of(tmp_path, left, right)

    assert (first.op, first.cause.slug) == (op, "mask")


@pytest.mark.parametrize(
    ("left", "right", "slug"),
    [
        (
            lambda x, hidden: x.masked_fill(hidden, 0.0).softmax(-1),
            lambda x, hidden: (x * 1.5).masked_fill(hidden, 0.0).softmax(-1),
            "structure",
        ),
        (
            lambda x, hidden: (x + x.cos()).softmax(-1),
            lambda x, hidden: (x.cos(), (x + NOTHING).softmax(-1))[1],
            "structure",
        ),
        (
            lambda x, hidden: (x.mul_(2.0) + x).softmax(-1),
            lambda x, hidden: (x + x).softmax(-1),
            "inplace",
        ),
        (
            lambda x, hidden: x.masked_fill(hidden, float("-inf")).softmax(-1),
            lambda x, hidden: x.bfloat16().float().masked_fill(hidden, float("-inf")).softmax(-1),
            "dtype",
        ),
        (
            lambda x, hidden: x.masked_fill(hidden, float("-inf")).softmax(-1),
            lambda x, hidden: (x.masked_fill(hidden, float("-inf")) * 1.5).softmax(-1),
            "structure",
        ),
        (
            lambda x, hidden: (x + added(hidden)).softmax(-1),
            lambda x, hidden: (x * 1.5 + added(hidden)).softmax(-1),
            "structure",
        ),
    ],
    ids=[
        "an op before the mask",
        "no mask is added",
        "nothing is hidden in place",
        "scores are cast before the mask",
        "masked scores are scaled",
        "scores are scaled before a mask is added",
    ],
)
def test_what_hides_nothing_is_no_mask(tmp_path: Path, left: Body, right: Body, slug: str):
    """The same changes beside a mask, or where there is none."""
    first = first_of(tmp_path, left, right)

    assert first.cause.slug == slug


def test_a_scale_before_another_does_not_take_its_place(tmp_path: Path):
    """Both multiply the same tensor, and only one of them with the number that the left run multiplies with."""
    first = first_of(
        tmp_path, lambda x, _: (x * 3.0).softmax(-1), lambda x, _: (x * 1.5 * 3.0).softmax(-1)
    )

    assert first.cause.slug == "structure"


def test_another_scale_is_the_same_op_with_other_arguments(tmp_path: Path):
    """No op of the right run has the arguments of the left one."""
    first = first_of(
        tmp_path, lambda x, _: (x * 3.0).softmax(-1), lambda x, _: (x * 1.5).softmax(-1)
    )

    assert first.cause.slug == "op-args"


def test_a_write_into_a_tensor_from_before_the_run_is_told_without_its_name(tmp_path: Path):
    """It has none: nothing but its content says that both runs have it."""
    target = torch.ones(5, 5), torch.ones(5, 5)

    def run(x: Tensor, y: Tensor, *, write: bool) -> Tensor:
        loss = (x - y).sum()
        if write:
            y.mul_(2.0)
        return loss + (x * y).sum()

    first = first_of(
        tmp_path,
        lambda x, _: run(x, target[0], write=False),
        lambda x, _: run(x, target[1], write=True),
    )

    assert (first.op, first.cause.slug) == ("aten.mul_.Tensor", "inplace")
