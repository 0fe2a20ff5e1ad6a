"""Check what a user says of renamed modules against the modules that there are."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Final

from opdrift.align.calls import Maps, paths_of
from opdrift.errors import InvalidOptionError
from opdrift.tracefile.reader import Trace

#: So many modules are named to a user who named one that is not there.
_NAMED: Final = 3


def check_maps(maps: Maps, left: Iterable[Trace], right: Iterable[Trace]) -> None:
    """Refuse a map that nothing in the traces answers to: what it was to tell would go untold.

    Args:
        maps: Pairs of a path on the left and its name on the right; "" is the program itself.
        left: The traces of the left run, one a rank. A module that one of them has is enough.
        right: The traces of the right run.

    Raises:
        InvalidOptionError: A run has no such module.
    """
    if not maps:
        return
    known = _modules(left), _modules(right)
    for pair in maps:
        for side, path, modules in zip(("left", "right"), pair, known, strict=True):
            if path and path not in modules:
                raise InvalidOptionError(
                    f"The map {pair[0]}={pair[1]}: the {side} run has no module {path!r}; {_instead(path, modules)}."
                )


def _modules(traces: Iterable[Trace]) -> set[str]:
    """The modules that were called, that own a parameter or a buffer, and those that they lie in."""
    found: set[str] = set()
    for trace in traces:
        owners = (leaf.name for leaf in trace.leaves if leaf.kind in ("parameter", "buffer"))
        for path in {*paths_of(trace), *(name.rpartition(".")[0] for name in owners)}:
            parts = path.split(".")
            found.update(".".join(parts[:end]) for end in range(1, len(parts) + 1))
    return found - {""}


def _instead(path: str, modules: set[str]) -> str:
    if not modules:
        return "no module was recorded in it"
    close = get_close_matches(path, sorted(modules), n=_NAMED, cutoff=0.5)
    names = close or sorted(modules, key=lambda m: (m.count("."), m))[:_NAMED]
    more = len(modules) - len(names)
    return f"it has {', '.join(names)}" + (f" and {more} more" if more else "")
