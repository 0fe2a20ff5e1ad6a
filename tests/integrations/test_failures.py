"""What an integration cannot follow is said, and the rest is followed."""

from __future__ import annotations

import logging

from fairscale.nn.misc.flatten_params_wrapper import FlattenParamsWrapper

from opdrift_integrations.failures import Failures
from opdrift_integrations.fairscale import FairscaleIntegration


def test_a_failure_is_said_once_in_the_log_and_in_the_trace(recorder, caplog):
    failed = Failures(recorder, "torch_fsdp", "torch's FSDP")

    for _ in range(3):
        failed(KeyError("shard"))
    failed(ValueError("other"))

    assert [mark["error"] for mark in recorder.marks] == ["KeyError: 'shard'", "ValueError: other"]
    assert caplog.text.count("could not follow torch's FSDP here, the run goes on: KeyError") == 1


def test_a_fairscale_without_one_of_the_watched_functions_is_followed_by_the_others(
    recorder, monkeypatch, caplog
):
    monkeypatch.delattr(FlattenParamsWrapper, "_unflatten_params_as_views")

    with caplog.at_level(logging.WARNING), FairscaleIntegration().attach(recorder):
        pass

    name = "FlattenParamsWrapper._unflatten_params_as_views"
    assert [mark["missing"] for mark in recorder.marks] == [name]
    assert f"looks for {name}, which this version of fairscale does not have" in caplog.text
