"""What a span holds, and how one becomes bytes: the part that OTLP's two encodings share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

Scalar = str | bool | int | float
#: What OTLP lets an attribute be, as far as all backends take it.
Value = Scalar | Sequence[str] | Sequence[bool] | Sequence[int] | Sequence[float]
Attributes = Mapping[str, Value]

#: Kind of all our spans (`SPAN_KIND_INTERNAL`).
INTERNAL: Final = 1
#: `flags` of a span: the parent is not of another process, and that is known.
LOCAL_PARENT: Final = 0x100
#: `flags` of a link: what it leads to is of another process.
REMOTE: Final = 0x300
ERROR: Final = 2


@dataclass(frozen=True, slots=True)
class Event:
    """Something at one moment of a span."""

    name: str
    time: int
    attributes: Attributes


@dataclass(frozen=True, slots=True)
class Link:
    """A span of another trace."""

    trace_id: bytes
    span_id: bytes
    attributes: Attributes


@dataclass(frozen=True, slots=True)
class Extras:
    """What few spans have.

    Attributes:
        error: Why the status is ERROR; None leaves it unset.
        dropped_events: How many more there were.
        dropped_links: Likewise.
    """

    events: Sequence[Event] = ()
    links: Sequence[Link] = ()
    error: str | None = None
    dropped_events: int = 0
    dropped_links: int = 0


NO_EXTRAS: Final = Extras()


@dataclass(frozen=True, slots=True)
class Limits:
    """Of `OTEL_SPAN_*_LIMIT` and `OTEL_ATTRIBUTE_*_LIMIT`.

    Attributes:
        attributes: Attributes of a span.
        length: Characters of a text.
        events: Events of a span.
        links: Links of a span.
        event_attributes: Attributes of an event.
        link_attributes: Attributes of a link.
    """

    attributes: int = 128
    length: int = 16384
    events: int = 128
    links: int = 128
    event_attributes: int = 128
    link_attributes: int = 128


class Encoder(Protocol):
    """Makes bytes of spans. Attributes are encoded one by one, so that those of many spans are encoded once."""

    content_type: str

    def attributes(self, values: Attributes) -> tuple[bytes, ...]:
        """Attributes of spans, to be handed to `span`."""

    def span(
        self,
        ident: bytes,
        parent: bytes,
        name: str,
        start: int,
        end: int,
        attributes: Sequence[bytes],
        extras: Extras = NO_EXTRAS,
    ) -> bytes:
        """One span; `parent` is empty for the root."""

    def request(self, spans: Sequence[bytes]) -> bytes:
        """A request with these spans."""


def limited(extras: Extras, limits: Limits) -> Extras:
    """What limits leave of them; the rest is counted."""
    return Extras(
        extras.events[: limits.events],
        extras.links[: limits.links],
        None if extras.error is None else extras.error[: limits.length],
        extras.dropped_events + max(len(extras.events) - limits.events, 0),
        extras.dropped_links + max(len(extras.links) - limits.links, 0),
    )


def utf8(text: str) -> bytes:
    """A text as bytes; a lone surrogate, which UTF-8 lacks, as Python writes it."""
    return text.encode("utf-8", "backslashreplace")


def shortened(value: Value, length: int) -> Value:
    """A value whose texts have at most `length` characters; integers too large for OTLP become texts."""
    if isinstance(value, str):
        return value if len(value) <= length else value[:length]
    if isinstance(value, float):
        return value
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**63 else str(value)
    if value and isinstance(value[0], float):
        return value
    return [shortened(each, length) for each in value]  # type: ignore[return-value]
