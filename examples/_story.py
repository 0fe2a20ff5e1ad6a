"""What the examples share: a folder for traces, fresh processes, and the `diff-trace` command."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path


@contextlib.contextmanager
def workspace(keep: Path | None) -> Iterator[Path]:
    """A folder for this story's traces: `keep`, or one that is gone afterwards."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="opdrift-example-") as folder:
        yield Path(folder)


def heading(text: str) -> None:
    """Print what the next part of the story is."""
    print(f"\n=== {text}\n", flush=True)


def diff_trace(folder: Path, left: str, right: str, *options: str) -> None:
    """Run `diff-trace left right` in `folder` and print it as a user sees it."""
    command(folder, "diff-trace", left, right, *options)


def command(folder: Path, name: str, *arguments: str) -> None:
    """Run one of opdrift's commands in `folder` and print it as a user sees it.

    Exit status 1 is an answer ("they differ"); above that it is trouble, which ends this process.
    """
    program = shutil.which(name, path=_path()) or sys.exit(
        f"There is no command {name}: install opdrift first (see the README)."
    )
    print(f"$ {name} {shlex.join(arguments)}", flush=True)
    status = subprocess.run([program, *arguments], cwd=folder, check=False).returncode
    if status not in (0, 1):
        sys.exit(f"{name} ended with status {status}")


def _path() -> str:
    """PATH, but first the folder where this Python's own commands are."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def together(commands: Sequence[tuple[str, Sequence[str | Path]]]) -> None:
    """Run scripts at the same time, one process each; the first failure ends this process."""
    lines = [[sys.executable, script, *map(str, arguments)] for script, arguments in commands]
    running = [
        subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for line in lines
    ]
    try:
        outputs = [process.communicate()[0] for process in running]
    finally:
        for process in running:
            process.kill()
    for line, process, output in zip(lines, running, outputs, strict=True):
        if process.returncode:
            sys.exit(f"{output}\n{shlex.join(line)} failed")
        if output:
            print(output, end="", flush=True)
