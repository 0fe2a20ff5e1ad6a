"""With which attention, precision and cache a transformers model was called is in the trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

import opdrift
from opdrift.plugins import Integration, SeesCalls
from opdrift.records import EnvironmentDifference
from opdrift.tracefile.reader import Trace
from opdrift_integrations.transformers import TransformersIntegration

IDS = torch.arange(2, 8).view(1, 6)
MODEL = "LlamaForCausalLM"


def llama(attention: str = "sdpa") -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, attn_implementation=attention,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def recorded(path: Path, model: nn.Module, *calls: dict[str, Any]) -> Trace:
    with opdrift.record(path, model=model), torch.no_grad():
        for call in calls or ({},):
            model(IDS, **call)
    return opdrift.load(path)


def settings(trace: Trace) -> list[dict[str, Any]]:
    return [dict(mark.fields) for mark in trace.marks if mark.kind == "model-settings"]


@pytest.fixture(scope="module")
def sdpa(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return recorded(tmp_path_factory.mktemp("sdpa") / "trace", llama())


def test_it_is_an_integration_that_is_told_of_calls():
    assert isinstance(TransformersIntegration(), Integration)
    assert isinstance(TransformersIntegration(), SeesCalls)


def test_the_settings_of_a_call_are_written_down(sdpa):
    assert settings(sdpa) == [
        {"library": "transformers", "module": "", "model": MODEL, "attention": {"": "sdpa"},
         "dtype": "float32", "use_cache": True, "cache": None}
    ]  # fmt: skip


def test_two_attentions_are_told_apart_by_name(tmp_path, sdpa):
    """As a setting that differs, and as evidence where attention is what differs."""
    found = opdrift.diff(sdpa, recorded(tmp_path / "trace", llama("eager")))

    difference = EnvironmentDifference(f"attention of {MODEL}", "sdpa", "eager")
    assert difference in found.environment
    assert found.first is not None
    assert f"attention of {MODEL}: left sdpa, right eager" in found.first.cause.evidence


def test_equal_settings_are_no_difference(tmp_path, sdpa):
    found = opdrift.diff(sdpa, recorded(tmp_path / "trace", llama()))

    assert (found.verdict, found.environment) == ("identical", ())


def test_another_cache_is_a_setting_that_differs_and_the_runs_are_identical(tmp_path, sdpa):
    model = llama()
    given = {"cache": StaticCache(config=model.config, max_cache_len=8)}

    found = opdrift.diff(sdpa, recorded(tmp_path / "trace", model, given))

    assert found.environment == (EnvironmentDifference(f"cache of {MODEL}", "none", "StaticCache"),)
    assert found.verdict == "identical"


def test_a_change_between_calls_is_written_down_and_repeated_calls_are_not(tmp_path):
    model = llama()

    with opdrift.record(tmp_path / "trace", model=model), torch.no_grad():
        model(IDS)
        model(IDS)
        model.set_attn_implementation("eager")
        model(IDS)

    found = settings(opdrift.load(tmp_path / "trace"))
    assert [mark["attention"][""] for mark in found] == ["sdpa", "eager"]


def test_a_model_inside_another_module_is_found_under_its_path(tmp_path):
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.language = llama()

        def forward(self, ids: torch.Tensor) -> Any:
            return self.language(ids, use_cache=False).logits

    (found,) = settings(recorded(tmp_path / "trace", Wrapper()))

    assert (found["module"], found["attention"]) == ("language", {"": "sdpa"})


def test_the_outputs_are_those_of_a_run_without_a_recorder(tmp_path):
    with torch.no_grad():
        plain = llama()(IDS).logits
        with opdrift.record(tmp_path / "trace"):
            seen = llama()(IDS).logits

    assert torch.equal(plain, seen)


def test_settings_without_these_names_are_no_failure(tmp_path, monkeypatch):
    """Another version of transformers: what is not there is left out."""
    model = llama()
    monkeypatch.setattr(
        type(model.config), "_attn_implementation", property(lambda self: None), raising=True
    )
    integration = TransformersIntegration()
    marks: list[dict[str, Any]] = []

    class Recorder:
        def mark(self, kind: str, **fields: Any) -> None:
            marks.append(fields)

        def clean_path(self, module: nn.Module) -> str:
            return ""

    with integration.attach(Recorder()):  # type: ignore[arg-type]
        integration.called(model, (IDS,), {})

    assert [mark["attention"] for mark in marks] == [{}]
