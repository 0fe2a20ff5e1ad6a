"""What the tests of fingerprints share: tensors of every dtype, and when two rows are the same."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from opdrift import tfp1
from opdrift.tfp1 import Code

EXACT = (
    "raw",
    "n",
    "min",
    "max",
    "absmax",
    "nan",
    "pinf",
    "ninf",
    "zero",
    "sub",
    "version",
    "code",
    "flags",
)
COMPONENT_DTYPE = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    *(getattr(torch, name) for name in tfp1.FP8_FORMATS),
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
    *COMPONENT_DTYPE,
)


def tensor_of(dtype: torch.dtype, n: int, seed: int = 0) -> torch.Tensor:
    """Values of all sizes; for floats also NaN, infinities, both zeros and a subnormal."""
    make = torch.Generator().manual_seed(seed)
    if dtype in COMPONENT_DTYPE:
        return torch.view_as_complex(tensor_of(COMPONENT_DTYPE[dtype], 2 * n, seed).view(n, 2))
    if dtype is torch.bool:
        return torch.randint(0, 2, (n,), generator=make).bool()
    if not dtype.is_floating_point or dtype.itemsize == 1:
        return (
            torch.randint(0, 256, (n * dtype.itemsize,), generator=make).to(torch.uint8).view(dtype)
        )
    spread = torch.exp(3 * torch.randn(n, dtype=torch.float64, generator=make))
    x = (spread * torch.randn(n, dtype=torch.float64, generator=make)).to(dtype)
    if n > 20:
        subnormal = torch.finfo(dtype).tiny / 4
        special = torch.tensor(
            [math.nan, math.inf, -math.inf, 0.0, -0.0, subnormal], dtype=torch.float64
        )
        x[torch.randperm(n, generator=make)[:6]] = special.to(dtype)
    return x


def sketch_of(row: np.void) -> np.ndarray:
    wide = Code(row["code"]).bytes >= 4
    return row["sketch"].view(np.float64 if wide else np.float32).astype(np.float64)


def assert_same(left: np.void, right: np.void) -> None:
    """All that every engine must agree on exactly, and the rest within tolerance."""
    assert [left[name] for name in EXACT] == [right[name] for name in EXACT]
    assert left["sample"].tolist() == right["sample"].tolist()
    norm = math.sqrt(left["ssq"])
    assert left["sum"] == pytest.approx(right["sum"], rel=1e-9, abs=1e-9 * norm * 32)
    assert left["ssq"] == pytest.approx(right["ssq"], rel=1e-9)
    np.testing.assert_allclose(sketch_of(left), sketch_of(right), rtol=2e-7, atol=2e-7 * norm)
