"""Numbers from NumPy to Arrow and back by their memory.

pyarrow's own conversions import pandas, where it is installed: half a second, in the middle of a program's run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

#: Arrow's names of types that NumPy calls otherwise.
_NUMPY: Final = {"double": "float64", "float": "float32", "halffloat": "float16"}


def array(column: Sequence[Any] | npt.NDArray[Any], kind: pa.DataType) -> pa.Array:
    """A column of numbers or texts, without nulls, as an Arrow array."""
    if pa.types.is_string(kind):
        return _texts([text.encode() for text in column], kind)
    data = np.ascontiguousarray(column, dtype=_dtype(kind))
    return pa.Array.from_buffers(kind, len(data), [None, pa.py_buffer(data)])


def numbers(column: pa.Array) -> npt.NDArray[Any]:
    """The numbers of an Arrow array without nulls, where they lie."""
    dtype, data = _dtype(column.type), column.buffers()[1]
    if not len(column):
        return np.empty(0, dtype)
    return np.frombuffer(data, dtype, len(column), column.offset * dtype.itemsize)


def _dtype(kind: pa.DataType) -> np.dtype[Any]:
    return np.dtype(_NUMPY.get(str(kind), str(kind)))


def _texts(encoded: Sequence[bytes], kind: pa.DataType) -> pa.Array:
    ends = np.zeros(len(encoded) + 1, np.int32)
    np.cumsum([len(each) for each in encoded], out=ends[1:])
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(kind, len(encoded), buffers)
