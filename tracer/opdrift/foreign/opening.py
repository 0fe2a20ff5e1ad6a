"""Tell logs of other tools apart by their first bytes, and read them."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from opdrift.errors import DamagedTraceError, NotATraceError
from opdrift.foreign import debugmode, torchtitan
from opdrift.foreign.model import Log

#: What torch.save (a zip file), pickle (protocols 2 to 5) and compressed files begin with.
_BINARY: Final = {
    b"PK\x03\x04": "a zip file, as torch.save() writes it",
    b"\x80": "a pickle",
    b"\x1f\x8b": "compressed by gzip",
}


def read_log(path: str | Path) -> Log:
    """Read a log that another tool wrote.

    Nothing in it is executed: pickles are refused, whatever they may hold.

    Raises:
        NotATraceError: It is none of the formats that are understood.
        DamagedTraceError: It is one of them, but cannot be read.
        TraceVersionError: It is of another version of its format.
    """
    name = str(path)
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise DamagedTraceError(
            f"{name} cannot be read: {error.strerror or error}. Check the permissions of the file."
        ) from error
    for start, what in _BINARY.items():
        if data.startswith(start):
            raise NotATraceError(
                f"{name} is {what}, which opdrift does not open: unpickling runs whatever code is in it."
                " Save DebugMode's logs with DebugMode.save_logs(), which writes JSON."
            )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise NotATraceError(
            f"{name} is no text (byte {error.start} is not UTF-8), so it is none of the logs that opdrift reads."
        ) from None
    if text.lstrip()[:1] in ("{", "["):
        return debugmode.parse(name, text)
    if torchtitan.FIRST_LINE.match(text):
        return torchtitan.parse(name, text)
    raise NotATraceError(
        f"{name} is a file, and none that opdrift reads: a trace is a folder that opdrift.record() made;"
        " of files it reads what DebugMode.save_logs() and torchtitan's numerics debugger wrote."
    )
