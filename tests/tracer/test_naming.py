"""The names of leaves and results: parameters, buffers, inputs, outputs, gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from recordings import Recording, recording
from torch import nn

from opdrift.plugins import OwnsParameters

X = torch.ones(1, 2)


def rows(found: Recording, kind: str) -> list[tuple[str, str]]:
    """Name and moment of each leaf row of a kind."""
    return [(leaf.name, leaf.when) for leaf in found.trace.leaves if leaf.kind == kind]


# ---- on entry ------------------------------------------------------------------------------------------


def test_parameters_and_buffers_are_named_on_entry():
    with recording(model=nn.BatchNorm1d(2)) as found:
        pass

    assert rows(found, "parameter") == [("weight", "entry"), ("bias", "entry")]
    assert [name for name, _ in rows(found, "buffer")] == [
        "running_mean",
        "running_var",
        "num_batches_tracked",
    ]


def test_tied_weights_have_both_names():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    with recording(model=model) as found:
        pass

    values = {leaf.value for leaf in found.trace.leaves}
    assert [name for name, _ in rows(found, "parameter")] == ["0.weight", "1.weight"]
    assert len(values) == 1


def test_models_of_a_mapping_have_their_names_in_front():
    with recording(model={"student": nn.Linear(2, 1), "teacher": nn.Linear(2, 1)}) as found:
        pass

    assert {name for name, _ in rows(found, "parameter")} == {
        "student.weight",
        "student.bias",
        "teacher.weight",
        "teacher.bias",
    }


def test_parameters_of_a_lazy_module_do_not_keep_others_from_their_names():
    """They have no shape yet, and looking at it raises."""
    model = nn.Sequential(nn.LazyLinear(2), nn.Linear(2, 1, bias=False))
    with recording(model=model) as found:
        model(X)

    assert found.leaves("1.weight")[0].when == "entry"
    assert found.leaves("0.weight")


def test_parameters_on_the_meta_device_have_names_and_no_content():
    with recording(model=nn.Linear(2, 1, device="meta")) as found:
        pass

    assert found.trace.fingerprint(found.leaves("weight")[0].value) is None


def test_the_mark_of_a_model_tells_its_type_and_counts():
    model = nn.BatchNorm1d(2).eval()
    model.register_buffer("cache", torch.ones(1), persistent=False)
    with recording(model=model) as found:
        pass

    (mark,) = (mark for mark in found.trace.marks if mark.kind == "model")
    assert mark.fields == {
        "name": "",
        "type": "BatchNorm1d",
        "training": False,
        "parameters": 2,
        "buffers": 4,
        "non_persistent": ["cache"],
        "sharded": [],
    }


def test_a_model_that_is_wrapped_later_is_named_once():
    class DistributedDataParallel(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, x):
            return self.module(x)

    model = nn.Linear(2, 1, bias=False)
    with recording(model=model) as found:
        DistributedDataParallel(model)(X)

    assert rows(found, "parameter") == [("weight", "entry")]


class Owner:
    name, library = "owner", "torch"

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def owns(self, tensor: Any) -> bool:
        return tensor is self.tensor


def test_what_an_integration_owns_is_not_named_by_the_model():
    model = nn.Linear(2, 1)
    owner = Owner(model.weight)
    assert isinstance(owner, OwnsParameters)
    with recording() as found:
        found.recorder._naming.owners.append(owner)
        model(X)

    assert [name for name, when in rows(found, "parameter") if when == "entry"] == ["bias"]


# ---- inputs ----------------------------------------------------------------------------------------------


def test_given_inputs_are_named_as_they_were_given():
    with recording(inputs={"ids": X}) as found:
        X * 2

    assert rows(found, "input") == [("ids", "entry")]


def test_arguments_that_an_op_of_the_run_made_are_no_inputs():
    model = nn.Linear(2, 1)
    with recording(model=model) as found:
        model(X * 2)

    assert rows(found, "input") == []


def test_arguments_from_before_the_run_are_named_by_the_signature():
    model = nn.Linear(2, 1)
    with recording(model=model) as found:
        model(X)

    assert rows(found, "input") == [("input", "use")]


def test_keyword_arguments_of_the_root_module_are_named():
    class Keyed(nn.Module):
        def forward(self, ids, *, mask):
            return ids * mask

    model, mask = Keyed(), torch.zeros(1, 2)
    with recording(model=model) as found:
        model(X, mask=mask)

    assert rows(found, "input") == [("ids", "use"), ("mask", "use")]


def test_every_batch_of_a_data_set_is_named():
    """They are views of one storage, which has its name after the first."""
    data = torch.arange(4.0).view(2, 2)
    batches = list(data.split(1))
    model = nn.Linear(2, 1)
    with recording(model=model) as found:
        for batch in batches:
            model(batch)

    assert [found.elements(leaf.value) for leaf in found.leaves("input")] == [
        [0.0, 1.0],
        [2.0, 3.0],
    ]


def test_the_same_input_again_is_not_named_again():
    model = nn.Linear(2, 1)
    with recording(model=model) as found:
        model(X)
        model(X)

    assert rows(found, "input") == [("input", "use")]


def test_a_parameter_that_is_an_argument_stays_a_parameter():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self, x):
            return x * 2

    model = Both()
    with recording(model=model) as found:
        model(model.weight)
        model(model.weight[:1])

    assert rows(found, "input") == []


# ---- results ---------------------------------------------------------------------------------------------


def test_what_the_root_module_returns_is_an_output():
    model = nn.Linear(2, 1)
    with recording(model=model) as found:
        model(X)

    assert rows(found, "output") == [("output", "return")]


def test_outputs_in_structures_are_named_by_their_place():
    @dataclass
    class Result:
        logits: torch.Tensor
        hidden: tuple[torch.Tensor, ...]

    class Structured(nn.Module):
        def forward(self, x):
            return Result(x * 2, (x + 1,))

    model = Structured()
    with recording(model=model) as found:
        model(X)

    assert [name for name, _ in rows(found, "output")] == ["output.logits", "output.hidden[0]"]


def test_a_parameter_that_is_returned_keeps_its_name():
    class Returning(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        def forward(self):
            return self.weight

    model = Returning()
    with recording(model=model, integrity="full") as found:
        model()
        model.weight.detach().numpy()[0] = 5.0
        model.weight * 2

    changed = [leaf.name for leaf in found.trace.leaves if leaf.when == "changed"]
    assert changed == ["weight"]


def test_gradients_are_named_at_the_end():
    model = nn.Linear(2, 1, bias=False)
    with recording(model=model) as found:
        model(X).sum().backward()

    assert rows(found, "gradient") == [("weight", "exit")]


def test_parameters_that_the_run_changed_are_named_at_the_end():
    model = nn.Linear(2, 1)
    with recording(model=model) as found, torch.no_grad():
        model.weight.zero_()

    assert ("weight", "exit") in rows(found, "parameter")
    assert ("bias", "exit") not in rows(found, "parameter")


def test_a_model_that_the_program_dropped_is_no_trouble():
    with recording() as found:
        nn.Linear(2, 1)(X)

    assert rows(found, "gradient") == []


# ---- by hand -----------------------------------------------------------------------------------------------


def test_a_tensor_can_be_named_by_hand_at_any_moment():
    with recording() as found:
        x = torch.ones(2)
        found.recorder.name_tensor(x[1:], "second", kind="buffer")

    (leaf,) = found.leaves("second")
    assert (leaf.kind, leaf.when, found.elements(leaf.value)) == ("buffer", "gather", [1.0])
