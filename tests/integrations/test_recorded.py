"""The integrations with a real recorder: what a trace of a wrapped model holds."""

from __future__ import annotations

import copy
import ctypes
import subprocess
import sys
from pathlib import Path

import esm
import fairscale.nn.data_parallel.fully_sharded_data_parallel as fsdp
import pytest
import torch
from fairscale.nn.wrap import enable_wrap, wrap
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from opdrift.recorder import record
from opdrift.tracefile.opening import load
from opdrift.tracefile.reader import Trace

pytestmark = [
    pytest.mark.usefixtures("one_rank"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated"),
]

OFFLOAD = {"mixed_precision": True, "cpu_offload": True}
TOKENS = torch.tensor([[0, 5, 6, 7, 8, 2], [0, 9, 4, 32, 2, 1]])


@pytest.fixture(scope="module")
def files(tmp_path_factory, load_example):
    small = load_example("_small_esm2")
    folder = tmp_path_factory.mktemp("checkpoint")
    small.write(folder)
    return small.read(folder)


def build(files, *, loaded: bool = True, wrapped: bool = True, **options: object):
    data, regression = copy.deepcopy(files)
    with enable_wrap(
        wrapper_cls=fsdp.FullyShardedDataParallel, compute_device=torch.device("cpu"), **options
    ):
        if loaded:
            model, _ = esm.pretrained.load_model_and_alphabet_core("esm2", data, regression)
        else:
            model, _, _ = esm.pretrained._load_model_and_alphabet_core_v2(data)
        model.eval()
        if not wrapped:
            return model
        for name, layer in model.layers.named_children():
            setattr(model.layers, name, wrap(layer))
        return wrap(model)


def infer(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS, repr_layers=[3], return_contacts=True)["logits"]


def contents(trace: Trace) -> dict[str, tuple[int, int, int]]:
    """The digest that each parameter and buffer has at its last naming."""
    leaves = [leaf for leaf in trace.leaves if leaf.kind in ("parameter", "buffer")]
    return {leaf.name: trace.fingerprint(leaf.value).key for leaf in leaves}


@pytest.mark.parametrize("options", [{}, {"cpu_offload": True}, {"flatten_parameters": False}])
def test_a_wrapped_model_has_the_leaves_of_the_plain_one(tmp_path, files, options):
    """Same 62 names, same contents, in full precision; nothing is named after flat parameters."""
    with record(tmp_path / "plain"):
        plain = infer(build(files, wrapped=False))
    with record(tmp_path / "wrapped"):
        wrapped = infer(build(files, **options))

    assert torch.equal(plain, wrapped)
    left, right = (contents(load(tmp_path / name)) for name in ("plain", "wrapped"))
    assert len(left) == 62
    assert left == right


def test_recording_changes_no_bit_of_an_offloaded_half_precision_run(tmp_path, files):
    plain = infer(build(files, **OFFLOAD))

    state = torch.get_rng_state()
    with record(tmp_path / "trace"):
        recorded = infer(build(files, **OFFLOAD))

    assert torch.equal(plain, recorded)
    # Building draws the weights that loading then replaces: as many draws with and without a recorder.
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    build(files, **OFFLOAD)
    assert torch.equal(torch.get_rng_state(), after)


def test_everything_is_intact_and_nothing_failed(tmp_path, files):
    with record(tmp_path / "trace"):
        model = build(files, **OFFLOAD)
        infer(model)
        infer(model)

    trace = load(tmp_path / "trace")
    checked = [mark for mark in trace.marks if mark.kind in ("gather", "use", "move", "cast")]
    assert len(checked) > 20
    assert {mark.fields["intact"] for mark in checked} == {True}
    assert trace.footer is not None
    assert trace.footer.failures == ()


def test_a_model_that_was_wrapped_before_the_recording_is_followed(tmp_path, files):
    model = build(files, **OFFLOAD)

    with record(tmp_path / "late", model=model):
        infer(model)

    names = contents(load(tmp_path / "late"))
    assert len(names) == 62


@pytest.mark.parametrize("loaded", [True, False])
def test_the_trace_says_whether_the_checkpoint_was_dropped(tmp_path, files, loaded):
    with record(tmp_path / "trace"):
        infer(build(files, loaded=loaded, **OFFLOAD))

    kinds = [mark.kind for mark in load(tmp_path / "trace").marks]
    assert ("load" in kinds, "checkpoint-dropped" in kinds) == (loaded, not loaded)


def test_recording_does_not_import_the_libraries_it_could_follow(tmp_path: Path):
    """Each of them costs time, and importing one has side effects of its own."""
    code = f"""
import sys, torch
from opdrift.recorder import record
with record({str(tmp_path / "trace")!r}):
    torch.ones(2) + 1
assert "opdrift_integrations.esm" in sys.modules
loaded = {{"fairscale", "esm", "accelerate", "transformers"}} & set(sys.modules)
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_changes_a_shard_between_the_optimizer_s_op_and_the_end_of_its_step_is_found(
    tmp_path: Path, dtype: torch.dtype
):
    """What the step left is known from the op that wrote it: a later change without an op is none of it."""
    mesh = init_device_mesh("cpu", (1,))
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    model = fully_shard(torch.nn.Linear(4, 3), mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weights = model._get_fsdp_state()._fsdp_param_group.fsdp_params[0]._sharded_param_data
    optimizer.register_step_post_hook(
        lambda *_: ctypes.c_float.from_address(weights.data_ptr()).__setattr__("value", 7.0)
    )

    with record(tmp_path / "run", model=model):
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).float().sum().backward()
            optimizer.step()

    marks = [mark for mark in load(tmp_path / "run").marks if mark.kind == "shard-changed"]
    assert [[each["parameter"] for each in mark.fields["mismatch"]] for mark in marks] == [
        ["weight"]
    ]
