"""What a report tells to type about a flag sets that flag."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import Any

import pytest

from opdrift.causes.setters import _STATEMENTS, statement, statements


@pytest.mark.parametrize(
    ("flag", "value", "expected"),
    [
        ("mkldnn.enabled", False, "torch.backends.mkldnn.enabled = False"),
        ("fp32_precision.mkldnn.matmul", "ieee", 'torch.backends.mkldnn.matmul.fp32_precision = "ieee"'),
        ("default_dtype", "float64", "torch.set_default_dtype(torch.float64)"),
        ("num_threads", 2, "torch.set_num_threads(2)"),
        ("num_threads", None, None),
        ("cuda.capability", "9.0", None),
        ("mkldnn.enabled", "unreadable: RuntimeError", None),
        ("sdp.flash", [True], None),
    ],
)  # fmt: skip
def test_a_flag_becomes_a_statement(flag: str, value: Any, expected: str | None):
    """What cannot be set, and what was not read, becomes none."""
    assert statement(flag, value) == expected


def test_statements_are_joined_and_said_once():
    flags = [
        ("sdp.flash", True),
        ("cuda.capability", "9.0"),
        ("num_threads", 1),
        ("num_threads", 1),
    ]

    assert (
        statements(flags) == "torch.backends.cuda.enable_flash_sdp(True); torch.set_num_threads(1)"
    )


@pytest.mark.slow
def test_each_statement_sets_its_flag_and_no_error_comes():
    """To another value than it has, each in turn, in a process of its own: settings are process-wide."""
    program = """
        import sys, torch
        from opdrift import environment
        from opdrift.causes.setters import _STATEMENTS, statement

        other = {
            "default_dtype": "float64", "float32_matmul_precision": "medium", "num_threads": 1,
            "quantized.engine": "fbgemm", **{n: "ieee" for n in _STATEMENTS if n.startswith("fp32_")},
        }
        torch.set_num_threads(2)
        for name in _STATEMENTS:
            if name == "autocast.cuda":
                continue  # it stays off without a GPU
            before = environment.snapshot()[name]
            value = other.get(name, before is not True)
            text = statement(name, value)
            if text.startswith("with "):
                exec(text.replace("...", "found = environment.snapshot()[name]"))
            else:
                exec(text)
                found = environment.snapshot()[name]
            if found != value:
                print(f"{text}: {name} is {found}")
            if not text.startswith("with ") and not str(before).startswith("unreadable"):
                exec(statement(name, before))
        """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True, text=True, timeout=120, check=False,
        env={"PYTHONPATH": ":".join(p for p in sys.path if p)},
    )  # fmt: skip

    assert done.stdout == ""
    assert done.returncode == 0, done.stderr
    assert len(_STATEMENTS) > 30
