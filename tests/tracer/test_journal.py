"""Marks that must be on disk before what they announce: a journal beside the table of marks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
import torch

import opdrift
from opdrift.tracefile.journal import JOURNAL, Journal, MarkRow, with_journal
from opdrift.tracefile.schema import TABLES


def row(number: int) -> MarkRow:
    return number, 10 * number, "collective", 0, 0, '{"what": "barrier"}'


def table(*rows: MarkRow) -> pa.Table:
    names = TABLES["marks"].names
    return pa.Table.from_pylist([dict(zip(names, r, strict=True)) for r in rows], TABLES["marks"])


def seqs(marks: pa.Table) -> list[int]:
    return marks["seq"].to_pylist()


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    found = Journal(tmp_path)
    yield found
    found.close()


def test_what_was_announced_is_on_disk_at_once(journal: Journal, tmp_path: Path):
    """Nothing is flushed or closed: the process may end here."""
    journal.append(row(1))
    journal.append(row(2))

    assert with_journal(tmp_path, table(row(0))).equals(table(row(0), row(1), row(2)))


def test_marks_that_the_table_has_are_not_read_twice(journal: Journal, tmp_path: Path):
    """A process may end between the flush and the emptying of the journal."""
    journal.append(row(1))
    journal.append(row(2))

    assert seqs(with_journal(tmp_path, table(row(1)))) == [1, 2]


def test_a_journal_is_emptied_and_goes_when_nothing_is_in_it(journal: Journal, tmp_path: Path):
    journal.append(row(1))
    journal.clear()
    assert (tmp_path / JOURNAL).read_bytes() == b""
    journal.append(row(2))
    assert seqs(with_journal(tmp_path, table())) == [2]

    journal.clear()
    journal.close()

    assert not (tmp_path / JOURNAL).exists()


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-9], lambda b: b.replace(b"20", b"21"), lambda b: b + b"\xff"]
)
def test_a_torn_or_damaged_line_ends_what_is_read(damage, journal: Journal, tmp_path: Path):
    """What is whole before it counts; no line is read with other content."""
    for number in (1, 2):
        journal.append(row(number))
    path = tmp_path / JOURNAL
    path.write_bytes(damage(path.read_bytes()))

    found = seqs(with_journal(tmp_path, table()))

    assert found in ([1], [1, 2])
    assert found == [1] or path.read_bytes().endswith(b"\xff")


def test_a_run_without_collectives_has_no_journal(tmp_path: Path):
    with opdrift.record(tmp_path / "a.trace"):
        torch.ones(2) + 1

    assert not (tmp_path / "a.trace" / JOURNAL).exists()
