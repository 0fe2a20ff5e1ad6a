"""Find and compile a program without running any of it, as `python SCRIPT` and `python -m` would."""

from __future__ import annotations

import importlib.util
import pkgutil
from importlib.machinery import ModuleSpec

from opdrift.commands.as_main import code_of
from opdrift.errors import InvalidOptionError


def check(module: bool, name: str) -> None:
    """Refuse what Python could not start; `sys.path` must be the program's.

    Raises:
        InvalidOptionError: There is no such script or module, or it does not compile.
    """
    said = f"-m {name}" if module else name
    try:
        if module:
            _compile_module(name)
        else:
            _compile_script(name)
    except SyntaxError as error:
        place = f" at {error.filename}:{error.lineno}" if error.lineno else ""
        raise InvalidOptionError(
            f"{said} cannot be run: {type(error).__name__}{place}: {error.msg}"
        ) from None
    except (ImportError, OSError, ValueError) as error:
        raise InvalidOptionError(f"{said} cannot be run: {error}") from None


def _compile_script(name: str) -> None:
    if pkgutil.get_importer(name) is None:  # a folder or an archive of modules is left to runpy
        code_of(name)


def _compile_module(name: str) -> None:
    spec = _spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        name = f"{name}.__main__"  # a package is run by this module of it
        spec = _spec(name)
    if spec is None:
        raise ImportError(f"no module named {name}")
    get_code = getattr(spec.loader, "get_code", None)
    if get_code is None or get_code(name) is None:
        raise ImportError(f"module {name} has no code that could be run")


def _spec(name: str) -> ModuleSpec | None:
    """A module's spec, without the import of its packages, which is part of the program."""
    top, *below = name.split(".")
    if not all((top, *below)):
        raise ImportError("a module is named by words with dots between")
    spec = importlib.util.find_spec(top)
    full = top
    for word in below:
        if spec is None:
            break
        full = f"{full}.{word}"
        spec = _below(spec, full)
    if spec is not None or not below:
        return spec
    # a package may itself add places to look; only then does it have to be imported here
    try:
        return importlib.util.find_spec(name)
    except Exception as error:
        raise ImportError(f"{type(error).__name__}: {error}") from None


def _below(package: ModuleSpec, full: str) -> ModuleSpec | None:
    """The first that the package's folders hold; a folder without __init__.py yields to a module."""
    portions: list[str] = []
    for place in package.submodule_search_locations or ():
        finder = pkgutil.get_importer(place)
        found = finder.find_spec(full) if finder is not None else None
        if found is not None and found.loader is not None:
            return found
        if found is not None:
            portions.extend(found.submodule_search_locations or ())
    if not portions:
        return None
    spec = ModuleSpec(full, None, is_package=True)
    spec.submodule_search_locations = portions
    return spec
