"""Watching a library's functions leaves nothing behind."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from types import SimpleNamespace
from typing import Any

import pytest

from opdrift_integrations.patching import watch


def double(x: int) -> int:
    return 2 * x


def seen_in(log: list[Any]) -> Any:
    def observer(x: int) -> Generator[None, Any, None]:
        log.append(("before", x))
        result = yield
        log.append(("after", result))

    return observer


def fail(error: Exception) -> None:
    raise AssertionError("an observer failed") from error


def test_an_observer_sees_the_arguments_and_the_result():
    library, log = SimpleNamespace(double=double), []

    with watch(library, "double", seen_in(log), fail):
        assert library.double(3) == 6

    assert log == [("before", 3), ("after", 6)]
    assert library.double is double


def test_observers_may_leave_in_any_order():
    """Two recorders that overlap without nesting: each sees its own time, and the original returns."""
    library, first, second = SimpleNamespace(double=double), [], []
    one, two = contextlib.ExitStack(), contextlib.ExitStack()

    one.enter_context(watch(library, "double", seen_in(first), fail))
    library.double(1)
    two.enter_context(watch(library, "double", seen_in(second), fail))
    library.double(2)
    one.close()
    library.double(3)
    two.close()

    assert [x for word, x in first if word == "before"] == [1, 2]
    assert [x for word, x in second if word == "before"] == [2, 3]
    assert library.double is double


def test_an_exception_of_the_call_reaches_the_caller_and_closes_the_observer():
    def broken(x: int) -> int:
        raise ZeroDivisionError

    library, log = SimpleNamespace(broken=broken), []

    def observer(x: int) -> Generator[None, Any, None]:
        try:
            yield
            log.append("returned")
        finally:
            log.append("closed")

    with pytest.raises(ZeroDivisionError), watch(library, "broken", observer, fail):
        library.broken(1)

    assert log == ["closed"]
    assert library.broken is broken


@pytest.mark.parametrize("place", ["before", "after"])
def test_a_failing_observer_does_not_reach_the_caller(place):
    library, errors = SimpleNamespace(double=double), []

    def observer(x: int) -> Generator[None, Any, None]:
        if place == "before":
            raise KeyError(place)
        yield
        raise KeyError(place)

    with watch(library, "double", observer, errors.append):
        assert library.double(3) == 6

    assert [error.args for error in errors] == [(place,)]


def test_a_wrapper_that_somebody_put_over_ours_stays():
    library, log = SimpleNamespace(double=double), []

    with watch(library, "double", seen_in(log), fail):
        inner = library.double
        library.double = lambda x: inner(x) + 1

    assert library.double(3) == 7
    assert log == []


def test_an_inherited_function_is_refused():
    """Replacing it would leave an attribute where there was none."""

    class Library(SimpleNamespace):
        pass

    with pytest.raises(KeyError), watch(Library, "__eq__", seen_in([]), fail):
        pass
