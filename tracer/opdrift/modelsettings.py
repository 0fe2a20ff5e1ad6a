"""What models were told to compute with, as integrations wrote it down: attention, precision, cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from opdrift.records import EnvironmentDifference
from opdrift.tracefile.reader import Trace

#: Field of a "model-settings" mark -> how it is called in reports.
_CALLED: Final = {"dtype": "dtype", "use_cache": "use_cache", "cache": "cache"}
#: How the name of a difference in attention begins.
ATTENTION: Final = "attention of "


def settings_differences(left: Trace, right: Trace) -> tuple[EnvironmentDifference, ...]:
    """Settings that differ, of models that both traces say something of."""
    sides = _settings(left), _settings(right)
    return tuple(
        EnvironmentDifference(name, ", then ".join(one), ", then ".join(sides[1][name]))
        for name, one in sides[0].items()
        if name in sides[1] and one != sides[1][name]
    )


def _settings(trace: Trace) -> dict[str, list[str]]:
    """Name of a setting -> its values over time, one after another."""
    found: dict[str, list[str]] = {}
    for mark in trace.marks:
        if mark.kind != "model-settings":
            continue
        for name, value in _named(mark.fields):
            values = found.setdefault(name, [])
            if not values or values[-1] != value:
                values.append(value)
    return found


def _named(fields: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    model = f"{fields.get('model')}{_at(fields.get('module'))}"
    for part, implementation in (fields.get("attention") or {}).items():
        inside = f", {part}" if part else ""
        yield f"{ATTENTION}{model}{inside}", str(implementation)
    for field, called in _CALLED.items():
        value = fields.get(field)
        yield f"{called} of {model}", "none" if value is None else str(value)


def _at(path: Any) -> str:
    return f" in {path}" if path else ""
