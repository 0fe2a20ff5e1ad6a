"""Write a file or a folder whole, or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Literal

from opdrift.errors import ExportError
from opdrift.tracefile.claiming import is_trace


@contextmanager
def whole(
    target: Path, *, kind: Literal["file", "folder"], suffix: str, replace: bool
) -> Iterator[Path]:
    """Yield a path to write to; when the block ends well, it becomes `target`. Else nothing is left of it.

    Args:
        target: Where the result is to be.
        kind: What the block makes; a folder is made here.
        suffix: Of the files of a folder.
        replace: Replace what is there: a file, or a folder that holds nothing but files of this suffix.

    Raises:
        ExportError: It is in the way of something, or cannot be written.
    """
    _check(target, kind, suffix, replace)
    # /dev/stdout, a named pipe: nothing to replace, and what went into it is gone
    gone = kind == "file" and target.exists() and not target.is_file()
    partial = target if gone else target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        try:
            if kind == "folder":
                partial.mkdir()
            yield partial
            if not gone:
                _move(partial, target, replace)
        finally:  # whatever ends it, an interrupt too
            if not gone:
                _remove(partial)
    except OSError as error:
        left = "what it took before is incomplete" if gone else "nothing of it was left"
        raise ExportError(
            f"{target} cannot be written ({error.strerror or error}); {left}. Give another path with -o."
        ) from None


class Counted:
    """A file that is written to, and how many bytes that were: a pipe cannot tell.

    Attributes:
        written: Bytes so far.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.written = 0

    def write(self, data: bytes, /) -> int:
        """Write all of it."""
        self._file.write(data)
        self.written += len(data)
        return len(data)

    def flush(self) -> None:
        """Hand on what was written."""
        self._file.flush()


def file_size(length: int) -> str:
    """In words, of a number of bytes: 18400 -> "18 kB", 2100000 -> "2.1 MB"."""
    return f"{max(1, round(length / 1e3))} kB" if length < 50_000 else f"{length / 1e6:,.1f} MB"


def _check(target: Path, kind: str, suffix: str, replace: bool) -> None:
    if not target.parent.is_dir():
        raise ExportError(f"-o {target}: the folder {target.parent} does not exist; make it first.")
    for folder in (target, target.absolute().parent):
        if is_trace(folder):
            raise ExportError(
                f"-o {target}: {folder} is an opdrift trace, which an export would damage; give another path."
            )
    if not target.exists() or (kind == "file" and not target.is_file() and not target.is_dir()):
        return
    if kind == "file" and target.is_dir():
        raise ExportError(f"-o {target}: this is a folder; give the name of a file.")
    if kind == "folder" and not target.is_dir():
        raise ExportError(f"-o {target}: this is a file; give the name of a folder to make.")
    if kind == "folder" and any(p.suffix != suffix or p.is_dir() for p in target.iterdir()):
        raise ExportError(
            f"-o {target}: the folder holds something else than {suffix} files, so it is not replaced; give another path."
        )
    if not replace:
        raise ExportError(
            f"{target} exists already; give another path with -o, or --force to replace it."
        )


def _move(partial: Path, target: Path, replace: bool) -> None:
    """Let what was written take its place."""
    if target.exists() and not replace:
        raise ExportError(f"{target} has come into being meanwhile; it was not replaced.")
    if not target.is_dir():
        partial.replace(target)
        return
    former = partial.with_suffix(".former")
    target.rename(former)
    try:
        partial.rename(target)
    except BaseException:
        former.rename(target)
        raise
    shutil.rmtree(former)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
