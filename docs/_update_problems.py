"""Run every command of docs/problems/*.md and put what it printed into the page.

    python docs/_update_problems.py [--into FOLDER] [PAGE ...]        # or `make problems`

The programs of a page lie in a folder of its name. A page's commands run one after another in a copy of that
folder, and what stands below each in a console block is replaced by what it prints now, without what it
logs to stderr. Times are left out, and an output stays as it is where it differs only in what the CPU, an unseeded draw or
the clock decides.

Commands run in children of this process, which has imported torch already: forty programs that import it
themselves would take minutes. What begins with a variable or with `python -m` gets a process of its own.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import torch

from opdrift.commands import main as commands

PROBLEMS: Final = Path(__file__).parent / "problems"
WIDTH: Final = "90"
#: A block of commands, each with its output.
_BLOCK: Final = re.compile(r"(?<=```console\n).*?(?=^```)", re.MULTILINE | re.DOTALL)
#: ", 2026-03-02 09:00:00 UTC" at the end of the lines that say which trace a side is.
_MOMENT: Final = re.compile(r",\s+\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC$", re.MULTILINE)
_ROUNDED: Final = "rounding only"
#: What the commands import, so that their processes need not.
_IMPORTED: Final = (
    "opdrift.recorder", "opdrift.diagnose", "opdrift.render.text", "opdrift.commands.run",
    "opdrift.commands.diff_trace", "opdrift.commands.show",
)  # fmt: skip


def main() -> int:
    """Write the pages."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("pages", nargs="*", help="names without .md; all of them if none is given")
    parser.add_argument("--into", type=Path, default=PROBLEMS, help="where to write them")
    options = parser.parse_args()
    # settings of the person who runs this do not belong on the pages
    for name in ("NO_COLOR", "FORCE_COLOR", "OPDRIFT_DEBUG", "ATEN_CPU_CAPABILITY"):
        os.environ.pop(name, None)
    os.environ.update(
        COLUMNS=WIDTH, PYTHONIOENCODING="utf-8", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1"
    )
    torch.set_num_threads(
        1
    )  # it has read the variables already; torchrun gives each of its processes one, too
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for module in _IMPORTED:
        importlib.import_module(module)
    paths = sorted(path for path in PROBLEMS.glob("*.md") if (PROBLEMS / path.stem).is_dir())
    for path in paths:
        if not options.pages or path.stem in options.pages:
            (options.into / path.name).write_text(replayed(path), encoding="utf-8", newline="\n")
    return 0


def replayed(page: Path) -> str:
    """The page with what its commands print now."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(shutil.copytree(PROBLEMS / page.stem, Path(scratch) / page.stem))
        text = page.read_text(encoding="utf-8")
        return _BLOCK.sub(lambda block: _block(block.group(), folder), text)


def _block(text: str, folder: Path) -> str:
    made = ""
    for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
        command, _, before = part.partition("\n")
        now = _printed(command, folder)
        made += f"$ {command}\n{before if _settled(before) == _settled(now) else now}"
    return made


def _settled(text: str) -> str:
    """A report without what the CPU, an unseeded draw or the clock decides, and how that wraps its lines."""
    if text.startswith(_ROUNDED):
        return _ROUNDED  # which op is the first that rounds is the CPU's choice
    text = re.sub(
        r"^largest relative difference along the run\n(?:.+\n)*", "", text, flags=re.MULTILINE
    )
    text = re.sub(r"\b[0-9a-f]{8,}\b|\b\d{10,}\b|\bAVX\w+", "#", text)
    text = re.sub(r"[-+]?\b\d+(?:\.\d+(?:e[-+]?\d+)?|e[-+]?\d+)x?|\b\d+x", "#", text)
    text = re.sub(r"\b(largest|becomes|difference|to) \d+", r"\1 #", text)
    text = re.sub(r"\d+ of them are|\(\S+ ulp\)", "#", text)
    text = re.sub(r"from sketches|exact", "#", text)
    return " ".join(text.split())


def _printed(command: str, folder: Path) -> str:
    """What a command writes to stdout, times left out.

    Raises:
        SystemExit: It could not do its work.
    """
    words = shlex.split(command, comments=True)
    output, log = folder.parent / "stdout", folder.parent / "stderr"
    with output.open("wb") as out, log.open("wb") as err:
        if "=" in words[0] or words[:2] == ["python", "-m"]:
            status = subprocess.run(
                ["env", *words], cwd=folder, stdout=out, stderr=err, check=False, timeout=300
            ).returncode
        else:
            status = _in_child(words, folder, out.fileno(), err.fileno())
    if status not in (0, 1):  # 1: runs differ, or something was found
        sys.exit(f"{command}: status {status}\n{log.read_text(encoding='utf-8')}")
    text = _MOMENT.sub("", output.read_text(encoding="utf-8"))
    return re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)


def _in_child(words: list[str], folder: Path, out: int, err: int) -> int:
    """Run a command in a fork of this process; its exit status."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 3
    try:
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.chdir(folder)
        status = _run(words)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _run(words: list[str]) -> int:
    torch.default_generator.seed()  # a process that starts has a seed of its own
    program, *arguments = words
    if program == "python":
        sys.argv = arguments
        sys.path.insert(0, "")
        runpy.run_path(arguments[0], run_name="__main__")
        return 0
    sys.argv = words
    return {"opdrift": commands.opdrift, "diff-trace": commands.diff_trace}[program](arguments)


if __name__ == "__main__":
    sys.exit(main())
