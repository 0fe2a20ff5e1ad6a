"""`opdrift export parquet`: the tables hold what the trace holds, and the page's queries run."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from opdrift.export.parquet import ParquetExporter
from opdrift.export.processes import Processes, Selection
from opdrift.export.tables import write_tables
from opdrift.export.tableschema import TABLES
from opdrift.plugins import Export
from opdrift.testing import Builder, export, trace

PAGE = Path(__file__).parents[2] / "docs" / "export.md"
HOSTILE = "</script>\n<b>[red]\u202e\N{PILE OF POO}\ud800" + "x" * 10_000

#: What a trace's own tables can hold of it.
NAME = HOSTILE.replace("\ud800", "")


def tables(folder, *traces, **options):
    """Table -> its rows."""
    folder.mkdir(exist_ok=True)
    export(ParquetExporter(), *traces, output=folder, **options)
    return {name: pq.read_table(folder / f"{name}.parquet").to_pylist() for name in TABLES}


def run(*, change="", rank=None, label="tuesday"):
    """Two steps of two modules; a random op, an in-place op, a view, NaN, marks."""
    build = Builder(rank=rank, label=label)
    x = build.leaf("x", kind="input", shape=(4, 8))
    w = build.leaf("fc.weight")
    build.name(w, "tied.weight")
    for step in (5, 6):
        build.mark("step", step=step)
        with build.scope("fc", type="Linear"):
            t = build.op("t", w)
            x = build.op("mm", x, t, change=change, source=("net.py", 3, "forward"))
        with build.scope("drop", type="Dropout"):
            x = build.op("bernoulli_", x, settings={"p": 0.5})
    x = build.op(
        "log", x, content=np.array([np.nan, np.inf, 0.0, 2.0], np.float32), dtype="float16"
    )
    build.output(x)
    made = build.build()
    made.header = replace(made.header, start_unix_ns=1_796_087_766_833_090_491)
    return made


def test_every_op_is_a_row(tmp_path):
    """With what `Trace.op` says of it, and times since 1970 to the nanosecond."""
    traced = run()

    rows = tables(tmp_path / "made", traced)["ops"]

    assert [
        (
            r["seq"], r["op"], r["module"], r["module_type"], r["call"], r["phase"], r["thread"], r["duration_ns"],
            tuple(r["inputs"]), tuple(r["outputs"]), r["mutated"], r["node"], r["file"], r["line"], r["function"],
        )
        for r in rows
    ] == [
        (
            o.seq, o.name, o.call.path, o.call.type, o.call.id, o.phase, o.thread, o.duration_ns,
            o.inputs, o.outputs, o.mutated, o.node, *((o.source.file, o.source.line, o.source.function) if o.source else (None,) * 3),
        )
        for o in map(traced.op, range(len(traced.ops)))
    ]  # fmt: skip
    assert [r["start"].value for r in rows] == (
        traced.ops.start + traced.header.start_unix_ns
    ).tolist()
    assert [r["step"] for r in rows] == [5, 5, 5, 6, 6, 6, 6]
    assert [r["rng"] is not None for r in rows] == [
        o == "aten.bernoulli_.default" for o in (r["op"] for r in rows)
    ]
    assert json.loads(rows[1]["arguments"]) == {"self": "float32[4, 8]", "mat2": "float32[8, 4]"}
    assert {r["status"] for r in rows} == {None}


def test_every_value_is_a_row_with_its_statistics(tmp_path):
    """Views have a layout and no digest; who made a value is an op's number."""
    traced = run()

    rows = {row["value"]: row for row in tables(tmp_path / "made", traced)["tensors"]}

    assert list(rows) == list(range(1, len(traced.values.meta)))
    for value, row in rows.items():
        meta, found = traced.meta(value), traced.fingerprint(value)
        maker = int(traced.producer[value])
        assert row["maker"] == (None if maker < 0 else traced.ops.seq[maker])
        assert (tuple(row["shape"]), tuple(row["stride"]), row["dtype"], row["device"]) == (
            meta.shape, meta.stride, meta.dtype, meta.device,
        )  # fmt: skip
        if found is None:
            assert (row["digest"], row["components"], row["nan"]) == (None, None, None)
            continue
        assert row["digest"] == f"{found.raw:016x}"
        statistics = (
            "min",
            "max",
            "absmax",
            "sum",
            "ssq",
            "nan",
            "pinf",
            "ninf",
            "zero",
            "subnormal",
        )
        assert [row[name] for name in statistics] == [getattr(found, name) for name in statistics]
    log = rows[max(rows)]
    assert (log["nan"], log["pinf"], log["zero"], log["max"], log["code"]) == (1, 1, 1, 2.0, "f16")
    assert sum(row["digest"] is None for row in rows.values()) == 2


def test_names_marks_calls_and_the_run_have_tables(tmp_path):
    rows = tables(tmp_path / "made", run())

    assert [(r["name"], r["kind"], r["when"]) for r in rows["leaves"]] == [
        ("x", "input", "entry"), ("fc.weight", "parameter", "entry"), ("tied.weight", "parameter", "entry"),
        ("output", "output", "return"),
    ]  # fmt: skip
    assert [(r["kind"], json.loads(r["fields"])) for r in rows["marks"]] == [
        ("step", {"step": 5}),
        ("step", {"step": 6}),
    ]
    assert [(r["module"], r["number"]) for r in rows["calls"]] == [
        ("fc", 0), ("drop", 0), ("fc", 1), ("drop", 1),
    ]  # fmt: skip
    (told,) = rows["runs"]
    assert (told["label"], told["ended"], told["incomplete"], told["world_size"]) == (
        "tuesday", "ok", None, None,
    )  # fmt: skip
    assert json.loads(told["flags"]) == {"num_threads": 1}


def test_ranks_share_the_tables(tmp_path):
    """Each row says whose it is."""
    rows = tables(tmp_path / "made", run(rank=0), run(rank=1))

    assert all({row["rank"] for row in rows[name]} == {0, 1} for name in TABLES)
    assert [row["world_size"] for row in rows["runs"]] == [2, 2]


def test_ops_say_what_a_comparison_found(tmp_path):
    """The number of the other run's op is null where there is none."""
    left, right = trace("mm relu mm"), trace("mm _to_copy relu mm*")

    rows = tables(tmp_path / "made", right, against=left)["ops"]

    assert [(r["status"], r["counterpart"]) for r in rows] == [
        ("equal", 1), ("unpaired", None), ("equal", 2), ("origin", 3),
    ]  # fmt: skip


def test_of_a_part_of_a_run_only_what_it_touches_is_there(tmp_path):
    """--scope: the ops, their values, names, and the calls they ran in."""
    traced = run()
    processes = list(Processes([traced], Selection(scope="drop"), warn=pytest.fail))

    write_tables(Export(processes, None, tmp_path, lambda done, total: None, pytest.fail), tmp_path)

    rows = {name: pq.read_table(tmp_path / f"{name}.parquet").to_pylist() for name in TABLES}
    touched = {v for row in rows["ops"] for v in row["inputs"] + row["outputs"]}
    assert [row["op"] for row in rows["ops"]] == ["aten.bernoulli_.default"] * 2
    assert {row["value"] for row in rows["tensors"]} == touched
    assert {row["name"] for row in rows["leaves"]} == set()
    assert [row["module"] for row in rows["calls"]] == ["drop", "drop"]


def test_hostile_names_are_kept(tmp_path):
    """Whole, with half of a surrogate pair as its escape."""
    build = Builder(label=HOSTILE)
    with build.scope(HOSTILE, type=HOSTILE):
        build.op("relu", build.leaf(NAME), source=(HOSTILE, 1, HOSTILE), settings={"a": HOSTILE})
    build.mark(NAME, text=HOSTILE)

    rows = tables(tmp_path / "made", build.build())

    said = HOSTILE.replace("\ud800", "\\ud800")
    (op,) = rows["ops"]
    assert (op["module"], op["module_type"], op["file"], op["function"]) == (said,) * 4
    assert json.loads(op["arguments"])["a"] == said
    assert rows["runs"][0]["label"] == said
    assert (rows["leaves"][0]["name"], rows["marks"][0]["kind"]) == (NAME, NAME)
    assert json.loads(rows["marks"][0]["fields"])["text"] == said


def test_a_run_without_ops_gives_tables_without_rows(tmp_path):
    rows = tables(tmp_path / "made", Builder().build())

    assert {name: len(found) for name, found in rows.items()} == {
        "ops": 0, "tensors": 0, "leaves": 0, "marks": 0, "calls": 0, "runs": 1,
    }  # fmt: skip


def test_a_long_run_takes_few_bytes_an_op(tmp_path):
    """Names once, numbers as differences, digests as they are."""
    build = Builder()
    x = build.leaf("x", kind="input")
    for _ in range(2_000):
        x = build.op("relu", x, source=("net.py", 3, "forward"))

    tables(tmp_path / "made", build.build())

    size = sum(path.stat().st_size for path in (tmp_path / "made").iterdir())
    assert size < 2_000 * 15


@pytest.mark.parametrize("table", TABLES)
def test_every_column_is_explained(table):
    """In docs/export.md, in the part about its table."""
    text = PAGE.read_text(encoding="utf-8").partition("### Tables")[2]
    part = text.partition(f"\n`{table}`:")[2].partition("\n`")[0]
    part = re.split(r"\n`\w+`:|\n## ", text.partition(f"\n`{table}`:")[2])[0]
    told = set(re.findall(r"`(\w+)`", part))

    assert set(TABLES[table].names) - {"rank"} <= told


def queries():
    """The Python blocks of the page's section about Parquet."""
    section = PAGE.read_text(encoding="utf-8").partition("\n## Parquet\n")[2].partition("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


@pytest.mark.parametrize(
    ("library", "finds"),
    [("duckdb", "fc.weight"), ("polars", "absmax"), ("pandas", "aten.mm.default +receiver|origin")],
)
def test_the_queries_of_the_page_run(library, finds, tmp_path, monkeypatch, capfd):
    """On another run than theirs, as they are printed there."""
    pytest.importorskip(library)
    (query,) = (each for each in queries() if f"import {library}" in each)
    tables(tmp_path / "broken-2.parquet", run(change="*"), against=run())
    monkeypatch.chdir(tmp_path)

    exec(compile(query, str(PAGE), "exec"), {})

    assert re.search(finds, capfd.readouterr().out)
