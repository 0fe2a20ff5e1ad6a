"""A trace on disk: written, read back, torn, damaged, of another version."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import opdrift
from opdrift.errors import (
    DamagedTraceError,
    NotATraceError,
    OpdriftError,
    TraceExistsError,
    TraceVersionError,
)
from opdrift.tracefile.schema import CHECKS, FOOTER, HEADER, TABLES


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace of two forward passes with three parts: at open, in between, at the end."""
    path = tmp_path_factory.mktemp("traces") / "run.trace"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    with torch.no_grad(), opdrift.record(path, model=model) as recorder:
        model(torch.randn(4, 8))
        recorder._spool.flush(recorder._spool.thread())
        model(torch.randn(4, 8))
    return path


def copy_of(path: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(path, tmp_path / "copy.trace"))


def test_what_was_recorded_is_read_back(recorded: Path):
    trace = opdrift.load(recorded)

    assert trace.complete
    names = [trace.op(i).name for i in range(len(trace.ops)) if trace.op(i).call.path]
    assert (
        names
        == [
            "aten.t.default",
            "aten.addmm.default",
            "aten.relu.default",
            "aten.t.default",
            "aten.addmm.default",
        ]
        * 2
    )
    assert [leaf.name for leaf in trace.leaves if leaf.when == "entry"] == [
        "0.weight",
        "0.bias",
        "2.weight",
        "2.bias",
    ]
    assert trace.op(2).signature.op.arguments[:3] == ("self", "mat1", "mat2")


def test_a_fingerprint_survives_the_way_to_disk_and_back(tmp_path: Path):
    """Statistics exactly, samples exactly, the sketch to 2e-9."""
    x = torch.linspace(-3, 5, 1000)
    with opdrift.record(tmp_path / "run.trace", inputs={"x": x}) as recorder:
        row = recorder._engine.fingerprint(x)

    trace = opdrift.load(tmp_path / "run.trace")
    found = trace.fingerprint(trace.leaves[0].value)

    assert found is not None
    assert found.sketch is not None
    assert (found.raw, found.n, found.min, found.max, found.ssq) == (
        row["raw"],
        1000,
        -3.0,
        5.0,
        row["ssq"],
    )
    assert found.sample.tolist() == row["sample"].tolist()
    exact = row["sketch"].view("<f8").reshape(-1, 16).sum(0)  # folded, as below 4096 components
    assert abs(found.sketch - exact).max() <= 4e-9 * abs(exact).max()


@pytest.mark.parametrize("table", sorted(TABLES))
def test_a_torn_table_is_read_up_to_its_last_whole_part(recorded: Path, table: str, tmp_path: Path):
    path = copy_of(recorded, tmp_path)
    file = path / f"{table}.arrows"
    file.write_bytes(file.read_bytes()[:-9])

    trace = opdrift.load(path)

    assert trace.incomplete is not None
    assert "incomplete at op" in trace.incomplete
    whole = opdrift.load(recorded)
    assert trace.ops.seq.tolist() == whole.ops.seq.tolist()[: len(trace.ops)]
    for index in range(len(trace.ops)):
        assert trace.op(index).outputs == whole.op(index).outputs


def test_a_trace_without_footer_says_that_the_run_was_killed(recorded: Path, tmp_path: Path):
    path = copy_of(recorded, tmp_path)
    (path / FOOTER).unlink()

    trace = opdrift.load(path)

    assert trace.incomplete is not None
    assert "killed" in trace.incomplete
    assert len(trace.ops) == len(opdrift.load(recorded).ops)


def test_any_flipped_byte_is_an_error_or_reads_as_incomplete(recorded: Path, tmp_path: Path):
    """Never a traceback, never a trace that looks whole but is not."""
    draw = random.Random(0)
    files = [HEADER, FOOTER, CHECKS, *(f"{name}.arrows" for name in TABLES)]
    path = copy_of(recorded, tmp_path)
    for name in files:
        file = path / name
        original = file.read_bytes()
        for position in sorted(draw.sample(range(len(original)), min(40, len(original)))):
            damaged = bytearray(original)
            damaged[position] ^= 1 << draw.randrange(8)
            file.write_bytes(damaged)
            try:
                trace = opdrift.load(path)
            except OpdriftError:
                continue
            finally:
                file.write_bytes(original)
            if trace.complete:  # only where the byte means nothing: white space of a JSON file
                assert name in (HEADER, FOOTER, CHECKS)
                assert (
                    json.loads(damaged.splitlines()[0] if name == CHECKS else damaged) is not None
                )
    assert opdrift.load(path).complete


def test_what_is_no_trace_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()

    with pytest.raises(NotATraceError, match="does not exist"):
        opdrift.load(tmp_path / "nothing")
    with pytest.raises(NotATraceError, match="is a file"):
        opdrift.load(tmp_path / "file")
    with pytest.raises(NotATraceError, match="has no header"):
        opdrift.load(tmp_path / "folder")


def test_a_newer_schema_asks_for_an_upgrade(recorded: Path, tmp_path: Path):
    path = copy_of(recorded, tmp_path)
    header = json.loads((path / HEADER).read_text())
    (path / HEADER).write_text(json.dumps({**header, "schema": "opdrift.trace/2"}))

    with pytest.raises(TraceVersionError, match="pip install -U opdrift"):
        opdrift.load(path)


def test_a_table_that_a_later_version_added_is_passed_over(recorded: Path, tmp_path: Path):
    path = copy_of(recorded, tmp_path)
    lines = [json.loads(line) for line in (path / CHECKS).read_text().splitlines()]
    (path / CHECKS).write_text(
        "".join(json.dumps({**line, "later": [8, 1]}) + "\n" for line in lines)
    )

    assert opdrift.load(path).complete


def test_a_header_that_was_changed_by_hand_is_damaged(recorded: Path, tmp_path: Path):
    path = copy_of(recorded, tmp_path)
    header = json.loads((path / HEADER).read_text())
    (path / HEADER).write_text(json.dumps({**header, "torch": "9.9"}))

    with pytest.raises(DamagedTraceError, match="checksum"):
        opdrift.load(path)


def test_a_trace_is_never_overwritten_unasked(tmp_path: Path):
    path = tmp_path / "run.trace"
    with opdrift.record(path):
        torch.ones(2) + 1
    before = opdrift.load(path).header.created

    with pytest.raises(TraceExistsError, match="overwrite=True"), opdrift.record(path):
        pass
    assert opdrift.load(path).header.created == before
    with opdrift.record(path, overwrite=True):
        pass
    assert len(opdrift.load(path).ops) == 0


def test_a_trace_stays_if_the_one_that_replaces_it_cannot_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "run.trace"
    with opdrift.record(path):
        torch.ones(2) + 1

    def fail(*_: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr("opdrift.recorder.Recorder._open", fail)
    with pytest.raises(RuntimeError, match="planted"), opdrift.record(path, overwrite=True):
        pass

    assert len(opdrift.load(path).ops) == 2
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.trace"]


def test_a_folder_that_is_no_trace_is_never_replaced(tmp_path: Path):
    """Not even with overwrite=True."""
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("x")

    with (
        pytest.raises(TraceExistsError, match="left alone"),
        opdrift.record(tmp_path / "thesis", overwrite=True),
    ):
        pass

    assert (tmp_path / "thesis" / "chapter1.tex").read_text() == "x"
