"""OTLP's JSON encoding, one request a line: what OpenTelemetry's file exporters write and collectors read.

Ids are hexadecimal and 64-bit numbers are texts, as opentelemetry.io/docs/specs/otlp (JSON Protobuf encoding) has it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from opdrift_integrations.otlp.encoding import (
    ERROR,
    INTERNAL,
    LOCAL_PARENT,
    NO_EXTRAS,
    REMOTE,
    Attributes,
    Event,
    Extras,
    Limits,
    Link,
    Value,
    limited,
    shortened,
    utf8,
)


class JsonLines:
    """The JSON encoding of one process's spans; arguments as of `Protobuf`."""

    content_type = "application/json"

    def __init__(
        self, trace_id: bytes, resource: Attributes, scope: tuple[str, str, str], limits: Limits
    ) -> None:
        name, version, schema = scope
        self._limits = limits
        self._trace_id = trace_id.hex()
        head = {"attributes": self._pairs(resource, len(resource))}
        self._head = b'{"resourceSpans":[{"resource":%b,"scopeSpans":[{"scope":%b,"spans":[' % (
            _dump(head),
            _dump({"name": name, "version": version}),
        )
        self._tail = b'],"schemaUrl":%b}],"schemaUrl":%b}]}\n' % (_dump(schema), _dump(schema))

    def attributes(self, values: Attributes) -> tuple[bytes, ...]:
        """See `Encoder`."""
        return tuple(_dump(pair) for pair in self._pairs(values, len(values)))

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
        """See `Encoder`."""
        limits = self._limits
        said: dict[str, Any] = {"traceId": self._trace_id, "spanId": ident.hex()}
        if parent:
            said["parentSpanId"] = parent.hex()
        said |= {
            "name": _text(name[: limits.length]),
            "kind": INTERNAL,
            "startTimeUnixNano": str(start),
            "endTimeUnixNano": str(end),
            "flags": LOCAL_PARENT,
        }
        if len(attributes) > limits.attributes:
            said["droppedAttributesCount"] = len(attributes) - limits.attributes
        said |= self._rest(extras)
        kept = b",".join(attributes[: limits.attributes])
        return b'%b,"attributes":[%b]}' % (_dump(said)[:-1], kept)

    def request(self, spans: Sequence[bytes]) -> bytes:
        """See `Encoder`; it ends with a line break."""
        return self._head + b",".join(spans) + self._tail

    def _rest(self, extras: Extras) -> dict[str, Any]:
        kept = limited(extras, self._limits)
        said: dict[str, Any] = {}
        if kept.events:
            said["events"] = [self._event(event) for event in kept.events]
        if kept.dropped_events:
            said["droppedEventsCount"] = kept.dropped_events
        if kept.links:
            said["links"] = [self._link(link) for link in kept.links]
        if kept.dropped_links:
            said["droppedLinksCount"] = kept.dropped_links
        if kept.error is not None:
            said["status"] = {"code": ERROR, "message": _text(kept.error)}
        return said

    def _event(self, event: Event) -> dict[str, Any]:
        pairs = self._pairs(event.attributes, self._limits.event_attributes)
        said = {"name": _text(event.name), "timeUnixNano": str(event.time), "attributes": pairs}
        dropped = len(event.attributes) - len(pairs)
        return {**said, "droppedAttributesCount": dropped} if dropped else said

    def _link(self, link: Link) -> dict[str, Any]:
        pairs = self._pairs(link.attributes, self._limits.link_attributes)
        ids = {"traceId": link.trace_id.hex(), "spanId": link.span_id.hex()}
        dropped = len(link.attributes) - len(pairs)
        said = {**ids, "attributes": pairs, "flags": REMOTE}
        return {**said, "droppedAttributesCount": dropped} if dropped else said

    def _pairs(self, values: Attributes, limit: int) -> list[dict[str, Any]]:
        length = self._limits.length
        pairs = [
            {"key": _text(k), "value": _value(shortened(v, length))} for k, v in values.items()
        ]
        return pairs[:limit]


def _dump(data: object) -> bytes:
    return json.dumps(data, separators=(",", ":"), allow_nan=False).encode("ascii")


def _text(text: str) -> str:
    return utf8(text).decode()


def _value(value: Value) -> dict[str, Any]:
    if isinstance(value, str):
        return {"stringValue": _text(value)}
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        if math.isnan(value):
            return {"doubleValue": "NaN"}
        if math.isinf(value):
            return {"doubleValue": "Infinity" if value > 0 else "-Infinity"}
        return {"doubleValue": value}
    return {"arrayValue": {"values": [_value(each) for each in value]}}
