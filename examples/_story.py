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


def diff_trace(folder: Path, left: str, right: str, *options: str) -> int:
    """Run `diff-trace left right` in `folder` and print it as a user sees it; its exit status.

    0 means identical, 1 that they differ. Anything else ends this process.
    """
    command = shutil.which("diff-trace", path=_path()) or sys.exit(
        "There is no command diff-trace: install opdrift first (see the README)."
    )
    arguments = [left, right, *options]
    print(f"$ diff-trace {shlex.join(arguments)}", flush=True)
    status = subprocess.run([command, *arguments], cwd=folder, check=False).returncode
    if status not in (0, 1):
        sys.exit(f"diff-trace ended with status {status}")
    return status


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
