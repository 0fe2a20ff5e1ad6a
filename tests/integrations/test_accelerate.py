"""What accelerate moves in and out is in the trace, and a move that goes wrong is found in the run alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import cpu_offload_with_hook, dispatch_model, hooks
from offloading import X, in_memory, on_disk, only, recorded, said
from torch import nn

import opdrift
from opdrift.findings import findings
from opdrift.plugins import Integration
from opdrift.records import Leaf
from opdrift.tracefile.reader import Trace
from opdrift_integrations.accelerate import AccelerateIntegration


class Net(nn.Module):
    """A few layers with a buffer; `before` and `inside` run around the work of `second`, whose weights are in place."""

    def __init__(
        self,
        inside: Callable[[nn.Module], object] | None = None,
        before: Callable[[nn.Module], object] | None = None,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 6)
        self.norm = nn.LayerNorm(6)
        self.second = Changing(inside, before)
        self.register_buffer("scale", torch.full((3,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(x))) * self.scale


class Changing(nn.Linear):
    """A linear layer that something happens to before or after its work is done."""

    def __init__(
        self,
        inside: Callable[[nn.Module], object] | None,
        before: Callable[[nn.Module], object] | None,
    ) -> None:
        super().__init__(6, 3)
        self.inside, self.before = inside, before

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.before is not None:
            self.before(self)
        y = super().forward(x)
        if self.inside is not None:
            self.inside(self)
        return y


class Averages(nn.Module):
    """Running statistics, which a forward in training mode changes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


def partly(folder: Path, model: nn.Module) -> nn.Module:
    places = {"first": "cpu", "norm": "cpu", "second": "disk", "scale": "cpu"}
    return dispatch_model(model, device_map=places, main_device="cpu", offload_dir=folder)


def test_it_is_an_integration():
    assert isinstance(AccelerateIntegration(), Integration)


# ---- runs in which nothing is wrong ------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return recorded(tmp_path_factory.mktemp("plain") / "trace", Net())


@pytest.mark.filterwarnings("ignore:The following device_map keys do not match any submodules")
@pytest.mark.parametrize("offload", [in_memory, on_disk, partly])
def test_an_offloaded_run_is_identical_to_the_plain_one_and_has_no_findings(
    tmp_path, plain, offload
):
    expected = Net()(X)
    model = offload(tmp_path / "weights", Net())

    trace = recorded(tmp_path / "trace", model)

    assert opdrift.diff(plain, trace).verdict == "identical"
    assert findings([trace]) == ()
    # every function of accelerate that is watched is there
    assert not [mark for mark in trace.marks if mark.kind == "integration-failed"]
    assert trace.footer is not None
    assert trace.footer.failures == ()
    assert torch.equal(model(X), expected)


def test_each_move_says_what_from_where_and_when(tmp_path):
    trace = recorded(tmp_path / "trace", on_disk(tmp_path / "weights", Net()), steps=1)

    moved = [m for m in trace.marks if m.kind == "move" and m.fields["unit"] == "second"]
    assert [(m.fields["direction"], m.fields["parameters"][0]) for m in moved] == [
        ("load", ["second.weight", 0, [3, 6]]),
        ("load", ["second.bias", 0, [3]]),
        ("drop", ["second.weight", 0, [3, 6]]),
        ("drop", ["second.bias", 0, [3]]),
    ]
    load = moved[0].fields
    assert (load["source_device"], load["destination_device"], load["bytes"]) == ("disk", "cpu", 72)
    assert Path(load["file"]).name == "second.weight.dat"
    assert (load["blocking"], load["phase"], load["nth"], load["intact"]) == (
        True,
        "forward",
        1,
        True,
    )
    # between its module's ops: after the norm, before the product
    names = {op.seq: op.name for op in (trace.op(i) for i in range(len(trace.ops)))}
    after = [names[s] for s in sorted(names) if s > moved[1].seq]
    assert "aten.native_layer_norm.default" not in after
    assert "aten.addmm.default" in after


def test_offloaded_parameters_keep_their_names(tmp_path, plain):
    trace = recorded(tmp_path / "trace", on_disk(tmp_path / "weights", Net()), steps=1)

    def contents(of: Trace) -> dict[str, tuple[int, int, int]]:
        named = [leaf for leaf in of.leaves if leaf.kind == "parameter"]
        found = {leaf.name: of.fingerprint(leaf.value) for leaf in named}
        return {name: print_.key for name, print_ in found.items() if print_ is not None}

    assert contents(trace) == contents(plain)
    assert len(contents(trace)) == 6


def test_what_was_written_to_disk_is_followed_to_its_first_load(tmp_path):
    """The whole life is recorded: taken out of the module, written, loaded; nothing is named by the file."""
    with opdrift.record(tmp_path / "trace"), torch.no_grad():
        on_disk(tmp_path / "weights", Net())(X)

    trace = opdrift.load(tmp_path / "trace")
    directions = [
        m.fields["direction"]
        for m in trace.marks
        if m.kind == "move" and m.fields["parameters"][0][0] == "first.weight"
    ]
    assert directions == ["write", "drop", "load", "drop"]
    load = next(m for m in trace.marks if m.fields.get("direction") == "load")
    assert (load.fields["seen"], load.fields["source_unchanged"]) == ("attach", True)
    assert findings([trace]) == ()


def test_tied_weights_are_told(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight

    trace = recorded(tmp_path / "trace", in_memory(tmp_path, model), steps=1)

    loads = [m.fields for m in trace.marks if m.fields.get("direction") == "load"]
    assert [load["tied"] for load in loads] == [[], [["1.weight", "0.weight"]]]
    assert findings([trace]) == ()


def test_a_module_that_is_moved_as_a_whole_is_one_mark(tmp_path):
    """cpu_offload_with_hook; without an accelerator the other device is the one without memory."""
    model, _ = cpu_offload_with_hook(Net(), execution_device="meta")

    with opdrift.record(tmp_path / "trace", model=model), torch.no_grad():
        model(X)

    trace = opdrift.load(tmp_path / "trace")
    (move,) = [m.fields for m in trace.marks if m.kind == "move"]
    assert (move["direction"], move["source_device"], move["destination_device"]) == (
        "load",
        "cpu",
        "meta",
    )
    assert [name for name, *_ in move["parameters"]][:2] == ["first.weight", "first.bias"]
    assert (move["bytes"], move["source_dtype"], move["intact"]) == (264, "float32", None)


def test_recording_changes_no_bit_and_leaves_nothing_behind(tmp_path):
    before = dict(vars(hooks)), dict(vars(hooks.AlignDevicesHook))
    model = on_disk(tmp_path / "weights", Net(), offload_buffers=True)

    def fail() -> None:
        with opdrift.record(tmp_path / "trace", model=model), torch.no_grad():
            model(X)
            model(torch.ones(2, 5))

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        fail()

    assert (dict(vars(hooks)), dict(vars(hooks.AlignDevicesHook))) == before
    with torch.no_grad():
        assert torch.equal(model(X), Net()(X))


def test_a_function_that_this_version_lacks_is_named_and_the_rest_is_recorded(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.delattr(hooks.CpuOffload, "pre_forward")

    trace = recorded(tmp_path / "trace", in_memory(tmp_path, Net()), steps=1)

    (mark,) = [m for m in trace.marks if m.kind == "integration-failed"]
    assert mark.fields["missing"] == "CpuOffload.pre_forward"
    assert "CpuOffload.pre_forward" in caplog.text
    assert any(m.kind == "move" for m in trace.marks)


def named(trace: Trace, name: str) -> list[Leaf]:
    return [leaf for leaf in trace.leaves if (leaf.name, leaf.when) == (name, "gather")]


def test_what_was_read_from_a_file_is_not_read_again(tmp_path):
    """Its copy into memory was fingerprinted; the mark tells that, and no use asks again what the weight holds."""
    trace = recorded(tmp_path / "trace", on_disk(tmp_path / "weights", Net()), steps=3)

    loads = [
        mark.fields
        for mark in trace.marks
        if mark.kind == "move" and mark.fields["direction"] == "load"
    ]
    fingerprints = [
        trace.fingerprint(leaf.value)
        for leaf in trace.leaves
        if leaf.when == "gather" and leaf.kind == "parameter"
    ]
    assert len(loads) == 18
    assert [int(load["destination"]["raw"], 16) for load in loads] == [
        print_.raw for print_ in fingerprints if print_ is not None
    ]
    assert not [leaf for leaf in trace.leaves if leaf.when == "use" and leaf.kind == "parameter"]


def test_memory_that_is_loaded_as_it_was_is_named_once(tmp_path):
    """And once more when an op has written it."""
    source = Net()
    weights = {name: tensor.detach() for name, tensor in source.state_dict().items()}
    model = in_memory(tmp_path, source, state_dict=weights)

    trace = recorded(
        tmp_path / "trace", model, steps=4, between=lambda: weights["second.weight"].mul_(2)
    )

    assert len(named(trace, "first.weight")) == 1
    assert len({leaf.value for leaf in named(trace, "second.weight")}) == 2
    loads = [m.fields for m in trace.marks if m.fields.get("direction") == "load"]
    assert [load["nth"] for load in loads if load["parameters"][0][0] == "first.weight"] == [
        *range(1, 5)
    ]


# ---- planted faults ----------------------------------------------------------------------------------


def replacing(monkeypatch: pytest.MonkeyPatch, change: Callable[[nn.Module, str], object]) -> None:
    """Let accelerate's own mover do something wrong to what it has put in place."""
    right = hooks.set_module_tensor_to_device

    def wrong(module: nn.Module, name: str, device: Any, **options: Any) -> None:
        right(module, name, device, **options)
        if options.get("value") is not None:
            change(module, name)

    monkeypatch.setattr(hooks, "set_module_tensor_to_device", wrong)


def test_a_torn_copy_is_found_with_the_elements_that_are_missing(tmp_path, monkeypatch):
    def tear(module: nn.Module, name: str) -> None:
        if tuple(module._parameters[name].shape) == (3, 6):
            torn = module._parameters[name].detach().clone()
            torn.view(-1)[7:] = 0
            module._parameters[name] = nn.Parameter(torn)

    model = on_disk(tmp_path / "weights", Net())
    replacing(monkeypatch, tear)

    finding = only(findings([recorded(tmp_path / "trace", model, steps=4)]))

    assert "the same happened 3 more times, the last time after op" in said(finding)
    assert (finding.kind, finding.name, finding.module) == ("move", "second.weight", "second")
    assert (finding.step, finding.cause.slug, finding.cause.confidence) == (
        0,
        "fsdp-gather",
        "certain",
    )
    assert "11 elements differ, from 7 to 17, all of them zero" in said(finding)


def test_another_tensor_s_content_is_named(tmp_path, monkeypatch):
    model = Net()
    other = model.second.bias.detach().clone()
    hooked: list[bool] = []

    def exchange(module: nn.Module, name: str) -> None:
        if name == "scale" and hooked:
            module._buffers[name] = other.clone()

    model = in_memory(tmp_path, model, offload_buffers=True)
    replacing(monkeypatch, exchange)

    trace = recorded(tmp_path / "trace", model, between=lambda: hooked.append(True))

    finding = only(findings([trace]))
    assert (finding.name, finding.step, finding.cause.slug) == ("scale", 1, "fsdp-gather")
    assert "it is what second.bias holds" in said(finding)


def test_a_stale_copy_is_told_by_what_it_held_before(tmp_path, monkeypatch):
    """The source was updated by an op, and the module is given the old copy."""
    source = Net()
    weights = {name: tensor.detach() for name, tensor in source.state_dict().items()}
    kept: dict[str, nn.Parameter] = {}

    def stale(module: nn.Module, name: str) -> None:
        if tuple(module._parameters[name].shape) == (3, 6):
            copy = module._parameters[name].detach().clone()
            module._parameters[name] = kept.setdefault(name, nn.Parameter(copy))

    model = in_memory(tmp_path, source, state_dict=weights)
    replacing(monkeypatch, stale)

    found = findings(
        [recorded(tmp_path / "trace", model, between=lambda: weights["second.weight"].mul_(2))]
    )

    finding = only(found)
    assert (finding.name, finding.step, finding.cause.slug) == ("second.weight", 1, "fsdp-gather")
    assert re.search(r"it is what it held after op \d+", said(finding))


def test_a_file_that_changes_under_the_model_is_found_with_the_element(tmp_path):
    model = on_disk(tmp_path / "weights", Net())

    def poke() -> None:
        file = np.memmap(tmp_path / "weights" / "second.weight.dat", np.float32, "r+", shape=(18,))
        file[11] += 1
        file.flush()

    finding = only(findings([recorded(tmp_path / "trace", model, between=poke)]))

    assert (finding.name, finding.step, finding.cause.slug) == ("second.weight", 1, "race")
    assert "one element differs: 11 of 18" in said(finding)
    assert "second.weight.dat" in finding.cause.summary


def test_a_comparison_gives_the_move_that_went_wrong_as_the_cause(tmp_path, plain):
    """Not that one run has an op more where it reads the file."""

    def poked(name: str) -> Trace:
        model = on_disk(tmp_path / name, Net())

        def poke() -> None:
            file = np.memmap(tmp_path / name / "second.weight.dat", np.float32, "r+", shape=(18,))
            file[11] += 1
            file.flush()

        return recorded(tmp_path / f"{name}.trace", model, between=poke)

    one, other = poked("one"), poked("other")

    found = opdrift.diff(plain, one)
    assert found.first is not None
    assert found.first.cause.slug == "race"
    assert found.first.cause.summary.startswith("in the right run, second.weight: the file")
    assert opdrift.diff(one, other).verdict == "identical"


def test_host_memory_that_changes_with_no_op_is_found(tmp_path, plain):
    source = Net()
    weights = {name: tensor.detach() for name, tensor in source.state_dict().items()}
    model = in_memory(tmp_path, source, state_dict=weights)

    def poke() -> None:
        weights["second.weight"].numpy()[1, 4] += 1

    trace = recorded(tmp_path / "trace", model, between=poke)

    finding = next(each for each in findings([trace]) if each.kind == "move")
    assert (finding.name, finding.step, finding.cause.slug) == ("second.weight", 1, "race")
    assert "one element differs: 10 of 18" in said(finding)
    # what the op reads was not read again at its use, but the move says what it was given
    first = opdrift.diff(plain, trace).first
    assert first is not None
    assert first.cause.summary == f"in the right run, {finding.cause.summary}"


def test_host_memory_that_an_op_changes_is_no_fault(tmp_path):
    source = Net()
    weights = {name: tensor.detach() for name, tensor in source.state_dict().items()}
    model = in_memory(tmp_path, source, state_dict=weights)

    trace = recorded(tmp_path / "trace", model, between=lambda: weights["second.weight"].mul_(2))

    assert findings([trace]) == ()


def scaled(module: nn.Module) -> None:
    module.weight.data.mul_(0.5)


def test_an_in_place_change_of_a_weight_from_disk_is_lost(tmp_path):
    model = on_disk(tmp_path / "weights", Net(scaled))

    finding = only(findings([recorded(tmp_path / "trace", model)]))

    assert (finding.name, finding.step, finding.cause.slug) == ("second.weight", 0, "fsdp-gather")
    assert finding.op == "aten.mul_.Tensor"
    assert "the change is lost with the next load" in finding.cause.summary
    assert "test_accelerate.py" in said(finding)


def test_an_in_place_change_of_what_the_module_shares_with_its_source_stays(tmp_path):
    """Nothing was copied, so nothing is lost: as without offload."""
    plain = recorded(tmp_path / "plain", Net(scaled))
    trace = recorded(tmp_path / "trace", in_memory(tmp_path, Net(scaled)))

    assert findings([trace]) == ()
    assert opdrift.diff(plain, trace).verdict == "identical"


@pytest.mark.parametrize("offload", [in_memory, on_disk])
def test_data_that_is_pointed_elsewhere_is_found(tmp_path, offload):
    def swap(module: nn.Module) -> None:
        module.weight.data = torch.ones(3, 6)

    model = offload(tmp_path / "weights", Net(swap))

    finding = only(findings([recorded(tmp_path / "trace", model)]))

    assert (finding.name, finding.step, finding.cause.slug) == ("second.weight", 0, "fsdp-gather")
    assert "lies in other memory than what was loaded" in said(finding)


def test_a_weight_that_is_overwritten_unseen_while_it_is_in_place_is_found(tmp_path):
    def poke(module: nn.Module) -> None:
        module.weight.detach().numpy()[2, 5] = 7.0

    model = on_disk(tmp_path / "weights", Net(poke))

    found = [f for f in findings([recorded(tmp_path / "trace", model)]) if f.kind == "move"]

    finding = found[0]
    assert (finding.name, finding.step, finding.cause.slug) == ("second.weight", 0, "race")
    assert "one element differs: 17 of 18" in said(finding)


def pointed_elsewhere(module: nn.Module) -> None:
    module.weight.data = module.weight.data * 1.5


def written_unseen(module: nn.Module) -> None:
    module.weight.detach().numpy()[2, 5] = 7.0


@pytest.mark.parametrize("before", [pointed_elsewhere, written_unseen, scaled])
def test_a_comparison_gives_what_was_lost_as_the_cause_of_the_op_that_used_it(
    tmp_path, plain, before
):
    """The op runs before the weight is taken out of the module, where the change shows."""
    trace = recorded(tmp_path / "trace", on_disk(tmp_path / "weights", Net(before=before)))

    finding = next(f for f in findings([trace]) if f.kind == "move")
    found = opdrift.diff(plain, trace).first
    assert found is not None
    assert (found.cause.slug, found.cause.confidence) == (
        finding.cause.slug,
        finding.cause.confidence,
    )
    assert found.cause.summary == f"in the right run, {finding.cause.summary}"


def test_files_that_were_exchanged_are_told_of_both_tensors(tmp_path, plain):
    """One finding names both; what differs of either has it as its cause."""
    folder = tmp_path / "weights"
    files = folder / "norm.weight.dat", folder / "norm.bias.dat"

    def exchange() -> None:
        first, second = (file.read_bytes() for file in files)
        files[0].write_bytes(second)
        files[1].write_bytes(first)

    trace = recorded(tmp_path / "trace", on_disk(folder, Net()), between=exchange)

    finding = only(findings([trace]))
    assert finding.names == ("norm.weight", "norm.bias")
    causes = {origin.cause.slug for origin in opdrift.diff(plain, trace).origins}
    assert causes == {finding.cause.slug}


def test_statistics_that_a_forward_updates_are_lost_with_offloaded_buffers(tmp_path):
    """accelerate reads buffers anew at each call, so BatchNorm in training never gets anywhere."""
    model = on_disk(tmp_path / "weights", Averages().train(), offload_buffers=True)

    found = findings([recorded(tmp_path / "trace", model)])

    assert {(f.name, f.cause.slug) for f in found} == {
        ("norm.running_mean", "fsdp-gather"),
        ("norm.num_batches_tracked", "fsdp-gather"),
    }
    assert any("the same with 1 more: norm.running_var" in f.cause.evidence for f in found)
    assert {f.step for f in found} == {0}


def test_an_offload_folder_of_another_model_is_found_at_the_first_load(tmp_path):
    """disk_offload keeps the files that it finds in the folder."""
    old = Net()
    on_disk(tmp_path / "weights", old)

    model = Net()
    model.second.weight.data.mul_(3)
    with opdrift.record(tmp_path / "trace"), torch.no_grad():
        on_disk(tmp_path / "weights", model)(X)

    finding = only(findings([opdrift.load(tmp_path / "trace")]))
    assert (finding.name, finding.cause.slug) == ("second.weight", "fsdp-gather")
    assert "the offload folder is an older one" in finding.cause.try_.lower()


def test_a_folder_in_which_all_is_old_is_one_finding(tmp_path):
    """The first tensor leads; the others are named with it."""
    on_disk(tmp_path / "weights", Net())
    model = Net()
    for weight in model.parameters():
        weight.data.add_(1)
    with opdrift.record(tmp_path / "trace"), torch.no_grad():
        on_disk(tmp_path / "weights", model)(X)

    finding = only(findings([opdrift.load(tmp_path / "trace")]))

    others = len(list(model.parameters())) - 1
    assert any(line.startswith(f"the same with {others} more: ") for line in finding.cause.evidence)
