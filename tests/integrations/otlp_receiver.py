"""A receiver of spans that answers as it is told, and what tests read from spans."""

from __future__ import annotations

import contextlib
import gzip
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTracePartialSuccess,
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass(frozen=True)
class Reply:
    """What the receiver answers."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


OK = Reply(headers={"Content-Type": "application/x-protobuf"})


def partial(rejected: int, message: str) -> Reply:
    """Taken, but for some spans."""
    said = ExportTraceServiceResponse(
        partial_success=ExportTracePartialSuccess(rejected_spans=rejected, error_message=message)
    )
    return Reply(200, said.SerializeToString(), OK.headers)


@dataclass
class Receiver:
    """What came, and where the receiver is."""

    url: str
    requests: list[ExportTraceServiceRequest] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    @property
    def spans(self) -> list[Span]:
        return [span for request in self.requests for span in spans_of(request)]


def spans_of(request: ExportTraceServiceRequest) -> list[Span]:
    return [
        span
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


@contextlib.contextmanager
def receiver(
    answer: Callable[[int, ExportTraceServiceRequest], Reply | None],
    tls: ssl.SSLContext | None = None,
) -> Iterator[Receiver]:
    """Serve on a free port; `answer` gets the number of the request, from 0, and None lets the connection drop.

    Only what is answered with 200 is kept.
    """
    lock = threading.Lock()
    count = [0]

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            plain = gzip.decompress(body) if self.headers["Content-Encoding"] == "gzip" else body
            request = ExportTraceServiceRequest.FromString(plain)
            with lock:
                number, count[0] = count[0], count[0] + 1
                found.headers.append(dict(self.headers))
                found.paths.append(self.path)
                found.sizes.append(len(body))
            reply = answer(number, request)
            if reply is None:
                self.close_connection = True
                self.connection.close()
                return
            if reply.status == 200:
                found.requests.append(request)
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(reply.body)))
            self.end_headers()
            self.wfile.write(reply.body)

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: object) -> None:
            pass  # connections that a test drops

    server = Server(("127.0.0.1", 0), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    scheme = "http" if tls is None else "https"
    found = Receiver(f"{scheme}://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def value_of(value: AnyValue) -> object:
    """As Python has it."""
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [value_of(each) for each in value.array_value.values]
    return getattr(value, kind) if kind else None


def attributes_of(span: Span | Span.Event | Span.Link) -> dict[str, object]:
    return {pair.key: value_of(pair.value) for pair in span.attributes}
