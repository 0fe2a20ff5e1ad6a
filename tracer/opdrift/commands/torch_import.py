"""Notice the moment at which the program has imported torch: before it, nothing of ours may import it.

What a program sets before it imports torch (environment variables, threads, warnings) would otherwise come too late.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Final

_TORCH: Final = "torch"


def when_imported(then: Callable[[], None]) -> None:
    """Call a function, which must not raise, once torch is loaded: now, or at the end of its import."""
    if _TORCH in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Finder(then))


class _Finder:
    """Finds torch as the other finders do, and has it loaded by a loader that tells when it is done.

    It stays until torch is loaded: libraries ask where torch is long before they import it.
    """

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then
        self._here = threading.local()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _TORCH or getattr(self._here, "asking", False):
            return None
        self._here.asking = True
        try:
            spec = find_spec(name)
        finally:
            self._here.asking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._loaded)
        return spec

    def _loaded(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            self._then()


class _Loader(Loader):
    """Loads a module by another loader, which stands in its place as soon as the module is made."""

    def __init__(self, loader: Loader, then: Callable[[], None]) -> None:
        self._loader = loader
        self._then = then

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked of a copy that has no loader yet
            raise AttributeError(name)
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._then()
