"""Run every example and put what it printed into README.md, so that the page shows what is true.

python examples/_update_readme.py
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
README = HERE / "README.md"
#: A console block whose first line is the command that printed the rest.
BLOCK = re.compile(r"(```console\n\$ python (examples/[^\n]*)\n).*?(```)", re.DOTALL)


def printed(match: re.Match[str]) -> str:
    """The block with what the command prints now; paths as they are from the repository's root."""
    print(f"python {match[2]}", flush=True)
    done = subprocess.run(
        [sys.executable, *shlex.split(match[2])],
        cwd=HERE.parent,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "PYTHONIOENCODING": "utf-8"},
    )
    output = done.stdout.replace(f"{HERE.parent}{os.sep}", "").strip()
    return f"{match[1]}{output}\n{match[3]}"


if __name__ == "__main__":
    README.write_text(
        BLOCK.sub(printed, README.read_text(encoding="utf-8")), encoding="utf-8", newline="\n"
    )
