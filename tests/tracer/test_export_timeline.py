"""Timelines: what lies on which track, and nothing overlaps on one."""

from __future__ import annotations

import gzip
import json
import os
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opdrift.export.chrome import ChromeExporter
from opdrift.export.kineto import DIALECT
from opdrift.export.livebytes import item_bytes, live_bytes
from opdrift.export.processes import Processes, Selection
from opdrift.export.timeline import timeline
from opdrift.export.tracks import Instant, Level, Slice, in_order, lanes
from opdrift.plugins import Export
from opdrift.testing import Builder, export, trace

HOSTILE = "</script>\n<b>[red]\u202e\N{PILE OF POO}\ud800" + "x" * 10_000


def timed(trace, spans, marks=None):
    """The trace with these starts and durations of its ops, on a clock that began at 5 s since 1970.

    `marks` are the number of the op, and the time, of each mark.
    """
    starts, durations = np.array(spans, np.int64).reshape(-1, 2).T
    trace.ops = replace(trace.ops, start=starts, duration=durations)
    trace.header = replace(trace.header, start_unix_ns=5 * 10**9)
    if marks is not None:
        trace.__dict__["marks"] = [
            replace(mark, seq=seq, time_ns=time)
            for mark, (seq, time) in zip(trace.marks, marks, strict=True)
        ]
    return trace


def drawn(trace, *, against=None, scope=None):
    """Track name -> what lies on it."""
    selection = Selection(scope=scope)
    (process,) = Processes([trace], selection, warn=pytest.fail, against=against)
    found = timeline(process, replace(DIALECT, category=None, step="step {}"))
    names = {track.id: track.name for track in found.tracks}
    rows = {name: [] for name in names.values()}
    for event in found.events:
        rows[names[event.track]].append(event)
    return rows


def spans(slices, *, clock=5 * 10**9):
    return [(s.name, s.start - clock, s.start - clock + s.duration) for s in slices]


# ---- rows ------------------------------------------------------------------------------------------------


def nested(starts, ends):
    """Whether no two of these slices overlap without one being in the other."""
    return all(
        b <= c or d <= b or (a == c and b <= d)
        for i, (a, b) in enumerate(zip(starts, ends, strict=True))
        for c, d in list(zip(starts, ends, strict=True))[i + 1 :]
    )


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 8)), max_size=12))
def test_what_overlaps_is_put_on_another_row(pairs):
    """Each row nests, and the first row is used where it can be."""
    starts = np.array([start for start, _ in pairs], np.int64)
    ends = starts + np.array([length for _, length in pairs], np.int64)
    order = in_order(starts, ends)
    starts, ends = starts[order], ends[order]

    rows = lanes(starts, ends)

    for row in range(int(rows.max(initial=0)) + 1):
        assert nested(starts[rows == row].tolist(), ends[rows == row].tolist())
    assert not nested(starts.tolist(), ends.tolist()) or np.all(rows == 0)


def test_overlapping_ops_get_a_track_of_their_own():
    """Nothing is dropped: a call that ends after the one around it lies beside it."""
    rows = drawn(timed(trace("mm relu sin cos"), [(0, 10), (2, 4), (5, 10), (20, 5)]))

    assert spans(rows["ops"]) == [("aten::mm", 0, 10), ("aten::relu", 2, 6), ("aten::cos", 20, 25)]
    assert spans(rows["ops (overlapping 1)"]) == [("aten::sin", 5, 15)]


# ---- modules ----------------------------------------------------------------------------------------------


def test_a_module_lasts_from_its_first_op_to_its_last():
    """Modules nest as their calls did, and are named from the module around them."""
    build = Builder()
    x = build.op("mm", build.leaf("x", kind="input"))
    with build.scope("layers.0", type="Block"):
        x = build.op("mm", x)
        with build.scope("mlp.up", type="Linear"):
            x = build.op("mm", x)
        x = build.op("relu", x)
    with build.scope("layers.0", type="Block"):
        build.op("mm", x)

    rows = drawn(timed(build.build(), [(n, 2) for n in (0, 10, 20, 30, 40)]))

    assert spans(rows["modules"]) == [
        ("layers.0 (Block)", 10, 32),
        ("mlp.up (Linear)", 20, 22),
        ("layers.0 (Block)", 40, 42),
    ]
    assert [dict(s.own)["call"] for s in rows["modules"]] == [0, 0, 1]


def test_a_module_that_backward_comes_back_to_is_drawn_again():
    """autograd may leave a module's ops for another's and return; both stretches nest."""
    build = Builder()
    x = build.leaf("x", kind="input")
    with build.scope("a", type="Linear"):
        x = build.op("mm", x)
        inner = x
    with build.scope("b", type="Linear"):
        x = build.op("mm", x)
    with build.scope("a", type="Linear"):
        build.op("mm", inner, phase="backward")
    with build.scope("b", type="Linear"):
        build.op("mm", x, phase="backward")
    with build.scope("a", type="Linear"):
        build.op("mm", inner, phase="backward")

    rows = drawn(timed(build.build(), [(10 * n, 2) for n in range(5)]))

    assert [(s.name[0], s.category) for s in rows["modules"]] == [
        ("a", "forward"), ("b", "forward"), ("a", "backward"), ("b", "backward"), ("a", "backward"),
    ]  # fmt: skip
    assert [(s.name, s.duration) for s in rows["steps and phases"]] == [
        ("forward", 12),
        ("backward", 22),
    ]


def test_an_op_that_calls_a_module_does_not_stretch_it():
    """A call of generated code lasts longer than the module that ran within it."""
    build = Builder()
    x = build.op("mm", build.leaf("x", kind="input"))
    with build.scope("a"):
        x = build.op("mm", x)
    build.op("mm", x)

    rows = drawn(timed(build.build(), [(0, 100), (10, 5), (40, 5)]))

    assert spans(rows["modules"]) == [("a (Module)", 10, 40)]


def test_only_the_ops_that_are_asked_for_are_drawn():
    """And no memory, of which they tell a part."""
    build = Builder()
    x = build.leaf("x", kind="input")
    for path in ("a", "b"):
        with build.scope(path):
            x = build.op("mm", x)

    rows = drawn(timed(build.build(), [(0, 5), (10, 5)]), scope="b")

    assert spans(rows["ops"]) == [("aten::mm", 10, 15)]
    assert spans(rows["modules"]) == [("b (Module)", 10, 15)]
    assert not any(name.startswith("live") for name in rows)


# ---- what is no op ----------------------------------------------------------------------------------------


def test_steps_hold_their_phases():
    """A step lasts to the next one; what ran before the first is in none."""
    build = Builder()
    x = build.op("relu", build.leaf("x", kind="input"))
    for number in (5, 6):
        build.mark("step", step=number)
        x = build.op("relu", x)
        x = build.op("relu", x, phase="backward")

    ops = [(10 * n, 3) for n in (1, 2, 3, 4, 5)]
    rows = drawn(timed(build.build(), ops, marks=[(1, 15), (3, 35)]))

    assert spans(rows["steps and phases"]) == [
        ("forward", 10, 13),
        ("step 5", 15, 35),
        ("forward", 20, 23),
        ("backward", 30, 33),
        ("step 6", 35, 53),
        ("forward", 40, 43),
        ("backward", 50, 53),
    ]


def test_a_step_without_ops_is_a_moment():
    """It is not left out."""
    build = Builder()
    build.mark("step", step=1)
    build.mark("step", step=2)
    build.op("relu", build.leaf("x", kind="input"))

    rows = drawn(timed(build.build(), [(10, 3)]))

    assert [s.name for s in rows["steps and phases"]] == ["step 2", "forward"]
    assert [i.name for i in rows["steps and phases, moments"]] == ["step 1"]


def test_gathers_last_until_they_are_given_back():
    """Two units are gathered at a time; every mark is there, with what it says."""
    build = Builder()
    x = build.op("relu", build.leaf("x", kind="input"))
    fields = {"library": "torch_fsdp", "phase": "forward"}
    build.mark("gather", unit="a", intact=True, **fields)
    x = build.op("relu", x)
    build.mark("gather", unit="b", intact=False, **fields)
    x = build.op("relu", x)
    build.mark("reshard", unit="a", **fields)
    x = build.op("relu", x)
    build.mark("flags", allow_tf32=[True, False])

    rows = drawn(timed(build.build(), [(n, 1) for n in range(4)]))

    assert spans(rows["gathers and moves"]) == [("a gathered", 1, 3)]
    assert spans(rows["gathers and moves (overlapping 1)"]) == [("b gathered", 2, 4)]
    assert [i.name for i in rows["gathers and moves, moments"]] == [
        "gather a", "gather b NOT INTACT", "reshard a",
    ]  # fmt: skip
    assert dict(rows["gathers and moves, moments"][0].own)["library"] == "torch_fsdp"
    assert [i.name for i in rows["marks"]] == ["flags allow_tf32"]


@pytest.mark.parametrize(("kinds", "end"), [(("free", "reshard"), 2), (("free",), 1), ((), 4)])
def test_freeing_what_was_sent_does_not_end_a_gather(kinds, end):
    """Only where the library tells no reshard; what is never given back lasts to the end."""
    build = Builder()
    x = build.leaf("x", kind="input")
    build.mark("gather", library="fsdp", unit="a")
    for kind in kinds:
        x = build.op("relu", x)
        build.mark(kind, library="fsdp", unit="a")
    build.op("relu", x)

    rows = drawn(timed(build.build(), [(n, 4 - n) for n in range(len(kinds) + 1)]))

    assert spans(rows["gathers and moves"]) == [("a gathered", 0, end)]


def test_a_collective_takes_as_long_as_its_op():
    """Its mark is written before it is issued, and says what it is."""
    build = Builder()
    build.mark("collective", what="all_reduce", ranks=[0, 1])
    x = build.op("c10d.allreduce_.default", build.leaf("x", kind="input"))
    build.op("relu", x)

    rows = drawn(timed(build.build(), [(10, 30), (50, 1)], marks=[(1, 9)]))

    assert spans(rows["collectives"]) == [("all_reduce", 10, 40)]


def test_compilations_last_from_start_to_end():
    """One that did not end lasts to the end of the run."""
    build = Builder()
    build.mark("compile", event="start", id="0/0")
    x = build.op("relu", build.leaf("x", kind="input"))
    build.mark("compile", event="end", id="0/0")
    build.op("relu", x)
    build.mark("compile", event="start", id="1/0")

    rows = drawn(timed(build.build(), [(10, 5), (20, 5)]))

    assert spans(rows["compilations"]) == [("compile 0/0", 0, 1), ("compile 1/0", 2, 25)]


# ---- memory -----------------------------------------------------------------------------------------------


def test_memory_is_held_from_the_first_use_to_the_last():
    """Leaves from the start, results of the run to its end; a view adds nothing."""
    build = Builder()
    x = build.leaf("x", kind="input", shape=(4, 8))  # 128 bytes
    w = build.leaf("w", shape=(8, 8))  # 256
    y = build.op("mm", x, w, shape=(4, 8))
    z = build.op("view", y, shape=(8, 4))
    last = build.op("relu", z, shape=(2, 4))  # 32
    build.op("sin", last, shape=(1,))  # 4
    build.output(last)

    (curve,) = live_bytes(timed(build.build(), [(n, 1) for n in range(4)]))

    assert curve.device == "cpu"
    assert list(zip(curve.times.tolist(), curve.bytes.tolist(), strict=True)) == [
        (0, 128 + 256 + 128),
        (1, 128),
        (2, 128 + 32),
        (3, 32 + 4),
    ]


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("float32", 4), ("bfloat16", 2), ("bool", 1), ("float8_e4m3fn", 1), ("complex128", 16), ("uint64", 8)],
)  # fmt: skip
def test_bytes_of_an_element(dtype, size):
    assert item_bytes(dtype) == size


# ---- --against --------------------------------------------------------------------------------------------


def test_the_first_divergence_is_marked_and_arrows_lead_from_it():
    """Ops are categorised; arrows go from what the op read to it and on to what its difference reached."""
    left, right = (trace(text) for text in ("mm relu mm* sin cos", "mm relu mm sin cos"))

    rows = drawn(right, against=left)

    assert [s.category for s in rows["ops"]] == [
        "equal", "equal", "origin", "receiver", "receiver",
    ]  # fmt: skip
    (instant,) = rows["divergences"]
    assert isinstance(instant, Instant)
    assert instant.name == "first divergence: aten.mm.default"
    assert instant.time == rows["ops"][2].start
    assert dict(instant.own)["op here"] == 3
    ends = {each: s.name for s in rows["ops"] for each in s.arrows_in}
    arrows = [(s.name, ends.pop(each)) for s in rows["ops"] for each in s.arrows_out]
    assert arrows == [
        ("aten::relu", "aten::mm"), ("aten::mm", "aten::sin"), ("aten::sin", "aten::cos"),
    ]  # fmt: skip
    assert ends == {}


def test_runs_that_agree_have_neither_marks_nor_arrows():
    """Every op is equal."""
    rows = drawn(trace("mm relu"), against=trace("mm relu"))

    assert rows["divergences"] == []
    assert {(s.category, s.arrows_in, s.arrows_out) for s in rows["ops"]} == {("equal", (), ())}


# ---- Chrome's JSON ------------------------------------------------------------------------------------------


def chrome(tmp_path, *traces, name="made.json", **options):
    path = tmp_path / name
    said = export(ChromeExporter(), *traces, output=path, **options)
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data), said


def test_an_op_is_told_as_kineto_tells_it(tmp_path):
    """The names of fields and types are those of torch.profiler; times are microseconds, exact to the nanosecond."""
    build = Builder()
    x, w = build.leaf("x", kind="input", shape=(4, 8)), build.leaf("w", dtype="bfloat16")
    build.op("addmm", x, x, w, settings={"beta": 2}, source=("net.py", 3, "forward"))
    traced = timed(build.build(), [(1_234_567_891, 1_001)])
    traced.header = replace(traced.header, start_unix_ns=1_796_087_766_833_090_490)

    document, said = chrome(tmp_path, traced)

    (op,) = (e for e in document["traceEvents"] if e.get("cat") == "cpu_op")
    base = document["baseTimeNanoseconds"]
    assert base == 1_790_857_026_000_000_000  # torch 2.13's profiler wrote this at that time
    assert round(op["ts"] * 1000) == 1_796_087_766_833_090_490 + 1_234_567_891 - base
    assert (op["name"], op["dur"]) == ("aten::addmm", 1.001)
    args = op["args"]
    assert args["Input Dims"] == [[4, 8], [4, 8], [4, 8], []]
    assert args["Input type"] == ["float", "float", "c10::BFloat16", "Scalar"]
    assert args["Input Strides"] == [[8, 1], [8, 1], [8, 1], []]
    assert args["Concrete Inputs"] == ["", "", "", "2"]
    assert (args["External id"], args["Ev Idx"], args["overload"]) == (1, 0, "aten.addmm.default")
    assert args["source"] == "net.py:3 in forward"
    assert len(args["digest"]) == 16
    assert document["distributedInfo"] == {"rank": 0, "world_size": 1}
    assert said.startswith("wrote 1 op, ")


def test_every_event_of_the_timeline_is_in_the_document(tmp_path):
    """Slices, instants, counters, arrows."""
    left, right = trace("mm relu mm*"), trace("mm relu mm")
    (process,) = Processes([right], Selection(), warn=pytest.fail, against=left)
    events = list(timeline(process, DIALECT).events)

    document, _ = chrome(tmp_path, right, against=left)

    phases = [e["ph"] for e in document["traceEvents"]]
    assert phases.count("X") == sum(isinstance(e, Slice) for e in events)
    assert phases.count("i") == sum(isinstance(e, Instant) for e in events) == 1
    assert phases.count("C") == sum(isinstance(e, Level) for e in events) > 0
    assert phases.count("s") == phases.count("f") == 1


def test_hostile_names_stay_in_the_document(tmp_path):
    """Whole in the arguments, cut and escaped where they are shown."""
    build = Builder(label=HOSTILE)
    with build.scope(HOSTILE, type=HOSTILE):
        build.op("relu", build.leaf("x", kind="input"), source=(HOSTILE, 1, HOSTILE))
    build.mark("note", text=HOSTILE, number=float("nan"))

    document, _ = chrome(tmp_path, build.build())

    (module,) = (e for e in document["traceEvents"] if "training" in e.get("args", {}))
    assert module["cat"] == "user_annotation"
    said = HOSTILE.replace("\ud800", "\\ud800")
    assert module["args"]["module"] == said
    assert "\n" not in module["name"]
    assert len(module["name"]) < 400
    (note,) = (e for e in document["traceEvents"] if e["ph"] == "i")
    assert (note["args"]["text"], note["args"]["number"]) == (said, "nan")


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_a_file_called_gz_is_compressed_and_equal_each_time(tmp_path, name):
    """Nothing of the moment or the folder is in it."""
    paths = [tmp_path / folder / name for folder in ("one", "two")]
    for path in paths:
        path.parent.mkdir()
        export(ChromeExporter(), trace("mm relu"), output=path)

    one, two = (path.read_bytes() for path in paths)
    assert one == two
    assert (one[:2] == b"\x1f\x8b") == name.endswith(".gz")
    json.loads(gzip.decompress(one) if name.endswith(".gz") else one)


def test_the_name_that_was_asked_for_decides(tmp_path):
    """Not that of the file that is being written, which takes its place when it is whole."""
    (process,) = Processes([trace("mm relu")], Selection(), warn=pytest.fail)
    asked = Export([process], Namespace(output=Path("a.json.gz")), tmp_path / ".a.json.gz.7.partial", print, pytest.fail)  # fmt: skip

    ChromeExporter().export(asked)

    assert (tmp_path / ".a.json.gz.7.partial").read_bytes()[:2] == b"\x1f\x8b"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_takes_what_a_file_takes(tmp_path):
    """As with `-o /dev/stdout`: nothing is asked for that a pipe has not."""
    pipe, file = tmp_path / "pipe" / "made", tmp_path / "file" / "made"
    for path in (pipe, file):
        path.parent.mkdir()
    os.mkfifo(pipe)
    with ThreadPoolExecutor() as pool:
        read = pool.submit(pipe.read_bytes)
        said = export(ChromeExporter(), trace("mm relu"), output=pipe)
        piped = read.result(timeout=60)

    assert export(ChromeExporter(), trace("mm relu"), output=file) == said
    assert file.read_bytes() == piped


def test_ranks_are_processes_on_one_axis(tmp_path):
    """Each with its number, named, and no rank for the whole."""
    ranks = []
    for rank in (0, 1):
        build = Builder(rank=rank, label="train")
        build.op("relu", build.leaf("x", kind="input"))
        ranks.append(build.build())

    document, said = chrome(tmp_path, *ranks)

    names = {
        e["pid"]: e["args"]["name"] for e in document["traceEvents"] if e["name"] == "process_name"
    }
    assert names == {1000: "rank 0 train", 1001: "rank 1 train"}
    assert "distributedInfo" not in document
    assert said.startswith("wrote 2 ops of 2 ranks, ")


@pytest.mark.parametrize(
    ("label", "program", "called"),
    [
        ("tuesday", ("python", "train.py"), "tuesday"),
        ("", ("python", "-u", "src/train.py", "--lr", "1"), "train.py"),
        ("", ("python", "-m", "pack.train"), "pack.train"),
        ("", ("python",), "python"),
        ("", (), "run"),
    ],
)
def test_a_process_is_called_as_the_run_or_the_program(label, program, called, tmp_path):
    traced = trace("relu")
    traced.header = replace(traced.header, label=label, program=program)

    document, _ = chrome(tmp_path, traced)

    (named,) = (e for e in document["traceEvents"] if e["name"] == "process_name")
    assert named["args"]["name"] == called


def test_a_run_without_ops_is_an_empty_timeline(tmp_path):
    document, said = chrome(tmp_path, Builder().build())

    assert [e["ph"] for e in document["traceEvents"] if e["ph"] != "M"] == []
    assert said.startswith("wrote 0 ops, 0 events")


def test_slices_come_in_order_on_each_track():
    """Writers rely on it: a slice begins no earlier than the one before it on its track."""
    build = Builder()
    x = build.leaf("x", kind="input")
    for number in range(3):
        build.mark("step", step=number)
        with build.scope(f"layers.{number}"):
            x = build.op("mm", x)

    for events in drawn(build.build()).values():
        starts = [e.start for e in events if isinstance(e, Slice)]
        assert all(a <= b for a, b in pairwise(starts))
