"""The row that a fingerprint is written into: 640 bytes, little-endian."""

from __future__ import annotations

from typing import Final

import numpy as np

ROW_BYTES: Final = 640

ROW: Final = np.dtype(
    [
        ("raw", "<u8"),
        ("n", "<i8"),  # components
        ("min", "<f8"),  # over the finite values; +inf and -inf where there is none
        ("max", "<f8"),
        ("absmax", "<f8"),
        ("sum", "<f8"),
        ("ssq", "<f8"),  # sum of squares
        ("nan", "<i8"),
        ("pinf", "<i8"),
        ("ninf", "<i8"),
        ("zero", "<i8"),  # +0 and -0
        ("sub", "<i8"),  # subnormal in the component's own format
        ("sketch", "u1", 256),  # 32 float64 for components of 4 and 8 bytes, else 64 float32
        ("sample", "<u8", 32),  # bit patterns at tfp1.sample_positions(n)
        ("version", "<u4"),
        ("code", "<u4"),  # tfp1.Code
        ("flags", "<u4"),
        ("item", "<u4"),  # which item of a batch; 0 for a whole tensor
        ("value", "<i8"),  # the caller's id of the value
        ("pad", "<u8"),
    ]
)
assert ROW.itemsize == ROW_BYTES

HAS_RAW: Final = 1
HAS_STATISTICS: Final = 2
HAS_SKETCH: Final = 4
HAS_SAMPLE: Final = 8
