"""Print versions, flags and the active fingerprint path; for bug reports."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from typing import Any, Final

from opdrift.commands.console import complain, emit
from opdrift.commands.exit_codes import ExitCode
from opdrift.render.words import readable

EPILOG: Final = "exit status: 0; 2 if torch cannot be imported, which recording needs."

#: Runs in a process of its own: what a broken torch does there (even a crash) can still be reported,
#: and this command, as every reading one, never imports torch.
_ASK: Final = (
    "import json, sys, opdrift.environment as e; json.dump(e.report(), sys.stdout, default=str)"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No options."""


def run(options: argparse.Namespace) -> int:
    """Print what is known, also where torch cannot be imported."""
    del options
    import platform
    import subprocess

    done = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True, check=False)
    if done.returncode == 0:
        emit(_lines(json.loads(done.stdout)))
        return ExitCode.SAME
    import opdrift

    emit(
        _lines(
            {
                "opdrift": opdrift.__version__,
                "python": sys.version.replace("\n", " "),
                "platform": platform.platform(),
            }
        )
    )
    last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    complain("opdrift", f"torch could not be asked ({last}), so nothing can be recorded here.")
    return ExitCode.TROUBLE


def _lines(facts: Mapping[str, Any], indent: str = "") -> str:
    out = []
    for name, value in facts.items():
        if isinstance(value, Mapping):
            out.append(f"{indent}{readable(name)}\n{_lines(value, indent + '  ')}")
        else:
            out.append(f"{indent}{readable(name)}: {readable(str(value))}\n")
    return "".join(out)
