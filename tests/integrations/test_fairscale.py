"""What fairscale FSDP does becomes marks, and parameters keep the names that the model gave them."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import fairscale.nn.data_parallel.fully_sharded_data_parallel as fsdp
import pytest
import torch
from fairscale.nn.misc.flatten_params_wrapper import FlattenParamsWrapper
from fairscale.nn.wrap import enable_wrap, wrap
from torch import nn

from opdrift.plugins import Integration
from opdrift_integrations.fairscale import FairscaleIntegration

FSDP = fsdp.FullyShardedDataParallel
OFFLOAD = {"mixed_precision": True, "cpu_offload": True}

pytestmark = [
    pytest.mark.usefixtures("one_rank"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
    # The group's file store is closed by the group, not by Python.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("scale", torch.tensor([1 / 3, 0.5]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scale[0]


class Net(nn.Module):
    """A tied embedding, two blocks; sizes that do not divide by two."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(6, 7)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


TOKENS = torch.tensor([[0, 3, 6, 2]])


def wrapped(**options: object) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A wrapped net, and the content that each of its names had before."""
    torch.manual_seed(3)
    net = Net().eval()
    names = [*net.named_parameters(remove_duplicate=False), *net.named_buffers()]
    state = {name: tensor.detach().clone() for name, tensor in names}
    with enable_wrap(wrapper_cls=FSDP, compute_device=torch.device("cpu"), **options):
        for index, layer in enumerate(net.layers):
            net.layers[index] = wrap(layer)
        return wrap(net), state


@pytest.fixture
def attached(recorder):
    """A wrapped net whose fairscale calls are watched."""

    @contextlib.contextmanager
    def attach(**options: object):
        net, state = wrapped(**options)
        recorder.model = net
        with FairscaleIntegration().attach(recorder):
            yield net, state
        assert not recorder.of("integration-failed")

    return attach


def wrong_in(mark: dict) -> list[tuple[str, int, int, bool]]:
    """The stretches that a mark says are not the shard's."""
    fields = ("parameter", "offset", "numel", "zeros")
    return [tuple(each[name] for name in fields) for each in mark["mismatch"]]


def test_it_is_an_integration():
    assert isinstance(FairscaleIntegration(), Integration)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mixed_precision": True},
        OFFLOAD,
        {"cpu_offload": True},
        {"flatten_parameters": False},
        {**OFFLOAD, "flatten_parameters": False},
    ],
)
def test_every_parameter_is_named_with_what_the_model_computes_with(attached, recorder, options):
    with torch.no_grad(), attached(**options) as (net, state):
        net(TOKENS)

    named = {name: tensor for kind, name, tensor in recorder.names if kind == "parameter"}
    half = options.get("mixed_precision", False)
    parameters = {name: tensor for name, tensor in state.items() if "scale" not in name}
    assert named.keys() == parameters.keys()
    for name, tensor in parameters.items():
        assert torch.equal(named[name], tensor.half() if half else tensor), name


def test_an_offloaded_half_precision_forward_is_written_down_step_by_step(attached, recorder):
    with torch.no_grad(), attached(**OFFLOAD) as (net, _):
        net(TOKENS)

    of_layer = [mark for mark in recorder.marks if mark.get("unit") == "layers.1"]
    assert [(mark["kind"], mark.get("direction"), mark.get("intact")) for mark in of_layer] == [
        ("cast", None, True),
        ("move", "load", True),
        ("gather", None, True),
        ("reshard", None, True),
        ("free", None, None),
        ("move", "drop", True),
    ]
    assert {mark["phase"] for mark in of_layer[:3]} == {"forward"}
    assert of_layer[0]["source_dtype"] == "float32"
    assert of_layer[0]["destination_dtype"] == "float16"


def test_a_gather_says_where_each_parameter_lies(attached, recorder):
    with torch.no_grad(), attached(**OFFLOAD) as (net, _):
        net(TOKENS)

    (gather,) = recorder.of("gather", unit="")
    assert gather["buffer"] == "flat_param_0"
    assert gather["parameters"] == [["embed.weight", 0, [7, 6]], ["head.bias", 42, [7]]]
    assert gather["tied"] == [["head.weight", "embed.weight"]]
    assert (gather["bytes"], gather["dtype"], gather["padding"]) == (98, "float16", 0)
    assert gather["segments"] == [gather["shard"]]


def test_without_cast_move_or_shards_there_is_nothing_to_gather(attached, recorder):
    """One rank in full precision computes with the master itself."""
    with torch.no_grad(), attached() as (net, _):
        net(TOKENS)

    assert recorder.marks == []


def test_parameters_that_are_still_there_are_checked_at_their_next_use(attached, recorder):
    """The root keeps its full parameters after forward; a write to the master makes them stale."""
    with torch.no_grad(), attached(**OFFLOAD) as (net, _):
        net(TOKENS)
        net.params[0]._fp32_shard[44] += 1  # the third element of head.bias
        net(TOKENS)

    (use,) = recorder.of("use", unit="")
    assert use["intact"] is False
    assert wrong_in(use) == [("head.bias", 0, 7, False)]
    assert all(mark["intact"] for mark in recorder.of("gather"))


def test_a_gather_that_is_not_its_shard_names_the_parameters(attached, recorder, monkeypatch):
    rebuild = FSDP._rebuild_full_params

    def torn(unit, force_full_precision=False):
        result = rebuild(unit, force_full_precision)
        unit.params[0].data.reshape(-1)[:36] = 0
        return result

    monkeypatch.setattr(FSDP, "_rebuild_full_params", torn)
    with torch.no_grad(), attached(**OFFLOAD) as (net, _):
        net(TOKENS)

    (gather,) = recorder.of("gather", unit="layers.0")
    assert gather["intact"] is False
    assert wrong_in(gather) == [("layers.0.linear.weight", 0, 36, True)]


def test_a_cast_that_is_not_its_source_is_not_intact(attached, recorder, monkeypatch):
    cast = FSDP._cast_fp32_param_shards_to_fp16

    def stale(unit, params=None):
        cast(unit, params)
        unit.params[0]._fp16_shard[0] += 1

    monkeypatch.setattr(FSDP, "_cast_fp32_param_shards_to_fp16", stale)
    with torch.no_grad(), attached(**OFFLOAD) as (net, _):
        net(TOKENS)

    assert {mark["intact"] for mark in recorder.of("cast", what="shard")} == {False}
    assert {mark["intact"] for mark in recorder.of("move", direction="load")} == {False}
    assert {mark["intact"] for mark in recorder.of("gather")} == {True}


def test_a_buffer_cast_for_good_is_marked_and_named_once(attached, recorder):
    with torch.no_grad(), attached(mixed_precision=True) as (net, state):
        net(TOKENS)
        net(TOKENS)

    marks = recorder.of("buffer-cast")
    assert [mark["name"] for mark in marks] == ["layers.0.scale", "layers.1.scale"]
    assert {(mark["source_dtype"], mark["destination_dtype"]) for mark in marks} == {
        ("float32", "float16")
    }
    assert {mark["lossless"] for mark in marks} == {False}
    rounding = abs(float(state["layers.0.scale"].half()[0]) - 1 / 3)
    assert marks[0]["largest_change"] == pytest.approx(rounding, rel=1e-3)
    assert torch.equal(recorder.content("layers.1.scale"), state["layers.1.scale"].half())


def test_inputs_that_are_cast_are_marked(recorder):
    with enable_wrap(wrapper_cls=FSDP, compute_device=torch.device("cpu"), mixed_precision=True):
        net = wrap(nn.Linear(3, 2))
    recorder.model = net

    with torch.no_grad(), FairscaleIntegration().attach(recorder):
        net(torch.ones(5, 3))

    (mark,) = recorder.of("cast", what="input")
    assert (mark["shape"], mark["destination_dtype"]) == ([5, 3], "float16")


def test_backward_gathers_again_and_training_is_bit_identical(attached, recorder):
    def train(net: nn.Module) -> dict[str, torch.Tensor]:
        net.train()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(2):
            net(TOKENS).float().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return {name: tensor.clone() for name, tensor in net.state_dict().items()}

    plain = train(wrapped(mixed_precision=True)[0])
    state = torch.get_rng_state()
    with attached(mixed_precision=True) as (net, _):
        torch.set_rng_state(state)
        watched = train(net)
        assert torch.equal(torch.get_rng_state(), state)

    assert {mark["phase"] for mark in recorder.of("gather", unit="layers.0")} >= {
        "forward",
        "backward",
    }
    assert all(mark["intact"] for mark in [*recorder.of("gather"), *recorder.of("use")])
    assert plain.keys() == watched.keys()
    assert all(torch.equal(plain[name], watched[name]) for name in plain)


def test_marks_are_json(attached, recorder):
    with torch.no_grad(), attached(**OFFLOAD) as (net, _):
        net(TOKENS)

    assert json.loads(json.dumps(recorder.marks)) == recorder.marks


def test_an_unknown_unit_is_followed_without_names(recorder):
    """The recorder may not have met the model yet: `state_dict` before any forward."""
    net, _ = wrapped(**OFFLOAD)

    with FairscaleIntegration().attach(recorder):
        net.state_dict()

    assert (
        recorder.of("gather", phase="summon") == []
    )  # one rank in full precision: nothing to gather
    assert recorder.names == []
    assert not recorder.of("integration-failed")


def test_everything_is_as_before_after_an_exception(attached):
    owners = (FSDP, fsdp, FlattenParamsWrapper)
    before = [dict(vars(owner)) for owner in owners]

    with pytest.raises(IndexError), torch.no_grad(), attached(**OFFLOAD) as (net, _):
        net(TOKENS + 100)

    assert [dict(vars(owner)) for owner in owners] == before


def test_a_failure_of_the_recorder_does_not_stop_the_run(recorder, caplog):
    net, _ = wrapped(**OFFLOAD)
    recorder.model = net
    recorder.digest = lambda tensor: 1 / 0

    with torch.no_grad(), FairscaleIntegration().attach(recorder):
        output = net(TOKENS)

    assert torch.equal(output, net(TOKENS))
    assert [mark["error"] for mark in recorder.of("integration-failed")] == [
        "ZeroDivisionError: division by zero"
    ]
    assert "the run goes on" in caplog.text


def test_a_flattened_module_without_fsdp_keeps_its_names(recorder):
    torch.manual_seed(3)
    net = nn.Linear(3, 2)
    weight = net.weight.detach().clone()
    recorder.model = wrapper = FlattenParamsWrapper(net)

    with torch.no_grad(), FairscaleIntegration().attach(recorder):
        wrapper(torch.ones(1, 3))

    assert [name for _, name, _ in recorder.names] == ["weight", "bias"]
    assert torch.equal(recorder.content("weight"), weight)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory, two_processes) -> Path:
    """What each of two processes that share a model wrote down."""
    folder = tmp_path_factory.mktemp("two")
    two_processes("two_ranks.py", folder)
    return folder


def marks_of(folder: Path) -> list[list[dict]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def gathers(marks: list[dict]) -> dict[tuple, dict]:
    return {(m["unit"], m["buffer"], m["nth"]): m for m in marks if m["kind"] == "gather"}


@pytest.mark.slow
def test_each_segment_of_a_gather_is_another_rank_s_shard(two_ranks):
    """Across ranks the digests fit together."""
    left, right = map(gathers, marks_of(two_ranks))

    assert left.keys() == right.keys()
    assert {unit for unit, _, _ in left} == {"", "0", "2"}
    for key, mark in left.items():
        assert mark["segments"] == [mark["shard"], right[key]["shard"]]
        assert right[key]["segments"] == mark["segments"]
        assert (mark["intact"], right[key]["intact"]) == (True, True)


@pytest.mark.slow
def test_parameters_are_whole_on_every_rank(two_ranks):
    """Each rank names the gathered parameter, not its half."""
    names = [
        {mark["name"]: mark["digest"] for mark in marks if mark["kind"] == "named"}
        for marks in marks_of(two_ranks)
    ]

    assert names[0] == names[1]
    assert names[0] == json.loads((two_ranks / "plain.json").read_text())
