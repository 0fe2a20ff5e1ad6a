"""OTLP over HTTP: one connection, kept open, with the standard library alone."""

from __future__ import annotations

import gzip
import http.client
import socket
import ssl
from base64 import b64encode
from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final
from urllib.parse import SplitResult, unquote, urlsplit
from urllib.request import getproxies, proxy_bypass

from opdrift.errors import InvalidOptionError
from opdrift_integrations.otlp.answers import partial_success, status_message
from opdrift_integrations.otlp.delivery import Answer
from opdrift_integrations.otlp.settings import Settings

#: As the OTLP specification has it: the request may be taken later.
_RETRYABLE: Final = frozenset({429, 502, 503, 504})
#: Whatever else is sent would be answered in the same way.
_HOPELESS: Final = frozenset({401, 403, 404, 405, 407, 415, 501})
#: Characters of an answer that are repeated to the user.
_SAID: Final = 200
#: No proxy leads to this machine.
_HERE: Final = frozenset({"localhost", "127.0.0.1", "::1"})


class HttpChannel:
    """A connection to `settings.endpoint`.

    Args:
        settings: Where and how.
        content_type: Of the requests.

    Raises:
        InvalidOptionError: Certificates cannot be read.
    """

    def __init__(self, settings: Settings, content_type: str) -> None:
        self._url = settings.endpoint
        self._unanswered = settings.unanswered
        self._compress = settings.compress
        parts = urlsplit(self._url)
        self._path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._headers = {"User-Agent": "opdrift", **settings.headers, "Content-Type": content_type}
        if settings.compress:
            self._headers["Content-Encoding"] = "gzip"
        proxy = _proxy(self._url)
        if proxy is not None and parts.scheme == "http":
            self._path = self._url  # a proxy is told the whole of it
            self._headers |= _proxy_headers(proxy)
        self._via = "" if proxy is None else f" (by the proxy {proxy.hostname})"
        self._connect = _connector(settings, proxy)
        self._connection: http.client.HTTPConnection | None = None
        self._reached = False

    def send(self, body: bytes) -> Answer:
        """See `Channel`."""
        data = gzip.compress(body, 1) if self._compress else body
        try:
            response, said = self._request(data)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            return self._unreachable(error)
        self._reached = True
        return self._answer(response, said)

    def close(self) -> None:
        """See `Channel`."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _request(self, data: bytes) -> tuple[http.client.HTTPResponse, bytes]:
        if self._connection is not None:
            try:
                return self._exchange(self._connection, data)
            except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError):
                self.close()  # a server may close what was idle; only a new connection tells
        self._connection = self._connect()
        return self._exchange(self._connection, data)

    def _exchange(
        self, connection: http.client.HTTPConnection, data: bytes
    ) -> tuple[http.client.HTTPResponse, bytes]:
        connection.request("POST", self._path, data, self._headers)
        response = connection.getresponse()
        return response, response.read()

    def _unreachable(self, error: OSError | http.client.HTTPException) -> Answer:
        """Nothing answered, or nothing that speaks HTTP."""
        url = self._url + self._via
        if isinstance(error, ssl.SSLCertVerificationError):
            reason = (
                f"{url}: its certificate is not trusted ({error.verify_message});"
                " OTEL_EXPORTER_OTLP_CERTIFICATE names a file with one that is to be"
            )
            return Answer(problem=reason, hopeless=True)
        if isinstance(error, ssl.SSLError):
            reason = f"{url}: no TLS connection ({error.reason or error}); is it http:// rather than https://?"
            return Answer(problem=reason, hopeless=True)
        if isinstance(error, TimeoutError):
            return Answer(problem=f"{url} {self._unanswered}", again=True)
        if isinstance(error, socket.gaierror):
            reason = f"{url}: the host is not known ({error.strerror})"
            return Answer(problem=reason, hopeless=True)
        if str(error).startswith("Tunnel connection failed"):  # as http.client says it
            return Answer(problem=f"{url}: {error}", hopeless=True)
        if self._reached:
            return Answer(problem=f"{url} broke off the connection ({_said(error)})", again=True)
        if isinstance(error, ConnectionRefusedError):
            reason = f"{url}: nothing listens there (connection refused); start the receiver, or give its --endpoint"
            return Answer(problem=reason, hopeless=True)
        reason = f"{url} does not answer as HTTP ({_said(error)}); is it a gRPC port, for --protocol grpc, or https://?"
        return Answer(problem=reason, hopeless=True)

    def _answer(self, response: http.client.HTTPResponse, said: bytes) -> Answer:
        status, kind = response.status, response.headers.get_content_type()
        if 200 <= status < 300:
            refused, message = partial_success(said, kind)
            return Answer(refused, message)
        problem = f"{self._url} answered {status} {response.reason}"
        if 300 <= status < 400:
            target = response.headers.get("Location", "nowhere")
            return Answer(
                problem=f"{problem}: it redirects to {target}; give that as --endpoint",
                hopeless=True,
            )
        message = status_message(said, kind)[:_SAID].strip()
        problem += f": {message}" if message else ""
        return Answer(
            problem=problem,
            again=status in _RETRYABLE,
            wait=_retry_after(response.headers.get("Retry-After")),
            hopeless=status in _HOPELESS,
            too_large=status == 413,
        )


def _connector(
    settings: Settings, proxy: SplitResult | None
) -> Callable[[], http.client.HTTPConnection]:
    """What makes a connection to the receiver, or to a proxy that leads there."""
    parts = urlsplit(settings.endpoint)
    host, timeout = parts.hostname or "", settings.timeout
    if parts.scheme == "http":
        place = (host, parts.port) if proxy is None else (proxy.hostname or "", proxy.port)
        return lambda: http.client.HTTPConnection(*place, timeout=timeout)
    context = _tls(settings)

    def connect() -> http.client.HTTPConnection:
        if proxy is None:
            return http.client.HTTPSConnection(host, parts.port, timeout=timeout, context=context)
        made = http.client.HTTPSConnection(
            proxy.hostname or "", proxy.port, timeout=timeout, context=context
        )
        made.set_tunnel(host, parts.port or 443, _proxy_headers(proxy))
        return made

    return connect


def _proxy(endpoint: str) -> SplitResult | None:
    """The proxy that `HTTP_PROXY` or `HTTPS_PROXY` name for it; none for this machine and what `NO_PROXY` names."""
    parts = urlsplit(endpoint)
    host = parts.hostname or ""
    named = getproxies().get(parts.scheme)
    if not named or host in _HERE or proxy_bypass(host):
        return None
    return urlsplit(named if "://" in named else f"http://{named}")


def _proxy_headers(proxy: SplitResult) -> dict[str, str]:
    if proxy.username is None:
        return {}
    word = f"{unquote(proxy.username)}:{unquote(proxy.password or '')}"
    return {"Proxy-Authorization": "Basic " + b64encode(word.encode()).decode()}


def _tls(settings: Settings) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=settings.certificate)
        if settings.client_certificate is not None:
            context.load_cert_chain(settings.client_certificate, settings.client_key)
    except (OSError, ssl.SSLError) as error:
        raise InvalidOptionError(
            f"The certificates that OTEL_EXPORTER_OTLP_..._CERTIFICATE and _KEY name cannot be used ({error})."
        ) from None
    return context


def _retry_after(text: str | None) -> float | None:
    """Seconds from now, of a number of seconds or a date; None for what is neither."""
    if text is None:
        return None
    if text.strip().isdecimal():
        return float(text)
    try:
        when = parsedate_to_datetime(text)
    except ValueError:
        return None
    when = when if when.tzinfo else when.replace(tzinfo=UTC)
    return max((when - datetime.now(UTC)).total_seconds(), 0.0)


def _said(error: Exception) -> str:
    return str(error) or type(error).__name__
