"""Watch the functions of a library by replacing the attribute they are looked up under."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

#: Called with the arguments of the watched call. Runs up to its one bare `yield` before the call
#: and is sent the result after it. If the call raises, it is closed at the yield.
Observer = Callable[..., Generator[None, Any, None]]

#: Takes what an observer raised. The watched call goes on as if nobody watched.
FailureHandler = Callable[[Exception], None]

_OBSERVERS = "__opdrift_observers__"

# Not state: it only keeps two threads from replacing the same attribute at once.
_lock = threading.Lock()


@contextlib.contextmanager
def watch(owner: Any, name: str, observer: Observer, on_failure: FailureHandler) -> Iterator[None]:
    """Let `observer` see every call of `owner.name` inside the block.

    Any number may watch the same function and leave in any order: they share one wrapper, which
    goes when the last one leaves. `owner` is a class or a module that defines `name` itself.
    """
    entry = (observer, on_failure)
    with _lock:
        present = vars(owner)[name]
        observers: list[tuple[Observer, FailureHandler]] | None = getattr(present, _OBSERVERS, None)
        if observers is None:
            observers = []
            wrapper = _wrapper(present, observers)
            setattr(owner, name, wrapper)
        else:
            wrapper = present
        observers.append(entry)
    try:
        yield
    finally:
        with _lock:
            observers[:] = [other for other in observers if other is not entry]
            # Somebody else may have put a wrapper over ours: it stays, and ours below it is idle.
            if not observers and vars(owner).get(name) is wrapper:
                setattr(owner, name, wrapper.__wrapped__)


@contextlib.contextmanager
def watch_all(
    points: Iterable[tuple[Any, str, Observer]],
    on_failure: FailureHandler,
    on_missing: Callable[[str], None],
) -> Iterator[None]:
    """`watch` each (owner, name, observer); what this version of the library lacks is told to `on_missing`."""
    with contextlib.ExitStack() as stack:
        for owner, name, observer in points:
            if name in vars(owner):
                stack.enter_context(watch(owner, name, observer, on_failure))
            else:
                on_missing(f"{owner.__name__}.{name}")
        yield


def _wrapper(original: Any, observers: list[tuple[Observer, FailureHandler]]) -> Any:
    @functools.wraps(original)
    def watched(*args: Any, **kwargs: Any) -> Any:
        running = []
        for observer, on_failure in tuple(observers):
            call = _started(observer, on_failure, args, kwargs)
            if call is not None:
                running.append((call, on_failure))
        try:
            result = original(*args, **kwargs)
        except BaseException:
            for call, on_failure in running:
                _finish(call.close, on_failure)
            raise
        for call, on_failure in running:
            _finish(call.send, on_failure, result)
        return result

    setattr(watched, _OBSERVERS, observers)
    return watched


def _started(
    observer: Observer, on_failure: FailureHandler, args: Any, kwargs: Any
) -> Generator[None, Any, None] | None:
    """The observer of one call, run up to its yield; None if it does not care or failed."""
    try:
        call = observer(*args, **kwargs)
        next(call)
    except StopIteration:
        return None
    except Exception as error:
        on_failure(error)
        return None
    return call


def _finish(step: Callable[..., Any], on_failure: FailureHandler, *result: Any) -> None:
    try:
        step(*result)
    except StopIteration:
        return
    except Exception as error:
        on_failure(error)
