"""Launch the Triton kernel with as little Python as there can be.

Triton's own launcher binds and specialises arguments at every call (some 10 us); here a compiled kernel is
kept for each way of reading memory and called directly.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Final

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from opdrift.fingerprint import triton_kernel as kernel
from opdrift.fingerprint.partials import PARTIAL
from opdrift.fingerprint.tensors import FIRST_FP8_KIND
from opdrift.tfp1 import (
    FP8_FORMATS,
    SAMPLE_SEED,
    SIGN_SEED,
    Code,
    P,
    R,
    fp8_smallest_normal,
    fp8_values,
    splitmix64,
)

SMALL: Final = 4096
"""Up to so many components one program does a tensor in a few steps."""
TILE: Final = 4096 * int(kernel.LARGE_CHUNKS.value)
PROGRAMS: Final = 512
"""At most so many programs an item: some rounds of the largest GPUs, and few rows to copy."""
_MAX_TILES: Final = 1000  # of a program: counts of a lane are kept in 16 bits
_OPTIONS: Final = {"num_warps": 8, "enable_fp_fusion": False}
_INTEGERS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Launch = Callable[..., Any]


class TritonKernel:
    """Writes partial rows on one device that Triton compiles for.

    Args:
        device: Where tensors and rows are.
    """

    name: Final = f"triton {triton.__version__}"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tables: dict[tuple[int, int], Tensor] = {}
        self._compiled: dict[tuple[int, bool, bool, bool], Any] = {}

    def split(self, n: int) -> tuple[int, int]:
        """How many parts n components have, and how many components each part but the last has."""
        if n <= SMALL:
            return 1, SMALL
        tiles = -(-n // (TILE * PROGRAMS))
        if tiles > _MAX_TILES:
            raise ValueError(f"{n} components are more than the kernel counts")
        return -(-n // (TILE * tiles)), TILE * tiles

    def write(
        self, data: Tensor, kind: int, batch: tuple[int, int, int], rows: Tensor, at: int
    ) -> None:
        """Launch what writes the partial rows of a tensor, on the current stream of the current device.

        Args:
            data: Contiguous memory, as `tensors.plain_on_device` gives it.
            kind: What it holds.
            batch: (outer, items, inner): item b is `[:, b, :]` of the components.
            rows: Rows of int64 words.
            at: The first of the rows to write; items in turn.
        """
        outer, items, inner = batch
        n = outer * inner
        parts, span = self.split(n)
        small, strided = n <= SMALL, outer > 1
        tiles = 1 if small else span // TILE
        code = int(Code.FP8) if kind >= FIRST_FP8_KIND else kind
        table = self._tables.get((code, kind))
        if table is None:
            table = self._make_table(Code(code), kind)
        address = data.data_ptr()
        variant = (code, strided, small, address % 16 == 0)
        grid = (parts, items, 1)
        numbers = (n, tiles, inner, code, strided, small)
        compiled = self._compiled.get(variant)
        if compiled is None:
            self._compiled[variant] = self._launch(grid, data, rows, at, table, numbers)
            return
        compiled[grid](address, rows.data_ptr() + at * PARTIAL.itemsize, table.data_ptr(), *numbers)

    def _launch(
        self,
        grid: tuple[int, int, int],
        data: Tensor,
        rows: Tensor,
        at: int,
        table: Tensor,
        numbers: tuple[int, int, int, int, bool, bool],
    ) -> Any:
        """Launch through Triton's own launcher, which compiles; gives None under its interpreter."""
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction(), torch.no_grad():
            bits = data.view(_INTEGERS[data.element_size()])
            return kernel.fingerprint[grid](bits, rows[at:], table, *numbers, **_OPTIONS)

    def _make_table(self, code: Code, kind: int) -> Tensor:
        with torch.inference_mode(mode=False):
            table = torch.from_numpy(_table(code, kind).copy()).to(self._device)
        self._tables[int(code), kind] = table
        return table


@cache
def _table(code: Code, kind: int) -> NDArray[np.int64]:
    """The words of triton_kernel's table for one kind of digits."""
    base = (
        pow(R, 2, P) if code.bytes == 8 else R
    )  # the kernel gives high halves their factor r later
    limbs = ((0, 31), (31, 30), (61, 0)) if code.bytes < 4 else ((0, 21), (21, 20), (41, 20))
    words = [0] * int(kernel.TABLE_WORDS.value)
    for row in range(64):
        weight = pow(base, 64 * row, P)
        for limb, (low, size) in enumerate(limbs):
            words[kernel.WEIGHTS.value + 4 * row + limb] = weight >> low & (1 << size) - 1
        words[kernel.SIGNS.value + row] = splitmix64(SIGN_SEED + row)
    for chunk in range(kernel.LARGE_CHUNKS.value):
        weight = pow(base, 4096 * chunk, P)
        for lane in range(64):
            words[kernel.LANES.value + 64 * chunk + lane] = weight
            weight = weight * base % P
    for k in range(32):
        words[kernel.JITTER.value + k] = splitmix64(SAMPLE_SEED + k) >> 32
    words[kernel.STEP.value] = pow(base, TILE, P)
    if code is Code.FP8:
        name = FP8_FORMATS[kind - FIRST_FP8_KIND]
        numbers = np.array([*fp8_values(name), fp8_smallest_normal(name)], np.float32)
        *values, words[kernel.SMALLEST.value] = numbers.view(np.uint32).tolist()
        words[kernel.VALUES.value : kernel.VALUES.value + 256] = values
    return np.array(words, np.uint64).view(np.int64)
