"""Digests of contents in another precision."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import opdrift
from opdrift.recorder import Recorder
from opdrift_integrations import digests


@pytest.mark.parametrize("block", [1, 7, 100, 1 << 18])
def test_a_cast_is_digested_as_if_it_had_been_made_whole(
    block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Contents are cast block by block; pieces may end anywhere in a block, be longer, or hold nothing."""
    monkeypatch.setattr(digests, "_BLOCK", block)
    monkeypatch.setattr(Recorder, "cast_digests", lambda *_: None)
    first, second = torch.randn(40), torch.randn(3)

    with opdrift.record(tmp_path / "run.trace", integrations=()) as recorder, recorder.quiet():
        found = digests.cast_digests(
            recorder, [(first, (5, 0, 21, 14)), (second, (3,))], torch.bfloat16
        )
        whole = recorder.digests([(first.bfloat16(), (5, 0, 21, 14)), (second.bfloat16(), (3,))])

    assert [digests.as_field(each) for each in found] == [digests.as_field(each) for each in whole]


def test_a_cast_that_holds_nans_is_made_by_torch(tmp_path: Path):
    """What becomes of a NaN differs between the start and the end of a tensor: only torch knows it."""
    content = torch.randn(5000)
    content[[3, 4998]] = float("nan")

    with opdrift.record(tmp_path / "run.trace", integrations=()) as recorder, recorder.quiet():
        at_once = recorder.cast_digests([(content, (5000,))], torch.bfloat16)
        found = digests.cast_digests(recorder, [(content, (5000,))], torch.bfloat16)
        whole = recorder.digests([(content.bfloat16(), (5000,))])

    assert at_once is None
    assert [digests.as_field(each) for each in found] == [digests.as_field(each) for each in whole]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_casts_to_other_types_are_made_by_torch(dtype: torch.dtype, tmp_path: Path):
    content = torch.randn(50)

    with opdrift.record(tmp_path / "run.trace", integrations=()) as recorder, recorder.quiet():
        at_once = recorder.cast_digests([(content, (50,))], dtype)
        found = digests.cast_digests(recorder, [(content, (20, 30))], dtype)
        whole = recorder.digests([(content.to(dtype), (20, 30))])

    assert at_once is None
    assert [digests.as_field(each) for each in found] == [digests.as_field(each) for each in whole]
