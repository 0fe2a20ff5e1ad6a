"""Programs of several real ranks on gloo, in the words of the tests of ranks."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from subprocess import PIPE, CompletedProcess, Popen

import opdrift
from opdrift.findings import findings
from opdrift.records import Finding
from opdrift.tracefile.opening import rank_folders

ROOT = Path(__file__).parents[2]

START = """
    import os, signal, sys, time, warnings, torch, opdrift
    import torch.distributed as dist
    from datetime import timedelta
    from pathlib import Path
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    warnings.simplefilter("ignore")  # torch 2.13 renames collectives
    torch.set_num_threads(1)
    rank = int(sys.argv[1])
    dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=int(sys.argv[3]),
                            timeout=timedelta(seconds=20))
"""

#: A write that no op makes, into the fourth element of a float32 tensor.
POKE = """
    import ctypes

    def poke(tensor):
        "As a thread or a library would: with no op at all."
        ctypes.c_float.from_address(tensor.data_ptr() + 12).value = 9.0
"""


def together(program: str, folder: Path, *, ranks: int = 2) -> list[CompletedProcess[str]]:
    """Run a program as so many ranks in a folder, with opdrift importable."""
    sources = [str(ROOT / "tracer"), str(ROOT / "integrations")]
    code = f"import sys; sys.path[:0] = {sources!r}\n" + textwrap.dedent(program)
    started = [
        Popen([sys.executable, "-W", "error", "-c", code, str(rank), str(folder / "store"), str(ranks)],
              cwd=folder, stdout=PIPE, stderr=PIPE, text=True)
        for rank in range(ranks)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=120) for process in started]
    return [
        CompletedProcess(process.args, process.returncode, *output)
        for process, output in zip(started, outputs, strict=True)
    ]


def found_in(trace: Path) -> list[Finding]:
    """What the ranks of a run show to be wrong."""
    return list(findings([opdrift.load(folder) for folder in rank_folders(trace).values()]))
