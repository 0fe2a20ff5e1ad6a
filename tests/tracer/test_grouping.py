"""What follows from a leaf of another type is no origin of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import opdrift
from opdrift.records import Diagnosis

ROWS = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Masked(nn.Module):
    """A product in the type of its weight, some of it replaced by a constant."""

    def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(ROWS.mT @ ROWS)
        self.make = make

    def forward(self, rows: Tensor) -> Tensor:
        found = rows.to(self.weight.dtype) @ self.weight
        return torch.where(found > 0, found, self.make(found)) * 2


def compared(
    folder: Path, left: Callable[[Tensor], Tensor], right: Callable[[Tensor], Tensor]
) -> Diagnosis:
    """The diagnosis of a float32 model and a bfloat16 one, with constants that these make."""
    for name, model in (("left", Masked(left)), ("right", Masked(right).bfloat16())):
        with torch.no_grad(), opdrift.record(folder / name, model=model, integrations=()):
            model(ROWS)
    return opdrift.diff(folder / "left", folder / "right")


def half(like: Tensor) -> Tensor:
    return torch.full((), 0.5, dtype=like.dtype)


def test_a_constant_in_the_type_of_the_weights_is_no_origin(tmp_path: Path) -> None:
    found = compared(tmp_path, half, half)

    assert [(o.name, o.cause.slug) for o in found.origins] == [("weight", "dtype")]


def test_another_number_in_that_type_is_an_origin(tmp_path: Path) -> None:
    found = compared(tmp_path, half, lambda like: torch.full((), 0.75, dtype=like.dtype))

    assert found.origins[0].name == "weight"
    assert len(found.origins) == 2


def test_a_constant_in_a_type_that_no_weight_has_is_an_origin(tmp_path: Path) -> None:
    """The weights are not why it is made in float64."""
    found = compared(tmp_path, half, lambda like: torch.full((), 0.5, dtype=torch.float64))

    assert found.origins[0].name == "weight"
    assert len(found.origins) == 2
