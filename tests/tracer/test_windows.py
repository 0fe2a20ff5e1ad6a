"""Ops are profiled in windows, and nobody else's profiler notices. The host stands for a device."""

from __future__ import annotations

import dataclasses
import gc
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from time import time_ns
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, schedule

import opdrift
from opdrift import mode, neutral
from opdrift.kernels import full, profilers
from opdrift.kernels.kineto import Event
from opdrift.kernels.observed import ObservedOps
from opdrift.kernels.windows import Windows
from opdrift.picks.observed import Observed, Seen

pytestmark = pytest.mark.filterwarnings("ignore:Profiler clears events:UserWarning")
_NAMES = ("_prepare_profiler", "_enable_profiler", "_disable_profiler")


class Host:
    """The CPU as a device that is profiled: what it runs is told here, and not by kineto."""

    activities = frozenset({ProfilerActivity.CPU})

    def __init__(self) -> None:
        self.ready = True
        self.waits = 0
        self.events: list[Event] = []
        self.is_profiled: Callable[[], bool] = lambda: True

    def is_ready(self) -> bool:
        return self.ready

    def synchronize(self) -> None:
        self.waits += 1

    def launch(self, name: str) -> None:
        """Run a kernel of this name; it is done much later. Nobody tells of it between windows."""
        if not self.is_profiled():
            return
        now, number = time_ns(), len(self.events) + 1
        thread = threading.get_native_id()
        self.events += [
            Event("cudaLaunchKernel", "launch", now, number, thread),
            Event(name, "kernel", now + 10**9 + number, number),
        ]

    def read(self, found: Sequence[Any]) -> Iterable[Event]:
        """The events of a window; kineto itself must have none, or its end would be dangerous."""
        assert list(found) == []
        events, self.events = self.events, []
        return events


class Watched:
    """Windows of a few ops, and what they wrote."""

    def __init__(self, size: int = 4) -> None:
        self.marks: list[Mapping[str, Any]] = []
        self.failures: list[str] = []
        self.device = Host()
        self.windows = Windows(
            ObservedOps("profiler", self.marks.append),
            self.device,
            failed=lambda where, error: self.failures.append(f"{where}: {error!r}"),
            read=self.device.read,
            size=size,
        )
        self.device.is_profiled = lambda: self.windows._opened > 0
        self._seq = 0

    def run(self, op: str | Callable[[], object], times: int = 1) -> None:
        """Run ops, each of one kernel of this name or of what is called."""
        for _ in range(times):
            self._seq += 1
            seq = self._seq
            self.windows.begin(seq, "aten.mm.default")
            try:
                if isinstance(op, str):
                    self.device.launch(op)
                else:
                    op()
            finally:
                self.windows.end(seq)

    def compute(self, op: Callable[[], object], times: int = 1) -> None:
        """Run ops that compute something here, with one kernel each."""
        self.run(lambda: (op(), self.device.launch("kernel")), times)

    @property
    def names(self) -> dict[int, list[str]]:
        return {
            seq: [mark["names"][i] for i in indices]
            for mark in self.marks
            for seq, indices in mark.get("ops", ())
        }

    @property
    def refused(self) -> list[str]:
        return [mark["refused"] for mark in self.marks if "refused" in mark]


@pytest.fixture
def watched() -> Iterator[Watched]:
    found = Watched()
    found.windows.attach()
    yield found
    found.windows.close()
    assert found.failures == []
    assert not isinstance(torch._C._autograd._enable_profiler, profilers._Hook)
    assert not profilers.ProgramsProfiler(lambda: None).runs


@pytest.fixture(scope="module")
def x() -> torch.Tensor:
    return torch.ones(4, 4)


def names_of(user: profile) -> list[str]:
    return [event.name for event in user.events() if event.name.startswith("aten::")]


# ---- windows ---------------------------------------------------------------------------------------------


def test_every_op_of_every_window_has_its_kernels(watched: Watched):
    """Two full windows, and one that the end of the recording cuts short."""
    for _ in range(5):
        watched.run("gemm")
        watched.run(lambda: (watched.device.launch("a"), watched.device.launch("b")))
    watched.run(lambda: None)
    watched.windows.close()

    assert watched.names == {
        **{seq: ["gemm"] for seq in (1, 3, 5, 7, 9)},
        **{seq: ["a", "b"] for seq in (2, 4, 6, 8, 10)},
    }
    assert [(m["first"], m["last"]) for m in watched.marks] == [(1, 4), (5, 8), (9, 11)]
    assert watched.device.waits == 3  # each window waits for the device once


def test_an_op_that_raises_and_one_inside_another_are_watched(watched: Watched):
    """An op ends however it ends; a window ends within none."""

    def outer() -> None:
        watched.device.launch("outer")
        watched.run("inner", 9)

    def raising() -> None:
        watched.device.launch("before it raised")
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011 (it is the one above)
        watched.run(raising)
    watched.run(outer)
    watched.run("after")
    watched.windows.close()

    assert watched.names == {
        1: ["before it raised"],
        2: ["outer"],
        **{seq: ["inner"] for seq in range(3, 12)},
        12: ["after"],
    }
    assert [(m["first"], m["last"]) for m in watched.marks] == [(1, 11), (12, 12)]


def test_ops_of_other_threads_are_watched_and_any_thread_may_end_a_window(watched: Watched):
    """As autograd's threads do in a long backward."""
    watched.run("main", 2)
    thread = threading.Thread(target=lambda: watched.run("other", 7))
    thread.start()
    thread.join()
    watched.run("main")
    watched.windows.close()

    assert [watched.names[seq] for seq in range(1, 11)] == [["main"]] * 2 + [["other"]] * 7 + [["main"]]  # fmt: skip


def test_a_window_waits_for_a_device_that_is_at_work_and_captures_nothing(watched: Watched):
    """Before its first use nothing is profiled; during a capture no window begins or ends."""
    watched.device.ready = False
    watched.run(lambda: None, 2)
    watched.device.ready = True
    watched.run("gemm", 3)
    watched.device.ready = False
    watched.run("gemm", 3)
    waits = watched.device.waits
    watched.device.ready = True
    watched.run("gemm")
    watched.windows.close()

    assert waits == 0
    assert sorted(watched.names) == [3, 4, 5, 6, 7, 8, 9]
    assert [(m["first"], m["last"]) for m in watched.marks] == [(3, 8), (9, 9)]


def test_a_window_may_end_within_what_torch_would_record(watched: Watched, x: torch.Tensor):
    """A dispatch mode runs within torch's events, which outlive a window: kineto must hold none of them."""
    with torch.profiler.record_function("of the program"):
        watched.run("gemm", 9)
        with torch.profiler.record_function("inside"):
            watched.run(lambda: torch.relu(x), 9)
    watched.windows.close()

    assert sorted(watched.names) == list(range(1, 10))


def test_a_kernel_without_a_launch_is_told_in_words(watched: Watched):
    """And what is launched between ops is nobody's."""
    watched.run("gemm")
    watched.device.launch("fingerprint")
    watched.device.events += [Event("nccl", "kernel", 5, 77), Event("nccl", "kernel", 6, 78)]
    watched.run("gemm")
    watched.windows.close()

    (mark,) = watched.marks
    assert mark["names"] == ["gemm"]
    assert mark["raw"] == [(2, "2 times nccl, launched by nothing that the profiler saw")]


def test_a_clock_that_is_not_the_systems_is_not_joined_by(watched: Watched):
    """Launches an hour off: they would belong to no op, or to a wrong one."""
    watched.run("gemm", 2)
    watched.device.events = [
        dataclasses.replace(event, start=event.start - 3600 * 10**9) for event in watched.device.events
    ]  # fmt: skip
    watched.windows.close()
    watched.run("gemm")

    assert watched.names == {}
    (why,) = watched.refused
    assert re.fullmatch(r"the profiler's clock is 3\d{12} ns off the system's", why)


def test_a_failure_ends_the_profile_and_is_noted_once(x: torch.Tensor):
    """What cannot be read costs kernel names, not the run, and leaves no profiler behind."""
    watched = Watched()
    watched.windows._read = lambda found: 1 / 0  # type: ignore[assignment,return-value]
    watched.windows.attach()

    watched.run("gemm", 12)
    watched.windows.close()

    assert watched.failures == ["kernel names: ZeroDivisionError('division by zero')"]
    with profile(activities=[ProfilerActivity.CPU]) as user:
        torch.relu(x)
    assert names_of(user) == ["aten::relu", "aten::clamp_min"]


def test_a_device_that_torch_cannot_profile_is_said_so(watched: Watched):
    """A build without CUPTI."""
    watched.device.activities = frozenset({ProfilerActivity.MTIA})
    watched.run("gemm", 9)

    assert watched.refused == [
        "this build of torch has no profiler for the device (CUPTI or roctracer)"
    ]


# ---- the program's own profiler --------------------------------------------------------------------------


def test_the_programs_profiler_takes_over_and_gives_back(watched: Watched, x: torch.Tensor):
    """It holds all its ops and none of ours; the ops in it are not watched, those around it are."""
    watched.compute(lambda: torch.relu(x), 2)
    with profile(activities=[ProfilerActivity.CPU]) as user:
        watched.compute(lambda: torch.abs(x), 9)
    watched.compute(lambda: torch.relu(x), 2)
    watched.windows.close()

    assert names_of(user).count("aten::abs") == 9 * 2  # it calls its out variant
    assert not [event.name for event in user.events() if "opdrift" in event.name]
    assert sorted(watched.names) == [1, 2, 12, 13]
    assert watched.refused == ["the program started its own profiler, and there can be only one"]


def test_a_profiler_that_comes_and_goes_is_logged_once(
    watched: Watched, caplog: pytest.LogCaptureFixture
):
    """The trace tells each stretch of ops that was not watched."""
    for _ in range(3):
        watched.run("gemm")
        with profile(activities=[ProfilerActivity.CPU]):
            watched.run("gemm")
    watched.windows.close()

    assert sorted(watched.names) == [1, 3, 5]
    assert len(watched.refused) == 3
    assert len(caplog.records) == 1


def test_a_profiler_that_ran_before_keeps_running(x: torch.Tensor):
    """Ours waits until it has ended."""
    watched = Watched()
    with profile(activities=[ProfilerActivity.CPU]) as user:
        watched.windows.attach()
        watched.compute(lambda: torch.relu(x), 3)
    watched.compute(lambda: torch.relu(x))
    watched.windows.close()

    assert names_of(user).count("aten::relu") == 3
    assert sorted(watched.names) == [4]
    assert watched.refused == ["the program's own profiler runs, and there can be only one"]


def scheduled() -> profile:
    return profile(
        activities=[ProfilerActivity.CPU], schedule=schedule(wait=1, warmup=1, active=1, repeat=1)
    )


def test_a_profiler_with_a_schedule_is_left_alone_from_its_warm_up_on(
    watched: Watched, x: torch.Tensor
):
    """While it waits we may profile; a warm-up that we disturb would end the process."""
    with scheduled() as user:
        for _ in range(3):
            watched.compute(lambda: torch.relu(x), 6)
            user.step()
        watched.compute(lambda: torch.relu(x), 6)
    watched.windows.close()

    assert names_of(user).count("aten::relu") == 6
    assert sorted(watched.names) == [1, 2, 3, 4, 5, 6, 19, 20, 21, 22, 23, 24]


def test_a_warm_up_that_began_before_the_recording_is_not_disturbed(x: torch.Tensor):
    """Also if the recording is over before the profile starts, which would end the process."""
    watched, brief = Watched(), Watched()
    with scheduled() as user:
        user.step()
        brief.windows.attach()
        brief.compute(lambda: torch.relu(x), 6)
        brief.windows.close()
        watched.windows.attach()
        watched.compute(lambda: torch.relu(x), 6)
        user.step()
        watched.compute(lambda: torch.relu(x), 6)
    watched.compute(lambda: torch.relu(x), 6)
    watched.windows.close()

    assert names_of(user).count("aten::relu") == 6
    assert sorted(brief.names) == []
    assert sorted(watched.names) == [13, 14, 15, 16, 17, 18]


def test_a_profiler_on_another_thread_keeps_its_events(watched: Watched, x: torch.Tensor):
    """It starts while an op of ours runs: that op's kernels may be cut, so they are not relied on."""
    users: list[profile] = []

    def profiled() -> None:
        with profile(activities=[ProfilerActivity.CPU]) as user:
            torch.abs(x)
        users.append(user)

    def beside() -> None:
        thread = threading.Thread(target=profiled)
        thread.start()
        thread.join()

    watched.compute(lambda: torch.relu(x))
    watched.compute(beside)
    watched.compute(lambda: torch.relu(x))
    watched.windows.close()

    assert "aten::abs" in names_of(users[0])
    assert sorted(watched.names) == [1, 3]
    assert [seq for mark in watched.marks for seq in mark.get("ambiguous", ())] == [2]


@pytest.mark.filterwarnings("ignore")
def test_other_profilers_of_torchs_run_beside_it(watched: Watched, x: torch.Tensor):
    """The legacy one, and the one that annotates for VTune; a legacy one that met ours would end the process."""
    watched.compute(lambda: torch.relu(x))
    with torch.autograd.profiler_legacy.profile() as legacy:
        watched.compute(lambda: torch.abs(x))
    watched.compute(lambda: torch.relu(x))
    with torch.autograd.profiler.emit_itt():
        watched.compute(lambda: torch.relu(x))
    watched.compute(lambda: torch.relu(x))
    watched.windows.close()

    assert [event.name for event in legacy.function_events if "abs" in event.name]
    assert sorted(watched.names) == [1, 3, 5]


def test_of_two_recorders_one_watches(watched: Watched, x: torch.Tensor):
    """The other one says so, and takes no part from then on."""
    other = Watched()
    other.windows.attach()

    other.compute(lambda: watched.compute(lambda: torch.relu(x)))
    other.windows.close()
    watched.compute(lambda: torch.relu(x))
    watched.windows.close()

    assert other.refused == [
        "another recorder of this process records them, and there can be only one"
    ]
    assert (sorted(other.names), sorted(watched.names)) == ([], [1, 2])


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_profiles_nothing(watched: Watched, x: torch.Tensor):
    """Threads that a profile needs were not forked with it; the parent goes on."""
    watched.compute(lambda: torch.relu(x))
    child = os.fork()
    if child == 0:
        watched.compute(lambda: torch.relu(x), 9)
        watched.windows.close()
        os._exit(int(bool(watched.marks or watched.failures)))
    _, status = os.waitpid(child, 0)
    watched.compute(lambda: torch.relu(x))
    watched.windows.close()

    assert os.waitstatus_to_exitcode(status) == 0
    assert sorted(watched.names) == [1, 2]


# ---- in a recording --------------------------------------------------------------------------------------


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Host:
    """What a recording profiles, as it does a GPU."""
    found = Host()

    def watch(write_mark: Any, failed: Any) -> Windows:
        observed = ObservedOps("profiler", write_mark)
        return Windows(observed, found, failed=failed, read=found.read, size=16)

    monkeypatch.setattr(full, "watch_devices", watch)
    return found


def step(model: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    loss = model(x).square().sum()
    loss.backward()
    return [loss, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def test_a_recorded_step_has_the_kernels_of_each_op_and_the_same_bits(
    tmp_path: Path, device: Host, monkeypatch: pytest.MonkeyPatch
):
    """Forward and backward of a layer, over many windows; every product launches a kernel."""
    genuine = neutral.run

    def launching(plan: Any, args: Any, kwargs: Any, keys: Any) -> Any:
        if "mm" in plan.name:
            device.launch(f"kernel of {plan.name}")
        return genuine(plan, args, kwargs, keys)

    monkeypatch.setattr(mode, "run", launching)
    torch.manual_seed(0)
    model = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    x = torch.randn(2, 5, 16)
    plain = step(model, x)

    with opdrift.record(tmp_path / "t", model=model, kernels="full"):
        recorded = step(model, x)

    assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))
    trace = opdrift.load(tmp_path / "t")
    assert trace.footer is not None
    assert trace.footer.failures == ()
    observed = Observed(trace)
    ops = [trace.op(index) for index in range(len(trace.ops))]
    seen = {op.seq: observed.of(op.seq, "profiler") for op in ops}
    assert [seen[op.seq] for op in ops] == [
        Seen("profiler", (f"kernel of {op.name}",) if "mm" in op.name else ()) for op in ops
    ]


def test_kinetos_lines_stay_off_stderr(tmp_path: Path):
    """Two lines for each window otherwise; the variable that does it is gone from the environment afterwards."""
    program = f"""
import os, sys
sys.path[:0] = {sys.path!r}
import torch
import test_windows
watched = test_windows.Watched()
watched.windows.attach()
watched.run("gemm", 9)
watched.windows.close()
assert len(watched.names) == 9 and not watched.failures
assert "KINETO_LOG_LEVEL" not in os.environ
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={k: v for k, v in os.environ.items() if k != "KINETO_LOG_LEVEL"},
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_nothing_is_kept_alive(watched: Watched):
    """Events hold no tensors."""
    watched.compute(lambda: torch.ones(3))
    tensor = torch.ones(5)
    watched.compute(lambda: tensor + 1)
    count = sum(1 for each in gc.get_objects() if type(each) is torch.Tensor)
    watched.windows.close()

    assert sum(1 for each in gc.get_objects() if type(each) is torch.Tensor) == count


def test_a_program_that_looked_the_function_up_before_the_end_can_still_call_it(
    watched: Watched, x: torch.Tensor
):
    """`from torch.autograd.profiler import _enable_profiler` inside the recording keeps working after it."""
    kept = [getattr(torch.autograd.profiler, name) for name in _NAMES]
    watched.windows.close()
    config = torch.autograd.profiler.profile().config()

    kept[0](config, {ProfilerActivity.CPU})
    kept[1](config, {ProfilerActivity.CPU})
    torch.relu(x)
    result = kept[2]()

    assert "aten::relu" in [event.name() for event in result.events()]
