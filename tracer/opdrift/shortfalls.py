"""What a recording lacks or failed at: said once while the program runs, and noted in the trace."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from opdrift.fingerprint.tensors import WITHOUT_CONTENT

log = logging.getLogger("opdrift")

_MAX_FAILURES: Final = 100
_MAX_LOGGED: Final = 5


class Shortfalls:
    """What one recording lacks or failed at."""

    def __init__(self) -> None:
        self._failures: dict[tuple[str, str], int] = {}
        self._lost: list[str] = []
        #: devices without a kernel
        self._slow_devices: list[str] = []
        #: why kernels were not watched although that was asked for
        self._unwatched: list[str] = []

    @property
    def failures(self) -> list[dict[str, Any]]:
        """Where the tracer failed, as the footer lists it."""
        return [
            {"where": where, "error": what, "count": count}
            for (where, what), count in self._failures.items()
        ]

    @property
    def notes(self) -> list[str]:
        """What is missing, in sentences."""
        return [*self._lost, *self._slow_devices, *self._unwatched]

    def guarded(self, where: str, action: Callable[[], object]) -> None:
        """Do something of the tracer's; its failure is noted, and reaches nobody."""
        try:
            action()
        except Exception as error:
            self.failed(where, error)

    def failed(self, where: str, error: BaseException) -> None:
        """Note a failure of the tracer; the first few places are logged, once each."""
        key = (where, repr(error)[:500])
        count = self._failures.get(key, 0)
        if count or len(self._failures) < _MAX_FAILURES:
            self._failures[key] = count + 1
        if count or len(self._failures) > _MAX_LOGGED:
            return
        log.warning(
            "opdrift could not record everything at %s: %r. The run is not affected; please report this.%s",
            where,
            error,
            " Further failures are only noted in the trace." * (len(self._failures) == _MAX_LOGGED),
        )

    def lost_contents(self, skipped: Mapping[str, int]) -> None:
        """Contents were left out, for these reasons; what has no content lacks nothing."""
        self._lost = [
            f"{count} contents were not fingerprinted: {reason}"
            for reason, count in skipped.items()
        ]
        lost = {
            reason: count
            for reason, count in skipped.items()
            if not reason.endswith(WITHOUT_CONTENT)
        }
        if lost:
            log.warning(
                "opdrift recorded %d values without their contents: %s. The run is not affected; the trace lists them.",
                sum(lost.values()),
                "; ".join(list(lost)[:3]),
            )

    def slow_device(self, device: str, by: str, why: Sequence[str]) -> None:
        """A device's tensors are not fingerprinted by its kernel."""
        self._slow_devices.append(
            f"{device} was fingerprinted by {by} instead of a kernel: {'; '.join(why)}"
        )
        log.warning(
            "opdrift fingerprints %s by %s, which is far slower than its kernel: %s. The run is not affected.",
            device,
            by,
            "; ".join(why),
        )

    def kernels_unwatched(self, why: str) -> None:
        """Kernels are not watched, or not any more; said once for each reason."""
        note = f"which kernels ran was not observed: {why}"
        if note in self._unwatched:
            return
        self._unwatched.append(note)
        log.warning(
            "opdrift does not see which kernels ran: %s. They are named by rule, as with kernels='auto'. The run is not"
            " affected.",
            why,
        )
