"""Digests of contents in another precision."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import opdrift
from opdrift_integrations import digests


@pytest.mark.parametrize("block", [1, 7, 100, 1 << 18])
def test_a_cast_is_digested_as_if_it_had_been_made_whole(
    block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Contents are cast block by block; pieces may end anywhere in a block, be longer, or hold nothing."""
    monkeypatch.setattr(digests, "_BLOCK", block)
    first, second = torch.randn(40), torch.randn(3)

    with opdrift.record(tmp_path / "run.trace", integrations=()) as recorder, recorder.quiet():
        found = digests.cast_digests(
            recorder, [(first, (5, 0, 21, 14)), (second, (3,))], torch.bfloat16
        )
        whole = recorder.digests([(first.bfloat16(), (5, 0, 21, 14)), (second.bfloat16(), (3,))])

    assert [digests.as_field(each) for each in found] == [digests.as_field(each) for each in whole]
