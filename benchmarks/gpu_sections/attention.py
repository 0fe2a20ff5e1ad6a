"""Sections: the rules for attention backends hold on this GPU, and torch agrees with what reports say of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import attention_rules
import torch
import torch.nn.functional as F  # noqa: N812 (as torch writes it)
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import opdrift
from gpu_sections.check import Check
from opdrift.picks import Picks
from opdrift.records import Pick

#: Disagreements that are printed.
SHOWN = 8
Attention = Callable[[], Tensor]


def check_rules(check: Check) -> None:
    """Random calls: torch's chooser and its `can_use_*` against the rules."""
    if torch.version.hip is not None:
        print("  there are no rules for AMD's devices")
        return
    count = 500 if not check.is_gpu else 5_000 if check.quick else 20_000
    chosen, wrong = attention_rules.hold(check.device.type, count)
    for found in wrong[:SHOWN]:
        print(f"  {found}")
    check.expect(not wrong, f"attention rules: {len(wrong)} disagreements in {count} calls")
    print(f"  {count} calls: {dict(chosen)}")


def calls(check: Check) -> Iterator[tuple[str, Attention]]:
    """Attention of many kinds, each of which some backend refuses."""

    def made(heads: int, length: int, size: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(2, heads, length, size, device=check.device).to(dtype)

    q, wide, odd = made(8, 128, 64), made(8, 128, 512), made(8, 128, 100)
    full, few, one = made(8, 128, 64, torch.float32), made(2, 128, 64), made(8, 1, 64)
    mask = torch.zeros(128, 128, device=check.device, dtype=torch.bfloat16)
    sdpa = F.scaled_dot_product_attention
    yield "plain", lambda: sdpa(q, q, q)
    yield "causal", lambda: sdpa(q, q, q, is_causal=True)
    yield "causal, one query", lambda: sdpa(one, q, q, is_causal=True)
    yield "mask", lambda: sdpa(q, q, q, mask)
    yield "bool mask", lambda: sdpa(q, q, q, mask == 0)
    yield "dropout 0.1", lambda: sdpa(q, q, q, dropout_p=0.1)
    yield "float32", lambda: sdpa(full, full, full)
    yield "float64", lambda: sdpa(full.double(), full.double(), full.double())
    yield "heads of 512", lambda: sdpa(wide, wide, wide)
    yield "heads of 100", lambda: sdpa(odd, odd, odd)
    yield "grouped heads", lambda: sdpa(q, few, few, enable_gqa=True)
    yield "grouped heads, mask", lambda: sdpa(q, few, few, mask, enable_gqa=True)
    yield "transposed last dims", lambda: sdpa(wide.mT, wide.mT, wide.mT)


def picks(path: Path) -> dict[str, Pick]:
    """Name of a call -> what its trace says that it ran."""
    trace = opdrift.load(path)
    starts = [(mark.seq, str(mark.fields["name"])) for mark in trace.marks if mark.kind == "call"]
    ends = [seq for seq, _ in starts[1:]] + [len(trace.ops)]
    found = Picks(trace)
    named = {}
    for (start, name), end in zip(starts, ends, strict=True):
        told = found.among(range(start, end)).values()
        named[name] = next((pick for pick in told if pick.backend is not None), None)
    return {name: pick for name, pick in named.items() if pick is not None}


def check_answers(check: Check, scratch: Path) -> None:
    """Recorded calls, split by the dispatcher and whole: the backend that ran, and torch's word on the others."""
    path = scratch / "attention.trace"
    for whole in (False, True):
        mode = torch.inference_mode() if whole else contextlib.nullcontext()
        with mode, opdrift.record(path, overwrite=True) as recorder:
            for name, call in calls(check):
                recorder.mark("call", name=name)
                call()
        trace = opdrift.load(path)
        asked = sum(mark.kind == "can-use" for mark in trace.marks)
        check.expect(
            not check.is_gpu or asked > 0, "torch was not asked which backends it could use"
        )
        print(f"  {'whole' if whole else 'split'}: torch was asked {asked} times")
        for name, pick in picks(path).items():
            refused = "; ".join(f"not {other}: {why}" for other, why in pick.refused.items())
            print(f"    {name:22}{pick.backend}{' ' * bool(refused)}{refused}")
            if check.is_gpu:
                check.expect("asked after the op" not in refused, f"{name}: {refused}")


def check_pinned_backends(check: Check, scratch: Path) -> None:
    """Each backend by itself, where it takes the call: the trace names it."""
    path = scratch / "pinned.trace"
    q = torch.randn(2, 8, 128, 64, device=check.device).to(torch.bfloat16)
    names = ("FLASH_ATTENTION", "EFFICIENT_ATTENTION", "CUDNN_ATTENTION", "MATH")
    for name in names if check.is_gpu else ("FLASH_ATTENTION", "MATH"):
        try:
            with (
                sdpa_kernel([getattr(SDPBackend, name)]),
                opdrift.record(path, overwrite=True) as r,
            ):
                r.mark("call", name=name)
                F.scaled_dot_product_attention(q, q, q)
        except RuntimeError as error:
            print(f"  {name}: {str(error).splitlines()[0]}")
            continue
        found = picks(path).get(name)
        check.expect(found is not None and found.backend == name, f"{name} was told as {found}")
        print(f"  {name}: {None if found is None else found.library}")
