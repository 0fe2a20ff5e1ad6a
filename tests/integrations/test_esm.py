"""Whether an ESM checkpoint reached its model is in the trace."""

from __future__ import annotations

import copy

import esm
import pytest
import torch
from torch import nn

from opdrift.plugins import Integration
from opdrift_integrations.esm import EsmIntegration


@pytest.fixture(scope="module")
def files(tmp_path_factory, load_example):
    small = load_example("_small_esm2")
    folder = tmp_path_factory.mktemp("checkpoint")
    small.write(folder)
    return small.read(folder)


@pytest.fixture
def model_data(files):
    """A fresh copy: esm's functions write the regression into the dict that they are given."""
    return copy.deepcopy(files[0])


def test_it_is_an_integration():
    assert isinstance(EsmIntegration(), Integration)


def test_the_checkpoint_s_names_and_digests_are_written_down(recorder, model_data):
    with EsmIntegration().attach(recorder):
        _, _, state = esm.pretrained._load_model_and_alphabet_core_v2(model_data)

    (mark,) = recorder.of("checkpoint")
    assert (mark["source"], mark["model"]) == ("_load_model_and_alphabet_core_v2", "ESM2")
    assert [name for name, *_ in mark["tensors"]] == list(state)
    name, dtype, shape, digest = mark["tensors"][0]
    assert (name, dtype, shape) == ("embed_tokens.weight", "float32", [33, 64])
    assert digest["raw"] == f"{recorder.digest(state['embed_tokens.weight']).raw:016x}"


def test_a_dropped_state_dict_is_reported_with_the_remedy(recorder, model_data):
    """facebookresearch/esm#297."""
    with EsmIntegration().attach(recorder):
        model, _, _ = esm.pretrained._load_model_and_alphabet_core_v2(model_data)
        model(torch.tensor([[0, 5, 6, 2]]))

    (mark,) = recorder.of("checkpoint-dropped")
    assert mark["tensors"] == 60
    assert "load_state_dict was never called" in mark["summary"]
    assert "load the third return value" in mark["try"]
    assert not recorder.of("load")


def test_it_is_reported_when_the_body_raises(recorder, model_data):
    def run() -> None:
        with EsmIntegration().attach(recorder):
            model, _, _ = esm.pretrained._load_model_and_alphabet_core_v2(model_data)
            model(torch.tensor([[0, 500]]))

    with pytest.raises(IndexError):
        run()

    assert len(recorder.of("checkpoint-dropped")) == 1


def test_esm_s_own_loader_loads(recorder, files, model_data):
    with EsmIntegration().attach(recorder):
        model, _ = esm.pretrained.load_model_and_alphabet_core("esm2_t3", model_data, files[1])

    (mark,) = recorder.of("load")
    assert sorted(mark["copied"]) == sorted(model.state_dict())
    assert (mark["missing"], mark["unexpected"], mark["raised"]) == ([], [], False)
    assert not recorder.of("checkpoint-dropped")


def test_a_partial_load_says_what_is_missing(recorder, model_data):
    with EsmIntegration().attach(recorder):
        model, _, state = esm.pretrained._load_model_and_alphabet_core_v2(model_data)
        renamed = {name.replace("layers.1.", "layer.1."): state[name] for name in state}
        model.load_state_dict(renamed, strict=False)

    (mark,) = recorder.of("load")
    assert len([name for name in mark["missing"] if name.startswith("layers.1.")]) == 17
    assert all(name.startswith("layer.1.") for name in mark["unexpected"])
    assert not set(mark["copied"]) & set(mark["unexpected"])


def test_a_load_that_raises_is_marked_and_raises(recorder, model_data):
    with EsmIntegration().attach(recorder):
        model, _, _ = esm.pretrained._load_model_and_alphabet_core_v2(model_data)
        with pytest.raises(RuntimeError, match="Missing key"):
            model.load_state_dict({})

    (mark,) = recorder.of("load")
    assert (mark["raised"], mark["copied"]) == (True, None)


def test_a_load_through_a_wrapper_counts(recorder, model_data):
    with EsmIntegration().attach(recorder):
        model, _, state = esm.pretrained._load_model_and_alphabet_core_v2(model_data)
        wrapper = nn.Sequential(model)
        wrapper.load_state_dict({f"0.{name}": state[name] for name in state}, strict=False)

    assert len(recorder.of("load")) == 1
    assert not recorder.of("checkpoint-dropped")


def test_other_models_are_none_of_its_business(recorder, model_data):
    with EsmIntegration().attach(recorder):
        esm.pretrained._load_model_and_alphabet_core_v2(model_data)
        other = nn.Linear(2, 2)
        other.load_state_dict(other.state_dict())

    assert not recorder.of("load")


def test_nothing_stays_attached(recorder, model_data):
    before = (dict(vars(esm.pretrained)), dict(vars(nn.Module)))

    with pytest.raises(KeyError), EsmIntegration().attach(recorder):
        esm.pretrained._load_model_and_alphabet_core_v2({})

    assert (dict(vars(esm.pretrained)), dict(vars(nn.Module))) == before


def test_another_library_of_that_name_is_left_alone(recorder, monkeypatch):
    monkeypatch.delattr(esm, "pretrained")

    with EsmIntegration().attach(recorder):
        nn.Linear(2, 2).load_state_dict(nn.Linear(2, 2).state_dict())

    assert recorder.marks == []
