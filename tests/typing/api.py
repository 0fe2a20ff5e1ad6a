"""User code that is only type-checked: what the public surface promises. Never run."""

from __future__ import annotations

from pathlib import Path
from typing import assert_type

import torch
from torch import nn

import opdrift
from opdrift.testing import assert_same_run


class Net(nn.Module):
    """A model."""


def record_with_every_option(model: nn.Module, tokens: torch.Tensor) -> None:
    """Options are keyword-only; the `with` gives a recorder."""
    with opdrift.record(
        Path("monday.trace"),
        model={"encoder": model, "head": Net()},
        inputs={"tokens": tokens},
        batch=opdrift.Batch(2, lengths=[3, 5], pad_side="left"),
        integrations=("esm",),
        kernels="off",
        integrity="full",
        label="monday",
        overwrite=True,
    ) as recorder:
        assert_type(recorder, opdrift.Recorder)
        recorder.mark("step", number=1)
        with recorder.scope("generation"), recorder.pause():
            model(tokens)
        recorder.name_tensor(tokens, "tokens", kind="input")


def compare_recorders(left: opdrift.Recorder, right: opdrift.Recorder) -> None:
    """A recorder stands for the path that it wrote to."""
    assert_type(opdrift.diff(left, right), opdrift.Diagnosis)
    assert_same_run(left, right, allow="nothing", maps=["encoder=model.encoder"])


def read_and_compare() -> int:
    """Paths or traces; the diagnosis is typed down to the cause."""
    trace = opdrift.load("monday.trace")
    assert_type(trace, opdrift.Trace)
    diagnosis = opdrift.diff(trace, "tuesday.trace", samples=(0, 3))
    assert_type(diagnosis, opdrift.Diagnosis)
    if diagnosis.verdict == "identical":
        return 0
    first = diagnosis.first or diagnosis.first_bitwise
    if first is None or first.cause.confidence != "certain":
        return 1
    assert_type(first.cause.evidence, tuple[str, ...])
    assert_type(first.seq.left, int | None)
    return len(diagnosis.origins)


def errors_have_one_base(path: str) -> opdrift.Trace | None:
    """One `except` catches everything that opdrift raises on purpose."""
    try:
        return opdrift.load(path, rank=0)
    except opdrift.NotATraceError:
        return None
    except opdrift.OpdriftError as error:
        raise SystemExit(str(error)) from error


def wrong_calls_are_found(model: nn.Module) -> None:
    """What mypy must refuse; `warn_unused_ignores` fails if it ever accepts one."""
    opdrift.record("monday.trace", model)  # type: ignore[call-arg]
    opdrift.record("monday.trace", kernels="some")  # type: ignore[arg-type]
    opdrift.diff("monday.trace", 3)  # type: ignore[arg-type]
    opdrift.Batch()  # type: ignore[call-arg]
