"""What offloaded weights are loaded from: another tensor's file, another entry of the state dict."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from accelerate import init_empty_weights, load_checkpoint_and_dispatch
from offloading import X, in_memory, on_disk, only, recorded, said, said_of
from torch import nn

import opdrift
from opdrift.findings import findings
from opdrift.tracefile.reader import Trace


def exchange(folder: Path, one: str, other: str) -> None:
    """Exchange the files of two tensors of one shape."""
    first, second, aside = (folder / f"{name}.dat" for name in (one, other, "aside"))
    first.rename(aside)
    second.rename(first)
    aside.rename(second)


class Twice(nn.Module):
    """Two layers of one shape."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


NAMES = ("first.weight", "second.weight")


def test_files_that_are_exchanged_are_told_with_the_tensor_whose_content_they_hold(tmp_path):
    """And a comparison does not speak of shards."""
    plain = recorded(tmp_path / "plain", Twice())
    model = on_disk(tmp_path / "weights", Twice())

    trace = recorded(
        tmp_path / "trace", model, between=lambda: exchange(tmp_path / "weights", *NAMES)
    )

    finding = only(findings([trace]))
    assert (finding.name, finding.step, finding.cause.slug) == ("first.weight", 1, "fsdp-gather")
    assert "holds another tensor's values" in finding.cause.summary
    assert "it is what second.weight held" in finding.cause.evidence
    assert "the same with 1 more: second.weight" in finding.cause.evidence
    assert "files were exchanged" in finding.cause.try_
    found = opdrift.diff(plain, trace)
    assert found.first is not None
    assert "holds another tensor's values" in found.first.cause.summary
    assert not [cause for cause in found.causes if "shards" in said_of(cause)]


def test_files_that_were_exchanged_before_the_first_load_are_no_older_folder(tmp_path):
    with opdrift.record(tmp_path / "trace"), torch.no_grad():
        model = on_disk(tmp_path / "weights", Twice())
        exchange(tmp_path / "weights", *NAMES)
        model(X)

    finding = only(findings([opdrift.load(tmp_path / "trace")]))
    assert (finding.name, finding.cause.slug) == ("first.weight", "fsdp-gather")
    assert "it is what second.weight held" in finding.cause.evidence
    assert "an older one" not in finding.cause.try_


def replaced(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Trace:
    """A run whose state dict, which the model is offloaded to, is changed before the last forward."""
    model = Twice()
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    offloaded = in_memory(path, model, state_dict=weights)
    return recorded(path / "trace", offloaded, between=lambda: change(weights))


def test_entries_that_are_exchanged_in_the_state_dict_are_no_unseen_write(tmp_path):
    def swap(weights: dict[str, torch.Tensor]) -> None:
        one, other = NAMES
        weights[one], weights[other] = weights[other], weights[one]

    finding = only(findings([replaced(tmp_path, swap)]))

    assert (finding.name, finding.step, finding.cause.slug) == ("first.weight", 1, "fsdp-gather")
    assert "it is what second.weight held" in finding.cause.evidence
    assert "it lies elsewhere than at the load before" in finding.cause.evidence
    assert "no op that was recorded" not in said(finding)


def test_new_weights_that_the_run_made_are_no_fault(tmp_path):
    def renew(weights: dict[str, torch.Tensor]) -> None:
        weights["first.weight"] = weights["second.weight"] * 2

    assert findings([replaced(tmp_path, renew)]) == ()


def test_new_weights_that_nobody_saw_being_made_are_possibly_one(tmp_path):
    new = torch.ones(4, 4)

    def renew(weights: dict[str, torch.Tensor]) -> None:
        weights["first.weight"] = new

    finding = only(findings([replaced(tmp_path, renew)]))

    assert (finding.name, finding.cause.confidence) == ("first.weight", "possible")
    assert "If the program gave the model these weights, all is right" in finding.cause.try_


def loaded_from(tmp_path: Path, state: dict[str, torch.Tensor], name: str) -> Path:
    """The trace of a model that accelerate loads from a checkpoint and spreads over memory and a folder."""
    torch.save(state, tmp_path / f"{name}.pt")
    with opdrift.record(tmp_path / name), torch.no_grad():
        with init_empty_weights():
            model = Twice()
        spread = load_checkpoint_and_dispatch(
            model,
            str(tmp_path / f"{name}.pt"),
            device_map={"first": "cpu", "second": "disk"},
            offload_folder=tmp_path / f"{name}-weights",
        )
        spread(X)
    return tmp_path / name


def weights(factor: float) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(int(factor))
    return {name: torch.randn(t.shape, generator=drawn) for name, t in Twice().state_dict().items()}


def test_two_checkpoints_that_accelerate_loads_are_no_missing_load(tmp_path):
    """And the same checkpoint twice is no difference."""
    one, other = loaded_from(tmp_path, weights(1), "one"), loaded_from(tmp_path, weights(2), "two")

    found = opdrift.diff(one, other)

    assert found.first is not None
    assert found.first.cause.summary == (
        "4 of 4 tensors of the model differ before the first op; both runs loaded them, each from something else"
    )
    assert (
        "both: accelerate brought first.weight in as it loaded a checkpoint, and 3 others likewise"
        in found.first.cause.evidence
    )
    assert opdrift.diff(one, loaded_from(tmp_path, weights(1), "again")).verdict == "identical"


def offloaded(tmp_path: Path, state: dict[str, torch.Tensor], folder: str, name: str) -> Path:
    """The trace of a model that is loaded and offloaded before its recording."""
    model = Twice()
    model.load_state_dict(state)
    recorded(tmp_path / name, on_disk(tmp_path / folder, model), steps=1)
    return tmp_path / name


def test_a_folder_of_an_older_model_is_told_with_its_files_where_the_offloading_is_not_recorded(
    tmp_path,
):
    """Only that it was read from them is known, in either order of the runs; and a folder of the right one is no difference."""
    plain = Twice()
    plain.load_state_dict(weights(1))
    recorded(tmp_path / "plain", plain, steps=1)
    offloaded(tmp_path, weights(2), "older", "first use")
    stale = offloaded(tmp_path, weights(1), "older", "stale")
    right = offloaded(tmp_path, weights(1), "new", "right")

    for found, side in (
        (opdrift.diff(tmp_path / "plain", stale), "right"),
        (opdrift.diff(stale, tmp_path / "plain"), "left"),
    ):
        assert found.first is not None
        cause = found.first.cause
        assert f"the {side} run loaded them in its recording" in cause.summary
        file = tmp_path / "older" / "first.weight.dat"
        said = f"{side}: accelerate brought first.weight in from {file}, and 3 others likewise"
        assert said in cause.evidence
        assert cause.try_.startswith("Compare what these files hold with the checkpoint")
    assert opdrift.diff(tmp_path / "plain", right).verdict == "identical"
