"""The kept run of a test: its name, whose it is, and what is never kept."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from opdrift.errors import IncomparableTracesError
from opdrift.testing.goldens import Golden, golden_of
from opdrift.tracefile.schema import checksum


def labelled(trace: Path, folder: Path, **header: object) -> Path:
    """A copy of a trace with another header."""
    shutil.copytree(trace, folder)
    found = json.loads((folder / "header.json").read_text())
    del found["crc"]
    found |= header
    (folder / "header.json").write_text(json.dumps({**found, "crc": checksum(found)}))
    return folder


@pytest.fixture
def run(recorded: Path, tmp_path: Path) -> Path:
    return labelled(recorded / "base.trace", tmp_path / "run.trace", label="test_a.py::test_x")


@pytest.fixture
def golden(tmp_path: Path) -> Golden:
    return golden_of(tmp_path / "test_a.py", ("test_x",), "")


def test_it_lies_beside_the_tests():
    golden = golden_of(Path("tests/test_a.py"), ("TestX", "test_y[fp16-2]"), "decode")

    assert golden == Golden(
        Path("tests/opdrift-goldens/test_a/TestX.test_y[fp16-2].decode.trace.zip"),
        "test_a.py::TestX::test_y[fp16-2] decode",
    )


def test_names_that_file_systems_dislike_stay_apart():
    names = [
        "test_x[a/b]",
        "test_x[a:b]",
        "test_x[a b]",
        "test_x[a_b]",
        "test_x" * 60,
        "test_x" * 61,
    ]
    files = [golden_of(Path("test_a.py"), (name,), "").file.name for name in names]

    assert len(set(files)) == len(files)
    assert all(len(name) < 130 and not set(name) & set('/:\\ "<>|?*') for name in files)
    assert files[3] == "test_x[a_b].trace.zip"


def test_a_kept_run_is_current_until_the_run_changes(
    run: Path, golden: Golden, recorded: Path, tmp_path: Path
):
    said = golden.keep(run, root=tmp_path)

    assert said.endswith(" bytes")
    assert " ops, " in said
    assert golden.is_current(run, tmp_path / "first")
    assert not golden.is_current(recorded / "math.trace", tmp_path / "second")
    assert (
        golden.compare(recorded / "math.trace", tmp_path / "third", tolerance=None).verdict
        == "rounding"
    )


def test_the_run_of_another_test_is_refused(run: Path, tmp_path: Path):
    """Compared with it, a test would fail, or pass, for nothing it did."""
    Golden(tmp_path / "x.trace.zip", "test_a.py::test_x").keep(run, root=tmp_path)
    other = Golden(tmp_path / "x.trace.zip", "test_a.py::test_y")

    for use in (other.is_current, lambda r, to: other.compare(r, to, tolerance=None)):
        with pytest.raises(
            IncomparableTracesError, match=r"holds the run of 'test_a.py::test_x', not"
        ):
            use(run, tmp_path / f"golden-{use}")


def test_a_golden_that_cannot_be_read_is_to_be_replaced(run: Path, golden: Golden, tmp_path: Path):
    golden.file.parent.mkdir(parents=True)
    golden.file.write_text("<<<<<<< HEAD")

    assert not golden.is_current(run, tmp_path / "golden.trace")
    golden.keep(run, root=tmp_path)
    assert golden.is_current(run, tmp_path / "golden.trace")


def test_a_run_that_was_cut_off_is_not_kept(run: Path, golden: Golden, tmp_path: Path):
    (run / "footer.json").unlink()

    with pytest.raises(IncomparableTracesError, match="incomplete at op"):
        golden.keep(run, root=tmp_path)
    assert not golden.file.exists()


def test_a_distributed_run_is_neither_kept_nor_compared(run: Path, golden: Golden, tmp_path: Path):
    labelled(run, tmp_path / "ranks" / "rank-00000", rank=0, world_size=2)

    with pytest.raises(IncomparableTracesError, match="is of a distributed run"):
        golden.keep(tmp_path / "ranks", root=tmp_path)
    golden.keep(run, root=tmp_path)
    with pytest.raises(IncomparableTracesError, match="is of a distributed run"):
        golden.compare(tmp_path / "ranks", tmp_path / "golden.trace", tolerance=None)
