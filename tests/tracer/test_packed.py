"""Traces in one file: what is left out, what is kept, and files that are none."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest

import opdrift
from opdrift.errors import DamagedTraceError, NotATraceError
from opdrift.tracefile.packed import pack, unpack


def packed(trace: Path, file: Path) -> Path:
    pack(trace, file, program=("pytest",), shorten=lambda path: f"short/{Path(path).name}")
    return file


def test_an_unpacked_trace_is_compared_as_the_trace_itself(recorded: Path, tmp_path: Path):
    """Everything that a diagnosis says, but when the run was and where it lies."""
    unpack(packed(recorded / "base.trace", tmp_path / "base.zip"), tmp_path / "base")

    assert opdrift.load(tmp_path / "base").complete
    assert opdrift.diff(tmp_path / "base", recorded / "base.trace").verdict == "identical"
    for name in ("math", "eps", "nan", "weights"):
        found = opdrift.diff(tmp_path / "base", recorded / f"{name}.trace")
        wanted = opdrift.diff(recorded / "base.trace", recorded / f"{name}.trace")
        assert (found.verdict, len(found.origins)) == (wanted.verdict, len(wanted.origins))
        assert found.first is not None
        assert wanted.first is not None
        assert found.first.cause.slug == wanted.first.cause.slug
        assert found.first.relative_difference == wanted.first.relative_difference


def test_the_file_is_small(recorded: Path, tmp_path: Path):
    """Less than two thirds of the folder, for a model of three layers."""
    size = sum(path.stat().st_size for path in (recorded / "base.trace").iterdir())

    assert packed(recorded / "base.trace", tmp_path / "base.zip").stat().st_size < size * 2 / 3


def test_times_and_paths_are_left_out(recorded: Path, tmp_path: Path):
    """The order in which ops began is kept; when and for how long, and where files lay, is not."""
    unpack(packed(recorded / "base.trace", tmp_path / "base.zip"), tmp_path / "base")

    trace, whole = opdrift.load(tmp_path / "base"), opdrift.load(recorded / "base.trace")
    assert trace.header.program == ("pytest",)
    assert trace.ops.duration.sum() == 0
    assert trace.ops.start.max() < 10_000
    assert trace.ops.start.argsort().tolist() == whole.ops.start.argsort().tolist()
    assert [mark.seq for mark in trace.marks] == [mark.seq for mark in whole.marks]
    assert {str(trace.op(i).source).rpartition("/")[0] for i in range(len(trace.ops))} == {"short"}


def test_equal_runs_give_equal_files(recorded: Path, tmp_path: Path):
    """But for the date of the run, in the header: whoever reads a diff of a repository sees what changed."""
    parts = []
    for name in ("base", "same"):
        with zipfile.ZipFile(packed(recorded / f"{name}.trace", tmp_path / f"{name}.zip")) as file:
            parts.append({part: file.read(part) for part in file.namelist()})
    headers = [json.loads(each.pop("header.json")) for each in parts]

    assert parts[0] == parts[1]
    differing = {key for key in headers[0] if headers[0][key] != headers[1][key]}
    assert differing <= {"created", "start_unix_ns", "label", "crc"}


def test_only_what_a_trace_is_made_of_is_unpacked(recorded: Path, tmp_path: Path):
    """An archive from elsewhere writes nothing outside of its folder."""
    file = packed(recorded / "base.trace", tmp_path / "base.zip")
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("../outside.txt", "no")
        archive.writestr("more.txt", "no")

    unpack(file, tmp_path / "below" / "base")

    assert [path.name for path in (tmp_path / "below").iterdir()] == ["base"]
    assert not (tmp_path / "below" / "base" / "more.txt").exists()


@pytest.mark.parametrize(
    "content", [b"", b"version https://git-lfs.github.com/spec/v1\n", b"PK\x03\x04"]
)
def test_what_is_no_archive_is_said_to_be_none(content: bytes, tmp_path: Path):
    (tmp_path / "odd.zip").write_bytes(content)

    with pytest.raises(DamagedTraceError, match="git-lfs"):
        unpack(tmp_path / "odd.zip", tmp_path / "odd")
    assert not (tmp_path / "odd").exists()


def test_an_archive_of_something_else_is_no_trace(tmp_path: Path):
    with zipfile.ZipFile(tmp_path / "odd.zip", "w") as archive:
        archive.writestr("readme.txt", "hello")

    with pytest.raises(NotATraceError, match=r"has no header\.json"):
        unpack(tmp_path / "odd.zip", tmp_path / "odd")


def test_a_damaged_archive_is_never_read_as_whole(recorded: Path, tmp_path: Path):
    """Any byte of a content that is flipped is noticed."""
    file = packed(recorded / "base.trace", tmp_path / "base.zip")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0xFF
    file.write_bytes(data)

    with pytest.raises(DamagedTraceError, match="cannot be read as a packed trace"):
        unpack(file, tmp_path / "base")
