"""OTLP over gRPC: one channel, and our own bytes."""

from __future__ import annotations

import threading
from typing import Final
from urllib.parse import urlsplit

import grpc

from opdrift.errors import InvalidOptionError
from opdrift_integrations.otlp.answers import partial_success
from opdrift_integrations.otlp.delivery import Answer
from opdrift_integrations.otlp.settings import Settings

_METHOD: Final = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
#: As the OTLP specification has it: the request may be taken later.
_RETRYABLE: Final = frozenset(
    {
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)
#: Whatever else is sent would be answered in the same way.
_HOPELESS: Final = frozenset(
    {
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNIMPLEMENTED,
    }
)

#: Seconds in which gRPC tells that a connection is there, after an answer has come over it.
_TOLD: Final = 0.5


class GrpcChannel:
    """A channel to `settings.endpoint`.

    Args:
        settings: Where and how.

    Raises:
        InvalidOptionError: Certificates cannot be read.
    """

    def __init__(self, settings: Settings) -> None:
        parts = urlsplit(settings.endpoint)
        self._url = settings.endpoint
        self._timeout = settings.timeout
        self._unanswered = settings.unanswered
        self._reached = threading.Event()
        # gRPC wants the names of headers in lower case
        self._metadata = [(name.lower(), value) for name, value in settings.headers.items()]
        compression = grpc.Compression.Gzip if settings.compress else grpc.Compression.NoCompression
        # it comes back from a lost connection at our pace, not at its own
        options = [
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1000),
        ]
        if parts.scheme == "http":
            self._channel = grpc.insecure_channel(parts.netloc, options, compression)
        else:
            self._channel = grpc.secure_channel(
                parts.netloc, _credentials(settings), options, compression
            )
        # a server that is too busy answers with the code that stands for an address that leads nowhere
        self._channel.subscribe(self._watch)
        self._export = self._channel.unary_unary(_METHOD)  # bytes in, bytes out

    def send(self, body: bytes) -> Answer:
        """See `Channel`."""
        try:
            said = self._export(body, timeout=self._timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            return self._failed(error)
        return Answer(*partial_success(said, "application/grpc"))

    def close(self) -> None:
        """See `Channel`."""
        self._channel.close()

    def _watch(self, state: grpc.ChannelConnectivity) -> None:
        if state is grpc.ChannelConnectivity.READY:
            self._reached.set()

    def _failed(self, error: grpc.RpcError) -> Answer:
        code, details = error.code(), error.details() or ""
        problem = f"{self._url} answered {code.name}" + (f": {details}" if details else "")
        if code == grpc.StatusCode.DEADLINE_EXCEEDED:
            problem = f"{self._url} {self._unanswered}"
        unreachable = code == grpc.StatusCode.UNAVAILABLE and not self._reached.wait(_TOLD)
        if unreachable:
            reason = details.rpartition(": ")[2] if "connect" in details else details
            problem = f"{self._url} cannot be reached ({reason}); start the receiver, or give its --endpoint"
        # the server may have less room than our requests, or be busy: details alone tell which
        too_large = code == grpc.StatusCode.RESOURCE_EXHAUSTED and "larger than max" in details
        retryable = code in _RETRYABLE or code == grpc.StatusCode.RESOURCE_EXHAUSTED
        return Answer(
            problem=problem,
            again=retryable and not unreachable and not too_large,
            hopeless=code in _HOPELESS or unreachable,
            too_large=too_large,
        )


def _credentials(settings: Settings) -> grpc.ChannelCredentials:
    try:
        root = settings.certificate and settings.certificate.read_bytes()
        chain = settings.client_certificate and settings.client_certificate.read_bytes()
        key = settings.client_key and settings.client_key.read_bytes()
    except OSError as error:
        raise InvalidOptionError(
            f"{error.filename} cannot be read ({error.strerror}); OTEL_EXPORTER_OTLP_..._CERTIFICATE or _KEY names it."
        ) from None
    return grpc.ssl_channel_credentials(root, key, chain)
