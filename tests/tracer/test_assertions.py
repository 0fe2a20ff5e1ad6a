"""`assert_same_run`: what passes, what fails with which words, and what must not pass unseen."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from opdrift.errors import IncomparableTracesError, InvalidOptionError
from opdrift.testing import assert_same_run, trace


@pytest.mark.parametrize("allow", ["nothing", "rounding"])
def test_equal_runs_pass(allow):
    assert_same_run(trace("mm relu mm"), trace("mm relu mm"), allow=allow)


def test_rounding_passes_unless_equal_bits_are_asked_for():
    left, right = trace("mm relu mm"), trace("mm~ relu mm")

    assert_same_run(left, right)
    with pytest.raises(
        AssertionError, match=r"^rounding only: (.*\n)*.*allow='rounding' lets this pass"
    ):
        assert_same_run(left, right, allow="nothing")


def test_a_failure_reads_as_the_report_of_diff_trace():
    """The verdict is the first line, which summaries of failures show; then the card."""
    with pytest.raises(AssertionError) as failure:
        assert_same_run(trace("mm relu mm"), trace("mm relu mm!"))

    lines = str(failure.value).splitlines()
    assert lines[0].startswith("diverged: before the first op: w1 differs")
    assert [line.split()[0] for line in lines if line.startswith("  ") and line[2] != " "][:3] == [
        "where",
        "cause",
        "try",
    ]


@pytest.mark.parametrize("columns", [40, 80])
def test_a_failure_fits_behind_the_margin_of_test_runners(columns, monkeypatch):
    """pytest puts four characters before each line; only commands to be copied stay whole."""
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(AssertionError) as failure:
        assert_same_run(trace("mm relu mm"), trace("mm* relu mm"))

    report, _, _ = str(failure.value).partition("\nnext:")
    assert max(map(len, report.splitlines())) <= columns - 4


def test_a_tolerance_lets_pass_what_rounding_does_not_explain():
    left, right = trace("mm relu mm"), trace("mm* relu mm")

    with pytest.raises(AssertionError):
        assert_same_run(left, right)
    assert_same_run(left, right, rtol=100.0, atol=100.0)


def test_samples_and_ranks_are_in_the_next_command(recorded):
    """The command that looks further asks the same question."""
    with pytest.raises(AssertionError, match=r"diff-trace \S+ \S+ --rank 0 --side-by-side"):
        assert_same_run(recorded / "base.trace", recorded / "weights.trace", rank=0)


def test_renamed_modules_can_be_mapped():
    left, right = trace("a{ mm } mm"), trace("b{ mm } mm")

    assert_same_run(left, right, maps=["a=b"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"allow": "everything"}, "choose one of 'nothing', 'rounding'"),
        ({"rtol": 1e-3}, "atol=None: give both"),
        ({"atol": 1e-3}, "rtol=None, atol=0.001: give both"),
    ],
)
def test_wrong_options_are_refused(options, words):
    with pytest.raises(InvalidOptionError, match=words):
        assert_same_run(trace("mm"), trace("mm"), **options)


def test_runs_that_hold_nothing_do_not_pass():
    """The model ran outside the block, or on another thread: the test would pass whatever it computes."""
    with pytest.raises(IncomparableTracesError, match="holds an op, so that nothing was compared"):
        assert_same_run(trace(""), trace(""))


@pytest.mark.parametrize("right", ["same", "math"])
def test_a_run_that_was_cut_off_does_not_pass(right, recorded, tmp_path: Path):
    """Neither as identical nor as rounding: what is missing may differ."""
    cut = tmp_path / "cut.trace"
    shutil.copytree(recorded / f"{right}.trace", cut)
    (cut / "footer.json").unlink()

    with pytest.raises(IncomparableTracesError, match="incomplete"):
        assert_same_run(recorded / "base.trace", cut)


def test_a_run_that_lacks_a_rank_does_not_pass(tmp_path: Path, recorded):
    """What the missing rank computed was not compared."""
    for name in ("left", "right"):
        for rank in (0, 1):
            _as_rank(recorded / "base.trace", tmp_path / name, rank)
    assert_same_run(tmp_path / "left", tmp_path / "right")

    shutil.rmtree(tmp_path / "right" / "rank-00001")

    with pytest.raises(IncomparableTracesError, match=r"Of 2 ranks only 0 could be compared"):
        assert_same_run(tmp_path / "left", tmp_path / "right")
    assert_same_run(tmp_path / "left", tmp_path / "right", rank=0)


def _as_rank(trace: Path, run: Path, rank: int) -> None:
    """A copy of a trace as one rank of two would have written it."""
    import json

    from opdrift.tracefile.schema import checksum

    folder = run / f"rank-{rank:05d}"
    shutil.copytree(trace, folder)
    header = json.loads((folder / "header.json").read_text())
    del header["crc"]
    header |= {"rank": rank, "world_size": 2}
    (folder / "header.json").write_text(json.dumps({**header, "crc": checksum(header)}))
