"""Rows as columns: the compiled core's are those that NumPy makes."""

import numpy as np
import pyarrow as pa
import pytest
import torch

from opdrift.errors import InvalidOptionError
from opdrift.fingerprint import ENGINES, load_engine
from opdrift.tracefile.writer import fingerprint_columns

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.int64,
    torch.bool,
    torch.float64,
    torch.int8,
    torch.float8_e4m3fn,
)
SIZES = (0, 1, 31, 32, 33, 64, 4095, 4096, 5000)


def rows_of(engine):
    """A row of every dtype and size, with values that take all bits of a sketch."""
    torch.manual_seed(0)
    contents = [(torch.randn(n) * 1e3).to(dtype) for dtype in DTYPES for n in SIZES]
    rows = np.zeros(len(contents), engine.ROW)
    for place, content in enumerate(contents):
        rows[place] = engine.fingerprint(content, 100 + place)
    return rows


@pytest.mark.parametrize("name", [name for name in ENGINES if name != "numpy"])
def test_the_core_makes_the_columns_that_numpy_makes(name, monkeypatch):
    """Also from the middle of a ring, and from no rows."""
    monkeypatch.setenv("OPDRIFT_FINGERPRINT", name)
    try:
        engine = load_engine()
    except InvalidOptionError:
        pytest.skip("not to be had here")
    rows = rows_of(engine)

    for some in (rows, rows[7:], rows[:1], rows[:0]):
        for ours, expected in zip(engine.columns(some), fingerprint_columns(some), strict=True):
            assert pa.array(ours).equals(pa.array(expected))
