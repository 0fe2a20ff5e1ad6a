"""Writes that no op makes, into leaves and into what ops made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

import opdrift
from opdrift.findings import findings
from opdrift.tracefile.reader import Trace

Body = Callable[[Tensor], object]


def record(path: Path, body: Body, *, integrity: Literal["auto", "full", "off"] = "full") -> Trace:
    x = torch.arange(6.0)
    with torch.no_grad(), opdrift.record(path, integrity=integrity):
        body(x)
    return opdrift.load(path)


def poke(tensor: Tensor) -> None:
    tensor.numpy()[0] += 1.0


def reads_what_numpy_wrote(x: Tensor) -> None:
    y = x.sin()
    poke(y)
    y.exp()


def reads_around_a_part_that_was_written(x: Tensor) -> None:
    y = x.sin()
    y[3:].mul_(2.0)
    poke(y)
    y[:3].exp()


def reads_what_an_op_filled(x: Tensor) -> None:
    y = torch.empty(6)
    y.copy_(x)
    poke(y)
    y.exp()


def reads_a_leaf_first(x: Tensor) -> None:
    poke(x)  # `.numpy()` shows it to the recorder
    x.exp()


@pytest.mark.parametrize(
    "body",
    [
        reads_what_numpy_wrote,
        reads_around_a_part_that_was_written,
        reads_what_an_op_filled,
        reads_a_leaf_first,
    ],
)
def test_with_full_integrity_every_hidden_write_is_found_at_its_reader(tmp_path: Path, body: Body):
    """Also into what an op made, into a part that was not written last, and at the first op of all."""
    trace = record(tmp_path / "trace", body)

    found = findings([trace])

    assert [(f.kind, f.op) for f in found] == [("hidden-write", "aten.exp.default")]


def test_a_hidden_write_names_the_op_whose_result_was_overwritten(tmp_path: Path):
    """There is no name to give, but there is a maker."""
    trace = record(tmp_path / "trace", reads_what_numpy_wrote)

    found = findings([trace])

    assert found[0].cause.summary.startswith("what aten.sin.default (op 1) wrote: the content")


@pytest.mark.parametrize("integrity", ["auto", "off"])
def test_what_ops_made_is_read_again_with_full_integrity_only(
    tmp_path: Path, integrity: Literal["auto", "off"]
):
    """It would cost as much as the fingerprints themselves."""
    trace = record(tmp_path / "trace", reads_what_numpy_wrote, integrity=integrity)

    assert findings([trace]) == ()


def writes_with_ops(x: Tensor) -> None:
    y = x.sin()
    y.mul_(2.0)
    y[2:].add_(1.0)
    y[0] = 3.0
    torch._foreach_add_([y, x], 1.0)
    z = y.t().contiguous().view(2, 3)
    z[:, 1].zero_()
    (z.sum() + y.exp().sum()).item()


def resizes(x: Tensor) -> None:
    y = x.sin()
    y.resize_(9)
    y.fill_(1.0)
    y.exp()
    torch.sin(x, out=y.resize_(6))
    y.exp()


def trains(x: Tensor) -> None:
    weight = torch.nn.Parameter(x.cos())
    step = torch.optim.Adam([weight])
    with torch.enable_grad():
        for _ in range(3):
            step.zero_grad()
            (weight * x).sum().backward()
            step.step()


def normalises(x: Tensor) -> None:
    norm = torch.nn.BatchNorm1d(2)
    norm.running_mean = x[:2].sin()
    for _ in range(2):
        norm(x.view(3, 2))


@pytest.mark.parametrize("body", [writes_with_ops, resizes, trains, normalises])
def test_what_ops_write_is_no_hidden_write(tmp_path: Path, body: Body):
    """Whole or in part, in place or through `out=`, declared in the schema or not."""
    trace = record(tmp_path / "trace", body)

    assert [f.cause.summary for f in findings([trace]) if f.kind == "hidden-write"] == []


def test_two_runs_come_apart_where_the_overwritten_result_is_read(tmp_path: Path):
    """The op computes rightly from what it got: a race, and no other kernel."""

    def sound(x: Tensor) -> None:
        x.sin().exp()

    left = record(tmp_path / "left", sound)
    right = record(tmp_path / "right", reads_what_numpy_wrote)

    first = opdrift.diff(left, right).first

    assert first is not None
    assert (first.kind, first.op, first.cause.slug) == (
        "hidden-write",
        "aten.exp.default",
        "race",
    )
    assert "the output of op 1 (aten.sin.default)" in first.cause.summary


def test_a_buffer_that_an_integration_names_again_has_what_it_holds_then(tmp_path):
    """Running statistics are written with no version moved: only their content tells."""
    statistics, x = torch.zeros(3), torch.arange(6.0).view(2, 3)
    with torch.no_grad(), opdrift.record(tmp_path / "t.trace", integrity="off") as recorder:
        recorder.name_tensor(statistics, "mean", kind="buffer")
        with recorder.pause():
            torch.batch_norm(x, None, None, statistics, torch.ones(3), True, 1.0, 1e-5, False)
        recorder.name_tensor(statistics, "mean", kind="buffer")
        statistics.exp()
    trace = opdrift.load(tmp_path / "t.trace")

    read = trace.fingerprint(trace.op(len(trace.ops) - 1).inputs[0])
    assert read is not None
    assert (read.min, read.max) == (1.5, 3.5)
