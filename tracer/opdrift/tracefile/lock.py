"""Tell whether a file is still being written, by a lock that ends with its process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import IO

if sys.platform != "win32":
    import fcntl


def hold(file: IO[bytes]) -> bool:
    """Lock a file until it is closed; False if somebody else has locked it.

    True, without a lock, where there are none: Windows, some network file systems.
    """
    if sys.platform == "win32":
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def is_held(path: Path) -> bool:
    """Whether somebody, in this process or another, has locked a file."""
    try:
        with path.open("rb") as file:
            return not hold(file)
    except OSError:
        return False
