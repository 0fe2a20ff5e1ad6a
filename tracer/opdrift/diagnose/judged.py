"""An origin with what was found out about it."""

from __future__ import annotations

from dataclasses import dataclass

from opdrift.origins.model import Origin
from opdrift.records import Cause
from opdrift.sizes import Size


@dataclass(frozen=True, slots=True)
class Judged:
    """An origin with its size and causes."""

    origin: Origin
    size: Size
    causes: tuple[Cause, ...]
