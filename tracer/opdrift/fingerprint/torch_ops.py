"""The fingerprint in torch's own ops: for any device, slow, and without waiting for it.

About a hundred small ops a tensor. They need int64 and float64 arithmetic, which some devices lack.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from opdrift.fingerprint.tensors import FIRST_FP8_KIND, flat
from opdrift.tfp1 import (
    CHUNK_SEED,
    FP8_FORMATS,
    ROW_LANES,
    SAMPLE_SEED,
    SAMPLES,
    SIGN_SEED,
    Code,
    P,
    R,
    fp8_smallest_normal,
    fp8_values,
    splitmix64,
)

SPAN: Final = 1 << 20
"""Components of a part: some tens of megabytes of temporaries."""
_BLOCK: Final = 512
"""Digits that are weighted and summed at once: 512 products of 32 and 21 bits stay below 2^63."""
_PAIRS: Final = _BLOCK // 2
_M32: Final = (1 << 32) - 1
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NUMBERS: Final = {
    Code.F32: torch.float32,
    Code.F64: torch.float64,
    Code.F16: torch.float16,
    Code.BF16: torch.bfloat16,
    Code.I8: torch.int8,
}
_SMALLEST_NORMAL: Final = {
    Code.F32: 2.0**-126,
    Code.F64: 2.0**-1022,
    Code.F16: 2.0**-14,
    Code.BF16: 2.0**-126,
}


class TorchOps:
    """Writes partial rows on one device.

    Args:
        device: Where tensors and rows are.
        span: Components of a part, a multiple of 4096.
    """

    name: Final = "torch ops"

    def __init__(self, device: torch.device, *, span: int = SPAN) -> None:
        self._device = device
        self._span = span
        self._weights: dict[int, Tensor] = {}
        self._fp8_values: dict[int, Tensor] = {}
        words = [splitmix64(SIGN_SEED + row) for row in range(64)]
        signs = [[-1.0 if word >> lane & 1 else 1.0 for lane in range(ROW_LANES)] for word in words]
        self._signs = self._table(signs, torch.float64)
        self._jitter = self._table([splitmix64(SAMPLE_SEED + k) >> 32 for k in range(SAMPLES)])

    def split(self, n: int) -> tuple[int, int]:
        """How many parts n components have, and how many components each part but the last has."""
        return max(1, -(-n // self._span)), self._span

    def write(
        self, data: Tensor, kind: int, batch: tuple[int, int, int], rows: Tensor, at: int
    ) -> None:
        """Enqueue what writes the partial rows of a tensor, on the current stream.

        Args:
            data: Contiguous memory, as `tensors.plain_on_device` gives it.
            kind: What it holds.
            batch: (outer, items, inner): item b is `[:, b, :]` of the components.
            rows: Rows of int64 words.
            at: The first of the rows to write; items in turn.
        """
        code = Code.FP8 if kind >= FIRST_FP8_KIND else Code(kind)
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction(), torch.no_grad():
            bits = flat(data).view(_INTEGERS[code.bytes]).view(batch)
            parts, _ = self.split(batch[0] * batch[2])
            for item in range(batch[1]):
                start = at + item * parts
                own = flat(bits[:, item])
                self._write_item(own, kind, code, rows[start : start + parts])

    def _write_item(self, bits: Tensor, kind: int, code: Code, rows: Tensor) -> None:
        sample = self._sample(bits, code)
        for part, row in enumerate(rows):
            start = part * self._span
            piece = bits[start : start + self._span]
            # in the order of partials.PARTIAL
            raw = self._digest(piece, code)
            words = [raw & _M32, raw >> 32, torch.zeros_like(raw), torch.zeros_like(raw)]
            counts, sums, sketch = self._statistics(piece, kind, code, start)
            padding = torch.zeros(3, dtype=torch.int64, device=self._device)
            row.copy_(
                torch.cat(
                    [
                        torch.stack(words),
                        counts,
                        sums.view(torch.int64),
                        padding,
                        sample,
                        sketch.view(torch.int64),
                    ]
                )
            )

    # ---- digest and sample -------------------------------------------------------------------------

    def _digest(self, bits: Tensor, code: Code) -> Tensor:
        """`sum digit[i] r^i mod P`, as one number below P on the device."""
        if code.bytes == 8:
            bits = bits.view(torch.int32)  # low half first
        digits = bits.to(torch.int64) & ((1 << min(8 * code.bytes, 32)) - 1)
        level = 0
        values = self._weigh(digits, level)
        while len(values) > 1:  # the same once more, with the blocks' values as pairs of digits
            level += 1
            values = self._weigh(torch.stack([values & _M32, values >> 32], -1).view(-1), level)
        return values[0]

    def _weigh(self, digits: Tensor, level: int) -> Tensor:
        """The weighted sum mod P of each block of digits; the weights in limbs of 21, 20 and 20 bits."""
        blocks = pad(digits, (0, max(-len(digits) % _BLOCK, _BLOCK - len(digits)))).view(-1, _BLOCK)
        first, second, third = (
            _reduce((blocks * limb).sum(-1)) for limb in self._limbs(level).unbind()
        )
        return _reduce(_reduce(first + _turn(second, 21)) + _turn(third, 41))

    def _limbs(self, level: int) -> Tensor:
        """Weights of a block: of single digits, or higher up of pairs (x, 2^32 x)."""
        found = self._weights.get(level)
        if found is None:
            weights = [1]
            ratio = pow(R, _BLOCK * _PAIRS ** (level - 1), P) if level else R
            for _ in range((_PAIRS if level else _BLOCK) - 1):
                weights.append(weights[-1] * ratio % P)
            if level:
                weights = [x for weight in weights for x in (weight, (weight << 32) % P)]
            limbs = [[w >> low & (1 << size) - 1 for w in weights] for low, size in _LIMBS]
            found = self._weights[level] = self._table(limbs)
        return found

    def _sample(self, bits: Tensor, code: Code) -> Tensor:
        """The components at tfp1.sample_positions(n), zero-extended; 0 beyond them."""
        n = len(bits)
        if n <= SAMPLES:
            chosen = pad(bits.to(torch.int64), (0, SAMPLES - n))
        else:
            stride = n >> 5
            k = torch.arange(SAMPLES, device=self._device)
            chosen = bits[k * stride + (self._jitter * stride >> 32)].to(torch.int64)
        return chosen if code.bytes == 8 else chosen & ((1 << 8 * code.bytes) - 1)

    # ---- statistics --------------------------------------------------------------------------------

    def _values(self, bits: Tensor, kind: int, code: Code) -> Tensor:
        """The components as float64: exact but for 64-bit integers beyond 2^53."""
        if code is Code.FP8:
            table = self._fp8_values.get(kind)
            if table is None:
                values = fp8_values(FP8_FORMATS[kind - FIRST_FP8_KIND])
                table = self._fp8_values[kind] = self._table(values, torch.float64)
            return table[bits.to(torch.int64)]
        if code in (Code.U16, Code.U32):
            return (bits.to(torch.int64) & ((1 << 8 * code.bytes) - 1)).to(torch.float64)
        if code is Code.U64:  # the upper half is exact, so that the sum is rounded once
            upper = ((bits >> 32) & _M32).to(torch.float64) * 4294967296.0
            return upper + (bits & _M32).to(torch.float64)
        return bits.view(_NUMBERS.get(code, bits.dtype)).to(torch.float64)

    def _statistics(
        self, bits: Tensor, kind: int, code: Code, start: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Five counts; min, max, sum and sum of squares; 64 buckets."""
        none = torch.zeros(0, dtype=torch.float64, device=self._device)
        values = none if code is Code.RAW else self._values(bits, kind, code)
        finite = torch.isfinite(values)
        kept = torch.where(finite, values, 0.0)
        zero = values == 0
        counts = [torch.isnan(values), values == math.inf, values == -math.inf, zero]
        normal = _SMALLEST_NORMAL.get(code, 0.0)
        if code is Code.FP8:
            normal = fp8_smallest_normal(FP8_FORMATS[kind - FIRST_FP8_KIND])
        counts.append((values.abs() < normal) & ~zero)
        edge = none.new_full((1,), math.inf)  # also where there is no value at all
        extremes = (
            torch.cat([torch.where(finite, values, math.inf), edge]).amin(),
            torch.cat([torch.where(finite, values, -math.inf), -edge]).amax(),
        )
        sums = torch.stack([*extremes, kept.sum(), (kept * kept).sum()])
        return torch.stack([count.sum() for count in counts]), sums, self._sketch(kept, start)

    def _sketch(self, values: Tensor, start: int) -> Tensor:
        """The buckets of values from component `start` on, as tfp1.sketch_slot says."""
        chunks = -(-len(values) // (64 * ROW_LANES))
        rows = chunks * 64
        lanes = pad(values, (0, rows * ROW_LANES - len(values))).view(rows, ROW_LANES)
        row = torch.arange(rows, device=self._device) + start // ROW_LANES
        mixed = _mix32(row)
        signed = lanes * self._signs[row & 63] * (1.0 - 2.0 * (mixed & 1))[:, None]
        lane = torch.arange(ROW_LANES, device=self._device)
        within = signed.gather(1, lane ^ ((mixed >> 1) & 7)[:, None] * 8)
        chunk = torch.arange(chunks, device=self._device) + start // (64 * ROW_LANES)
        turn = _mix32(chunk ^ CHUNK_SEED) & 63
        return within.view(chunks, 64, ROW_LANES).sum(1).gather(1, lane ^ turn[:, None]).sum(0)

    def _table(self, values: Sequence[object], dtype: torch.dtype = torch.int64) -> Tensor:
        with torch.inference_mode(mode=False):
            return torch.tensor(values, dtype=dtype).to(self._device)


_LIMBS: Final = ((0, 21), (21, 20), (41, 20))


def _reduce(x: Tensor) -> Tensor:
    """`x mod P`, of x from 0 to 2^63 - 1."""
    folded = (x & P) + (x >> 61)
    return torch.where(folded >= P, folded - P, folded)


def _turn(x: Tensor, by: int) -> Tensor:
    """`x * 2^by mod P`, of x below P: a rotation of 61 bits."""
    return ((x & ((1 << (61 - by)) - 1)) << by) | (x >> (61 - by))


def _mix32(x: Tensor) -> Tensor:
    """tfp1.mix32 of many, in int64: products of 32 bits wrap, and their low halves are right."""
    x = (x & _M32) * 0x9E3779B1 & _M32
    x = (x ^ x >> 16) * 0x85EBCA6B & _M32
    x = (x ^ x >> 13) * 0xC2B2AE35 & _M32
    return x ^ x >> 16
