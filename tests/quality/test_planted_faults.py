"""Every fault that can be planted into one op of a small model is found at that op, for the right reason.

`pytest` plants a subset that is the same every time; `make quality` plants all, and prints the figures of
docs/quality.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from planting import Garden, Tally, every, summary
from plants import FAULTS
from small_models import MODELS
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import opdrift
from opdrift.findings import findings

#: Of each kind, every so many-th plant of each model is planted; a whole run takes ten minutes and more.
SUBSET = 60


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Thousands of tiny ops: threads would mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def whole(request: pytest.FixtureRequest) -> bool:
    """Whether everything is to be planted."""
    return bool(request.config.getoption("--all-plants"))


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_every_fault_is_found_at_its_op_for_the_right_reason(
    tmp_path: Path, model: str, whole: bool, capsys: pytest.CaptureFixture[str]
):
    """Where a fault changes a result it is found; where it changes none, the runs are identical."""
    garden, tally = Garden(MODELS[model], tmp_path), Tally()
    plants = list(every(garden.scout(), 1 if whole else SUBSET))

    for plant in plants:
        garden.diagnose(plant, tally)

    with capsys.disabled():
        print(summary(model, tally))  # noqa: T201 (the figures are what the run is for)
    assert tally.misses == []
    assert tally.found.total() > len(plants) // 2


@pytest.mark.parametrize("model", MODELS)
def test_without_a_fault_there_is_no_difference(tmp_path: Path, model: str):
    """Neither between two runs, nor in one of them."""
    garden = Garden(MODELS[model], tmp_path)

    again = garden.record(None, name="again")

    assert opdrift.diff(garden.plain.trace, again.trace).verdict == "identical"
    assert findings([again.trace]) == ()


def test_each_kind_of_fault_can_be_planted(tmp_path: Path):
    """In some model at least: else a kind that is never planted would count as found."""
    kinds = {plant.fault for make in MODELS.values() for plant in Garden(make, tmp_path).scout()}

    assert kinds == set(FAULTS)


class Litter(TorchDispatchMode):
    """Leaves other bytes in the workspace of a recurrent layer."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mkldnn_rnn_layer.default:
            with torch._C._DisableTorchDispatch():
                out[3].view(torch.uint8)[-1:] ^= 255
        return out


def test_the_workspace_of_a_recurrent_layer_is_no_result(tmp_path: Path):
    """Some of its bytes are never written: whatever was in memory stays there."""
    model, x = torch.nn.LSTM(4, 3), torch.randn(2, 1, 4)

    def record(path: Path) -> Tensor:
        with opdrift.record(path, model=model):
            return model(x)[0]

    record(tmp_path / "left")
    with Litter():
        record(tmp_path / "right")

    assert opdrift.diff(tmp_path / "left", tmp_path / "right").verdict == "identical"
