"""Where a fingerprint cannot be had the run goes on, and the trace says of what and why; one warning at most."""

from __future__ import annotations

import dataclasses
import os
import stat
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import opdrift
from opdrift.fingerprint import compiled, load_engine

Record = Callable[[Callable[[], Any]], tuple["opdrift.Trace", list[str]]]


@pytest.fixture
def recorded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Record:
    """Record a run; the trace, and everything that was said to the user."""

    def record(run: Callable[[], Any]) -> tuple[opdrift.Trace, list[str]]:
        caplog.clear()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            with opdrift.record(tmp_path / "a.trace", overwrite=True):
                kept = run()
        said = [str(w.message) for w in seen if "opdrift" in str(w.message)]
        said += [r.getMessage() for r in caplog.records if r.name.startswith("opdrift")]
        trace = opdrift.load(tmp_path / "a.trace")
        del kept
        return trace, said

    return record


def has_fingerprint(trace: opdrift.Trace, name: str) -> list[bool]:
    """Whether outputs of the last op of a name have one."""
    op = [trace.op(k) for k in range(len(trace.ops)) if trace.op(k).name == name][-1]
    return [trace.fingerprint(value) is not None for value in op.outputs]


# ---- memory that is gone -----------------------------------------------------------------------------------


@pytest.fixture
def ops() -> Iterator[Any]:
    """Custom ops that free what they return or were given, before anybody can read it."""
    library = torch.library.Library("opdrift_bad_input", "DEF")

    def freed(x: Tensor) -> Tensor:
        made = x * 2
        made.untyped_storage().resize_(0)
        return made

    def freed_transposed(x: Tensor) -> Tensor:
        made = (x * 2).view(10, 10).t()
        made.untyped_storage().resize_(0)
        return made

    def frees(x: Tensor) -> None:
        x.untyped_storage().resize_(0)

    for name, signature, run in (
        ("freed", "(Tensor x) -> Tensor", freed),
        ("freed_transposed", "(Tensor x) -> Tensor", freed_transposed),
        ("frees", "(Tensor(a!) x) -> ()", frees),
    ):
        library.define(f"{name}{signature}")
        library.impl(name, run, "CompositeExplicitAutograd")
    yield torch.ops.opdrift_bad_input
    library._destroy()


@pytest.mark.parametrize("name", ["freed", "freed_transposed"])
def test_an_output_whose_storage_was_freed_before_it_was_read_is_noted(recorded, ops, name):
    """Reading it would end the process; the op is recorded without a content, and the next ones with theirs."""
    trace, said = recorded(lambda: (getattr(ops, name)(torch.ones(100)), torch.ones(3) + 1))

    assert trace.footer is not None
    assert trace.footer.failures == ()
    assert trace.footer.notes == (
        "1 contents were not fingerprinted: its storage was freed: 0 bytes are left of the 400 it needs",
    )
    assert has_fingerprint(trace, f"opdrift_bad_input.{name}.default") == [False]
    assert has_fingerprint(trace, "aten.add.Tensor") == [True]
    assert said == [
        "opdrift recorded 1 values without their contents: its storage was freed: 0 bytes are left of the 400"
        " it needs. The run is not affected; the trace lists them."
    ]


def test_tensors_without_content_are_noted_and_nobody_is_warned(recorded):
    """Nothing is missing of a meta tensor."""
    trace, said = recorded(lambda: torch.ones(3, device="meta") * 2)

    assert trace.footer is not None
    assert trace.footer.notes == (
        "2 contents were not fingerprinted: a meta tensor has no content",
    )
    assert said == []


def test_reasons_are_bounded(recorded, ops):
    """Each freed size is a reason of its own: a long run must not grow by them."""
    trace, said = recorded(lambda: [ops.freed(torch.ones(n)) for n in range(1, 100)])

    assert trace.footer is not None
    assert len(trace.footer.notes) == 51
    assert trace.footer.notes[-1] == "49 contents were not fingerprinted: for other reasons"
    assert len(said) == 1


def test_an_input_whose_storage_the_op_frees_is_no_content_afterwards(recorded, ops):
    """What it held before has its fingerprint."""
    x = torch.ones(100)
    trace, _ = recorded(lambda: (x * 2, ops.frees(x), torch.ones(3) + 1))

    assert trace.footer is not None
    assert trace.footer.failures == ()
    assert has_fingerprint(trace, "aten.mul.Tensor") == [True]
    assert has_fingerprint(trace, "aten.add.Tensor") == [True]


# ---- engines ----------------------------------------------------------------------------------------------


@pytest.fixture
def no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installation without the compiled core."""
    monkeypatch.delenv("OPDRIFT_FINGERPRINT", raising=False)
    monkeypatch.setattr(compiled, "_FOLDER", tmp_path)
    compiled._checked.cache_clear()
    compiled._open.cache_clear()
    yield
    compiled._checked.cache_clear()
    compiled._open.cache_clear()


@pytest.mark.usefixtures("no_library")
def test_without_a_compiler_the_same_digests_are_recorded(recorded):
    """NumPy is slower and writes the same; the header says which it was, and why."""
    x = torch.arange(8.0)
    trace, _ = recorded(lambda: x * 2)
    found = trace.fingerprint(trace.op(0).outputs[0])

    assert found is not None
    assert found.raw == int(load_engine().fingerprint(x * 2)["raw"])
    assert "numpy (no compiled library)" in str(trace.header)


def test_a_dtype_that_nobody_knows_is_recorded_as_its_bytes(recorded, monkeypatch):
    """A dtype of a later torch is in no table: no numbers, but the digest."""
    known = load_engine()
    kinds = {dtype: kind for dtype, kind in known.kinds.items() if dtype != torch.float16}
    from opdrift import recorder
    from opdrift.fingerprint import tensors

    monkeypatch.setattr(
        recorder, "load_engine", lambda: dataclasses.replace(known, kinds=dict(kinds))
    )
    monkeypatch.setattr(tensors, "_READABLE", frozenset(kinds))
    monkeypatch.delitem(tensors._NUMBERS, torch.float16)
    trace, said = recorded(lambda: torch.ones(50).half())
    found = trace.fingerprint(trace.op(len(trace.ops) - 1).outputs[0])

    assert trace.footer is not None
    assert trace.footer.failures == ()
    assert found is not None
    assert (found.code, found.n) == (13, 100)
    assert found.raw == int(known.fingerprint(torch.ones(50).half().view(torch.uint8))["raw"])
    assert said == []


def test_a_cache_that_cannot_be_written_does_not_matter_on_the_host(tmp_path):
    """Nothing is compiled or cached at run time: a read-only home and installation are enough to record."""
    home = tmp_path / "home"
    home.mkdir()
    home.chmod(stat.S_IRUSR | stat.S_IXUSR)
    program = (
        "import torch, opdrift, sys\n"
        "with opdrift.record(sys.argv[1]):\n"
        "    torch.ones(3) * 2\n"
        "trace = opdrift.load(sys.argv[1])\n"
        "print(len(trace.ops), trace.footer.failures, trace.footer.notes)\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, str(tmp_path / "a.trace")],
        env={
            **os.environ,
            "HOME": str(home),
            "XDG_CACHE_HOME": str(home),
            "TRITON_CACHE_DIR": str(home / "triton"),
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert (done.stdout, done.stderr) == ("2 () ()\n", "")
    assert list(home.iterdir()) == []
