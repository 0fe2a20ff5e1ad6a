"""Sending spans: nothing is lost in silence, whatever the receiver does."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
import threading
from argparse import ArgumentParser
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from otlp_receiver import OK, Reply, attributes_of, partial, receiver, spans_of

import opdrift
from opdrift.commands.main import opdrift as command
from opdrift.errors import ExportError, InvalidOptionError
from opdrift.testing import Builder, export, trace
from opdrift_integrations.otlp import OtlpExporter
from opdrift_integrations.otlp import settings as read_settings
from opdrift_integrations.otlp.delivery import BATCH, Answer, Delivery
from opdrift_integrations.otlp.http import HttpChannel


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    """Nothing of the environment that the suite runs in."""
    import os

    for name in [n for n in os.environ if n.startswith("OTEL_") or n.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)


RUN = trace("fc{ mm relu mm }")
SPANS = 5  # the run, the module, three ops


def send(*arguments, run=RUN, **options):
    """Send a run with all its ops."""
    return export(OtlpExporter(), run, arguments=["--level", "all", *arguments], **options)


# ---- what arrives ----------------------------------------------------------------------------------------------


def test_all_spans_arrive_and_are_counted():
    """Over HTTP, at the path for traces."""
    with receiver(lambda *_: OK) as there:
        said = send("--endpoint", there.url)

    assert said == f"sent 5 spans, refused 0: {there.url}/v1/traces"
    assert there.paths == ["/v1/traces"]
    assert [span.name for span in there.spans] == [
        "torch.run", "fc (Module)", "aten.mm.default", "aten.relu.default", "aten.mm.default",
    ]  # fmt: skip
    assert there.headers[0]["Content-Type"] == "application/x-protobuf"


def test_a_real_receiver_takes_them(recorded):
    """oteltap, over HTTP: names, ids, nanoseconds, events, links and status as they were sent."""
    from oteltap import OtelTapHttpProtobufReceiver, OtelTapHttpProtobufReceiverSettings

    sides = [opdrift.load(recorded / f"{name}.trace") for name in ("eps", "base")]

    async def collected(tap, wanted):
        spans = []
        async for span in tap.stream_traces():
            spans.append(span)
            if len(spans) == wanted:
                break
        return spans

    async def received(port, wanted):
        url = f"http://127.0.0.1:{port}"
        settings = OtelTapHttpProtobufReceiverSettings(http_port=port)
        async with OtelTapHttpProtobufReceiver(settings) as tap:
            collecting = asyncio.create_task(collected(tap, wanted))
            await asyncio.sleep(0)  # lets it subscribe: what came before is not streamed
            said = await asyncio.to_thread(send, "--endpoint", url, run=sides[0], against=sides[1])
            return said, await collecting

    with receiver(lambda *_: OK) as there:
        send("--endpoint", there.url, run=sides[0], against=sides[1])
    wanted = {span.span_id: span.SerializeToString() for span in there.spans}
    said, spans = asyncio.run(asyncio.wait_for(received(free_port(), len(wanted)), 60))

    assert said.startswith(f"sent {len(wanted)} spans, refused 0")
    assert {span.span_id: span.SerializeToString() for span in spans} == wanted
    assert sum(len(span.links) for span in spans) > 20
    assert [e.name for s in spans for e in s.events].count("torch.diff.first_divergence") == 1


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def long_run(ops):
    build = Builder()
    x = build.leaf("x", kind="input")
    for _ in range(ops):
        x = build.op("relu", x, settings={"text": "x" * 8000})
    return build.build()


def test_requests_stay_below_two_megabytes():
    """Servers of gRPC take four by default."""
    with receiver(lambda *_: OK) as there:
        said = send("--endpoint", there.url, run=long_run(600))

    assert said.startswith("sent 601 spans, refused 0")
    assert len(there.spans) == 601
    assert len(there.sizes) == 3
    assert max(there.sizes) < BATCH + 100_000


# ---- refusals --------------------------------------------------------------------------------------------------


def test_what_the_receiver_did_not_take_is_told():
    """It took the request, but not all spans in it."""
    with receiver(lambda *_: partial(2, "no room")) as there, pytest.raises(ExportError) as error:
        send("--endpoint", there.url)

    assert str(error.value) == f"sent 3 spans, refused 2 by {there.url}/v1/traces: no room"


def test_a_warning_without_refusals_is_no_failure():
    """partial_success with a message alone."""
    with receiver(lambda *_: partial(0, "old schema")) as there:
        assert send("--endpoint", there.url).startswith("sent 5 spans, refused 0")


def test_a_busy_receiver_is_asked_again_when_it_says(monkeypatch):
    """Retry-After counts; the spans arrive once."""
    busy = Reply(503, b"", {"Retry-After": "0"})
    with receiver(lambda number, _: busy if number < 3 else OK) as there:
        said = send("--endpoint", there.url)

    assert said.startswith("sent 5 spans, refused 0")
    assert (len(there.paths), len(there.spans)) == (4, 5)


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_a_receiver_that_stays_busy_is_given_up(status):
    """And what was not sent is counted."""
    with (
        receiver(lambda *_: Reply(status, b"too much", {"Retry-After": "3600"})) as there,
        pytest.raises(ExportError) as error,
    ):
        send("--endpoint", there.url, "--give-up-after", "2")

    said = str(error.value)
    assert said.startswith(f"sent none of 5 spans: {there.url}/v1/traces answered {status} ")
    assert "too much; given up after 0 s (it asked for 3600 s more)" in said
    assert len(there.paths) == 1


def test_what_is_refused_for_good_is_counted_and_the_rest_sent():
    """400 to the second of three requests."""
    bad = Reply(400, b'{"message": "bad span"}', {"Content-Type": "application/json"})
    with (
        receiver(lambda number, _: bad if number == 1 else OK) as there,
        pytest.raises(ExportError) as error,
    ):
        send("--endpoint", there.url, run=long_run(600))

    taken = len(there.spans)
    assert 0 < taken < 601
    assert str(error.value).startswith(f"sent {taken} spans, refused {601 - taken} by ")
    assert "answered 400 Bad Request: bad span" in str(error.value)


def test_a_request_that_is_too_large_is_halved():
    """Until the receiver takes it."""
    with receiver(lambda _, r: OK if len(spans_of(r)) <= 2 else Reply(413)) as there:
        assert send("--endpoint", there.url).startswith("sent 5 spans, refused 0")

    assert sorted(len(spans_of(request)) for request in there.requests) == [1, 2, 2]


def test_a_span_that_is_too_large_alone_is_refused():
    """There is nothing left to halve."""
    with receiver(lambda *_: Reply(413)) as there, pytest.raises(ExportError, match="refused 5 "):
        send("--endpoint", there.url)


@pytest.mark.parametrize("status", [401, 403, 404])
def test_what_would_refuse_everything_is_asked_once(status):
    """A wrong key, a wrong path."""
    with receiver(lambda *_: Reply(status)) as there, pytest.raises(ExportError, match=str(status)):
        send("--endpoint", there.url, run=long_run(600))

    assert len(there.paths) == 1


def test_a_redirect_names_where_it_leads():
    """Following it would send a POST as a GET."""
    moved = Reply(301, b"", {"Location": "https://elsewhere/v1/traces"})
    with receiver(lambda *_: moved) as there, pytest.raises(ExportError) as error:
        send("--endpoint", there.url)

    assert "redirects to https://elsewhere/v1/traces" in str(error.value)


def test_a_connection_that_breaks_is_made_again():
    """The request that it took away is sent once more."""
    with receiver(lambda number, _: None if number == 1 else OK) as there:
        said = send("--endpoint", there.url, run=long_run(600))

    assert said.startswith("sent 601 spans, refused 0")
    assert len(there.spans) == 601


def test_a_receiver_that_dies_in_the_middle_is_told_with_what_it_got():
    """Sent, refused and left add up."""
    with (
        receiver(
            lambda number, _: OK if number == 0 else Reply(503, b"", {"Retry-After": "99"})
        ) as there,
        pytest.raises(ExportError) as error,
    ):
        send("--endpoint", there.url, "--give-up-after", "1", run=long_run(600))

    taken = len(there.spans)
    assert str(error.value).startswith(
        f"sent {taken} spans, refused 0, did not send the other {601 - taken}: "
    )


def test_an_interrupted_export_says_what_was_sent(recorded, monkeypatch, capsys):
    """Ctrl-C at the second request; the status is that of an interrupt."""
    monkeypatch.setattr("opdrift_integrations.otlp.delivery._MOST", 100)
    requests = []

    def interrupt(request):
        requests.append(request)
        if len(requests) == 2:
            raise KeyboardInterrupt
        return request

    sent = HttpChannel.send
    monkeypatch.setattr(HttpChannel, "send", lambda self, body: sent(self, interrupt(body)))
    with receiver(lambda *_: OK) as there:
        arguments = ["--level", "all", "--endpoint", there.url]
        assert command(["export", "otlp", str(recorded / "base.trace"), *arguments]) == 130

    assert len(there.spans) == 100
    assert capsys.readouterr().err == (
        "opdrift: interrupted: sent 100 spans, refused 0, did not send the other 28\n"
    )


# ---- receivers that are none -----------------------------------------------------------------------------------


def test_nothing_listens(recorded, capsys):
    """One sentence, status 2, at once."""
    url = f"http://127.0.0.1:{free_port()}"

    assert command(["export", "otlp", str(recorded / "base.trace"), "--endpoint", url]) == 2

    assert capsys.readouterr().err == (
        f"opdrift: sent none of 31 spans: {url}/v1/traces: nothing listens there (connection refused);"
        " start the receiver, or give its --endpoint\n"
    )


@contextmanager
def listening(answer):
    """A server that speaks no HTTP: `answer` gets each connection."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve():
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                answer(connection)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.getsockname()[1]}"
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join()


def until_closed(connection):
    while connection.recv(65536):
        pass


def test_a_receiver_that_hangs_is_given_up():
    """It takes the request and never answers."""
    with listening(until_closed) as place, pytest.raises(ExportError) as error:
        send("--endpoint", f"http://{place}", "--timeout", "0.2", "--give-up-after", "0.3")

    said = f"http://{place}/v1/traces did not answer within 0.2 s; --timeout waits longer; given up"
    assert said in str(error.value)


def test_a_port_that_speaks_something_else():
    """Such as gRPC's."""
    with (
        listening(lambda connection: connection.sendall(b"\x00\x00\x04")) as place,
        pytest.raises(ExportError, match=r"does not answer as HTTP.*--protocol grpc"),
    ):
        send("--endpoint", f"http://{place}")


def test_tls_where_there_is_none():
    """https:// to a receiver without it."""
    with (
        receiver(lambda *_: OK) as there,
        pytest.raises(ExportError, match=r"no TLS connection.*is it http://"),
    ):
        send("--endpoint", there.url.replace("http:", "https:"))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A certificate for 127.0.0.1 that nobody trusts, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "key.pem", "-out", "cert.pem",
         "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"],
        cwd=folder, capture_output=True, check=False,
    )  # fmt: skip
    if made.returncode:
        pytest.skip("there is no openssl to make a certificate with")
    return folder / "cert.pem", folder / "key.pem"


def test_a_certificate_is_trusted_when_a_variable_says_so(certificate, monkeypatch):
    """And not before."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    with receiver(lambda *_: OK, context) as there:
        with pytest.raises(
            ExportError, match=r"its certificate is not trusted .*CERTIFICATE names"
        ):
            send("--endpoint", there.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", str(certificate[0]))
        assert send("--endpoint", there.url).startswith("sent 5 spans")


def test_a_proxy_is_asked_for_the_receiver(monkeypatch):
    """HTTP_PROXY, with a password; it gets the whole URL."""
    with receiver(lambda *_: OK) as there:
        monkeypatch.setenv("http_proxy", there.url.replace("//", "//me:p%40ss@"))
        said = send("--endpoint", "http://collector.example:4318")

    assert said == "sent 5 spans, refused 0: http://collector.example:4318/v1/traces"
    assert there.paths == ["http://collector.example:4318/v1/traces"]
    assert there.headers[0]["Proxy-Authorization"] == "Basic bWU6cEBzcw=="


@pytest.mark.parametrize("variable", ["no_proxy", None])
def test_no_proxy_is_asked_for_what_is_near(variable, monkeypatch):
    """This machine, and what NO_PROXY names."""
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    if variable is not None:
        monkeypatch.setenv(variable, "127.0.0.1")
    with receiver(lambda *_: OK) as there:
        assert send("--endpoint", there.url).startswith("sent 5 spans")


def test_a_proxy_that_refuses_a_tunnel_is_named(monkeypatch):
    """https:// goes through it untouched."""
    asked = []

    def refuse(connection):
        asked.append(connection.recv(65536).partition(b"\r\n")[0])
        connection.sendall(b"HTTP/1.1 403 Forbidden\r\n\r\n")

    with listening(refuse) as place:
        monkeypatch.setenv("https_proxy", f"http://{place}")
        with pytest.raises(ExportError) as error:
            send("--endpoint", "https://collector.example:4318")

    assert asked[0].startswith(b"CONNECT collector.example:4318")
    assert "(by the proxy 127.0.0.1): Tunnel connection failed: 403 Forbidden" in str(error.value)


# ---- options and variables ---------------------------------------------------------------------------------------


def settings_of(*arguments, output=None, **environ):
    parser = ArgumentParser()
    parser.set_defaults(output=output)
    OtlpExporter().add_arguments(parser)
    return read_settings(parser.parse_args(arguments), environ)


@pytest.mark.parametrize(
    ("arguments", "environ", "endpoint"),
    [
        ([], {}, "http://localhost:4318/v1/traces"),
        (["--protocol", "grpc"], {}, "http://localhost:4317"),
        ([], {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://all:1/base/"}, "http://all:1/base/v1/traces"),
        ([], {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://traces:1/x"}, "http://traces:1/x"),
        ([], {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://t:1/x", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://a:1"}, "http://t:1/x"),
        (["--endpoint", "http://mine:1/x"], {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://t:1/x"}, "http://mine:1/x"),
        (["--endpoint", "http://mine:1"], {}, "http://mine:1/v1/traces"),
        (["--protocol", "grpc", "--endpoint", "mine:4317"], {}, "http://mine:4317"),
        ([], {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "http://localhost:4317"),
        (["--protocol", "http"], {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "http://localhost:4318/v1/traces"),
        (["--protocol", "file"], {}, ""),
    ],
)  # fmt: skip
def test_where_spans_go(arguments, environ, endpoint):
    """An option, else the variable for traces, else the general one, else the default."""
    assert settings_of(*arguments, **environ).endpoint == endpoint


def test_variables_say_how():
    """Headers, timeout, compression, limits, resource; the ones for traces count first."""
    found = settings_of(
        OTEL_EXPORTER_OTLP_HEADERS="all=1",
        OTEL_EXPORTER_OTLP_TRACES_HEADERS="api-key=a%3Db, x=y",
        OTEL_EXPORTER_OTLP_TIMEOUT="3500",
        OTEL_EXPORTER_OTLP_COMPRESSION="gzip",
        OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT="7",
        OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT="9",
        OTEL_SPAN_EVENT_COUNT_LIMIT="1",
        OTEL_SPAN_LINK_COUNT_LIMIT="0",
        OTEL_RESOURCE_ATTRIBUTES="deployment=test,service.name=other",
        OTEL_SERVICE_NAME="mine",
        OTEL_SDK_DISABLED="TRUE",
    )

    limits = found.limits
    assert found.headers == {"api-key": "a=b", "x": "y"}
    assert (found.timeout, found.compress, found.disabled) == (3.5, True, True)
    assert (limits.attributes, limits.length, limits.events, limits.links) == (7, 9, 1, 0)
    assert found.resource == {"deployment": "test", "service.name": "mine"}


@pytest.mark.parametrize(
    ("arguments", "environ", "timeout"),
    [
        ([], {}, 10.0),
        ([], {"OTEL_EXPORTER_OTLP_TIMEOUT": "10000"}, 10.0),
        ([], {"OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": "250", "OTEL_EXPORTER_OTLP_TIMEOUT": "9"}, 0.25),
        ([], {"OTEL_EXPORTER_OTLP_TIMEOUT": "0"}, None),
        (["--timeout", "2.5"], {"OTEL_EXPORTER_OTLP_TIMEOUT": "9"}, 2.5),
    ],
)
def test_timeouts_of_variables_are_milliseconds(arguments, environ, timeout):
    """As the specification has them, 0 for no limit; the option takes seconds."""
    assert settings_of(*arguments, **environ).timeout == timeout


def test_variables_arrive(monkeypatch):
    """In the request: compressed, with the header, and in the resource."""
    with receiver(lambda *_: OK) as there:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", there.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-mlflow-experiment-id=0")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
        monkeypatch.setenv("OTEL_SERVICE_NAME", "nightly")
        send()

    resource = attributes_of(there.requests[0].resource_spans[0].resource)
    assert there.headers[0]["x-mlflow-experiment-id"] == "0"
    assert there.headers[0]["Content-Encoding"] == "gzip"
    assert resource["service.name"] == "nightly"
    assert len(there.spans) == SPANS


def test_a_switched_off_sdk_sends_nothing(monkeypatch):
    """OTEL_SDK_DISABLED; it says so."""
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")

    assert send("--endpoint", "http://127.0.0.1:9") == "sent nothing: OTEL_SDK_DISABLED is set"


@pytest.mark.parametrize(
    ("arguments", "environ", "words"),
    [
        (["--endpoint", "localhost"], {}, "'localhost' is no endpoint: give a URL such as http://localhost:4318/v1/traces"),
        (["--endpoint", "ftp://x"], {}, "is no endpoint"),
        (["--endpoint", "http://x:port"], {}, "is no endpoint"),
        (["--endpoint", "http://x", "--protocol", "file"], {}, "--endpoint is for sending"),
        ([], {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, "opdrift sends http/protobuf and grpc"),
        ([], {"OTEL_EXPORTER_OTLP_COMPRESSION": "zstd"}, "knows gzip and none"),
        ([], {"OTEL_EXPORTER_OTLP_TIMEOUT": "soon"}, "OTEL_EXPORTER_OTLP_TIMEOUT='soon' is not a whole number of milliseconds"),
        ([], {"OTEL_EXPORTER_OTLP_TRACES_TIMEOUT": "2.5", "OTEL_EXPORTER_OTLP_TIMEOUT": "9"}, "OTEL_EXPORTER_OTLP_TRACES_TIMEOUT='2.5' is not"),
        ([], {"OTEL_RESOURCE_ATTRIBUTES": "nightly"}, "OTEL_RESOURCE_ATTRIBUTES is not of the form key=value"),
        ([], {"OTEL_SPAN_LINK_COUNT_LIMIT": "-1"}, "not a whole number from 0"),
        ([], {"OTEL_EXPORTER_OTLP_CERTIFICATE": "/nowhere.pem"}, "there is no such file"),
        ([], {"OTEL_EXPORTER_OTLP_HEADERS": "secret"}, "key=value"),
    ],
)  # fmt: skip
def test_wrong_settings_are_named(arguments, environ, words):
    """Before anything is read or sent."""
    with pytest.raises(InvalidOptionError) as error:
        settings_of(*arguments, **environ)
    assert words in str(error.value)


def test_the_protocol_may_be_written_as_the_variable_has_it():
    """OTEL_EXPORTER_OTLP_PROTOCOL says http/protobuf where --protocol says http."""
    assert settings_of("--protocol", "http/protobuf").protocol == "http"
    with pytest.raises(SystemExit):
        settings_of("--protocol", "http/json")


def test_a_wrong_header_is_not_repeated():
    """It may be a key."""
    with pytest.raises(InvalidOptionError) as error:
        settings_of(OTEL_EXPORTER_OTLP_HEADERS="s3cret")
    assert "s3cret" not in str(error.value)


def test_a_file_and_an_endpoint_exclude_each_other(recorded, tmp_path, capsys):
    """-o alone writes; with --protocol http it contradicts itself."""
    arguments = ["export", "otlp", str(recorded / "base.trace"), "-o", str(tmp_path / "x.jsonl")]

    assert command([*arguments, "--protocol", "http"]) == 2
    assert "leave out one of them" in capsys.readouterr().err
    assert command(arguments) == 0


# ---- patience ----------------------------------------------------------------------------------------------------


class Clock:
    """Time that passes only when somebody sleeps."""

    def __init__(self):
        self.now = 0.0
        self.slept = []

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds


class Busy:
    """A channel whose receiver has no time."""

    def send(self, body):
        return Answer(problem="busy", again=True)

    def close(self):
        pass


def test_pauses_double_until_patience_ends():
    """Half a second, one, two, four ..., each up to a quarter more or less; never longer than was allowed."""
    clock = Clock()
    delivery = Delivery(Busy(), patience=60, sleep=clock.sleep, clock=clock)

    with pytest.raises(ExportError, match=r"busy; given up after \d+ s; --give-up-after"):
        delivery.send([b"x"], b"".join)

    assert len(clock.slept) in (5, 6, 7)
    for pause, plain in zip(clock.slept, (0.5, 1, 2, 4, 8, 16, 30), strict=False):
        assert 0.75 * plain <= pause <= 1.25 * plain
    assert clock.now <= 60


def test_the_next_spans_are_made_when_the_ones_before_were_taken():
    """A slow receiver slows the export down instead of filling memory."""
    made, sent = [], []

    class Slow(Busy):
        def send(self, body):
            sent.append(len(made))
            return Answer()

    def spans():
        for number in range(100):
            made.append(number)
            yield bytes(BATCH // 4)

    Delivery(Slow(), patience=1).send(spans(), b"".join)

    assert len(sent) == 25
    # one more span is made before it is known that the request is full
    assert sent == [5 + 4 * i for i in range(24)] + [100]


# ---- gRPC --------------------------------------------------------------------------------------------------------


@contextmanager
def grpc_receiver(answer, **options):
    """A server of the trace service; `answer` gets the request and the context."""
    import grpc

    taken = []

    class Handler(grpc.GenericRpcHandler):
        def service(self, call):
            if call.method != "/opentelemetry.proto.collector.trace.v1.TraceService/Export":
                return None
            taken.append(dict(call.invocation_metadata))
            return grpc.unary_unary_rpc_method_handler(
                lambda body, context: answer(ExportTraceServiceRequest.FromString(body), context)
            )

    with ThreadPoolExecutor(2) as pool:
        server = grpc.server(pool, [Handler()], **options)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"http://127.0.0.1:{port}", taken
        finally:
            server.stop(None).wait()


def test_spans_arrive_over_grpc(monkeypatch):
    """With headers as metadata."""
    requests = []
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "Api-Key=k")
    with grpc_receiver(lambda request, _: requests.append(request) or b"") as (url, calls):
        said = send("--protocol", "grpc", "--endpoint", url, "--compression", "gzip")

    assert said == f"sent 5 spans, refused 0: {url}"
    assert sum(len(spans_of(request)) for request in requests) == SPANS
    assert calls[0]["api-key"] == "k"


def test_grpc_refusals_are_counted():
    """partial_success is the same there."""
    with (
        grpc_receiver(lambda *_: partial(4, "full").body) as (url, _),
        pytest.raises(ExportError, match=r"sent 1 span, refused 4 by .*: full"),
    ):
        send("--protocol", "grpc", "--endpoint", url)


@pytest.mark.parametrize("busy", [1, 2])
def test_grpc_that_is_busy_is_asked_again(busy):
    """UNAVAILABLE is what a collector that is out of memory answers, also to the first request."""
    import grpc

    calls, requests = [], []

    def answer(request, context):
        calls.append(1)
        if len(calls) == busy:
            context.abort(grpc.StatusCode.UNAVAILABLE, "data refused due to high memory usage")
        requests.append(request)
        return b""

    with grpc_receiver(answer) as (url, _):
        said = send("--protocol", "grpc", "--endpoint", url, run=long_run(300))

    assert said.startswith("sent 301 spans, refused 0")
    assert (len(calls), sum(len(spans_of(r)) for r in requests)) == (3, 301)


def test_a_request_that_grpc_finds_too_large_is_halved():
    """A server with a smaller limit than ours."""
    requests = []
    limit = [("grpc.max_receive_message_length", 500_000)]
    with grpc_receiver(lambda r, _: requests.append(r) or b"", options=limit) as (url, _):
        said = send("--protocol", "grpc", "--endpoint", url, run=long_run(300))

    assert said.startswith("sent 301 spans, refused 0")
    assert sum(len(spans_of(request)) for request in requests) == 301


@pytest.mark.parametrize("code", ["UNAUTHENTICATED", "INVALID_ARGUMENT"])
def test_grpc_that_refuses_says_why(code):
    """The code and the server's words."""
    import grpc

    with (
        grpc_receiver(lambda _, context: context.abort(grpc.StatusCode[code], "no key")) as (
            url,
            _,
        ),
        pytest.raises(ExportError, match=f"answered {code}: no key"),
    ):
        send("--protocol", "grpc", "--endpoint", url)


def test_no_grpc_server():
    """At once, with the address."""
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(
        ExportError, match=f"sent none of 5 spans: {url} cannot be reached .*Connection refused"
    ):
        send("--protocol", "grpc", "--endpoint", url)


def test_grpc_that_is_not_installed(monkeypatch):
    """The extra that brings it."""
    monkeypatch.setattr("opdrift_integrations.otlp.sending.find_spec", lambda name: None)
    with pytest.raises(ExportError, match=r"needs grpc, .*: pip install 'opdrift\[otel\]'"):
        send("--protocol", "grpc")
