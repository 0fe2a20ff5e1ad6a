"""torch's FSDP1 and FSDP2: what they do becomes marks, right runs have no findings, and planted faults do."""

from __future__ import annotations

import gc
import json
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, fully_shard
from torch.distributed.fsdp._flat_param import FlatParamHandle
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.optim import optimizer as torch_optimizer

import opdrift
from opdrift.findings import findings
from opdrift.plugins import Integration, OwnsParameters
from opdrift.records import Finding
from opdrift.tracefile.reader import Trace
from opdrift_integrations.torch_fsdp import TorchFsdpIntegration, flat, groups
from opdrift_integrations.torch_fsdp.watching import lacking

pytestmark = [
    pytest.mark.slow,
    # the group's file store is closed by the group, not by Python
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

SAME_AS_PLAIN = (
    "fsdp1",
    "fsdp1-flat",
    "fsdp1-kept",
    "fsdp1-state",
    "fsdp2",
    "fsdp2-offload",
    "fsdp2-kept",
    "fsdp2-columns",
    "fsdp2-state",
    "fsdp2-unshard",
)
RIGHT = (
    *SAME_AS_PLAIN,
    "plain",
    "fsdp1-bf16",
    "fsdp1-summon",
    "fsdp1-accumulate",
    "fsdp1-loaded",
    "fsdp2-bf16",
    "fsdp2-accumulate",
    "fsdp2-loaded",
)


@dataclass(frozen=True)
class World:
    """What two processes recorded."""

    folder: Path
    said: tuple[dict[str, Any], ...]

    def traces(self, case: str) -> list[Trace]:
        return [opdrift.load(self.folder / case, rank=rank) for rank in (0, 1)]

    def found(self, case: str) -> list[Finding]:
        return list(findings(self.traces(case)))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory, two_processes) -> World:
    """All cases of fsdp_world.py, recorded by two processes."""
    folder = tmp_path_factory.mktemp("world")
    two_processes("fsdp_world.py", folder)
    said = tuple(json.loads((folder / f"said-{rank}.json").read_text()) for rank in range(2))
    return World(folder, said)


# ---- right runs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", RIGHT)
def test_right_runs_have_no_findings_and_are_followed(world, case):
    traces = world.traces(case)

    assert list(findings(traces)) == []
    for trace in traces:
        assert trace.footer is not None
        assert trace.footer.failures == ()
        kinds = {mark.kind for mark in trace.marks}
        assert "integration-failed" not in kinds
        assert ("gather" in kinds) == (case != "plain")


def test_recording_changes_nothing(world):
    """Outputs, weights that training left and random state are the same with and without a recorder."""
    for said in world.said:
        assert {name: each["same"] for name, each in said.items()} == dict.fromkeys(said, True)


@pytest.mark.parametrize("case", SAME_AS_PLAIN)
def test_a_sharded_run_is_identical_to_the_plain_one(world, case):
    """An inference, two training steps, and an inference with what was learnt; on both ranks."""
    found = opdrift.diff(world.folder / "plain", world.folder / case)

    assert (found.verdict, found.first) == ("identical", None)
    assert {rank: each.verdict for rank, each in found.ranks.items()} == {
        0: "identical",
        1: "identical",
    }


def test_weights_that_training_left_are_compared_at_their_next_gather(world):
    """The gathered parameters of the last forward are what the plain run has at its end, digest for digest."""

    def last(trace: Trace, whens: set[str]) -> dict[str, int]:
        rows = [leaf for leaf in trace.leaves if leaf.kind == "parameter" and leaf.when in whens]
        return {leaf.name: trace.fingerprint(leaf.value).raw for leaf in rows}

    plain = last(world.traces("plain")[0], {"entry", "exit"})
    plain["head.weight"] = plain["embed.weight"]  # one tensor, which has its first name at the end
    for case in ("fsdp1", "fsdp2"):
        for trace in world.traces(case):
            assert last(trace, {"gather"}) == plain


def test_a_sharded_run_that_differs_from_the_plain_one_diverges(world):
    found = opdrift.diff(world.folder / "plain", world.folder / "fsdp1-summon")

    assert found.verdict == "diverged"


# ---- faults --------------------------------------------------------------------------------------------

Place = tuple[str, int | None, str | None, str, int | None]


def place(finding: Finding) -> Place:
    return finding.kind, finding.rank, finding.name, finding.cause.slug, finding.step


WEIGHT = "layers.0.fc1.weight"
FOUND: dict[str, Place] = {
    "fsdp1-clamped": ("gather", 1, WEIGHT, "fsdp-gather", 1),
    "fsdp2-clamped": ("gather", 1, WEIGHT, "fsdp-gather", 1),
    "fsdp1-swapped": ("gather", 1, WEIGHT, "fsdp-gather", 1),
    "fsdp2-swapped": ("gather", 1, WEIGHT, "fsdp-gather", 1),
    "fsdp1-torn": ("gather", 1, WEIGHT, "race", 1),
    "fsdp2-torn": ("gather", 1, WEIGHT, "race", 1),
    "fsdp1-kept-torn": ("gather", 0, WEIGHT, "race", 1),
    "fsdp2-kept-torn": ("gather", 0, WEIGHT, "race", 1),
    "fsdp2-kept-meanwhile": ("hidden-write", 1, WEIGHT, "race", 1),
    "fsdp1-hidden": ("hidden-write", 1, "layers.1.fc2.weight", "race", 1),
    "fsdp2-hidden": ("hidden-write", 1, "layers.1.fc2.weight", "race", 1),
    "fsdp1-bf16-clamped": ("gather", 1, WEIGHT, "fsdp-gather", 1),
    "fsdp2-bf16-clamped": ("gather", 1, WEIGHT, "fsdp-gather", 1),
    "fsdp1-bf16-swapped": ("gather", 1, WEIGHT, "fsdp-gather", 1),
    "fsdp2-bf16-swapped": ("gather", 1, WEIGHT, "fsdp-gather", 1),
    "fsdp1-bf16-torn": ("gather", 1, WEIGHT, "race", 1),
    "fsdp2-bf16-torn": ("gather", 1, WEIGHT, "race", 1),
    "fsdp1-bf16-order": ("gather", 1, "layers.0.fc1.bias", "fsdp-gather", 0),
    "fsdp2-bf16-order": ("gather", 1, WEIGHT, "fsdp-gather", 0),
    "fsdp1-bf16-hidden": ("hidden-write", 1, "layers.1.fc2.weight", "race", 1),
    "fsdp2-bf16-meanwhile": ("hidden-write", 1, WEIGHT, "race", 1),
    "fsdp2-bf16-hidden": ("hidden-write", 1, "layers.1.fc2.weight", "race", 1),
    "fsdp1-buffers": ("replica", 1, "layers.1.scale", "replica", None),
    "fsdp2-buffers": ("replica", 1, "layers.1.scale", "replica", None),
    "fsdp1-order": ("gather", 1, "layers.0.fc1.bias", "fsdp-gather", 0),
    "fsdp2-order": ("gather", 1, WEIGHT, "fsdp-gather", 0),
    "fsdp1-unloaded": ("weights", 1, "embed.weight", "weights", None),
    "fsdp2-unloaded": ("weights", 1, "embed.weight", "weights", None),
}
SAID = {
    "clamped": "written by aten.clamp_.default",
    "swapped": "the shard takes its place: the other content is lost",
    "torn": "one element differs: 33 of the parameter",
    "hidden": "one element differs: ",
    "meanwhile": "one element differs: 75 of the parameter",
    "order": "it is rank 1's shard",
    "buffers": "share out the parameters of its model",
    "unloaded": "were last written by a random initialisation",
}


@pytest.mark.parametrize("case", FOUND)
def test_a_fault_is_one_finding_with_parameter_rank_and_step(world, case):
    (found,) = world.found(case)

    assert place(found) == FOUND[case]
    wanted = SAID[case.rpartition("-")[2]]
    assert any(wanted in line for line in found.cause.evidence)


@pytest.mark.parametrize(
    "case",
    ["fsdp1-stale", "fsdp2-stale", "fsdp1-bf16-stale", "fsdp2-bf16-stale", "fsdp2-offload-stale"],
)
def test_stale_parameters_are_found_at_their_use(world, case):
    """They were not given back, and the optimizer has made a step since."""
    found = world.found(case)

    assert {(each.rank, each.module) for each in found} == {
        (rank, unit) for rank in (0, 1) for unit in ("", "layers.0", "layers.1")
    }
    for each in found:
        assert (each.kind, each.cause.slug, each.step) == ("gather", "fsdp-gather", 1)
        assert any("that is what this shard held at" in line for line in each.cause.evidence)
        assert "reshard" in each.cause.try_


def test_parameters_that_were_gathered_before_the_optimizer_s_step_are_stale(world):
    """The next forward was prefetched too early."""
    found = world.found("fsdp2-early")

    assert {place(each)[:2] + place(each)[3:] for each in found} == {
        ("gather", rank, "fsdp-gather", 1) for rank in (0, 1)
    }
    assert {each.module for each in found} == {"layers.0"}
    assert all("were used as their shards had been before" in each.cause.summary for each in found)


def test_another_parameter_s_shard_is_found_on_both_ranks(world):
    """Rank 1 sends its part of norm.weight for that of norm.bias, and the other way round."""
    found = world.found("fsdp2-exchanged")

    assert [place(each) for each in found] == [
        ("gather", rank, "layers.0.norm.weight", "fsdp-gather", 0) for rank in (0, 1)
    ]
    assert found[0].cause.evidence[1] == "the segment of rank 1 is not what rank 1 held"


def test_another_unit_s_shard_is_found_on_both_ranks(world):
    """Rank 1 sends the second block's flat parameter for that of the first."""
    found = world.found("fsdp1-exchanged")

    assert [place(each) for each in found] == [
        ("gather", rank, "layers.0.fc1.bias", "fsdp-gather", 0) for rank in (0, 1)
    ]
    assert found[0].cause.evidence[1] == "the segment of rank 1 is not what rank 1 held"
    assert (
        "that is rank 1's part of layers.1.fc2.weight, from element 0 on" in found[1].cause.evidence
    )


def test_a_cast_that_ended_too_early_is_found_on_both_ranks(world):
    """The copy in low precision is sent as it is."""
    found = world.found("fsdp1-bf16-moved")

    assert [place(each) for each in found] == [
        ("gather", rank, "layers.0.fc2.weight", "fsdp-gather", 0) for rank in (0, 1)
    ]
    assert (
        "layers.0.fc2.bias: 10 elements from 0 on are not the shard's, all zeros"
        in found[1].cause.evidence
    )


def test_a_copy_that_ended_too_early_is_found_on_both_ranks(world):
    found = world.found("fsdp2-moved")

    assert [place(each) for each in found] == [
        ("gather", rank, WEIGHT, "fsdp-gather", 0) for rank in (0, 1)
    ]
    assert f"{WEIGHT}: 70 elements from 70 on are not the shard's" in found[1].cause.evidence


# ---- marks ---------------------------------------------------------------------------------------------


def test_gathers_say_where_each_parameter_lies(world):
    """Uneven shards are padded, FSDP1 aligns parameters too, and a tied one has both names."""
    (trace, _) = world.traces("fsdp2")
    first = next(mark.fields for mark in trace.marks if mark.kind == "gather")
    flat_, _ = world.traces("fsdp1")
    other = next(mark.fields for mark in flat_.marks if mark.kind == "gather")

    assert first["parameters"] == [["embed.weight", 0, [7, 10]], ["head.bias", 40, [7]]]
    assert (first["layout"], first["padding"], first["ranks"], first["rank"]) == (
        "each",
        11,
        [0, 1],
        0,
    )
    assert first["tied"] == [["head.weight", "embed.weight"]]
    assert [segment["n"] for segment in first["segments"]] == [44, 44]
    assert first["segments"][0] == first["shard"]
    assert (other["buffer"], other["layout"], other["padding"]) == ("_flat_param", "flat", 3)
    assert other["parameters"] == [["embed.weight", 0, [7, 10]], ["head.bias", 72, [7]]]


@pytest.mark.parametrize(
    ("case", "wanted"),
    [
        ("fsdp2", ["gather", "reshard", "free"]),
        ("fsdp2-bf16", ["cast", "gather", "reshard", "free"]),
        ("fsdp2-offload", ["move", "gather", "reshard", "move", "free"]),
        ("fsdp2-kept", ["gather", "use"]),
        ("fsdp1", ["views", "gather", "reshard", "views", "free"]),
    ],
)
def test_what_happens_to_a_unit_is_written_down_in_order(world, case, wanted):
    (trace, _) = world.traces(case)
    of_unit = [mark.kind for mark in trace.marks if mark.fields.get("unit") == "layers.1"]

    assert [kind for kind in of_unit if kind in {*wanted, "cast", "move"}][: len(wanted)] == wanted


def test_moves_of_offloaded_shards_say_from_where_to_where(world):
    (trace, _) = world.traces("fsdp2-offload")
    loads = [mark.fields for mark in trace.marks if mark.fields.get("direction") == "load"]

    assert {(load["source_device"], load["destination_device"], load["blocking"], load["intact"]) for load in loads} == {("cpu", "cpu", False, True)}  # fmt: skip
    assert loads[0]["source"] == loads[0]["destination"]


def test_casts_of_buffers_are_told_by_name(world):
    (trace, _) = world.traces("fsdp1-bf16")
    casts = {mark.fields["name"]: mark.fields for mark in trace.marks if mark.kind == "buffer-cast"}

    assert set(casts) == {"layers.0.scale", "layers.1.scale"}
    assert casts["layers.0.scale"]["lossless"] is False


# ---- one process -----------------------------------------------------------------------------------------


def test_it_is_an_integration():
    assert isinstance(TorchFsdpIntegration(), Integration)
    assert isinstance(TorchFsdpIntegration(), OwnsParameters)


@pytest.mark.parametrize("hooks", [flat.HOOKS, groups.HOOKS])
def test_this_torch_has_everything_that_is_watched(hooks):
    assert lacking(hooks) == []


def wrapped(version: int) -> nn.Module:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    if version == 1:
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    return fully_shard(model, mesh=init_device_mesh("cpu", (1,)))


@pytest.fixture
def quietly() -> Iterator[None]:
    """FSDP1 says that it does not shard over one rank."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def state_of_torch() -> list[Any]:
    hooks = dict(torch_optimizer._global_optimizer_post_hooks)
    owners = (FlatParamHandle, FSDPParamGroup, sys.modules["torch.distributed.fsdp._runtime_utils"])
    return [hooks, *(dict(vars(owner)) for owner in owners)]


@pytest.mark.usefixtures("one_rank", "quietly")
@pytest.mark.parametrize("version", [1, 2])
class TestOneRank:
    """Nothing is shared out, and much is done all the same."""

    def test_every_parameter_is_named_with_what_the_model_computes_with(self, recorder, version):
        recorder.model = model = wrapped(version)
        plain = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
        torch.manual_seed(3)
        for layer in plain:
            layer.reset_parameters()

        with torch.no_grad(), TorchFsdpIntegration().attach(recorder):
            model(torch.ones(2, 4))

        named = {name: tensor for kind, name, tensor in recorder.names if kind == "parameter"}
        assert named.keys() == dict(plain.named_parameters()).keys()
        assert all(torch.equal(named[name], p) for name, p in plain.named_parameters())
        assert not recorder.of("integration-failed")

    def test_everything_is_as_before_after_an_exception(self, recorder, version):
        model, before = wrapped(version), state_of_torch()

        with pytest.raises(RuntimeError), TorchFsdpIntegration().attach(recorder):
            model(torch.ones(2, 3))

        assert state_of_torch() == before

    def test_a_failure_of_the_recorder_does_not_stop_the_run(self, recorder, version, caplog):
        recorder.model = model = wrapped(version)
        expected = model(torch.ones(2, 4))
        recorder.clean_path = lambda module: 1 / 0

        with TorchFsdpIntegration().attach(recorder):
            output = model(torch.ones(2, 4))

        assert torch.equal(output, expected)
        assert [mark["error"] for mark in recorder.of("integration-failed")] == [
            "ZeroDivisionError: division by zero"
        ]
        assert "the run goes on" in caplog.text

    def test_a_torch_whose_internals_moved_is_recorded_without(
        self, recorder, version, caplog, monkeypatch
    ):
        """It is said which hook is missing; the other FSDP is followed as ever."""
        owner, name = (
            (FlatParamHandle, "unshard") if version == 1 else (FSDPParamGroup, "wait_for_unshard")
        )
        hooks = flat.HOOKS if version == 1 else groups.HOOKS
        place_ = next(key for key, hook in hooks.items() if hook[2] == name)
        monkeypatch.setitem(hooks, place_, (*hooks[place_][:2], f"{name}_moved"))
        recorder.model = model = wrapped(version)

        with torch.no_grad(), TorchFsdpIntegration().attach(recorder):
            model(torch.ones(2, 4))

        (mark,) = recorder.of("integration-failed")
        assert mark["missing"] == f"{owner.__module__}.{owner.__name__}.{name}_moved"
        assert f"opdrift does not follow FSDP{version} in this run" in caplog.text
        assert recorder.names == []

    def test_a_model_that_the_program_drops_is_not_kept(self, recorder, version):
        model = wrapped(version)
        recorder.clean_path = dict.fromkeys(model.modules(), "").get
        dropped = weakref.ref(model)  # FSDP1 itself keeps what is inside

        with TorchFsdpIntegration().attach(recorder):
            model(torch.ones(2, 4)).sum().backward()
            recorder.clean_path = None
            recorder.names.clear()
            del model
            gc.collect()
            assert dropped() is None

    def test_marks_are_json(self, recorder, version):
        recorder.model = model = wrapped(version)

        with TorchFsdpIntegration().attach(recorder):
            model(torch.ones(2, 4)).sum().backward()

        assert json.loads(json.dumps(recorder.marks)) == recorder.marks

    def test_stand_ins_are_owned_and_other_tensors_are_not(self, version):
        owns: Callable[[Any], bool] = TorchFsdpIntegration().owns

        assert all(owns(parameter) for parameter in wrapped(version).parameters())
        assert not any(owns(parameter) for parameter in nn.Linear(2, 2).parameters())


@pytest.mark.usefixtures("one_rank", "quietly")
def test_a_cast_copy_of_one_rank_is_checked(recorder):
    """Nothing is gathered over one rank, but mixed precision computes with a copy."""
    torch.manual_seed(3)
    half = MixedPrecision(param_dtype=torch.bfloat16)
    recorder.model = model = FullyShardedDataParallel(
        nn.Linear(4, 3), device_id=torch.device("cpu"), mixed_precision=half
    )

    with torch.no_grad(), TorchFsdpIntegration().attach(recorder):
        model(torch.ones(2, 4))

    (gather,) = recorder.of("gather")
    (cast,) = recorder.of("cast")
    assert (gather["intact"], gather["ranks"], gather["dtype"]) == (True, [0], "bfloat16")
    assert (cast["source_dtype"], cast["destination_dtype"]) == ("float32", "bfloat16")
