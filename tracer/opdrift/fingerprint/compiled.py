"""The compiled core: find it, check it, and hand out its functions.

hatch_build.py compiles `_tfp1.c` into up to four libraries beside this file when the package is built.
"""

from __future__ import annotations

import ctypes
import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from opdrift.tfp1 import FP8_FORMATS, fp8_smallest_normal, fp8_values

BUILDS: Final = ("baseline", "avx2", "avx512", "avx512ifma")
"""Slowest first; the index is what the core's opdrift_best_build answers."""
_FOLDER: Final = Path(__file__).parent

_ADDRESS, _COUNT, _KIND = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
_PUT_ARGUMENTS: Final = (_ADDRESS, _ADDRESS, _COUNT, _KIND, _COUNT)


class NotAvailableError(Exception):
    """A build that this installation or this machine does not have; the message says why."""


@dataclass(frozen=True, slots=True)
class Library:
    """The functions of one build; plain ctypes functions, because they are called once per op."""

    build: str
    put: Callable[[int, int, int, int, int], None]
    """(row address, data address, components, kind, value id); keeps the GIL."""
    put_large: Callable[[int, int, int, int, int], None]
    """The same without the GIL."""
    put_batch: Callable[[int, int, int, int, int, int, int], None]
    """(rows address, data address, outer, batch, inner, kind, value id); without the GIL."""
    raw: Callable[[int, int, int], int]
    """(data address, components, kind): the digest alone; without the GIL."""
    raws: Callable[[Sequence[int], Sequence[int], Sequence[int]], array[int]]
    """(data addresses, components, kinds): the digests alone; without the GIL."""
    bfloat16_raws: Callable[[Sequence[int], Sequence[int]], tuple[array[int], array[int]] | None]
    """(data addresses, components): the digests of float32, and those as bfloat16; None if NaNs are among it.

    Without the GIL.
    """
    columns: Callable[[int, int, Any], None]
    """(rows address, rows, `columns._Places`): rows as columns; without the GIL."""


def load(build: str | None = None) -> Library:
    """Load a build of the core; None means the fastest that is installed and runs here.

    Raises:
        NotAvailableError: There is no such library, it is stale, or the machine cannot run it.
    """
    best = _best_build()
    if build is None:
        installed = [name for name in BUILDS[: best + 1] if _path(name).exists()]
        return _open(installed[-1])
    if BUILDS.index(build) > best:
        raise NotAvailableError(f"this machine runs {', '.join(BUILDS[: best + 1])}")
    return _open(build)


def _path(build: str) -> Path:
    return _FOLDER / f"_tfp1_{build}.so"


def _best_build() -> int:
    """What the machine can run, asked of the plainest build, which runs everywhere."""
    return int(_checked("baseline").opdrift_best_build())


@cache
def _checked(build: str) -> ctypes.PyDLL:
    path = _path(build)
    if not path.exists():
        raise NotAvailableError("no compiled library")
    try:
        library = ctypes.PyDLL(str(path))
    except OSError as error:
        raise NotAvailableError(f"the compiled library does not load: {error}") from error
    library.opdrift_source.restype = ctypes.c_uint32
    if library.opdrift_source() != _source_checksum():
        raise NotAvailableError(
            "the compiled library is from another version: install opdrift again"
        )
    return library


def _source_checksum() -> int:
    """As hatch_build.py computes it: a checkout can move on without being built again."""
    return zlib.crc32(b"".join(part.read_bytes() for part in sorted(_FOLDER.glob("_tfp1*.[ch]"))))


@cache
def _open(build: str) -> Library:
    """The library's tables are written here, once, and only read afterwards: recorders can share it."""
    with_gil = _checked(build)
    without_gil = ctypes.CDLL(str(_path(build)))
    tables = (ctypes.c_float * (256 * len(FP8_FORMATS)))(
        *(v for name in FP8_FORMATS for v in fp8_values(name))
    )
    normals = (ctypes.c_double * len(FP8_FORMATS))(*map(fp8_smallest_normal, FP8_FORMATS))
    with_gil.opdrift_init.restype = None
    with_gil.opdrift_init(tables, normals)

    for library in (with_gil, without_gil):
        library.opdrift_put.argtypes = _PUT_ARGUMENTS
        library.opdrift_put.restype = None
    without_gil.opdrift_put_batch.argtypes = [
        _ADDRESS,
        _ADDRESS,
        _COUNT,
        _COUNT,
        _COUNT,
        _KIND,
        _COUNT,
    ]
    without_gil.opdrift_put_batch.restype = None
    without_gil.opdrift_raw.argtypes = [_ADDRESS, _COUNT, _KIND]
    without_gil.opdrift_raw.restype = ctypes.c_uint64
    without_gil.opdrift_raws.argtypes = [_ADDRESS, _ADDRESS, _ADDRESS, _COUNT, _ADDRESS]
    without_gil.opdrift_raws.restype = None
    without_gil.opdrift_bfloat16_raws.argtypes = [
        _ADDRESS,
        _ADDRESS,
        _COUNT,
        _ADDRESS,
        _ADDRESS,
    ]
    without_gil.opdrift_bfloat16_raws.restype = ctypes.c_int
    without_gil.opdrift_columns.argtypes = [_ADDRESS, _COUNT, _ADDRESS]
    without_gil.opdrift_columns.restype = None
    return Library(
        build=build,
        put=with_gil.opdrift_put,
        put_large=without_gil.opdrift_put,
        put_batch=without_gil.opdrift_put_batch,
        raw=without_gil.opdrift_raw,
        raws=_many(without_gil.opdrift_raws),
        bfloat16_raws=_many_as_bfloat16(without_gil.opdrift_bfloat16_raws),
        columns=without_gil.opdrift_columns,
    )


def _many(
    fill: Callable[[int, int, int, int, int], None],
) -> Callable[[Sequence[int], Sequence[int], Sequence[int]], array[int]]:
    def raws(addresses: Sequence[int], lengths: Sequence[int], kinds: Sequence[int]) -> array[int]:
        # in one piece: to make an array takes as long as to read a small tensor
        count = len(addresses)
        given, found = array("q", [*addresses, *lengths, *kinds]), array("Q", bytes(8 * count))
        at = _begin(given)
        fill(at, at + 8 * count, at + 16 * count, count, _begin(found))
        return found

    return raws


def _many_as_bfloat16(
    fill: Callable[[int, int, int, int, int], int],
) -> Callable[[Sequence[int], Sequence[int]], tuple[array[int], array[int]] | None]:
    def raws(
        addresses: Sequence[int], lengths: Sequence[int]
    ) -> tuple[array[int], array[int]] | None:
        count = len(addresses)
        given, found = array("q", [*addresses, *lengths]), array("Q", bytes(16 * count))
        at, to = _begin(given), _begin(found)
        whole = fill(at, at + 8 * count, count, to, to + 8 * count)
        return (found[:count], found[count:]) if whole else None

    return raws


def _begin(numbers: array[int]) -> int:
    return numbers.buffer_info()[0]
