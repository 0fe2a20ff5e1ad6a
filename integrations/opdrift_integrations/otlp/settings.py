"""Where spans go, and how: options of the command, and the environment variables of OpenTelemetry.

The variables are those of opentelemetry.io/docs/specs/otel (protocol/exporter, configuration/sdk-environment-variables);
one for traces (`OTEL_EXPORTER_OTLP_TRACES_...`) counts before the general one, an option before both.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal
from urllib.parse import unquote, urlsplit

from opdrift.errors import InvalidOptionError
from opdrift_integrations.otlp.encoding import Limits

Protocol = Literal["http", "grpc", "file"]
#: `OTEL_EXPORTER_OTLP_PROTOCOL` -> `--protocol`, which takes its words, too.
PROTOCOLS: Final[Mapping[str, Protocol]] = {"http/protobuf": "http", "grpc": "grpc"}
_DEFAULT: Final = {"http": "http://localhost:4318", "grpc": "http://localhost:4317"}
_PATH: Final = "/v1/traces"
#: Seconds (protocol/exporter.md, "Timeout").
_TIMEOUT: Final = 10.0


@dataclass(frozen=True, slots=True)
class Settings:
    """How to reach a receiver.

    Attributes:
        protocol: "file" sends nothing.
        endpoint: The whole URL; for gRPC `http://` or `https://`, host and port. "" for a file.
        headers: Of every request.
        timeout: Seconds that one request may take; None for as many as it takes.
        patience: Seconds after which a batch that is not taken is given up.
        compress: With gzip.
        certificate: CA certificates to trust instead of the system's.
        client_certificate: To show to the receiver.
        client_key: That certificate's key.
        limits: What spans are cut to.
        resource: Attributes of the resource, before our own.
        disabled: `OTEL_SDK_DISABLED` is set.
    """

    protocol: Protocol
    endpoint: str
    headers: Mapping[str, str]
    timeout: float | None
    patience: float
    compress: bool
    certificate: Path | None
    client_certificate: Path | None
    client_key: Path | None
    limits: Limits
    resource: Mapping[str, str]
    disabled: bool

    @property
    def unanswered(self) -> str:
        """What is said of a receiver that took too long."""
        limit = f" within {self.timeout:g} s; --timeout waits longer" if self.timeout else ""
        return f"did not answer{limit}"


def settings(options: Namespace, environ: Mapping[str, str]) -> Settings:
    """Read them.

    Raises:
        InvalidOptionError: A value cannot be understood, or options contradict each other.
    """
    found = _Variables(environ)
    protocol = _protocol(options, found)
    variable, text = found.otlp("COMPRESSION")
    compression = options.compression or text or "none"
    if compression not in ("gzip", "none"):
        raise InvalidOptionError(f"{variable}={compression!r}: opdrift knows gzip and none.")
    return Settings(
        protocol=protocol,
        endpoint="" if protocol == "file" else _endpoint(options, found, protocol),
        headers=found.pairs(*found.otlp("HEADERS")),
        timeout=_timeout(found) if options.timeout is None else options.timeout,
        patience=options.give_up_after,
        compress=compression == "gzip",
        certificate=found.file("CERTIFICATE"),
        client_certificate=found.file("CLIENT_CERTIFICATE"),
        client_key=found.file("CLIENT_KEY"),
        limits=_limits(found),
        resource=_resource(found),
        disabled=environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true",
    )


class _Variables:
    """The environment; a variable that is empty counts as unset."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def get(self, name: str) -> str | None:
        return self._environ.get(name, "").strip() or None

    def otlp(self, name: str) -> tuple[str, str | None]:
        """The name and text of an exporter's variable: the one for traces, else the general one."""
        special, general = (f"OTEL_EXPORTER_OTLP_{each}{name}" for each in ("TRACES_", ""))
        text = self.get(special)
        return (general, self.get(general)) if text is None else (special, text)

    def whole(self, default: int, *names: str) -> int:
        """The first of some variables that is set, a whole number from 0."""
        for name in names:
            text = self.get(name)
            if text is None:
                continue
            return _natural(name, text)
        return default

    def file(self, name: str) -> Path | None:
        variable, text = self.otlp(name)
        if text is None:
            return None
        if not Path(text).is_file():
            raise InvalidOptionError(f"{variable}={text!r}: there is no such file.")
        return Path(text)

    def pairs(self, name: str, text: str | None) -> Mapping[str, str]:
        """`key=value,key=value` with percent-encoded values (W3C Baggage)."""
        found = {}
        for part in (text or "").split(","):
            if not part.strip():
                continue
            key, equals, value = part.partition("=")
            if not equals or not key.strip():
                # its value may be a secret: it is not repeated
                raise InvalidOptionError(
                    f"{name} is not of the form key=value,key=value: one part has no key and '='."
                )
            found[unquote(key.strip())] = unquote(value.strip())
        return found


def _natural(name: str, text: str, unit: str = "") -> int:
    if not text.isdecimal():
        raise InvalidOptionError(f"{name}={text!r} is not a whole number{unit} from 0.")
    return int(text)


def _timeout(found: _Variables) -> float | None:
    """Seconds, of the variable's milliseconds; 0 stands for no limit (configuration/common.md, "Timeout")."""
    name, text = found.otlp("TIMEOUT")
    if text is None:
        return _TIMEOUT
    return _natural(name, text, " of milliseconds") / 1000 or None


def _protocol(options: Namespace, found: _Variables) -> Protocol:
    chosen: Protocol | None = options.protocol
    if chosen is None and options.output is not None:
        chosen = "file"
    if chosen == "file" and options.endpoint is not None:
        raise InvalidOptionError("--endpoint is for sending; a file is written with -o alone.")
    if chosen in ("http", "grpc") and options.output is not None:
        raise InvalidOptionError(
            f"-o writes a file, --protocol {chosen} sends; leave out one of them."
        )
    if chosen is not None:
        return chosen
    variable, text = found.otlp("PROTOCOL")
    text = text or "http/protobuf"
    if text not in PROTOCOLS:
        raise InvalidOptionError(
            f"{variable}={text!r}: opdrift sends {' and '.join(PROTOCOLS)}; choose with --protocol."
        )
    return PROTOCOLS[text]


def _endpoint(options: Namespace, found: _Variables, protocol: Protocol) -> str:
    given: str | None = options.endpoint or found.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
    general = found.get("OTEL_EXPORTER_OTLP_ENDPOINT") or _DEFAULT[protocol]
    url = given or general
    if protocol == "grpc" and "://" not in url:
        url = f"http://{url}"  # as gRPC's own targets are written
    try:
        parts = urlsplit(url)
        wrong = parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0
    except ValueError:  # a port that is no number
        wrong = True
    if wrong:
        raise InvalidOptionError(
            f"{url!r} is no endpoint: give a URL such as {_DEFAULT[protocol]}{_PATH if protocol == 'http' else ''}."
        )
    if protocol == "http" and given is None:
        return general.rstrip("/") + _PATH  # the general endpoint is where all signals go
    if protocol == "http" and parts.path in ("", "/") and options.endpoint:
        return url.rstrip("/") + _PATH  # nobody types the path to mean another one
    return url


def _limits(found: _Variables) -> Limits:
    default = Limits()
    return Limits(
        attributes=found.whole(
            default.attributes, "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "OTEL_ATTRIBUTE_COUNT_LIMIT"
        ),
        length=found.whole(
            default.length,
            "OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT",
            "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT",
        ),
        events=found.whole(default.events, "OTEL_SPAN_EVENT_COUNT_LIMIT"),
        links=found.whole(default.links, "OTEL_SPAN_LINK_COUNT_LIMIT"),
        event_attributes=found.whole(
            default.event_attributes,
            "OTEL_EVENT_ATTRIBUTE_COUNT_LIMIT",
            "OTEL_ATTRIBUTE_COUNT_LIMIT",
        ),
        link_attributes=found.whole(
            default.link_attributes,
            "OTEL_LINK_ATTRIBUTE_COUNT_LIMIT",
            "OTEL_ATTRIBUTE_COUNT_LIMIT",
        ),
    )


def _resource(found: _Variables) -> Mapping[str, str]:
    name = "OTEL_RESOURCE_ATTRIBUTES"
    attributes = dict(found.pairs(name, found.get(name)))
    service = found.get("OTEL_SERVICE_NAME")
    return {**attributes, "service.name": service} if service else attributes
