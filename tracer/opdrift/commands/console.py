"""Print results to stdout and complaints to stderr; write report files."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

from opdrift.errors import InvalidOptionError, OpdriftError
from opdrift.render.words import readable
from opdrift.tracefile.claiming import is_trace


def emit(*pieces: str) -> None:
    """Print a result. A reader that has gone (`| head`) is no error, and the exit status stays."""
    emit_all(pieces)


def emit_all(pieces: Iterable[str]) -> None:
    """Print a long result as it is made; stop making it when nobody reads.

    Raises:
        OpdriftError: It cannot be written where stdout leads, such as a full disk.
    """
    try:
        _put(sys.stdout, pieces)
    except OSError as error:
        _silence(sys.stdout)
        if not isinstance(error, BrokenPipeError):
            reason = error.strerror or error
            raise OpdriftError(f"the result cannot be written to stdout: {reason}.") from None


def complain(program: str, message: str) -> None:
    """Print one line to stderr: `program: message`. Where that fails, nobody can be told."""
    try:
        _put(sys.stderr, (f"{program}: {readable(message)}\n",))
    except OSError:
        _silence(sys.stderr)


def open_streams() -> None:
    """Give a process that was started without stdout or stderr (`>&-`) some that take all in silence."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (open until the process ends)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (likewise)


def _put(stream: TextIO, pieces: Iterable[str]) -> None:
    encoding = stream.encoding or "ascii"
    for piece in pieces:
        # what a terminal's encoding lacks is escaped rather than a reason to fail
        stream.write(piece.encode(encoding, "backslashreplace").decode(encoding))
    stream.flush()


def _silence(stream: TextIO) -> None:
    """Python flushes once more at exit; let that go nowhere instead of failing again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def check_output(path: Path) -> None:
    """Refuse what cannot or must not be written to, before any work is done.

    Raises:
        InvalidOptionError: The path is a folder, lies in a trace, or its folder does not exist.
    """
    if path.is_dir():
        kind = "an opdrift trace" if is_trace(path) else "a folder"
        raise InvalidOptionError(
            f"-o {path}: this is {kind}; give the name of a file to write the report to."
        )
    if not path.parent.is_dir():
        raise InvalidOptionError(
            f"-o {path}: the folder {path.parent} does not exist; make it first."
        )
    if is_trace(path.parent):
        raise InvalidOptionError(
            f"-o {path}: this lies in an opdrift trace, which a report would damage; give another path."
        )


def write_report(path: Path, text: str) -> None:
    """Write a report file, whole or not at all.

    Raises:
        InvalidOptionError: The file cannot be written.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        if path.exists() and not path.is_file():  # /dev/stdout, a named pipe: nothing to replace
            path.write_text(text, encoding="utf-8", newline="\n")
            return
        try:
            partial.write_text(text, encoding="utf-8", newline="\n")
            partial.replace(path)
        finally:  # whatever ends it, an interrupt too; nothing is left there where it succeeded
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise InvalidOptionError(
            f"-o {path}: cannot be written ({error.strerror or error}); give another path."
        ) from None
