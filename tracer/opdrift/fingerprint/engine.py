"""The engine that writes fingerprints: the compiled core where there is one, else NumPy."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from opdrift.errors import InvalidOptionError
from opdrift.fingerprint import compiled, numpy_fallback
from opdrift.fingerprint.columns import by_core
from opdrift.fingerprint.row import ROW, ROW_BYTES
from opdrift.fingerprint.tensors import (
    FIRST_FP8_KIND,
    can_fingerprint,
    kinds_by_dtype,
    plain,
    stretches,
)
from opdrift.tfp1 import FP8_FORMATS, Code
from opdrift.tracefile.writer import Columns, fingerprint_columns

ENGINES: Final = ("avx512ifma", "avx512", "avx2", "baseline", "numpy")
"""What the environment variable OPDRIFT_FINGERPRINT accepts."""
VARIABLE: Final = "OPDRIFT_FINGERPRINT"
CODES: Final = tuple(
    int(Code.FP8 if kind >= FIRST_FP8_KIND else kind)
    for kind in range(FIRST_FP8_KIND + len(FP8_FORMATS))
)
"""The component code of each kind."""
LARGE: Final = 32768
"""From so many components on, letting go of the GIL costs less than it gives: use put_large."""


@dataclass(frozen=True, slots=True)
class Engine:
    """One way to write fingerprints. Engines hold no state that changes, so recorders can share one.

    `put`, `put_large`, `put_batch`, `raw` and their likes for many take addresses and are called without any check: the
    memory must be contiguous and hold what `kinds` says about its dtype. `fingerprint` does all that.
    """

    ROW: ClassVar[np.dtype[np.void]] = ROW
    ROW_BYTES: ClassVar[int] = ROW_BYTES
    LARGE: ClassVar[int] = LARGE

    name: str
    """For people: "C (avx512)", or "numpy (no compiled library)"."""
    put: Callable[[int, int, int, int, int], None]
    """(row address, data address, components, kind, value id)"""
    put_large: Callable[[int, int, int, int, int], None]
    """The same, without the GIL where that is possible."""
    put_batch: Callable[[int, int, int, int, int, int, int], None]
    """(rows address, data address, outer, batch, inner, kind, value id): one row per item [:, b, :]"""
    raw: Callable[[int, int, int], int]
    """(data address, components, kind): the digest alone"""
    raws: Callable[[Sequence[int], Sequence[int], Sequence[int]], array[int]]
    """(data addresses, components, kinds): the digests alone of many contents"""
    bfloat16_raws: Callable[[Sequence[int], Sequence[int]], tuple[array[int], array[int]] | None]
    """(data addresses, components): the digests of contents of float32, and of what they are as bfloat16; None if NaNs
    are among them"""
    columns: Callable[[npt.NDArray[Any]], Columns]
    """Contiguous rows as the columns of the table `tensors`"""
    kinds: dict[torch.dtype, int] = field(default_factory=kinds_by_dtype)
    """The kind of each dtype whose contiguous, unconjugated memory can be read as it is."""

    def plain(self, tensor: Tensor) -> Tensor:
        """The same content in a form whose dtype is in `kinds`; see `tensors.plain`."""
        return plain(tensor)

    def can_fingerprint(self, tensor: Tensor) -> str | None:
        """Why the content cannot be read, or None; see `tensors.can_fingerprint`."""
        return can_fingerprint(tensor)

    def digest(self, tensor: Tensor) -> tuple[int, int, int]:
        """Hash, components and component code (`tfp1.Code`) of a tensor that `can_fingerprint` calls readable."""
        ready = tensor if self._is_ready(tensor) else self.plain(tensor)
        kind, n = self.kinds[ready.dtype], ready.numel()
        return self.raw(ready.data_ptr(), n, kind), n, CODES[kind]

    def digests(self, tensor: Tensor, sizes: Sequence[int]) -> list[tuple[int, int, int]]:
        """As `digest`, of stretches of so many elements that follow each other in a tensor."""
        if not self._is_ready(tensor):
            return [self.digest(stretch) for stretch in stretches(tensor, sizes)]
        kind, address, found = self.kinds[tensor.dtype], tensor.data_ptr(), []
        raw, code, width = self.raw, CODES[kind], tensor.element_size()
        for size in sizes:
            found.append((raw(address, size, kind), size, code))
            address += size * width
        return found

    def code(self, dtype: torch.dtype) -> int | None:
        """The component code of a dtype whose memory can be read as it is; None if it cannot."""
        kind = self.kinds.get(dtype)
        return None if kind is None else CODES[kind]

    def _is_ready(self, tensor: Tensor) -> bool:
        """Whether the memory of a readable tensor can be read as it is."""
        return (
            tensor.dtype in self.kinds
            and tensor.is_cpu
            and tensor.is_contiguous()
            and not tensor.is_neg()
            and not tensor.is_conj()
            and not tensor._is_zerotensor()
        )

    def fingerprint(self, tensor: Tensor, value: int = 0) -> np.void:
        """The row of a tensor's content.

        Args:
            tensor: Any layout, dtype and device that has content.
            value: The value id to write into the row.

        Raises:
            InvalidOptionError: The content cannot be read; `can_fingerprint` tells beforehand.
        """
        reason = can_fingerprint(tensor)
        if reason is not None:
            raise InvalidOptionError(
                f"The tensor of shape {tuple(tensor.shape)} has no fingerprint: {reason}."
            )
        ready = plain(tensor)
        rows = np.zeros(1, ROW)
        put = self.put if ready.numel() < LARGE else self.put_large
        put(rows.ctypes.data, ready.data_ptr(), ready.numel(), self.kinds[ready.dtype], value)
        row: np.void = rows[0]
        return row


def load_engine() -> Engine:
    """The fastest engine of this installation, or the one that OPDRIFT_FINGERPRINT names.

    Raises:
        InvalidOptionError: The variable names no engine, or one that cannot be had here.
    """
    wanted = os.environ.get(VARIABLE, "")
    if wanted == "numpy":
        return _numpy_engine(f"{VARIABLE}=numpy")
    if wanted and wanted not in ENGINES:
        raise InvalidOptionError(
            f"{VARIABLE} is {wanted!r}; it can be {', '.join(ENGINES)}, or unset."
        )
    try:
        library = compiled.load(wanted or None)
    except compiled.NotAvailableError as error:
        if wanted:
            raise InvalidOptionError(
                f"{VARIABLE} asks for {wanted!r}, which cannot be had: {error}. Unset it to use the fastest there is."
            ) from error
        return _numpy_engine(str(error))
    return Engine(
        name=f"C ({library.build})",
        put=library.put,
        put_large=library.put_large,
        put_batch=library.put_batch,
        raw=library.raw,
        raws=library.raws,
        bfloat16_raws=library.bfloat16_raws,
        columns=by_core(library.columns),
    )


def _numpy_engine(why: str) -> Engine:
    return Engine(
        name=f"numpy ({why})",
        put=numpy_fallback.put,
        put_large=numpy_fallback.put,
        put_batch=numpy_fallback.put_batch,
        raw=numpy_fallback.raw,
        raws=numpy_fallback.raws,
        bfloat16_raws=numpy_fallback.bfloat16_raws,
        columns=fingerprint_columns,
    )
