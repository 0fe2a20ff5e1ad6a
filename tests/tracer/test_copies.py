"""Copies that are not what they were made from, and moves between devices: within one run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import opdrift
from opdrift import transfers
from opdrift.findings import findings
from opdrift.tracefile.reader import Trace

Run = Callable[[], Any]


def recorded(path: Path, run: Run, **options: Any) -> Trace:
    with torch.no_grad(), opdrift.record(path, **options):
        run()
    trace = opdrift.load(path)
    assert trace.footer is not None
    assert trace.footer.failures == ()
    return trace


def poked() -> Tensor:
    """What an op made and numpy changed, of which no version counter tells."""
    made = torch.arange(6.0).sin()
    made.numpy()[4] += 1.0
    return made


# ---- copies ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "run"),
    [
        ("clone", lambda: poked().clone()),
        ("_to_copy", lambda: poked().to("cpu", copy=True)),
        ("copy_", lambda: torch.zeros(6).copy_(poked())),
    ],
)
def test_a_copy_of_what_was_changed_unseen_is_a_hidden_write(tmp_path, op, run):
    """The copy holds other values than the op before it wrote; the element is named."""
    (found,) = findings([recorded(tmp_path / "a.trace", run)])

    assert (found.kind, found.cause.slug, found.cause.confidence) == (
        "hidden-write",
        "race",
        "likely",
    )
    assert found.op is not None
    assert found.op.startswith(f"aten.{op}.")
    assert found.cause.summary.startswith("a float32[6]: its copy is not what it held")
    assert "one element differs: 4 of 6" in found.cause.evidence


@pytest.mark.parametrize("wrong", ["left", "right"])
def test_a_comparison_says_which_run_s_copy_is_not_its_source(tmp_path, wrong):
    """Equal inputs as far as they were read, and a clone that gives something else: no kernel does that."""
    for side in ("left", "right"):
        make = poked if side == wrong else torch.arange(6.0).sin
        recorded(tmp_path / f"{side}.trace", lambda make=make: make().clone().exp())

    first = opdrift.diff(tmp_path / "left.trace", tmp_path / "right.trace").first

    assert first is not None
    assert first.cause is not None
    assert (first.cause.slug, first.cause.confidence) == ("race", "likely")
    assert first.cause.summary.endswith(f"in the {wrong} run")


def in_steps() -> None:
    x = torch.arange(6.0)
    x.add_(1.0)
    x.clone().mul_(2.0).clone()


@pytest.mark.parametrize(
    "run",
    [
        in_steps,
        lambda: torch.arange(6.0).to(torch.float64).to(torch.float16).clone(),
        lambda: torch.zeros(3, 2).copy_(torch.ones(2)),
        lambda: torch.arange(6.0).view(2, 3).t().clone(memory_format=torch.contiguous_format),
        lambda: torch.randn(4, dtype=torch.complex64).conj().imag.clone(),
        lambda: torch.randn(4, dtype=torch.complex64).conj().clone(),
        lambda: torch.tensor([float("nan"), -0.0, float("inf")]).clone(),
        lambda: torch.empty(6).clone(),
    ],
)
def test_right_copies_are_no_findings(tmp_path, run):
    """In-place ops, casts, broadcasts, other layouts, views that lie in memory as what they are not."""
    found = findings([recorded(tmp_path / "a.trace", run)])

    assert [each.cause.summary for each in found if each.cause.slug == "race"] == []


# ---- moves -----------------------------------------------------------------------------------------------


@pytest.fixture
def doubles_are_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of float64 count as those of a device."""
    device = torch.device("cuda:0")
    monkeypatch.setattr(
        transfers, "_device", lambda t: device if t.dtype is torch.float64 else t.device
    )


def moves(trace: Trace) -> list[dict[str, Any]]:
    return [dict(mark.fields) for mark in trace.marks if mark.kind == "move"]


@pytest.mark.usefixtures("doubles_are_elsewhere")
def test_each_move_of_a_model_is_a_mark_with_its_names(tmp_path):
    """`.to(device)`: one mark a tensor, at the op that made the copy, with the parameter's module."""
    model = nn.Sequential(nn.Linear(4, 2, bias=False), nn.BatchNorm1d(2, affine=False))
    trace = recorded(tmp_path / "a.trace", model.double, model=model)

    first, *rest = moves(trace)
    assert first == {
        "library": "torch",
        "unit": "0",
        "direction": "host-to-device",
        "parameters": [["0.weight", 0, [2, 4]]],
        "shape": [2, 4],
        "source_dtype": "float32",
        "destination_dtype": "float64",
        "source_device": "cpu",
        "destination_device": "cuda:0",
        "bytes": 64,
        "blocking": True,
    }
    assert [each["parameters"][0][0] for each in rest] == ["1.running_mean", "1.running_var"]
    ops = [trace.op(trace.index_of(m.seq) or 0).name for m in trace.marks if m.kind == "move"]
    assert ops == ["aten._to_copy.default"] * 3


@pytest.mark.usefixtures("doubles_are_elsewhere")
def test_a_checkpoint_that_is_copied_to_a_device_has_the_parameter_s_name(tmp_path):
    """What is loaded has no name; what it is copied into has."""
    model = nn.Linear(2, 2, bias=False).double()
    loaded = {"weight": torch.ones(2, 2)}
    trace = recorded(tmp_path / "a.trace", lambda: model.load_state_dict(loaded), model=model)

    (move,) = moves(trace)
    assert (move["parameters"], move["direction"]) == ([["weight", 0, [2, 2]]], "host-to-device")


@pytest.mark.usefixtures("doubles_are_elsewhere")
def test_a_nameless_tensor_is_moved_where_its_op_ran(tmp_path):
    """Activations have no name; a copy that is not waited for is told as such."""

    class Out(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.empty(3).copy_(x.sin(), non_blocking=True)

    model = nn.Sequential(Out())
    x = torch.ones(3, dtype=torch.float64)
    trace = recorded(tmp_path / "a.trace", lambda: model(x), model=model)

    (move,) = moves(trace)
    assert (move["unit"], move["parameters"], move["direction"], move["blocking"]) == (
        "0",
        [],
        "device-to-host",
        False,
    )


def test_what_stays_on_a_device_or_has_no_content_is_no_move(tmp_path):
    """Casts, copies on the host, tensors on "meta"."""

    def run() -> None:
        x = torch.ones(3)
        x.double().cpu()
        x.to("meta")
        torch.zeros(3).copy_(x)

    assert moves(recorded(tmp_path / "a.trace", run)) == []
