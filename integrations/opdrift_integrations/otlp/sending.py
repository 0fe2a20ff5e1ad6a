"""Send a run's spans, or write them to a file; nothing is left out in silence."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from opdrift.errors import ExportError
from opdrift.plugins import Export, Process
from opdrift_integrations.otlp import attributes
from opdrift_integrations.otlp.delivery import Answer, Channel, Delivery, Tally
from opdrift_integrations.otlp.encoding import Encoder
from opdrift_integrations.otlp.http import HttpChannel
from opdrift_integrations.otlp.jsonlines import JsonLines
from opdrift_integrations.otlp.protobuf import Protobuf
from opdrift_integrations.otlp.settings import Settings
from opdrift_integrations.otlp.spans import Spans


class FileChannel:
    """Requests as lines of a file."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb")

    def send(self, body: bytes) -> Answer:
        """See `Channel`."""
        self._file.write(body)
        return Answer()

    def close(self) -> None:
        """See `Channel`."""
        self._file.close()


def deliver(export: Export, chosen: Settings) -> str:
    """Send all processes of an export, or write them to `export.output`; say what became of how many spans.

    Raises:
        ExportError: Some were not taken.
    """
    encoder: type[JsonLines | Protobuf] = Protobuf if export.output is None else JsonLines
    with closing(_channel(chosen, export.output)) as channel:
        delivery = Delivery(channel, patience=chosen.patience)
        tally = delivery.tally
        for number, process in enumerate(export.processes, 1):
            spans = Spans(process, export.options.level, _encoders(process, chosen, encoder))
            before = tally.sent + tally.refused
            try:
                delivery.send(_counted(spans, export), spans.request)
            except (ExportError, KeyboardInterrupt) as error:
                left = len(spans) - (tally.sent + tally.refused - before)
                said = _broken_off(tally, left, len(export.processes) - number)
                if isinstance(error, ExportError):
                    raise ExportError(f"{said}: {error}") from None
                if export.output is None:
                    export.warn(f"interrupted: {said}")
                raise
    if tally.refused:
        said = "; ".join(tally.reasons) or "it did not say why"
        raise ExportError(f"{_said(tally)} by {chosen.endpoint}: {said}")
    if export.output is not None:
        return f"wrote {_spans(tally.sent)} as OTLP JSON lines"
    return f"{_said(tally)}: {chosen.endpoint}"


def _spans(number: int) -> str:
    return f"{number:,} span" + "s" * (number != 1)


def _said(tally: Tally) -> str:
    return f"sent {_spans(tally.sent)}, refused {tally.refused:,}"


def _broken_off(tally: Tally, left: int, ranks: int) -> str:
    more = f" and those of {ranks} more rank" + "s" * (ranks != 1) if ranks else ""
    if tally.sent or tally.refused:
        return f"{_said(tally)}, did not send the other {left:,}{more}"
    return f"sent none of {_spans(left)}{more}"


def _counted(spans: Spans, export: Export) -> Iterator[bytes]:
    total = len(spans)
    for done, span in enumerate(spans):
        if done % 256 == 0:
            export.progress(done, total)
        yield span


def _encoders(
    process: Process, chosen: Settings, kind: type[JsonLines | Protobuf]
) -> Callable[[bytes], Encoder]:
    ours = _version()
    resource = {**attributes.resource(process.trace.header, ours), **chosen.resource}
    scope = (attributes.SCOPE_NAME, ours, attributes.schema_url())
    return lambda trace_id: kind(trace_id, resource, scope, chosen.limits)


def _channel(chosen: Settings, output: Path | None) -> Channel:
    if output is not None:
        return FileChannel(output)
    if chosen.protocol == "http":
        return HttpChannel(chosen, Protobuf.content_type)
    if find_spec("grpc") is None:
        raise ExportError(
            "export otlp --protocol grpc needs grpc, which this Python does not have: pip install 'opdrift[otel]'"
        )
    from opdrift_integrations.otlp.grpc import GrpcChannel  # noqa: PLC0415 (of the extra)

    return GrpcChannel(chosen)


def _version() -> str:
    try:
        return version("opdrift")
    except PackageNotFoundError:
        return "0+uninstalled"  # a checkout on the path
