"""Read what a receiver answers: ExportTraceServiceResponse and google.rpc.Status, in both encodings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any


def partial_success(body: bytes, content_type: str) -> tuple[int, str]:
    """How many spans of a request were refused although it was taken, and why; (0, "") where none was.

    A receiver that answers something else took the request all the same: its status said so.
    """
    if content_type == "application/json":
        found = _json(body).get("partialSuccess")
        if not isinstance(found, dict):
            return 0, ""
        try:
            return int(found.get("rejectedSpans", 0)), str(found.get("errorMessage", ""))
        except (TypeError, ValueError):
            return 0, ""
    refused, message = 0, ""
    for number, value in _fields(_first(body, 1)):
        if number == 1 and isinstance(value, int):
            refused = value
        elif number == 2 and isinstance(value, bytes):
            message = value.decode("utf-8", "replace")
    return refused, message


def status_message(body: bytes, content_type: str) -> str:
    """Why a request was refused, as far as its answer says."""
    if content_type == "application/json":
        said = _json(body).get("message")
        return said if isinstance(said, str) else body.decode("utf-8", "replace")
    if content_type in ("application/x-protobuf", "application/grpc"):
        return _first(body, 2).decode("utf-8", "replace")
    if content_type == "text/html":
        return ""  # a page for people, of a proxy
    return body.decode("utf-8", "replace")


def _json(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _first(body: bytes, wanted: int) -> bytes:
    """A field that is a message or a text; empty if there is none."""
    for number, value in _fields(body):
        if number == wanted and isinstance(value, bytes):
            return value
    return b""


def _fields(body: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a protobuf message, as far as it is one; fixed ones are left out."""
    at = 0
    try:
        while at < len(body):
            key, at = _varint(body, at)
            kind = key & 7
            if kind == 0:
                value, at = _varint(body, at)
                yield key >> 3, value
            elif kind == 2:
                size, at = _varint(body, at)
                yield key >> 3, body[at : at + size]
                at += size
            elif kind in (1, 5):
                at += 8 if kind == 1 else 4
            else:
                return
    except IndexError:
        return


def _varint(body: bytes, at: int) -> tuple[int, int]:
    found = shift = 0
    while True:
        byte = body[at]
        at += 1
        found |= (byte & 0x7F) << shift
        if byte < 0x80:
            return found, at
        shift += 7
