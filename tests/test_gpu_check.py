"""The script that checks a GPU: on one, rehearsed without, and what it says where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
HAS_GPU = torch.cuda.is_available()


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    roots = [str(ROOT / "tracer"), str(ROOT / "integrations")]
    return subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "gpu_check.py"), *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(roots)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    """One sentence, and a status of its own: nothing was found right or wrong."""
    done = run()

    assert done.returncode == 2
    assert done.stdout == "torch sees no CUDA or ROCm device here, so nothing was checked.\n"


@pytest.mark.slow
def test_its_checks_hold_where_the_host_stands_for_a_device():
    """Torch ops in place of the kernel; what depends on the device's speed is left out."""
    sections = (
        "equality",
        "items",
        "order",
        "neutrality",
        "rules",
        "pinned",
        "rows",
        "copies",
        "offload",
    )
    done = run("--device", "cpu", "--quick", *sections)

    assert done.returncode == 0, done.stdout + done.stderr
    assert "\n0 wrong, " in done.stdout


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not HAS_GPU, reason="torch sees no CUDA or ROCm device")
def test_on_a_gpu_nothing_is_wrong():
    """The kernel itself, on the device that it is for."""
    done = run("--quick")

    assert done.returncode == 0, done.stdout + done.stderr


def test_an_unknown_section_is_refused():
    """Nothing is checked then, which must not look like success."""
    done = run("equalty")

    assert done.returncode == 2
    assert "no section equalty; there are equality, items" in done.stderr


def rules(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", ROOT / "benchmarks" / "attention_rules.py", *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_the_rules_for_attention_are_held_against_torch_on_the_cpu():
    """The script itself, where there are rules that are exact."""
    done = rules("--device", "cpu", "--calls", "1000")

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("; 0 disagreements\n")


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not HAS_GPU, reason="torch sees no CUDA or ROCm device")
def test_the_rules_for_attention_are_held_against_torch_on_a_gpu():
    """Each backend's list of conditions, asked of torch one by one."""
    done = rules()

    assert done.returncode == 0, done.stdout + done.stderr
