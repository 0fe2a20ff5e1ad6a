"""What offloaded weights are loaded from: another tensor's file, another entry of the state dict."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
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
