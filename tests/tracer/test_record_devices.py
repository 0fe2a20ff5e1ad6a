"""Recording tensors of devices: the host stands for one here, and every tensor goes through its ring."""

from __future__ import annotations

import ctypes
import dataclasses
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.ipc as ipc
import pytest
import torch
from fake_device import HostAccelerator
from torch import Tensor, nn

import opdrift
from opdrift import memory, recorder, rereading, spool, values
from opdrift.fingerprint import devices, load_engine
from opdrift.fingerprint.torch_ops import TorchOps
from opdrift.memory import InFlight, Use, under_way
from opdrift.plans import Plan
from opdrift.records import PENDING, UNFINGERPRINTED

ENGINE = load_engine()


class Elsewhere:
    """What the tests may change about the device."""

    def __init__(self) -> None:
        self.made: list[HostAccelerator] = []
        self.makers: tuple[devices.Maker, ...] = (TorchOps,)

    def accelerator(self, device: torch.device) -> HostAccelerator:
        self.made.append(HostAccelerator(device))
        return self.made[-1]


def pretend(patch: pytest.MonkeyPatch) -> Elsewhere:
    """Let every tensor count as one of a device, which is fingerprinted by torch ops."""
    found = Elsewhere()
    patch.setattr(devices, "Accelerator", found.accelerator)
    patch.setattr(devices, "kernels_for", lambda device: found.makers)
    patch.setattr(values.Values, "is_elsewhere", staticmethod(lambda tensor: True))
    # without kinds no output takes the short cut for contiguous tensors of the host
    patch.setattr(recorder, "load_engine", lambda: dataclasses.replace(ENGINE, kinds={}))
    return found


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Elsewhere:
    return pretend(monkeypatch)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def contents(trace: opdrift.Trace) -> list[tuple[str, list[Any]]]:
    """Per op its name, and the exact part of its outputs' fingerprints."""
    found = []
    for index in range(len(trace.ops)):
        op = trace.op(index)
        prints = [trace.fingerprint(value) for value in op.outputs]
        found.append((op.name, [p and (p.raw, p.n, p.code, p.min, p.max) for p in prints]))
    return found


def record(path: Path, run: Callable[[], Any], **options: Any) -> opdrift.Trace:
    with opdrift.record(path, **options):
        kept = run()
    trace = opdrift.load(path)
    assert trace.incomplete is None
    assert trace.footer is not None
    assert trace.footer.failures == ()
    del kept
    return trace


def overload(name: str) -> Any:
    """The overload called `aten.mul.Tensor`."""
    found: Any = torch.ops
    for part in name.split("."):
        found = getattr(found, part)
    return found


def test_a_device_s_trace_is_that_of_the_host(tmp_path, model):
    """The same values have the same fingerprints, and the traces are identical."""
    x = torch.randn(2, 5, 16)
    model.eval()
    with torch.no_grad():
        host = record(tmp_path / "host.trace", lambda: model(x), model=model)
        with pytest.MonkeyPatch.context() as patch:
            pretend(patch)
            device = record(tmp_path / "device.trace", lambda: model(x), model=model)

    assert contents(device) == contents(host)
    assert [leaf.name for leaf in device.leaves] == [leaf.name for leaf in host.leaves]
    assert opdrift.diff(tmp_path / "host.trace", tmp_path / "device.trace").verdict == "identical"


def test_training_is_not_changed(elsewhere, unchanged, model):
    """Gradients, parameters, random state: bit by bit, with everything fingerprinted late."""
    start = {name: value.clone() for name, value in model.state_dict().items()}

    def run() -> list[Tensor]:
        model.load_state_dict(start)
        model.zero_grad(set_to_none=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        loss = model(torch.randn(2, 5, 16)).square().mean()
        loss.backward()
        optimizer.step()
        return [loss, *(p.grad for p in model.parameters()), *model.parameters()]

    trace = unchanged(run, model=model)
    bare = {name for name, prints in contents(trace) if prints and None in prints}
    assert {name for name in bare if not overload(name).is_view and "empty" not in name} == set()
    assert trace.footer.notes == ()


def test_an_in_place_op_s_old_and_new_content_are_told_apart(tmp_path, elsewhere):
    """Each is fingerprinted at its place in the order of ops, though both come later."""
    x = torch.ones(3)
    trace = record(tmp_path / "a.trace", lambda: (y := x * 2).add_(1).mul_(y))
    sums = [trace.fingerprint(trace.op(k).outputs[0]).sum for k in range(3)]

    assert sums == [6.0, 9.0, 27.0]


def test_the_trace_says_what_fingerprinted_the_device(tmp_path, elsewhere, caplog):
    """Once, in a mark; and why it was not a kernel, in a note and a warning."""

    def broken(device: torch.device) -> devices.Kernel:
        raise OSError("[Errno 30] Read-only file system: '~/.triton'")

    elsewhere.makers = (broken, TorchOps)
    with caplog.at_level(logging.WARNING, "opdrift"):
        trace = record(tmp_path / "a.trace", lambda: torch.ones(3) * torch.ones(3))
    why = "OSError: [Errno 30] Read-only file system: '~/.triton'"

    assert [m.fields for m in trace.marks if m.kind == "fingerprints"] == [
        {"device": "cpu", "by": "torch ops", "why": [why]}
    ]
    assert trace.footer.notes == (f"cpu was fingerprinted by torch ops instead of a kernel: {why}",)
    assert len([r for r in caplog.records if "far slower" in r.message]) == 1
    assert all(None not in prints for _, prints in contents(trace))


def test_what_is_captured_is_noted_and_not_touched(tmp_path, elsewhere):
    """A captured op computes nothing yet; afterwards everything goes on as before."""

    def run() -> Tensor:
        x = torch.ones(3) + 1
        elsewhere.made[0].capturing = True
        y = x * 2
        elsewhere.made[0].capturing = False
        return y + 1

    trace = record(tmp_path / "a.trace", run)

    assert [prints == [None] for _, prints in contents(trace)] == [False, False, True, False]
    assert trace.footer.notes == (f"1 contents were not fingerprinted: {devices.CAPTURED}",)


def test_a_tensor_that_the_device_cannot_read_is_left_out(tmp_path, elsewhere):
    """The op is recorded, and the footer says how many contents are missing, and why."""

    def refuse(*_: object, **__: object) -> str:
        return "cuda:0 had no memory left for it"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(devices.Devices, "put", refuse)
        trace = record(tmp_path / "a.trace", lambda: torch.ones(3) * 2)

    assert contents(trace) == [("aten.ones.default", [None]), ("aten.mul.Tensor", [None])]
    assert trace.footer.notes == (
        "2 contents were not fingerprinted: cuda:0 had no memory left for it",
    )


def samples(trace: opdrift.Trace) -> list[tuple[int, ...]]:
    """The exact part of each row of the table `samples`."""
    table = ipc.open_stream(trace.path / "samples.arrows").read_all().to_pylist()
    return sorted((row["value"], row["item"], row["raw"], row["n"], row["nan"]) for row in table)


@pytest.mark.parametrize("lengths", [None, (5, 3)], ids=["whole", "padded"])
def test_the_samples_of_a_device_s_batch_are_those_of_the_host(tmp_path, model, lengths):
    """Each sample of each tensor that carries the batch, its valid part if it is padded."""
    x = torch.randn(2, 5, 16)
    model.eval()
    batch = opdrift.Batch(2, lengths)
    with torch.no_grad():
        host = record(tmp_path / "host.trace", lambda: model(x), model=model, batch=batch)
        with pytest.MonkeyPatch.context() as patch:
            pretend(patch)
            device = record(tmp_path / "device.trace", lambda: model(x), model=model, batch=batch)

    assert samples(device) == samples(host) != []


# ---- leaves that change with no op -----------------------------------------------------------------------


def hidden(trace: opdrift.Trace) -> list[tuple[str, float]]:
    """Names and sums of what changed with no op."""
    return [
        (leaf.name, trace.fingerprint(leaf.value).sum)
        for leaf in trace.leaves
        if leaf.when == "changed"
    ]


class Weighted:
    """A model of one weight, which can be written with no op."""

    def __init__(self) -> None:
        self.weight = nn.Parameter(torch.ones(4))
        self.model = nn.Module()
        self.model.weight = self.weight

    def use(self, uses: int, half_way: Callable[[], object]) -> Tensor:
        x = torch.ones(4)
        with torch.no_grad():
            for use in range(uses):
                if use == uses // 2:
                    half_way()
                x = x * self.weight
        return x

    def writer(self) -> Callable[[], None]:
        """What writes the weight by way of NumPy."""
        memory = self.weight.detach().numpy()
        return lambda: memory.fill(0)


def test_a_hidden_write_into_a_device_s_weight_is_found_later(tmp_path, elsewhere, monkeypatch):
    """Leaves are read again without waiting; that one changed is told once it is known."""
    # nothing of this may depend on how fast the machine is: all rows arrive with the next op, time never runs out
    for module in (recorder, spool):
        monkeypatch.setattr(module, "FLUSH_NS", 0)
    monkeypatch.setattr(rereading, "RECHECK_GRANT_NS", 1 << 60)
    monkeypatch.setattr(rereading, "_ROUND", 4)
    it = Weighted()
    write = it.writer()
    trace = record(tmp_path / "a.trace", lambda: it.use(60, write), model=it.model)

    assert hidden(trace) == [("weight", 0.0)]
    assert next(leaf.seq for leaf in trace.leaves if leaf.when == "changed") > 30


def test_with_full_integrity_it_is_found_at_its_use(tmp_path, elsewhere):
    """Each use waits for the device then; the op that reads the new content names the new value."""
    it = Weighted()
    write = it.writer()
    trace = record(tmp_path / "a.trace", lambda: it.use(6, write), model=it.model, integrity="full")
    read = [trace.op(k).inputs[1] for k in range(len(trace.ops)) if "mul" in trace.op(k).name]

    assert hidden(trace) == [("weight", 0.0)]
    assert read == [read[0]] * 3 + [read[3]] * 3
    assert read[3] == next(leaf.value for leaf in trace.leaves if leaf.when == "changed")


@pytest.mark.parametrize(("content", "found"), [(1.0, []), (2.0, [("weight", 8.0)])])
def test_a_weight_that_moved_is_looked_at(tmp_path, elsewhere, content, found):
    """Another address is a reason to look, and only another content is a hidden write."""
    it = Weighted()

    def move() -> None:
        storage = it.weight.untyped_storage()
        before = storage.data_ptr()
        kept = []
        while storage.data_ptr() == before:
            storage.resize_(0)
            kept.append(np.ones(4, np.float32))  # so that the allocator gives another place
            storage.resize_(1 << (4 + len(kept)))
        values = np.full(4, content, np.float32)
        ctypes.memmove(storage.data_ptr(), values.ctypes.data, values.nbytes)

    trace = record(tmp_path / "a.trace", lambda: it.use(4, move), model=it.model)

    assert hidden(trace) == found


def test_reading_leaves_again_does_not_keep_storages_alive(tmp_path, elsewhere):
    """What is under way holds neither tensors nor what says that their storages live."""
    with opdrift.record(tmp_path / "a.trace") as recording:
        for _ in range(50):
            torch.ones(3) * torch.ones(3)
        alive = list(recording._values.made.alive())
    trace = opdrift.load(tmp_path / "a.trace")

    assert alive == []
    assert [leaf for leaf in trace.leaves if leaf.kind == "alive"] == []


def test_a_digest_is_had_from_the_device(tmp_path, elsewhere):
    """Integrations ask for it; the tensor itself is not copied."""
    x = torch.randn(7)
    with opdrift.record(tmp_path / "a.trace") as recording:
        digest = recording.digest(x)
        elsewhere.made[0].capturing = True
        captured = recording.digest(x)
        elsewhere.made[0].capturing = False

    row = ENGINE.fingerprint(x)
    assert digest is not None
    assert (digest.raw, digest.n, digest.code) == (int(row["raw"]), 7, 0)
    assert captured is None


def test_unwritten_memory_of_a_device_is_not_waited_for():
    """Kernels that are no ops write there all the time, so whoever reads it is not blamed."""
    storage = SimpleNamespace(nbytes=lambda: 16, device=torch.device("cuda"))
    unwritten = memory.Unwritten(storage)

    assert memory.glimpse(storage) is None
    assert unwritten.was_touched(storage)


# ---- copies from a device that are not waited for --------------------------------------------------------


class Event:
    """A mark in a stream."""

    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        self.done = True


@pytest.fixture
def event(monkeypatch: pytest.MonkeyPatch) -> Iterator[Event]:
    """What an accelerator's mark gives."""
    found = Event()
    accelerator = SimpleNamespace(mark=lambda: found, is_capturing=lambda: False)
    monkeypatch.setattr(memory, "Accelerator", lambda device: accelerator)
    return found


def tensor_on(device: str) -> Any:
    return SimpleNamespace(
        device=torch.device(device), is_cpu=device == "cpu", is_meta=device == "meta"
    )


TO_COPY = Plan(torch.ops.aten._to_copy.default, 1)
COPY = Plan(torch.ops.aten.copy_.default, 2)
HOST, DEVICE, META = tensor_on("cpu"), tensor_on("cuda"), tensor_on("meta")


@pytest.mark.parametrize(
    ("use", "target", "expected"),
    [
        (Use(TO_COPY, (DEVICE,), {"non_blocking": True}), HOST, True),
        (Use(TO_COPY, (DEVICE,), {"non_blocking": False}), HOST, False),
        (Use(TO_COPY, (DEVICE,), {}), HOST, False),
        (Use(TO_COPY, (HOST,), {"non_blocking": True}), DEVICE, False),
        (Use(TO_COPY, (HOST,), {"non_blocking": True}), HOST, False),
        (Use(TO_COPY, (META,), {"non_blocking": True}), HOST, False),
        (Use(COPY, (HOST, DEVICE, True), {}), HOST, True),
        (Use(COPY, (HOST, DEVICE), {}), HOST, False),
        (Use(COPY, (DEVICE, HOST, True), {}), DEVICE, False),
    ],
)
def test_a_copy_to_the_host_is_under_way_if_nobody_waited(event, use, target, expected):
    """Only from a device, and only with non_blocking: it is done when its event is."""
    found = under_way(use, target)

    assert (found is not None) is expected
    if found is not None:
        assert not found.is_done()
        event.done = True
        assert found.is_done()


def test_a_copy_under_way_is_fingerprinted_at_its_first_use_thereafter(
    tmp_path, monkeypatch, event
):
    """Reading it before would fingerprint what was in the memory before."""
    monkeypatch.setattr(
        "opdrift.outcomes.under_way",
        lambda use, target: InFlight(memory.Transfer(None), readable=True),
    )

    def run() -> None:
        copy = torch.ones(3).double()
        copy + 1
        event.done = True
        copy + 2

    trace = record(tmp_path / "a.trace", run)
    copied = next(
        trace.op(k) for k in range(len(trace.ops)) if trace.op(k).name == "aten._to_copy.default"
    )

    assert copied.flags & (PENDING | UNFINGERPRINTED) == PENDING | UNFINGERPRINTED
    assert trace.fingerprint(copied.outputs[0]).sum == 3.0


def test_an_integration_gets_no_digest_of_a_copy_under_way(tmp_path, monkeypatch, event):
    """It would be that of what was in the memory before, and a false alarm."""
    monkeypatch.setattr(
        "opdrift.outcomes.under_way",
        lambda use, target: InFlight(memory.Transfer(None), readable=True),
    )
    digests = []

    with opdrift.record(tmp_path / "a.trace") as recorder:
        copy = torch.ones(3).double()
        digests.append(recorder.digest(copy))
        event.done = True
        digests.append(recorder.digest(copy))

    assert digests[0] is None
    assert digests[1] is not None


def test_a_captured_copy_is_never_known_to_be_done(monkeypatch):
    """Its event cannot be asked, and the copy is done at a replay only."""
    accelerator = SimpleNamespace(mark=lambda: None, is_capturing=lambda: True)
    monkeypatch.setattr(memory, "Accelerator", lambda device: accelerator)
    transfer = memory.Transfer(torch.device("cuda"))

    transfer.wait()
    assert not transfer.is_completed()
