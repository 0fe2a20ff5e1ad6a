"""Write docs/gallery.md: what `diff-trace` says about each case of a folder of cases.

    python docs/_update_gallery.py [CASES]        # or `make gallery`

A case is a file that `check_cases.py` in the same folder can record; both runs are recorded anew, each case
in a process of its own. Times, run ids and folders are left out, so that the page changes only when a
report does (or torch, or the machine: sizes of rounding and names of kernels depend on it).
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

DOCS = Path(__file__).parent
PAGE = DOCS / "gallery.md"
CASES = DOCS.parent.parent / "shared" / "cases"
#: ", 2026-03-02 09:00:00 UTC" at the end of the lines that say which trace a side is.
MOMENT = re.compile(r", \d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?: \S+)?$", re.MULTILINE)

TOP = """\
<!-- Written by `make gallery` from cases that lie outside of this repository; no test holds it against what the reports say now. -->

# Gallery

What `diff-trace` says, case by case: what was planted, then the whole report, recorded with torch {torch} on a CPU.
Cases marked CLEAN hold nothing that matters, those marked BENIGN rounding alone; the rest a defect that people have met.

"""


def main() -> int:
    """Write the page; status 1 if a case could not be recorded or compared."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("cases", nargs="?", type=Path, default=CASES)
    parser.add_argument(
        "--only", nargs="*", default=[], help="numbers; print these and write nothing"
    )
    parser.add_argument("--record", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.record:
        print("\n".join(record(*options.record)))
        return 0
    if not (options.cases / "check_cases.py").is_file():
        parser.error(f"{options.cases} holds no check_cases.py; name the folder of the cases")
    paths = sorted(options.cases.glob("[0-9][0-9]*_*.py"))
    if options.only:
        paths = [path for path in paths if path.stem.split("_")[0] in options.only]
    broken, sections = [], []
    for path in paths:
        report, failed = report_of(path)
        print(f"{path.stem}: {report.partition(chr(10))[0]}", file=sys.stderr, flush=True)
        broken += [path.stem] if failed else []
        sections.append(section(path, report))
    if options.only:
        print("\n".join(sections))
    else:
        version = metadata.version("torch").partition("+")[0]
        PAGE.write_text(TOP.format(torch=version) + "\n".join(sections), encoding="utf-8")
    return 1 if broken else 0


def record(case: Path, folder: Path) -> list[str]:
    """Record both runs of a case, and return what `diff-trace` is to be called with."""
    spec = importlib.util.spec_from_file_location("check_cases", case.parent / "check_cases.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    arguments: list[str] = module.record_both(case, folder)
    return arguments


def report_of(case: Path) -> tuple[str, bool]:
    """The text report of a case, and whether there is none."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        # recorded and compared where it lies beside its traces, so that reports name it shortly
        copy = shutil.copy(case, folder)
        shutil.copy(case.parent / "check_cases.py", folder)
        recorded = subprocess.run(
            [sys.executable, __file__, "--record", copy, scratch],
            cwd=folder, capture_output=True, text=True, timeout=180, check=False,
        )  # fmt: skip
        if recorded.returncode:
            last = recorded.stderr.strip().splitlines()[-1:]
            return f"could not be recorded: {''.join(last)}", True
        arguments = [
            a.replace(f"{scratch}/", "") for a in recorded.stdout.splitlines() if a.strip()
        ]
        compared = subprocess.run(
            [sys.executable, "-m", "opdrift", "diff", *arguments, "-o", "report.txt"],
            cwd=folder, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        command = f"$ diff-trace {' '.join(arguments)}"
        if compared.returncode not in (0, 1):
            return f"{command}\n{compared.stderr.strip()}", True
        text = (folder / "report.txt").read_text(encoding="utf-8")
    return f"{command}\n{MOMENT.sub('', text).rstrip()}", False


def section(case: Path, report: str) -> str:
    """A case's part of the page."""
    tree = ast.parse(case.read_text(encoding="utf-8"))
    planted = " ".join((ast.get_docstring(tree) or "").split("\n\n")[0].split())
    return f"## {case.stem}\n\n{planted}\n\n```console\n{report}\n```\n"


if __name__ == "__main__":
    sys.exit(main())
