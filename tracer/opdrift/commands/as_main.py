"""Be `python SCRIPT` or `python -m MODULE`: from here on the process is the program's, as it would be alone."""

from __future__ import annotations

import builtins
import io
import os
import pkgutil
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from types import CodeType, ModuleType, TracebackType
from typing import Final

#: Where the files of opdrift lie.
_OURS: Final = os.path.join(os.path.dirname(os.path.dirname(__file__)), "")


@contextmanager
def searching_as(module: bool, name: str) -> Iterator[None]:
    """Let `sys.path` be what the program's would be, for a while."""
    before = sys.path[:]
    _search_as(module, name)
    try:
        yield
    finally:
        sys.path[:] = before


def become(module: bool, name: str, arguments: Sequence[str]) -> None:
    """Let `sys.argv`, `sys.path` and `__main__` be the program's. Nobody puts them back: what runs at exit sees them."""
    _search_as(module, name)
    sys.argv = [name, *arguments]
    main = ModuleType("__main__")
    for attribute in ("__loader__", "__annotations__"):  # as Python itself prepares it
        if attribute in vars(sys.modules["__main__"]):
            vars(main)[attribute] = {} if attribute == "__annotations__" else None
    vars(main)["__builtins__"] = builtins
    sys.modules["__main__"] = main


def execute(module: bool, name: str) -> None:
    """Run the program as `__main__`; whatever it raises is the program's."""
    if module:
        # what Python calls for -m; the public run_module would take the module away again when it ends
        runpy._run_module_as_main(name)  # type: ignore[attr-defined]
    elif pkgutil.get_importer(name) is not None:  # a folder or an archive with a __main__.py
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
    else:
        names = vars(_script(name))
        exec(code_of(name), names)
        # a script that has ended has no file any more, for threads and for what runs at exit
        for name in ("__file__", "__cached__"):
            names.pop(name, None)


def code_of(script: str) -> CodeType:
    """A script's code, compiled for where it lies.

    Raises:
        OSError: It cannot be read.
        SyntaxError: It is no Python.
        ValueError: Likewise.
    """
    path = _absolute(script)
    with io.open_code(path) as file:
        compiled = pkgutil.read_code(file)
        if compiled is not None:
            return compiled  # type: ignore[no-any-return]
        file.seek(0)
        return compile(file.read(), path, "exec", dont_inherit=True)


def program_frames(trace: TracebackType | None) -> TracebackType | None:
    """A traceback from the program's first frame on, without ours; all of it if the program has none."""
    frames: list[TracebackType] = []
    here = trace
    while here is not None:
        frames.append(here)
        if here.tb_frame.f_code is execute.__code__:
            frames.clear()
        here = here.tb_next
    found = None
    for frame in reversed(frames):
        # ours are there too where an op failed that was being recorded, or the import of torch
        if not frame.tb_frame.f_code.co_filename.startswith(_OURS):
            found = TracebackType(found, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return found or trace


def _script(name: str) -> ModuleType:
    main, path = sys.modules["__main__"], _absolute(name)
    vars(main).update(__loader__=SourceFileLoader("__main__", path), __file__=path, __cached__=None)
    return main


def _absolute(script: str) -> str:
    """As Python names a script: below the working folder, and otherwise as it was given."""
    return script if os.path.isabs(script) else os.path.join(os.getcwd(), script)


def _search_as(module: bool, name: str) -> None:
    """Put in front of `sys.path` what Python puts there for the program, in the place of what it put there for us."""
    if sys.flags.safe_path:
        return
    if module:
        first = os.getcwd()
    elif pkgutil.get_importer(name) is not None:
        first = os.path.abspath(name)
    else:
        first = os.path.dirname(os.path.realpath(name))
    ours = ("", os.getcwd(), os.path.dirname(os.path.realpath(sys.argv[0])))
    sys.path[: sys.path[0] in ours] = [first]
