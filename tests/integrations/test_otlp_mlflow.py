"""Spans in a real backend: what MLflow stores is what was sent. Only with --mlflow, which may install it."""

from __future__ import annotations

import base64
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
from otlp_receiver import OK, receiver

import opdrift
from opdrift.testing import export
from opdrift_integrations.otlp import OtlpExporter

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def mlflow(request, tmp_path_factory):
    """The URL of a server that has nothing in it."""
    command = request.config.getoption("--mlflow")
    if command is None:
        pytest.skip("MLflow is only used with --mlflow")
    folder = tmp_path_factory.mktemp("mlflow")
    if command == "install":
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
        subprocess.run([folder / "venv/bin/pip", "install", "--quiet", "mlflow"], check=True)
        command = folder / "venv/bin/mlflow"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    quiet = {
        "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    }  # fmt: skip
    with open(folder / "log", "w") as log:
        server = subprocess.Popen(
            [command, "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
             "--backend-store-uri", f"sqlite:///{folder / 'store.db'}"],
            cwd=folder, env={**os.environ, **quiet}, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 180
        while not answers(f"{url}/health"):
            assert server.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.2)
        yield url
    finally:
        server.terminate()
        server.wait(30)


def answers(url):
    try:
        return urllib.request.urlopen(url, timeout=2).status == 200
    except (urllib.error.URLError, OSError):
        return False


def test_mlflow_stores_what_was_sent(mlflow, recorded, monkeypatch):
    """Names, ids, nanoseconds, events, links and status of every span, and the trace is marked as failed."""
    sides = [opdrift.load(recorded / f"{name}.trace") for name in ("eps", "base")]

    def send(endpoint):
        arguments = ["--level", "all", "--endpoint", endpoint, "--timeout", "60"]
        return export(OtlpExporter(), sides[0], against=sides[1], arguments=arguments)

    with receiver(lambda *_: OK) as there:
        send(there.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "x-mlflow-experiment-id=0")
    said = send(mlflow)

    trace_id = there.spans[0].trace_id.hex()
    with urllib.request.urlopen(
        f"{mlflow}/api/3.0/mlflow/traces/get?trace_id=tr-{trace_id}"
    ) as read:
        stored = json.load(read)["trace"]
    assert said == f"sent {len(there.spans)} spans, refused 0: {mlflow}/v1/traces"
    assert stored["trace_info"]["state"] == "ERROR"
    assert {_of_mlflow(span) for span in stored["spans"]} == {_sent(span) for span in there.spans}
    assert len(stored["spans"]) == len(there.spans) > 100


def _sent(span):
    return (
        span.name, span.span_id, span.parent_span_id, span.start_time_unix_nano, span.end_time_unix_nano,
        "STATUS_CODE_ERROR" if span.status.code == 2 else "STATUS_CODE_UNSET", span.status.message,
        tuple((event.name, event.time_unix_nano) for event in span.events),
        tuple((link.trace_id, link.span_id) for link in span.links),
    )  # fmt: skip


def _of_mlflow(span):
    def ident(data, name):
        return base64.b64decode(data.get(name, ""))

    return (
        span["name"], ident(span, "span_id"), ident(span, "parent_span_id"), span["start_time_unix_nano"],
        span["end_time_unix_nano"], span["status"].get("code", "STATUS_CODE_UNSET"), span["status"].get("message", ""),
        tuple((event["name"], event["time_unix_nano"]) for event in span.get("events", ())),
        tuple((ident(link, "trace_id"), ident(link, "span_id")) for link in span.get("links", ())),
    )  # fmt: skip
