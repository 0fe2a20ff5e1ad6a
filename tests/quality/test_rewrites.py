"""The same mathematics written otherwise: rounding where nothing is wrong, and the place where something is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from scenarios import Book, Of, Pair, Scenario, check, infer
from torch import Tensor, nn

import opdrift
from opdrift.records import Diagnosis

BOOK = Book()
diverges, rounds = BOOK.diverges, BOOK.rounds

A = torch.randn(64, 512, generator=torch.Generator().manual_seed(4))
B = torch.randn(512, 48, generator=torch.Generator().manual_seed(5))


# ---- one product in parts ------------------------------------------------------------------------------------


def in_parts(parts: int, last: float = 1.0) -> Callable[[], Tensor]:
    """A product outside of modules, summed part by part; the last part times a number."""

    def product() -> Tensor:
        size = A.shape[1] // parts
        total = A[:, :size] @ B[:size]
        for start in range(size, A.shape[1], size):
            part = A[:, start : start + size] @ B[start : start + size]
            if last != 1.0 and start + size == A.shape[1]:
                part = part * last
            total = total + part
        return total.relu()

    return product


@rounds
def a_product_whole_and_in_four_parts() -> Pair:
    return Pair(in_parts(1), in_parts(4))


@rounds
def a_product_in_two_parts_and_in_four() -> Pair:
    return Pair(in_parts(2), in_parts(4))


@diverges(cause="structure")
def a_product_in_two_parts_and_in_four_of_which_one_is_scaled() -> Pair:
    return Pair(in_parts(2), in_parts(4, last=1.01))


# ---- equal numbers in two types --------------------------------------------------------------------------------


class Overflowing(nn.Module):
    """A layer of float16 whose last product passes the largest number, unless its weight is kept in float32."""

    def __init__(self, *, keep: bool) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(16, 64, bias=False), nn.Linear(64, 16, bias=False)
        self.half()
        with torch.no_grad():
            self.inner.weight.mul_(60)
            self.outer.weight.abs_().mul_(400)
        if keep:
            self.outer.float()

    def forward(self, x: Tensor) -> Tensor:
        y = self.outer(self.inner(x).relu().to(self.outer.weight.dtype))
        return (y + x) * 2


def diffed(
    folder: Path, runs: tuple[Callable[[], object], ...], models: object = None
) -> Diagnosis:
    for number, run in enumerate(runs):
        model = models[number] if isinstance(models, tuple) else None
        with torch.no_grad(), opdrift.record(folder / str(number), model=model):
            run()
    return opdrift.diff(folder / "0", folder / "1")


def test_what_is_cast_for_a_weight_of_another_type_is_no_origin_and_no_infinity_amplifies(
    tmp_path: Path,
):
    """The weight's type is the fault; the cast of equal numbers to it follows, and infinities have no size."""
    models = []
    for keep in (True, False):
        torch.manual_seed(14)
        models.append(Overflowing(keep=keep))
    x = torch.full((3, 16), 4.0, dtype=torch.float16)

    found = diffed(tmp_path, tuple(lambda m=m: m(x) for m in models), tuple(models))

    assert found.verdict == "diverged"
    assert [(o.name, o.cause.slug) for o in found.origins] == [("outer.weight", "dtype")]
    assert found.amplifiers == ()


def test_a_cast_of_equal_numbers_is_no_origin_beside_other_weights(tmp_path: Path):
    """The weight has other numbers, in another type: the cast to go with it adds nothing that differs."""
    models = []
    for keep in (True, False):
        torch.manual_seed(14)
        models.append(Overflowing(keep=keep))
    with torch.no_grad():
        models[0].outer.weight.mul_(0.5)
    x = torch.full((3, 16), 1e-2, dtype=torch.float16)

    found = diffed(tmp_path, tuple(lambda m=m: m(x) for m in models), tuple(models))

    assert [(o.name, o.cause.slug) for o in found.origins] == [("outer.weight", "weights")]


SUMMAND = nn.Parameter(torch.randn(64, generator=torch.Generator().manual_seed(7)).half())
HALF = torch.randn(8, 64, generator=torch.Generator().manual_seed(6)).half()


@diverges("aten.add.Tensor", cause="dtype", says=("the left run computes in float16",))
def a_sum_is_cast_on_one_side_and_what_goes_into_it_on_the_other() -> Pair:
    """The casts read different tensors: they are no pair."""
    models = (
        Of(lambda m, x: (x + m.b).float().relu(), b=SUMMAND),
        Of(lambda m, x: (x.float() + m.b).relu(), b=SUMMAND),
    )
    return infer(models, HALF)


@pytest.mark.parametrize("scenario", BOOK.scenarios, ids=lambda s: s.make.__name__)
def test_place_and_cause(scenario: Scenario, tmp_path: Path):
    check(scenario, tmp_path)
