"""Send a trace to whatever takes OpenTelemetry's traces, or write it as such: `opdrift export otlp`."""

from __future__ import annotations

import os
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from typing import Final

from opdrift.plugins import Export
from opdrift_integrations.otlp.settings import PROTOCOLS, settings

_SUFFIX: Final = ".otlp.jsonl"


class OtlpExporter:
    """Send a trace as OpenTelemetry spans: run, steps, module calls, gathers and moves, ops.

    The receiver is that of --endpoint, else of OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or
    OTEL_EXPORTER_OTLP_ENDPOINT, else http://localhost:4318. The other OTEL_* variables count,
    too. Ids follow from the trace: sending twice sends the same spans.
    docs/otel-attributes.md lists the attributes.
    """

    writes = "file"
    requires = ()  # of HTTP and files; gRPC asks for its own library when it is chosen
    extra = "otel"

    def add_arguments(self, parser: ArgumentParser) -> None:
        """See `Exporter`."""
        add = parser.add_argument_group("OpenTelemetry").add_argument
        add(
            "--level",
            choices=("module", "divergent", "all"),
            default="divergent",
            help="which ops are spans: none, those that differ (with --against) or raised, all (default: divergent)",
        )
        add(
            "--protocol",
            type=lambda text: PROTOCOLS.get(text, text),
            choices=("http", "grpc", "file"),
            help="how to send; http, or http/protobuf, is protobuf over HTTP, file writes OTLP JSON lines (default: OTEL_EXPORTER_OTLP_PROTOCOL, else http)",
        )
        add("--endpoint", metavar="URL", help="where to send, such as http://localhost:4318")
        add(
            "--compression",
            choices=("gzip", "none"),
            help="of requests (default: OTEL_EXPORTER_OTLP_COMPRESSION, else none)",
        )
        add(
            "--timeout",
            metavar="SECONDS",
            type=_seconds,
            help="how long one request may take (default: OTEL_EXPORTER_OTLP_TIMEOUT, which is in milliseconds, else 10)",
        )
        add(
            "--give-up-after",
            metavar="SECONDS",
            type=_seconds,
            default=60.0,
            help="how long a request is tried again that the receiver is too busy for (default: 60)",
        )

    def suffix(self, options: Namespace) -> str | None:
        """See `Exporter`."""
        return _SUFFIX if settings(options, os.environ).protocol == "file" else None

    def export(self, export: Export) -> str:
        """See `Exporter`."""
        chosen = settings(export.options, os.environ)
        if chosen.disabled and export.output is None:
            return "sent nothing: OTEL_SDK_DISABLED is set"
        from opdrift_integrations.otlp.sending import deliver  # noqa: PLC0415 (it takes NumPy; --help does not)

        return deliver(export, chosen)


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return number
