"""Notice that the program imports a library while it is recorded."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any


class _Watch:
    """A finder that finds nothing: torch and Python ask it at each import, which is when it looks around."""

    def __init__(self, wanted: Mapping[str, Callable[[], None]]) -> None:
        self.wanted = dict(wanted)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        self.look()

    def look(self) -> None:
        for name in [n for n in self.wanted if _is_loaded(n)]:
            arrived = self.wanted.pop(name, None)
            if arrived is not None:
                arrived()


def _is_loaded(name: str) -> bool:
    module = sys.modules.get(name)
    return module is not None and not getattr(
        getattr(module, "__spec__", None), "_initializing", False
    )


@contextmanager
def watch_imports(wanted: Mapping[str, Callable[[], None]]) -> Iterator[Callable[[], None]]:
    """Call each function once its module is loaded: now, or at the first import after that.

    Yields:
        A function that looks at once; call it now and then, since the last import is followed by none.
    """
    watch = _Watch(wanted)
    watch.look()
    if watch.wanted:
        sys.meta_path.insert(0, watch)
    try:
        yield watch.look
    finally:
        if watch in sys.meta_path:
            sys.meta_path.remove(watch)
