"""How long `opdrift export` takes to write a long run, how much memory it needs, and how large the result is.

Usage: python benchmarks/export.py [--ops N] [FORMAT ...]

The trace is that of benchmarks/diff.py: steps of a 12-layer decoder, 281 ops and 113 module calls a step. Every export
runs in a process of its own, from the folder on disk to the file; reading the trace alone is the first line. Lower
is better.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import diff as made_up

FORMATS: Final = {"perfetto": "pftrace", "chrome": "json.gz", "parquet": "parquet"}
#: Runs in the process that is measured; without a format it only reads the trace.
MEASURE: Final = """
import json, resource, sys, time
start, cpu = time.perf_counter(), time.process_time()
from opdrift.commands.main import opdrift
from opdrift.tracefile.opening import load
trace, format_, output = sys.argv[1:]
if format_ == "read":
    len(load(trace).ops)
else:
    assert opdrift(["export", format_, trace, "-o", output]) == 0
print(json.dumps([time.perf_counter() - start, time.process_time() - cpu,
    resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024]))
"""


def measure(trace: Path, format_: str, output: Path) -> str:
    """One line on one format."""
    command = [sys.executable, "-c", MEASURE, str(trace), format_, str(output)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    wall, cpu, memory = json.loads(done.stdout.splitlines()[-1])
    files = list(output.iterdir()) if output.is_dir() else [output] if output.exists() else []
    size = sum(path.stat().st_size for path in files)
    return f"{format_:9} {cpu:8.1f} s CPU {wall:8.1f} s wall {memory / 1e6:8.0f} MB memory {size / 1e6:8.1f} MB written"


def main() -> None:
    """Measure the formats that are asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("formats", nargs="*", metavar="FORMAT", help=f"of {', '.join(FORMATS)}")
    parser.add_argument("--ops", type=int, default=1_000_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "long.trace"
        made_up.write(made_up.case("identical", options.ops)[0], trace)
        load = os.getloadavg()[0]
        print(f"{options.ops:,} ops, load {load:.1f}")
        for format_ in ("read", *(options.formats or FORMATS)):
            output = Path(folder) / f"made.{FORMATS.get(format_, format_)}"
            print(measure(trace, format_, output), flush=True)


if __name__ == "__main__":
    main()
