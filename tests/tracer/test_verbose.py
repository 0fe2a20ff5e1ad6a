"""What oneDNN and MKL say is taken op by op, and nobody but the trace notices."""

from __future__ import annotations

import ctypes
import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_routines import convolution, other, product, whole
from torch import nn

import opdrift
from opdrift.kernels import CannotWatchError, silent
from opdrift.kernels.observed import ObservedOps
from opdrift.kernels.verbose import Verbose, call_of
from opdrift.picks import Picks
from opdrift.picks.observed import Observed, Seen

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="needs glibc"),
    pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="a build without MKL"),
    pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="a build without oneDNN"),
]

libc = ctypes.CDLL(None)
SETTERS = ("mkldnn_set_verbose", "mkl_set_verbose")


def c_stdout() -> Any:
    """Where C code prints now."""
    return ctypes.c_void_p.in_dll(libc, "stdout")


@pytest.fixture(autouse=True)
def left_as_it_was() -> Iterator[None]:
    """The pointer to stdout and torch's functions are as before after every test."""
    functions = [getattr(torch._C._verbose, name) for name in SETTERS]
    pointer = c_stdout().value

    yield

    assert [getattr(torch._C._verbose, name) for name in SETTERS] == functions
    assert c_stdout().value == pointer


@pytest.fixture
def marks() -> list[Mapping[str, Any]]:
    return []


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def verbose(marks: list[Mapping[str, Any]], told: list[str]) -> Iterator[Verbose]:
    found = Verbose(ObservedOps("verbose", marks.append), told.append)
    yield found
    found.close()


def seen(trace: opdrift.Trace) -> list[tuple[str, Seen | None]]:
    """Each op's name and what it was seen to run, but for those that fill tensors."""
    observed = Observed(trace)
    names = [trace.op(i).name for i in range(len(trace.ops))]
    return [
        (name, observed.of(int(seq), "verbose"))
        for name, seq in zip(names, trace.ops.seq, strict=True)
        if name not in ("aten.ones.default", "aten.fill_.Scalar")
    ]


def routines(found: Seen | None) -> list[str]:
    """Names of the routines or primitives that an op was seen to run."""
    assert found is not None
    return [
        name.split(",")[5] if name.startswith("onednn") else name[12:].partition("(")[0]
        for name in found.names
    ]


def test_each_op_has_the_calls_of_its_own(tmp_path: Path):
    """A product is MKL's, gelu oneDNN's, and what torch computes itself calls neither."""
    a = torch.ones(16, 16)
    with opdrift.record(tmp_path / "t", kernels="full"):
        torch.mm(a, a)
        torch.add(a, a)
        torch.nn.functional.gelu(a)

    (_, product), (_, addition), (_, gelu) = seen(opdrift.load(tmp_path / "t"))

    assert (routines(product), routines(gelu)) == (["SGEMM"], ["eltwise"])
    assert addition == Seen("verbose")


def test_what_is_printed_is_the_same_in_a_file_a_pipe_and_nowhere(tmp_path: Path):
    """By Python, by C code and to the descriptor, between ops and in an op of the program, flushed or not."""
    program = Path(__file__).with_name("stdout_checks.py")
    paths = os.pathsep.join(path for path in sys.path if path)

    done = subprocess.run(
        [sys.executable, program, tmp_path],
        capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    for way, (plain, watched, calls) in json.loads(done.stdout.splitlines()[-1]).items():
        assert watched == plain, way
        assert calls[0] > 0, way
    assert "onednn_verbose" not in done.stdout
    assert "MKL_VERBOSE" not in done.stdout


def test_what_others_print_during_an_op_is_put_back(
    verbose: Verbose, marks: list[Mapping[str, Any]], capfd: pytest.CaptureFixture[str]
):
    """Another thread's C code, with a call of a library in the middle of its line."""
    a = torch.ones(16, 16)

    verbose.begin(1, "aten.mm.default")
    libc.printf(b"before, ")
    torch.mm(a, a)
    libc.printf(b"after\n")
    verbose.end(1)
    libc.fflush(c_stdout())
    verbose.close()

    assert capfd.readouterr().out == "before, after\n"
    assert len(marks[0]["names"]) == 1


def test_what_was_flushed_is_flushed_when_it_is_put_back(
    verbose: Verbose, capfd: pytest.CaptureFixture[str]
):
    """So it comes before what the program prints next by other ways."""
    verbose.begin(1, "aten.mm.default")
    libc.printf(b"from C\n")
    libc.fflush(c_stdout())
    verbose.end(1)
    os.write(1, b"from the program\n")

    assert capfd.readouterr().out == "from C\nfrom the program\n"


def test_an_op_that_raises_leaves_everything_as_it_was(tmp_path: Path):
    pointer = c_stdout().value
    with opdrift.record(tmp_path / "t", kernels="full"):
        with pytest.raises(RuntimeError):
            torch.mm(torch.ones(2, 2), torch.ones(3, 3))
        assert c_stdout().value == pointer
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))

    (_, raised), (_, product) = seen(opdrift.load(tmp_path / "t"))

    assert raised == Seen("verbose")
    assert routines(product) == ["SGEMM"]


def test_an_exception_that_leaves_the_recording_leaves_everything_as_it_was(tmp_path: Path):
    """`left_as_it_was` looks."""
    with pytest.raises(KeyError), opdrift.record(tmp_path / "t", kernels="full"):
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
        raise KeyError


def test_an_interrupt_in_an_op_does_not_hide_what_comes_later(
    verbose: Verbose, marks: list[Mapping[str, Any]], capfd: pytest.CaptureFixture[str]
):
    """A `begin` without its `end`: closing gives stdout back."""
    pointer = c_stdout().value
    verbose.begin(1, "aten.mm.default")

    verbose.close()

    assert c_stdout().value == pointer
    torch.mm(torch.ones(2, 2), torch.ones(2, 2))
    assert capfd.readouterr().out == ""


def test_ops_of_two_threads_at_once_are_ambiguous(verbose: Verbose, marks: list[Mapping[str, Any]]):
    a = torch.ones(16, 16)

    verbose.begin(1, "aten.mm.default")
    torch.mm(a, a)
    other = threading.Thread(target=lambda: verbose.begin(2, "aten.mm.default"))
    other.start()
    other.join()
    verbose.end(1)
    torch.mm(a, a)
    verbose.end(2)
    verbose.begin(3, "aten.mm.default")
    torch.mm(a, a)
    verbose.end(3)
    verbose.close()

    assert marks[0]["ambiguous"] == [1, 2]
    assert [seq for seq, _ in marks[0]["ops"]] == [3]


@pytest.mark.parametrize(
    ("name", "reason"),
    [("aten.sqrt_.default", "calls neither"), ("aten.relu.default", "never calls MKL")],
)
def test_calls_of_a_thread_that_is_not_recorded_end_the_watching(
    verbose: Verbose, marks: list[Mapping[str, Any]], told: list[str], name: str, reason: str
):
    """An op that cannot call the library was seen to: whose the calls of late were cannot be told."""
    a = torch.ones(16, 16)
    for seq, each in enumerate(("aten.mm.default", name, "aten.mm.default"), 1):
        verbose.begin(seq, each)
        torch.mm(a, a)
        verbose.end(seq)
    verbose.close()

    (refused,) = marks
    assert refused["refused"] == told[0]
    assert refused["foreign"] is True
    assert told[0].startswith("another thread of the program calls oneDNN or MKL")
    assert f"({name}, which {reason}, was seen to)" in told[0]


def test_an_activation_may_call_onednn(verbose: Verbose, told: list[str]):
    """On tensors in oneDNN's own layout: only MKL is not its to call."""
    a = torch.ones(16, 16).to_mkldnn()

    verbose.begin(1, "aten.relu.default")
    torch.relu(a)
    verbose.end(1)

    assert told == []


def test_ops_that_are_said_to_call_nothing_are_torchs():
    """A name that is mistyped would never be met."""
    assert [n for n in silent._NEITHER | silent._NOT_MKL if not hasattr(torch.ops.aten, n)] == []
    assert not silent._NEITHER & silent._NOT_MKL


def test_a_sum_may_call_onednn(verbose: Verbose, marks: list[Mapping[str, Any]], told: list[str]):
    """It does on tensors in oneDNN's own layout."""
    a = torch.ones(16, 16).to_mkldnn()

    verbose.begin(1, "aten.add.Tensor")
    torch.add(a, a)
    verbose.end(1)
    verbose.close()

    assert told == []
    assert len(marks[0]["ops"]) == 1


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_watches_nothing_and_waits_for_nobody(
    verbose: Verbose, marks: list[Mapping[str, Any]]
):
    """The lock was held when it was forked, by a thread that the child does not have."""
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with verbose._lock:
            held.set()
            done.wait(20)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(20)
    child = os.fork()
    if child == 0:
        pointer = c_stdout().value
        verbose.begin(1, "aten.mm.default")
        unchanged = c_stdout().value == pointer
        verbose.end(1)
        os._exit(0 if unchanged else 1)
    done.set()
    holder.join()
    ended = _status(child)

    assert ended == 0
    assert marks == []


def _status(child: int) -> int | None:
    """How a child ended; None, and it is ended, if it does not within ten seconds."""
    for _ in range(200):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def test_an_op_that_collecting_garbage_runs_inside_does_not_wait_forever(
    verbose: Verbose, monkeypatch: pytest.MonkeyPatch
):
    """A finaliser of the program may run ops anywhere, also where an op is being noted."""
    add = ObservedOps.add

    def with_garbage(observed: ObservedOps, seq: int, *arguments: Any, **more: Any) -> None:
        monkeypatch.setattr(ObservedOps, "add", add)
        verbose.begin(2, "aten.mm.default")
        verbose.end(2)
        add(observed, seq, *arguments, **more)

    monkeypatch.setattr(ObservedOps, "add", with_garbage)

    verbose.begin(1, "aten.mm.default")
    done = threading.Thread(target=verbose.end, args=(1,), daemon=True)
    done.start()
    done.join(20)

    assert not done.is_alive()


def test_ops_of_the_program_are_not_watched(tmp_path: Path):
    """Their kernels may be Python code that prints; nothing is said of what they call."""
    with torch.library._scoped_library("opdrift_verbose", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x @ x, "CompositeExplicitAutograd")
        with opdrift.record(tmp_path / "t", kernels="full"):
            torch.mm(torch.ones(2, 2), torch.ones(2, 2))
            torch.ops.opdrift_verbose.twice(torch.ones(2, 2))

    found = dict(seen(opdrift.load(tmp_path / "t")))

    assert found["aten.mm.default"] is not None
    assert found["opdrift_verbose.twice.default"] is None


def test_a_line_of_unknown_format_is_kept_as_it_is(
    verbose: Verbose, marks: list[Mapping[str, Any]], capfd: pytest.CaptureFixture[str]
):
    verbose.begin(1, "aten.mm.default")
    libc.printf(b"onednn_verbose,v7,{matmul: new}\n")
    verbose.end(1)
    verbose.close()

    assert marks[0]["raw"] == [(1, "onednn_verbose,v7,{matmul: new}")]
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize(
    ("line", "call"),
    [
        ("onednn_verbose,v1,info,oneDNN v3.12.0 (commit 80afa71)", ""),
        ("onednn_verbose,v1,primitive,info,template:operation,engine,primitive", ""),
        ("MKL_VERBOSE oneMKL 2024.0 Update 2 Product build 20240605 for Intel(R) 64", ""),
        (
            "onednn_verbose,v1,primitive,exec,cpu,matmul,brg:avx2,undef,src:f32::blocked:ab::f0,,,2x3:3x4,1e-05",
            "onednn_verbose,v1,primitive,exec,cpu,matmul,brg:avx2,undef,src:f32::blocked:ab::f0,,,2x3:3x4",
        ),
        (
            "MKL_VERBOSE SGEMM(T,N,96,2,32,0x7ff0,0x55,32,(nil),96) 7.47ms CNR:OFF Dyn:1 FastMM:1 TID:3  NThr:12",
            "MKL_VERBOSE SGEMM(T,N,96,2,32,*,*,32,(nil),96) CNR:OFF Dyn:1 FastMM:1 NThr:12",
        ),
        ("onednn_verbose,v1,primitive,error,cpu,matmul", None),
        ("MKL_VERBOSE SGEMM took long", None),
    ],
)  # fmt: skip
def test_calls_are_told_from_other_lines(line: str, call: str | None):
    """Without times, addresses and threads' numbers; an empty text tells of no call, None is not understood."""
    assert call_of(line) == call


class TestNotCaptured:
    """Where somebody else reads what the libraries print, the run is recorded without it, and says so."""

    def reason(self, trace: opdrift.Trace) -> str:
        """Why nothing was observed, as told in a mark and in the footer."""
        (why,) = Observed(trace).refused
        assert trace.footer is not None
        assert trace.footer.notes == (f"which kernels ran was not observed: {why}",)
        return why

    @pytest.mark.parametrize("name", ["ONEDNN_VERBOSE", "DNNL_VERBOSE", "MKL_VERBOSE"])
    def test_a_variable_asks_for_it(
        self,
        name: str,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ):
        monkeypatch.setenv(name, "1")
        with caplog.at_level(logging.WARNING), opdrift.record(tmp_path / "t", kernels="full"):
            torch.mm(torch.ones(2, 2), torch.ones(2, 2))

        trace = opdrift.load(tmp_path / "t")

        assert self.reason(trace).startswith(f"{name}=1 is set")
        assert [found for _, found in seen(trace)] == [None]
        assert [r.message for r in caplog.records] == [
            f"opdrift does not see which kernels ran: {self.reason(trace)}. They are named by rule, as with"
            " kernels='auto'. The run is not affected."
        ]

    @pytest.mark.parametrize("library", ["mkldnn", "mkl"])
    def test_the_program_is_verbose_already(
        self, library: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ):
        """Its lines go on coming where it reads them."""
        a = torch.ones(16, 16)
        with (
            getattr(torch.backends, library).verbose(1),
            opdrift.record(tmp_path / "t", kernels="full"),
        ):
            torch.nn.functional.gelu(torch.mm(a, a))

        assert "verbose itself" in self.reason(opdrift.load(tmp_path / "t"))
        assert "VERBOSE" in capfd.readouterr().out.upper()

    def test_the_program_is_verbose_for_a_while(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ):
        """It gets its lines, and no others; before and after it the ops are watched."""
        a = torch.ones(16, 16)
        with opdrift.record(tmp_path / "t", kernels="full"):
            torch.mm(a, a)
            with torch.backends.mkl.verbose(1):
                torch.mm(a, a)
            torch.mm(a, a)

        trace = opdrift.load(tmp_path / "t")

        assert [each is not None for _, each in seen(trace)] == [True, False, True]
        assert "MKL verbose itself" in self.reason(trace)
        assert capfd.readouterr().out.count("MKL_VERBOSE SGEMM") == 1

    def test_a_function_of_torch_that_the_program_kept_works_after_the_recording(
        self, verbose: Verbose, told: list[str], capfd: pytest.CaptureFixture[str]
    ):
        """It was replaced while the recording ran."""
        kept = torch._C._verbose.mkl_set_verbose
        verbose.close()

        kept(1)
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
        kept(0)
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))

        assert told == []
        assert capfd.readouterr().out.count("MKL_VERBOSE SGEMM") == 1

    def test_another_recording_watches_already(self, tmp_path: Path):
        a = torch.ones(2, 2)
        with opdrift.record(tmp_path / "outer", kernels="full"):
            with opdrift.record(tmp_path / "inner", kernels="full"):
                torch.mm(a, a)
            torch.mm(a, a)

        outer = opdrift.load(tmp_path / "outer")

        assert "another recording" in self.reason(opdrift.load(tmp_path / "inner"))
        assert all(found is not None and found.names for _, found in seen(outer))

    def test_the_libraries_print_in_another_format(self, monkeypatch: pytest.MonkeyPatch):
        def set_verbose(level: int) -> int:
            if level:
                libc.printf(b"ONEDNN 9: all is well\n")
            return 1

        monkeypatch.setattr(torch._C._verbose, "mkldnn_set_verbose", set_verbose)

        with pytest.raises(
            CannotWatchError, match="format that is not known: 'ONEDNN 9: all is well'"
        ):
            Verbose(ObservedOps("verbose", lambda _: None), lambda _: None)

    def test_the_libraries_print_nothing(self, monkeypatch: pytest.MonkeyPatch):
        for name in SETTERS:
            monkeypatch.setattr(torch._C._verbose, name, lambda _: 1)

        with pytest.raises(CannotWatchError, match="neither oneDNN nor MKL prints"):
            Verbose(ObservedOps("verbose", lambda _: None), lambda _: None)

    def test_opdrift_itself_fails_at_an_op(
        self,
        verbose: Verbose,
        marks: list[Mapping[str, Any]],
        told: list[str],
        monkeypatch: pytest.MonkeyPatch,
    ):
        """Nothing is raised, and stdout is given back."""
        pointer = c_stdout().value
        monkeypatch.setattr(Verbose, "_note", lambda *_: 1 / 0)

        verbose.begin(1, "aten.mm.default")
        verbose.end(1)
        verbose.begin(2, "aten.mm.default")

        assert c_stdout().value == pointer
        assert told == ["opdrift failed at it: ZeroDivisionError('division by zero')"]
        assert marks[-1]["refused"] == told[0]


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="other CPUs have other libraries"
)
def test_what_is_seen_is_what_torchs_rules_say(tmp_path: Path):
    """200 random products, convolutions and the like: no pick is another library's than by rule."""
    rng = random.Random(3)
    makers = (product, product, whole, convolution, other)
    cases = [rng.choice(makers)(rng) for _ in range(200)]
    cases.append(lambda: torch.mv(torch.ones(10, 5), torch.ones(1).expand(5)))
    with torch.no_grad(), opdrift.record(tmp_path / "t", kernels="full", integrity="off"):
        for case in cases:
            case()

    trace = opdrift.load(tmp_path / "t")
    picks = Picks(trace)
    found = [pick for i in range(len(trace.ops)) if (pick := picks.of(i)) is not None]

    assert [pick for pick in found if "by torch's rules it would" in (pick.reason or "")] == []
    assert sum(pick.source == "verbose" for pick in found) > 100


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3)
        self.layer = nn.TransformerEncoderLayer(36, 4, 16, batch_first=True, dropout=0.5)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.layer(self.convolution(image).flatten(2))


def test_bits_gradients_and_random_state_are_the_same(unchanged: Any):
    """Convolution, products, attention, dropout, forward and backward; in bfloat16 too."""
    models = [Small(), Small().bfloat16()]

    def run() -> Any:
        found = []
        for model, dtype in zip(models, (torch.float32, torch.bfloat16), strict=True):
            model.zero_grad()
            out = model(torch.randn(2, 3, 8, 8).to(dtype))
            out.square().sum().backward()
            found += [out, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        return found

    trace = unchanged(run, kernels="full")

    assert sum(found is not None and bool(found.names) for _, found in seen(trace)) > 20


def test_a_default_device_and_autocast_of_the_program_play_no_part(tmp_path: Path):
    """What is tried at the start is no op of the program's."""
    torch.set_default_device("meta")
    try:
        with (
            torch.autocast("cpu", torch.bfloat16),
            torch.inference_mode(),
            opdrift.record(tmp_path / "t", kernels="full"),
        ):
            torch.mm(torch.ones(2, 2, device="cpu"), torch.ones(2, 2, device="cpu"))
    finally:
        torch.set_default_device(None)

    assert Observed(opdrift.load(tmp_path / "t")).refused == []
