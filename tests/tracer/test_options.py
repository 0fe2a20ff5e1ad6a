"""What `record` accepts, checked before anything begins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import opdrift


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"path": None}, "no path"),
        ({"path": 3}, "no path"),
        ({"path": b"a.trace"}, "no path"),
        ({"model": "esm2"}, "no nn.Module"),
        ({"model": {"a": 1}}, "no nn.Module"),
        ({"model": [nn.Linear(1, 1)]}, "no nn.Module"),
        ({"inputs": torch.ones(2)}, "mapping of names to tensors"),
        ({"inputs": {"x": [1]}}, "mapping of names to tensors"),
        ({"batch": 3}, "Batch"),
        ({"integrations": "fairscale"}, "sequence of names"),
        ({"integrations": ["nothing"]}, "no integration 'nothing'"),
        ({"integrations": [["fairscale"]]}, "sequence of names"),
        ({"kernels": "most"}, "choose one of 'auto', 'full', 'off'"),
        ({"integrity": True}, "choose one of 'auto', 'full', 'off'"),
        ({"label": None}, "no text"),
        ({"overwrite": "yes"}, "True or False"),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(options: dict[str, Any], words: str):
    with pytest.raises(opdrift.InvalidOptionError, match=words):
        opdrift.record(**{"path": "never.trace", **options})


def test_a_refusal_makes_no_folder(tmp_path: Path):
    with pytest.raises(opdrift.InvalidOptionError):
        opdrift.record(tmp_path / "a.trace", kernels="most")  # type: ignore[arg-type]

    assert list(tmp_path.iterdir()) == []


def test_paths_may_be_text(tmp_path: Path):
    with opdrift.record(f"{tmp_path}/a.trace"):
        pass

    assert opdrift.load(tmp_path / "a.trace").complete


def test_the_trace_says_what_was_asked_for(tmp_path: Path):
    batch = opdrift.Batch(2, lengths=[3, 4])
    with opdrift.record(tmp_path / "a.trace", batch=batch, integrity="off"):
        pass

    assert opdrift.load(tmp_path / "a.trace").header.options == {
        "kernels": "auto",
        "integrity": "off",
        "synchronised": False,
        "batch": {"size": 2, "lengths": [3, 4], "pad_side": "right"},
    }
