"""Settings that a program changes while it is recorded: noticed before the op that they steer, and told as marks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import opdrift
from opdrift.picks import Picks


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    """Puts back what these tests change."""
    threads, strategy = torch.get_num_threads(), torch.backends.opt_einsum.strategy
    precision = torch.backends.mkldnn.matmul.fp32_precision
    yield
    torch.backends.mkldnn.matmul.fp32_precision = precision
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)
    torch._C._set_mkldnn_enabled(True)
    torch.backends.opt_einsum.strategy = strategy


def changes(trace: opdrift.Trace) -> list[tuple[int, dict[str, object]]]:
    """After which op which flags changed."""
    return [(m.seq, dict(m.fields)) for m in trace.marks if m.kind == "flags"]


def recorded(path: Path, run: Callable[[], object]) -> opdrift.Trace:
    with opdrift.record(path, kernels="off", integrity="off"):
        run()
    return opdrift.load(path)


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="rules of builds with MKL")
def test_a_library_that_is_switched_off_for_the_second_time_around_a_loop_is_seen(tmp_path: Path):
    """No line is new there and no module is called: the product itself asks."""
    x = torch.ones(64, 64)

    def run() -> None:
        for enabled in (True, True, False, False, True):
            torch._C._set_mkldnn_enabled(enabled)
            torch.nn.functional.gelu(torch.mm(x, x))

    trace = recorded(tmp_path / "t", run)
    libraries = [picked.library for i in range(10) if (picked := Picks(trace).of(i)) is not None]

    assert changes(trace) == [
        (4, {"mkldnn.enabled": [True, False]}),
        (8, {"mkldnn.enabled": [False, True]}),
    ]
    assert libraries[1::2] == ["oneDNN", "oneDNN", "ATen", "ATen", "oneDNN"]


def test_threads_and_determinism_are_seen_at_the_next_module_call(tmp_path: Path):
    """Inside a root module that is called once, where no line is new and no op is steered by them alone."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.Softmax(-1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for threads, deterministic in ((2, False), (1, False), (1, True)):
                torch.set_num_threads(threads)
                torch.use_deterministic_algorithms(deterministic)
                x = self.act(x)
            return x

    torch.set_num_threads(2)
    trace = recorded(tmp_path / "t", lambda: Twice()(torch.ones(2, 3)))

    assert changes(trace) == [
        (2, {"num_threads": [2, 1]}),
        (3, {"deterministic_algorithms": [False, True]}),
    ]


def test_a_run_that_changes_nothing_has_no_mark(tmp_path: Path):
    def run() -> None:
        layer = nn.Linear(4, 4)
        for _ in range(3):
            with torch.no_grad():
                torch.mm(layer(torch.ones(2, 4)), torch.ones(4, 4))

    seen = {name for _, fields in changes(recorded(tmp_path / "t", run)) for name in fields}

    assert seen <= {"grad_mode"}


def test_flags_that_are_seldom_looked_at_and_variables_are_told_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Libraries read most variables once, so that one changed during the run is a fact and no cause."""
    monkeypatch.setenv("MKL_CBWR", "AVX2")

    def run() -> None:
        torch.ones(2).sin()
        torch.backends.opt_einsum.strategy = "optimal" if old != "optimal" else "greedy"
        monkeypatch.setenv("OMP_PROC_BIND", "true")
        del os.environ["MKL_CBWR"]

    old = torch.backends.opt_einsum.strategy
    monkeypatch.setattr(torch.backends.opt_einsum, "enabled", True)
    trace = recorded(tmp_path / "t", run)

    assert [fields for _, fields in changes(trace)] == [
        {"opt_einsum": [[True, old], [True, torch.backends.opt_einsum.strategy]]}
    ]
    assert [dict(m.fields) for m in trace.marks if m.kind == "variables"] == [
        {"MKL_CBWR": ["AVX2", None], "OMP_PROC_BIND": [None, "true"]}
    ]
    assert trace.header.variables["MKL_CBWR"] == "AVX2"


def test_a_flag_that_cannot_be_read_any_more_is_told_and_stops_nothing(tmp_path: Path):
    """torch's old getters raise once the new precision API was used in a way that they cannot say."""
    x = torch.ones(4, 4)
    torch.set_float32_matmul_precision(
        "highest"
    )  # other tests set it, and it has no way back to "none" ...
    torch.backends.mkldnn.matmul.fp32_precision = "none"  # ... but this

    def run() -> None:
        for precision in ("none", "tf32"):
            torch.backends.mkldnn.matmul.fp32_precision = precision
            torch.mm(x, x)

    trace = recorded(tmp_path / "t", run)

    assert changes(trace) == [
        (1, {"fp32_precision.mkldnn.matmul": ["none", "tf32"]}),
        (2, {"float32_matmul_precision": ["highest", "unreadable: RuntimeError"]}),
    ]
    assert trace.footer is not None
    assert trace.footer.failures == ()
