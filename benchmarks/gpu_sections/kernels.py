"""Sections: `kernels="full"` names the kernels of every op, changes nothing, and lets the program's profiler be."""

from __future__ import annotations

import contextlib
import shutil
import statistics
import time
from collections import Counter
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import opdrift
from gpu_sections.check import Check
from gpu_sections.recording import bits, forward, training_step, transformer
from opdrift.picks.device import kernel_library, kernel_text
from opdrift.picks.observed import Observed
from opdrift.tracefile.reader import Trace

#: Ops that cannot do without a kernel.
COMPUTE = ("mm", "attention", "layer_norm", "gelu", "relu", "softmax", "dropout", "mse", "mean")
SHOWN = 12


def kernels_of(trace: Trace) -> list[tuple[str, tuple[str, ...] | None]]:
    """The ops in order, with the kernels that they launched; None for those that nobody watched."""
    observed = Observed(trace)
    found = []
    for index in range(len(trace.ops)):
        op = trace.op(index)
        seen = observed.of(op.seq, "profiler")
        found.append((op.name, None if seen is None or seen.ambiguous else seen.names))
    return found


def said_of(
    check: Check, trace: Trace, *, refusals: int = 0
) -> list[tuple[str, tuple[str, ...] | None]]:
    """What a trace holds of kernels, after the complaints about it."""
    assert trace.footer is not None
    for failure in trace.footer.failures:
        check.expect(False, f"kernels: {failure}")
    refused = [why for why in Observed(trace).refused if "profiler" in why or "clock" in why]
    check.expect(len(refused) == refusals, f"kernels: refused {refused}")
    stray = [text for m in trace.marks if m.kind == "kernels" and m.fields["source"] == "profiler" for _, text in m.fields.get("raw", ())]  # fmt: skip
    for text in stray[:SHOWN]:
        print(f"    {text}")
    return kernels_of(trace)


def check_names(check: Check, scratch: Path) -> None:
    """A training step: the same bits, and a kernel for every op that computes."""
    path, results = scratch / "kernels.trace", []
    for recorded in (False, True, False):
        model, x = transformer(check)
        model.train()
        start = (
            opdrift.record(path, model=model, kernels="full", overwrite=True)
            if recorded
            else contextlib.nullcontext()
        )
        with start:
            kept = training_step(model, x)
        results.append(bits(kept))
    if results[0] != results[2]:
        print("  the plain run does not repeat itself, so nothing can be said of its bits")
    else:
        check.expect(results[0] == results[1], "kernels='full' changed the run")

    found = said_of(check, opdrift.load(path))
    watched = [(op, names) for op, names in found if names is not None]
    launched = sum(len(names) for _, names in watched)
    print(f"  {len(found)} ops, {len(watched)} watched, {launched} kernels")
    if not check.is_gpu:
        return
    check.expect(len(watched) > 0.99 * len(found), f"{len(found) - len(watched)} ops not watched")
    bare = Counter(op for op, names in watched if not names and any(word in op for word in COMPUTE))
    check.expect(not bare, f"ops that launched nothing: {dict(bare.most_common(SHOWN))}")
    libraries = Counter(str(kernel_library(name)) for _, names in watched for name in names)
    print(f"  libraries: {dict(libraries.most_common())}")
    kinds = Counter((op, kernel_text(name)) for op, names in watched for name in names)
    for (op, name), times in kinds.most_common(SHOWN):
        print(f"    {times:4} x {op:42}{name[:110]}")
    unknown = Counter(
        name for _, names in watched for name in names if kernel_library(name) is None
    )
    print(f"  names that tell no library: {[name[:60] for name, _ in unknown.most_common(SHOWN)]}")


def check_own_profiler(check: Check, scratch: Path) -> None:
    """A profiler of the program's in the middle keeps its events; ops before and after it are watched."""
    path = scratch / "profiled.trace"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if check.is_gpu else [])]
    model, x = transformer(check)
    model.eval()
    with opdrift.record(path, model=model, kernels="full", overwrite=True):
        forward(model, x)
        with profile(activities=activities) as user:
            forward(model, x)
        forward(model, x)
    theirs = [
        event for event in user.events() if event.name.startswith(("aten::", "void ", "at::"))
    ]
    check.expect(len(theirs) > 0, "the program's profiler has no events")
    found = said_of(check, opdrift.load(path), refusals=1)
    third = len(found) // 3
    parts = [[names for _, names in found[i * third : (i + 1) * third]] for i in range(3)]
    seen = [sum(names is not None for names in part) for part in parts]
    check.expect(
        seen[0] > 0.9 * third and seen[2] > 0.9 * third and seen[1] < 0.1 * third,
        f"watched of each third of the ops: {seen} of {third}",
    )
    print(f"  {len(theirs)} events of its own; watched of each third of the ops: {seen} of {third}")


def show_batch_sizes(check: Check, scratch: Path) -> None:
    """The kernels of one product, by the number of rows."""
    path = scratch / "rows.trace"
    layer = nn.Linear(1024, 1024).to(check.device, torch.bfloat16)
    for rows in (1, 2, 4, 15, 64, 480):
        x = torch.randn(rows, 1024, device=check.device).to(torch.bfloat16)
        with torch.no_grad(), opdrift.record(path, kernels="full", overwrite=True):
            layer(x)
        names = [kernel_text(n) for op, found in kernels_of(opdrift.load(path)) if "mm" in op for n in found or ()]  # fmt: skip
        print(f"  {rows:5} rows  {', '.join(names) or 'none'}")


def measure_names(check: Check, scratch: Path) -> None:
    """A forward pass with and without, in turns; opening and closing apart from what is inside."""
    model, x = transformer(check)
    model.eval()
    path = scratch / "cost.trace"
    inside: dict[str, list[float]] = {"auto": [], "full": []}
    whole: dict[str, list[float]] = {"auto": [], "full": []}
    forward(model, x)
    for number in range(6 if check.is_gpu else 2):
        for level in inside:
            check.synchronize()
            begun = time.perf_counter()
            with opdrift.record(path, model=model, kernels=level, overwrite=True):  # type: ignore[arg-type]
                opened = time.perf_counter()
                for _ in range(5):
                    forward(model, x)
                check.synchronize()
                closed = time.perf_counter()
            if number:
                inside[level].append(closed - opened)
                whole[level].append(time.perf_counter() - begun)
    ops = len(opdrift.load(path).ops)
    shutil.rmtree(path)
    for what, times in (("inside", inside), ("whole", whole)):
        auto, full = (statistics.median(times[level]) for level in ("auto", "full"))
        print(
            f"  {what:8}{full / auto:6.2f} times kernels='auto', {(full - auto) / ops * 1e6:.1f} us an op"
        )
