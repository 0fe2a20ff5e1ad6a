"""Take what C code prints to its stdout while an op runs, without touching file descriptor 1.

C code prints through a pointer, the variable `stdout` of the C library; here it points at a stream in memory for
as long as an op runs. Python's `sys.stdout`, pipes, files and whatever has redirected descriptor 1 see nothing of it.
"""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Final

from opdrift.kernels import CannotWatchError

_SEEK_SET: Final = 0


class CStdout:
    """The C library's stdout, and a stream in memory to put in its place.

    Raises:
        CannotWatchError: The C library is not glibc, whose `stdout` is a variable that all of C uses.
    """

    def __init__(self) -> None:
        if not _is_glibc():
            raise CannotWatchError(
                f"the stdout of C code can be read on Linux with glibc only, and this is {sys.platform}"
            )
        # with the interpreter's lock held: these calls never wait
        self._libc = libc = ctypes.PyDLL(None)
        libc.open_memstream.restype = ctypes.c_void_p
        libc.open_memstream.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        libc.fseek.argtypes = [ctypes.c_void_p, ctypes.c_long, ctypes.c_int]
        libc.fwrite.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p]
        for name in ("fflush", "fclose", "free"):
            getattr(libc, name).argtypes = [ctypes.c_void_p]
        self._pointer = ctypes.c_void_p.in_dll(libc, "stdout")
        self._text, self._size = ctypes.c_void_p(), ctypes.c_size_t()
        self._stream = libc.open_memstream(ctypes.byref(self._text), ctypes.byref(self._size))
        if not self._stream:
            raise CannotWatchError("the C library has no memory for a stream")
        self._theirs: int | None = None
        self._was_flushed = False
        self._fflush = libc.fflush

    def take(self) -> None:
        """From now on C code prints into memory."""
        if self._pointer.value != self._stream:  # it is there already if an interrupt cut us short
            self._theirs = self._pointer.value
            self._pointer.value = self._stream

    def give_back(self) -> bytes:
        """C code prints where it did before; returns what it printed meanwhile."""
        if self._pointer.value == self._stream:  # else C code of the program has changed it
            self._pointer.value = self._theirs
        flushed = self._size.value  # is brought up to date by a flush only
        self._fflush(self._stream)
        size = self._size.value
        if not size:
            return b""
        text = ctypes.string_at(self._text, size)
        self._libc.fseek(self._stream, 0, _SEEK_SET)
        self._size.value = 0
        self._was_flushed = flushed == size
        return text

    def put_back(self, text: bytes) -> None:
        """Print what was taken last and is not ours; flush it if who printed it did."""
        self._libc.fwrite(text, 1, len(text), self._theirs)
        if self._was_flushed:
            self._fflush(self._theirs)

    def close(self) -> None:
        """Free the stream, after the last `give_back`."""
        self._libc.fclose(self._stream)
        self._libc.free(self._text)


def _is_glibc() -> bool:
    """Elsewhere `stdout` may be a constant, and writing into it ends the process."""
    name = "CS_GNU_LIBC_VERSION"
    return sys.platform == "linux" and name in os.confstr_names and bool(os.confstr(name))
