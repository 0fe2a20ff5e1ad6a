"""Fingerprints as they are stored: the record of one value, and all of a trace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from opdrift.tracefile.arrays import numbers
from opdrift.tracefile.columns import Ints, column, ints
from opdrift.tracefile.schema import BUCKET_NARROW_BYTES, BUCKET_WIDE_BYTES
from opdrift.tracefile.stored import StoredRows

#: Code of a component -> its bytes.
_WIDTH = {0: 4, 1: 8, 2: 2, 3: 2, 4: 1, 5: 1, 6: 1, 7: 2, 8: 2, 9: 4, 10: 4, 11: 8, 12: 8, 13: 1}


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The tfp1 record of one value (notes/fingerprint section 7).

    `sketch` has `tfp1.stored_buckets` buckets; None for at most 32 components,
    whose `sample` (component bits, zero-extended) is the whole content. `fp8` is the dtype of code 4, which
    stands for several formats; empty for other codes, and where it is not known.
    """

    raw: int
    n: int
    code: int
    min: float
    max: float
    absmax: float
    sum: float
    ssq: float
    nan: int
    pinf: int
    ninf: int
    zero: int
    subnormal: int
    sketch: npt.NDArray[np.float64] | None
    sample: npt.NDArray[np.uint64]
    fp8: str = ""

    @property
    def key(self) -> tuple[int, int, int]:
        """Equal exactly for equal contents (up to 2**-61)."""
        return (self.raw, self.n, self.code)

    @property
    def nonfinite(self) -> int:
        """How many components are NaN or infinite."""
        return self.nan + self.pinf + self.ninf


class FingerprintColumns:
    """All fingerprints of a trace; scalars as arrays, sketches and samples decoded on demand.

    Args:
        table: As in the schema; or without sketches and samples, with a column `stored` instead.
        stored: Where the sketches and samples of such a table are.
    """

    def __init__(self, table: pa.Table, stored: StoredRows | None = None) -> None:
        self.value: Ints = ints(table, "value")
        self.raw = numbers(column(table, "raw")).astype(np.uint64, copy=False)
        self.n: Ints = ints(table, "n")
        self.code: Ints = ints(table, "code")
        self._numbers = {
            name: numbers(column(table, name))
            for name in (
                "min",
                "max",
                "absmax",
                "sum",
                "ssq",
                "nan",
                "pinf",
                "ninf",
                "zero",
                "subnormal",
            )
        }
        self._stored = stored
        if stored is None:
            self._sketch = column(table, "sketch")
            self._sample = column(table, "sample")
        else:
            self._row: Ints = ints(table, "stored")

    def __len__(self) -> int:
        return len(self.value)

    def number(self, name: str) -> npt.NDArray[Any]:
        """The column of a statistic: min, max, absmax, sum, ssq, nan, pinf, ninf, zero, subnormal."""
        return self._numbers[name]

    def key(self, row: int) -> tuple[int, int, int]:
        """`Fingerprint.key` of a row."""
        return int(self.raw[row]), int(self.n[row]), int(self.code[row])

    def __getitem__(self, row: int) -> Fingerprint:
        number = self._numbers
        code = int(self.code[row])
        sketch, sample = self._long(row)
        return Fingerprint(
            raw=int(self.raw[row]),
            n=int(self.n[row]),
            code=code,
            min=float(number["min"][row]),
            max=float(number["max"][row]),
            absmax=float(number["absmax"][row]),
            sum=float(number["sum"][row]),
            ssq=float(number["ssq"][row]),
            nan=int(number["nan"][row]),
            pinf=int(number["pinf"][row]),
            ninf=int(number["ninf"][row]),
            zero=int(number["zero"][row]),
            subnormal=int(number["subnormal"][row]),
            sketch=decode_sketch(sketch),
            sample=_decode_sample(sample, _WIDTH[code]),
        )

    def _long(self, row: int) -> tuple[bytes, ...]:
        if self._stored is not None:
            return self._stored[int(self._row[row])]
        return self._sketch[row].as_py() or b"", self._sample[row].as_py() or b""


def decode_sketch(data: bytes) -> npt.NDArray[np.float64] | None:
    """The buckets of a stored sketch; None where none was stored."""
    buckets = _BUCKETS_OF.get(len(data))
    if buckets is None:
        return None
    if len(data) == buckets * BUCKET_NARROW_BYTES:
        return np.frombuffer(data, "<f4").astype(np.float64)
    cut = np.zeros((buckets, 8), np.uint8)
    cut[:, 8 - BUCKET_WIDE_BYTES :] = np.frombuffer(data, np.uint8).reshape(buckets, -1)
    return cut.view("<f8").reshape(buckets).astype(np.float64)


#: Length of a stored sketch -> its buckets.
_BUCKETS_OF: Final = {
    **{n * BUCKET_WIDE_BYTES: n for n in (16, 32)},
    **{n * BUCKET_NARROW_BYTES: n for n in (32, 64)},
}


def _decode_sample(data: bytes, width: int) -> npt.NDArray[np.uint64]:
    return np.frombuffer(data, f"<u{width}").astype(np.uint64)
