"""Bring spans to a receiver: in requests of bounded size, one after the other, again where that may help, all counted."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from opdrift.errors import ExportError

#: Bytes of a request: half of what gRPC servers take by default.
BATCH: Final = 2 * 1024 * 1024
#: Spans of a request: small ones in such a batch would be more than some receivers like.
_MOST: Final = 8192
_FIRST_PAUSE: Final = 0.5
_LONGEST_PAUSE: Final = 30.0


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a request.

    Attributes:
        refused: Spans that the receiver says it did not take; all of them if `problem` is set.
        message: What it said about them.
        problem: Why the request failed; None if it was taken.
        again: The same request may be taken later.
        wait: Seconds after which it may, if the receiver said so.
        hopeless: Other requests would fail as this one did.
        too_large: Fewer spans at once may be taken.
    """

    refused: int = 0
    message: str = ""
    problem: str | None = None
    again: bool = False
    wait: float | None = None
    hopeless: bool = False
    too_large: bool = False


class Channel(Protocol):
    """A way to a receiver."""

    def send(self, body: bytes) -> Answer:
        """Bring it one request, and wait for the answer."""
        ...

    def close(self) -> None:
        """Let go of the connection."""


@dataclass(slots=True)
class Tally:
    """What became of the spans so far.

    Attributes:
        sent: Spans that were taken.
        refused: Spans that were not.
        reasons: What was said about those, each once.
    """

    sent: int = 0
    refused: int = 0
    reasons: list[str] = field(default_factory=list)

    def refuse(self, spans: int, reason: str) -> None:
        """Count spans that were not taken."""
        self.refused += spans
        if reason and reason not in self.reasons:
            self.reasons.append(reason)


class Delivery:
    """Sends spans over a channel.

    Args:
        channel: The way to the receiver.
        patience: Seconds after which a request that is not taken is given up.
        sleep: Waits; for tests.
    """

    def __init__(
        self,
        channel: Channel,
        *,
        patience: float,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tally = Tally()
        self._channel = channel
        self._patience = patience
        self._sleep = sleep
        self._clock = clock

    def send(self, spans: Iterable[bytes], request: Callable[[Sequence[bytes]], bytes]) -> None:
        """Send spans; the next ones are made when these were taken.

        Args:
            spans: Encoded.
            request: Makes a request of some.

        Raises:
            ExportError: The receiver cannot be reached any more, or would refuse all else as well.
        """
        batch: list[bytes] = []
        size = 0
        for span in spans:
            if batch and (size + len(span) > BATCH or len(batch) == _MOST):
                self._deliver(batch, request)
                batch, size = [], 0
            batch.append(span)
            size += len(span)
        if batch:
            self._deliver(batch, request)

    def _deliver(self, batch: Sequence[bytes], request: Callable[[Sequence[bytes]], bytes]) -> None:
        answer = self._insist(request(batch))
        if answer.problem is None:
            refused = min(answer.refused, len(batch))
            self.tally.sent += len(batch) - refused
            if refused:
                self.tally.refuse(refused, answer.message)
        elif answer.too_large and len(batch) > 1:
            middle = len(batch) // 2
            self._deliver(batch[:middle], request)
            self._deliver(batch[middle:], request)
        elif answer.hopeless:
            raise ExportError(answer.problem)
        else:
            self.tally.refuse(len(batch), answer.problem)

    def _insist(self, body: bytes) -> Answer:
        """Send a request until it is taken, or refused for good, or patience ends."""
        began = self._clock()
        pause = _FIRST_PAUSE
        while True:
            answer = self._channel.send(body)
            if not answer.again:
                return answer
            # spread by a quarter, so that many senders do not come back all at once
            wait = pause * random.uniform(0.75, 1.25) if answer.wait is None else answer.wait
            left = began + self._patience - self._clock()
            if wait > left:
                return Answer(
                    problem=f"{answer.problem}; given up after {self._clock() - began:.0f} s"
                    + (f" (it asked for {wait:.0f} s more)" if answer.wait is not None else "")
                    + "; --give-up-after waits longer",
                    hopeless=True,
                )
            self._sleep(wait)
            pause = min(pause * 2, _LONGEST_PAUSE)
