"""Writes that no op shows: which tensor is named, and how surely."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import opdrift
from opdrift.records import Diagnosis, Divergence
from opdrift.render import card, text
from opdrift.render.page import Screen
from opdrift.testing.builder import Builder

Write = Callable[["Net", Tensor], None]


class Net(nn.Module):
    """Two products; `write` may spoil something between them."""

    def __init__(self, write: Write | None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 4)
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.write is not None:
            self.write(self, h)
        return self.b(h)


def into_weight(net: Net, h: Tensor) -> None:
    net.b.weight.detach().numpy()[0] += 0.5


def into_activation(net: Net, h: Tensor) -> None:
    h.detach().numpy()[:, 0] = 0


@pytest.fixture
def compare(tmp_path: Path) -> Callable[..., Diagnosis]:
    """A run that leaves its tensors alone against one that writes into one, with `right` and `**options`."""

    def run(right: Write, **options: str) -> Diagnosis:
        torch.manual_seed(2)
        x = torch.randn(4, 16)
        for name, write in (("left", None), ("right", right)):
            net = Net(write)
            with torch.no_grad(), opdrift.record(tmp_path / name, model=net, **options):  # type: ignore[arg-type]
                net(x)
        return opdrift.diff(tmp_path / "left", tmp_path / "right")

    return run


def first(found: Diagnosis) -> Divergence:
    assert found.first is not None
    return found.first


@pytest.mark.parametrize(
    ("write", "named", "left_open"),
    [
        (into_weight, "b.weight", "the output of op 2 (aten.addmm.default) in a"),
        (into_activation, "the output of op 2 (aten.addmm.default) in a", "b.weight"),
    ],
)
def test_the_tensor_of_which_one_run_took_an_alias_is_named(
    compare: Callable[..., Diagnosis], write: Write, named: str, left_open: str
):
    """A weight reaches the product through t(), an activation is an op's: both are named, and never the bias."""
    cause = first(compare(write)).cause

    assert (cause.slug, cause.confidence) == ("race", "possible")
    assert cause.summary.startswith(f"{named} may have been written")
    assert f"nothing rules out {left_open}" in cause.evidence
    assert any("took an alias of" in line for line in cause.evidence)
    assert any(line.startswith("b.bias is added to each row alike") for line in cause.evidence)


@pytest.mark.parametrize(
    ("write", "named"),
    [
        (into_weight, "b.weight"),
        (into_activation, "the output of op 2 (aten.addmm.default) in a"),
    ],
)
def test_a_write_that_was_seen_is_named_with_its_run(
    compare: Callable[..., Diagnosis], write: Write, named: str
):
    """Read again at use, the content says itself where it changed; no CPU run is told of CUDA streams."""
    found = compare(write, integrity="full")
    cause = first(found).cause

    assert card.headline(found).endswith(f"{named} changed, and no recorded op wrote it")
    assert named in text.render(found, Screen(width=200)).split("where      ")[1].splitlines()[0]
    assert (
        cause.summary
        == f"{named} was written behind the dispatcher's back, seen in the right run only"
    )
    assert all(
        word in cause.try_ for word in ("in the right run", "numpy", ".data", "DLPack", "thread")
    )
    assert "stream" not in cause.try_


def product(
    *, alias: str | None = None, change: str = "", bias: bool = True, **contents: np.ndarray
) -> opdrift.Trace:
    """sin, then addmm of a bias, its output and a weight seen through t(); one of them may be detached before."""
    build = Builder()
    x = build.op("sin", build.leaf("x", kind="input", shape=(4, 8)))
    values = {
        "bias": build.leaf("fc.bias", shape=(8,)) if bias else x,
        "weight": build.leaf("fc.weight", shape=(8, 8)),
        "x": x,
    }
    if alias is not None:
        build.op("detach", values[alias])
    with build.scope("fc"):
        weight = build.op("t", values["weight"])
        inputs = [values["bias"], x, weight] if bias else [x, weight]
        out = build.op(
            "addmm" if bias else "mm",
            *inputs,
            change=change,
            shape=(4, 8),
            content=contents.get("out"),
        )  # type: ignore[arg-type]
    build.output(out)
    return build.build()


def cause_of(left: opdrift.Trace, right: opdrift.Trace) -> opdrift.records.Cause:
    return first(opdrift.diff(left, right)).cause


OUT = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)


def test_without_an_alias_all_that_may_have_changed_are_named():
    """Rows that are off by different amounts rule out the bias, and nothing tells the others apart."""
    spoiled = OUT + np.arange(32, dtype=np.float32).reshape(4, 8)

    found = cause_of(product(out=OUT), product(out=spoiled))

    assert found.summary.startswith(
        "one of the output of op 1 (aten.sin.default) in the root module or fc.weight may have been written"
    )
    assert any(line.startswith("fc.bias is added to each row alike") for line in found.evidence)


def test_a_bias_is_not_ruled_out_where_all_rows_are_off_alike():
    """Each column by an amount of its own: a bias does that, and so may a weight."""
    found = cause_of(product(out=OUT), product(out=OUT + np.arange(8, dtype=np.float32)))

    assert found.summary.startswith("one of fc.bias, ")
    assert "fc.weight may have been written" in found.summary
    assert not any("added to each row" in line for line in found.evidence)


def test_an_alias_that_both_runs_take_points_at_nothing():
    """detach() in both runs is what the program does."""
    found = cause_of(
        product(alias="weight", bias=False), product(alias="weight", bias=False, change="*")
    )

    assert found.summary.startswith("one of ")
    assert not any("alias" in line for line in found.evidence)


def test_an_op_that_reads_no_weight_is_not_suspected():
    """Nothing of the model among its inputs, and nobody took an alias: another result is the op's own."""

    def run(change: str) -> opdrift.Trace:
        build = Builder()
        h = build.op("sin", build.leaf("x", kind="input"))
        build.output(build.op("cos", h, change=change))  # type: ignore[arg-type]
        return build.build()

    assert cause_of(run(""), run("*")).slug != "race"


def gathered_in(op: str, *, changed: bool = False) -> opdrift.Trace:
    """A weight that an op lays into a buffer, and a product with it; `changed` by one unit in the last place."""
    build = Builder()
    weight = build.leaf("fc.weight", shape=(64,))
    content = build.content(weight).copy()
    if changed:
        content[3] = np.nextafter(content[3], np.float32(9))
    with build.scope("fc"):
        build.output(build.op("mm", build.op(op, weight, content=content)))
    return build.build()


@pytest.mark.parametrize(
    "op", ["fsdp.chunk_cat.default", "fsdp.all_gather_copy_in.default", "cat", "index_select", "narrow_copy"]
)  # fmt: skip
def test_what_only_moves_elements_rounds_nothing(op: str):
    """One bit that is another one was written by something: `rounding` is never the answer of a move."""
    diagnosis = opdrift.diff(gathered_in(op), gathered_in(op, changed=True))

    first = diagnosis.first
    assert first is not None
    assert (diagnosis.verdict, first.material, first.explained) == ("diverged", True, 0.0)
    assert (first.cause.slug, first.cause.confidence) == ("race", "likely")
    assert "only moves elements" in first.cause.summary
    assert "fc.weight was written behind the dispatcher's back" in first.cause.summary
    assert "rounding" not in {each.slug for each in diagnosis.causes}


def test_a_collective_is_not_taken_for_a_move_of_what_its_own_rank_gave():
    """What it brings is what other ranks gave."""
    op = "c10d._allgather_base_.default"
    diagnosis = opdrift.diff(gathered_in(op), gathered_in(op, changed=True))

    assert "only moves elements" not in diagnosis.causes[0].summary
