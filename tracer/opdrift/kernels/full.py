"""What `kernels="full"` adds to a recording: everything that can watch ops here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from opdrift.kernels import CannotWatchError, Watch
from opdrift.kernels.observed import ObservedOps
from opdrift.kernels.verbose import Verbose
from opdrift.kernels.windows import watch_devices


@contextmanager
def watching(
    write_mark: Callable[[Mapping[str, Any]], None],
    *,
    stopped: Callable[[str], None],
    failed: Callable[[str, BaseException], None],
) -> Iterator[tuple[Watch, ...]]:
    """Watch ops until the end of the `with`.

    Args:
        write_mark: Writes a mark of kind `kernels` with these fields.
        stopped: Called with the reason when the CPU's libraries cannot be watched, or not any more.
        failed: Notes a failure of the tracer itself.
    """
    watches: list[Watch] = []
    with ExitStack() as stack:
        ops = ObservedOps("verbose", write_mark)
        try:
            verbose = Verbose(ops, stopped)
        except CannotWatchError as error:
            ops.refuse(str(error))
            stopped(str(error))
        else:
            stack.callback(verbose.close)
            watches.append(verbose)
        windows = watch_devices(write_mark, failed)
        if windows is not None:
            stack.callback(windows.close)
            windows.attach()
            watches.append(windows)
        yield tuple(watches)
