"""Section: copies that are under way are not taken for done."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

import opdrift
from gpu_sections.check import ENGINE, Check


def busy(check: Check, x: Tensor) -> Tensor:
    """Enough work that a copy after it is still waiting when the host goes on."""
    for _ in range(40 if check.is_gpu else 1):
        x = x @ x
        x = x / x.norm()
    return x


def round_trip(check: Check, source: Tensor, pinned: Tensor) -> tuple[Tensor, Tensor]:
    """To the host into pinned memory, and from there back, both without waiting."""
    there = busy(check, source)
    pinned.copy_(there, non_blocking=True)
    back = pinned.to(check.device, non_blocking=True)
    doubled = back * 2
    if check.is_gpu:
        torch.cuda.synchronize(check.device)
    return pinned + 1, doubled


def check_copies(check: Check, scratch: Path) -> None:
    """Results with and without recording, and the contents that the trace holds of both ends."""
    side = 2048 if check.is_gpu else 32
    path = scratch / "copies.trace"
    torch.manual_seed(0)
    source = torch.randn(side, side).to(check.device)
    pinned = torch.empty(side, side, pin_memory=check.is_gpu)
    plain = [each.cpu() for each in round_trip(check, source, pinned)]
    pinned.fill_(-1.0)
    with opdrift.record(path, overwrite=True):
        recorded = round_trip(check, source, pinned)
    same = [torch.equal(a, b.cpu()) for a, b in zip(plain, recorded, strict=True)]
    check.expect(all(same), "recording changed what a copy under way gave")

    trace = opdrift.load(path)
    moves = [
        (mark.fields["direction"], mark.fields["blocking"])
        for mark in trace.marks
        if mark.kind == "move"
    ]
    both_ways = [("device-to-host", False), ("host-to-device", False)] if check.is_gpu else []
    check.expect(moves == both_ways, f"the copies between host and device are told as {moves}")

    # before the sum that ends the round trip reads it, the copy must have arrived
    wanted = {"aten.add.Tensor": pinned, "aten.mul.Tensor": pinned}
    read = known = 0
    for index in range(len(trace.ops)):
        op = trace.op(index)
        if op.name not in wanted:
            continue
        read += 1
        found = trace.fingerprint(op.inputs[0])
        row = ENGINE.fingerprint(wanted[op.name], 0)
        if found is not None:
            known += 1
            check.expect(
                (found.raw, found.n) == (int(row["raw"]), int(row["n"])),
                f"{op.name} is said to have read something else than the copy",
            )
    check.expect(read == 2, f"{read} of 2 readers of the copies were recorded")
    print(
        f"  {side} x {side} there and back: {sum(same)} of 2 results bit for bit, contents of {known} of 2 known"
    )
