"""The rules for CPU libraries against what oneDNN and MKL say themselves when they are verbose."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import opdrift
from opdrift.picks import Picks
from opdrift.records import RAISED, Pick

PROGRAM = Path(__file__).parent / "cpu_routines.py"


def said(lines: Sequence[str]) -> tuple[set[str], set[str]]:
    """Which primitives of oneDNN ran, and which routines of MKL."""
    primitives = {
        line.split(",")[5]
        for line in lines
        if line.startswith("onednn_verbose,v1,primitive,exec,") and ",reorder," not in line
    }
    return primitives, {m[1] for line in lines if (m := re.match(r"MKL_VERBOSE (\w+)\(", line))}


def agrees(chosen: Pick, primitives: set[str], routines: set[str]) -> bool:
    """Whether the libraries did what a pick says."""
    detail = chosen.name.partition(": ")[2]
    if chosen.library == "oneDNN":
        return bool(primitives)
    if "lower precision" in detail:  # oneDNN multiplies the large ones
        return "convolution" not in primitives
    if primitives:
        return False
    if chosen.library == "MKL":
        return routines == {detail}
    if (
        chosen.library == "NNPACK"
        or detail.endswith("products and own cells")
        or "unfolding" in detail
    ):
        return True  # what they call is not said
    named = re.search(r"[SD]GEMM", detail)
    return routines == ({named[0]} if named else set())


@pytest.mark.slow
@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="rules of builds with MKL")
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="held against CPUs of this kind"
)
@pytest.mark.parametrize(("units", "cases"), [("ALL", 1000), ("AVX512_CORE", 250), ("AVX2", 250)])
def test_the_libraries_do_what_the_rules_say(tmp_path: Path, units: str, cases: int) -> None:
    """Random ops, also on what oneDNN and torch take for a CPU without AMX, or without AVX-512."""
    variables = {
        **os.environ,
        "ONEDNN_MAX_CPU_ISA": units,
        "ONEDNN_VERBOSE": "1",
        "MKL_VERBOSE": "1",
        "MKL_VERBOSE_OUTPUT_FILE": str(tmp_path / "mkl.txt"),
        "OMP_NUM_THREADS": "1",
    }
    with (tmp_path / "stdout.txt").open("w+") as stdout:
        subprocess.run(
            [sys.executable, PROGRAM, tmp_path, str(cases)],
            env=variables, stdout=stdout, check=True, timeout=300,
        )  # fmt: skip
    trace = opdrift.load(tmp_path / "t")
    picks = Picks(trace)
    ends = [m.seq for m in trace.marks if m.kind == "case"]
    lines = json.loads((tmp_path / "said.json").read_text())
    wrong = []
    told: Counter[str] = Counter()
    for (first, last), each in zip(pairwise(ends), lines, strict=True):
        ops = [i for i in range(first, last) if not trace.ops.flags[i] & RAISED]
        chosen = [p for i in ops if (p := picks.of(i)) is not None]
        if len(chosen) != 1:  # layers of several products; or the rules say nothing
            continue
        told[f"{chosen[0].library} {chosen[0].name.partition(': ')[2]}"] += 1
        if not agrees(chosen[0], *said(each)):
            op = next(i for i in range(first, last) if picks.of(i) is not None)
            wrong.append((chosen[0], said(each), str(trace.op(op).signature.arguments)))

    assert wrong == []
    assert sum(told.values()) > 0.85 * cases, told
    assert len(told) > 15, told
