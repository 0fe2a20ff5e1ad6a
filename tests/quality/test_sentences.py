"""What a cause says is true of the run it speaks of."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import opdrift


def partly_loaded(path: Path, *, without: tuple[str, ...] = ()) -> Path:
    """A model that is built and loaded inside the recording, but for some names."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2))

    torch.manual_seed(1)
    state = build().state_dict()
    torch.manual_seed(7)
    with opdrift.record(path):
        model = build()
        kept = {name: tensor for name, tensor in state.items() if name not in without}
        model.load_state_dict(kept, strict=False)
        model(torch.ones(3, 8))
    return path


def test_only_the_run_that_lacks_the_checkpoint_is_said_to_have_drawn_its_weights(tmp_path: Path):
    """The other run's copies were seen, and so were those of the tensors that agree."""
    left = partly_loaded(tmp_path / "left.trace")
    right = partly_loaded(tmp_path / "right.trace", without=("0.weight", "0.bias"))

    cause = opdrift.diff(left, right).causes[0]

    assert cause.slug == "weights"
    assert "in the right run each was last written by a random draw" in cause.summary
    said = "\n".join(cause.evidence)
    assert "seeded with 7" in said
    assert "left: 2 of these" not in said
    assert "may not be loaded either" not in said
