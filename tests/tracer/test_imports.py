"""Noticing that the program imports a library."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from opdrift.imports import watch_imports


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Two modules that can be imported and are forgotten afterwards."""
    (tmp_path / "first_library.py").write_text("")
    (tmp_path / "second_library.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in ("first_library", "second_library"):
        sys.modules.pop(name, None)


def test_a_library_that_is_loaded_already_is_noticed_at_once():
    arrived = []
    with watch_imports({"json": lambda: arrived.append("json")}):
        assert arrived == ["json"]


@pytest.mark.usefixtures("library")
def test_a_library_is_noticed_at_the_next_import():
    arrived = []
    with watch_imports({"first_library": lambda: arrived.append("first")}):
        importlib.import_module("first_library")
        before = list(arrived)
        importlib.import_module("second_library")

    assert (before, arrived) == ([], ["first"])


@pytest.mark.usefixtures("library")
def test_a_library_is_noticed_when_one_looks():
    arrived = []
    with watch_imports({"first_library": lambda: arrived.append("first")}) as look:
        importlib.import_module("first_library")
        look()

    assert arrived == ["first"]


@pytest.mark.usefixtures("library")
def test_a_library_is_noticed_once():
    arrived = []
    with watch_imports({"first_library": lambda: arrived.append("first")}) as look:
        importlib.import_module("first_library")
        look()
        look()

    assert arrived == ["first"]


@pytest.mark.usefixtures("library")
def test_a_library_that_is_still_being_loaded_is_not_there_yet(tmp_path: Path):
    """Its attributes are missing while it imports others."""
    (tmp_path / "first_library.py").write_text("import second_library\nready = True")
    seen = []
    with watch_imports(
        {"first_library": lambda: seen.append(sys.modules["first_library"].ready)}
    ) as look:
        importlib.import_module("first_library")
        look()

    assert seen == [True]


def test_the_importers_are_as_before_afterwards():
    before = list(sys.meta_path)
    with watch_imports({"no_such_library": lambda: None}):
        during = len(sys.meta_path)

    assert during == len(before) + 1
    assert sys.meta_path == before


def test_the_importers_are_as_before_after_an_error():
    before = list(sys.meta_path)
    with pytest.raises(KeyError), watch_imports({"no_such_library": lambda: None}):
        raise KeyError

    assert sys.meta_path == before


def test_a_missing_library_is_missing_as_without_the_watch():
    with (
        watch_imports({"no_such_library": lambda: None}),
        pytest.raises(ModuleNotFoundError, match="no_such_library"),
    ):
        importlib.import_module("no_such_library")
