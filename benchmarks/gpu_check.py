"""Check the fingerprints, the recorder and what it says of kernels on a real GPU, and measure what they cost there.

Usage: python benchmarks/gpu_check.py [--device cuda|cpu] [--quick] [SECTION ...]

Needs a checkout with opdrift installed (`pip install -e .`), torch for CUDA or ROCm, and some minutes. Prints
one table a section. Exits with 1 if anything differs from what the CPU says or if recording changed a bit of
the run, and with 2 if there is no GPU. `--device cpu` is a rehearsal of the script itself: the host stands
for a device without a kernel, and figures mean nothing.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from gpu_sections import attention, copies, fingerprints, kernels, offload, recording, speed
from gpu_sections.check import ENGINE, Check, rehearse

SECTIONS: dict[str, tuple[str, Callable[[Check, Path], None]]] = {
    "equality": ("equality with the CPU", lambda check, _: fingerprints.check_equality(check)),
    "items": ("items of a batch", lambda check, _: fingerprints.check_items(check)),
    "order": ("order within a stream", lambda check, _: fingerprints.check_order(check)),
    "streams": ("streams and graphs", lambda check, _: fingerprints.check_streams(check)),
    "throughput": ("throughput, GB/s", lambda check, _: speed.measure_throughput(check)),
    "launches": ("launches", lambda check, _: speed.measure_launches(check)),
    "neutrality": ("neutrality", recording.check_neutrality),
    "diff": ("diff", recording.check_diff),
    "recording": ("12-layer transformer", recording.measure_recording),
    "rules": ("rules for attention", lambda check, _: attention.check_rules(check)),
    "answers": ("torch's answers about attention", attention.check_answers),
    "pinned": ("attention, one backend at a time", attention.check_pinned_backends),
    "kernels": ("kernel names", kernels.check_names),
    "profiler": ("the program's own profiler", kernels.check_own_profiler),
    "rows": ("kernels by batch size", kernels.show_batch_sizes),
    "names": ("what kernel names cost", kernels.measure_names),
    "copies": ("copies under way", copies.check_copies),
    "offload": ("weights that accelerate offloads", offload.check_offload),
}


def describe(check: Check) -> str:
    if not check.is_gpu:
        return "a rehearsal on the host"
    properties = torch.cuda.get_device_properties(check.device)
    return f"{properties.name}, {properties.total_memory >> 30} GiB, CUDA {torch.version.cuda}, HIP {torch.version.hip}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "sections",
        nargs="*",
        metavar="SECTION",
        help=f"{', '.join(SECTIONS)}; all if none is named",
    )
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--quick", action="store_true", help="smaller tensors, a smaller model")
    options = parser.parse_args()
    if unknown := set(options.sections) - set(SECTIONS):
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        print("torch sees no CUDA or ROCm device here, so nothing was checked.")
        return 2
    check = Check(
        torch.device("cuda", torch.cuda.current_device())
        if options.device == "cuda"
        else torch.device("cpu"),
        options.quick,
    )
    if check.is_gpu:  # so that a training step repeats itself
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.mha.set_fastpath_enabled(False)  # one op a layer would be no measure
    if not check.is_gpu:
        torch.set_num_threads(1)
        rehearse()
    print(f"torch {torch.__version__}, {describe(check)}, host engine {ENGINE.name}")
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for name in options.sections or SECTIONS:
            title, section = SECTIONS[name]
            print(f"\n{title} ({time.perf_counter() - begun:.0f} s)", flush=True)
            try:
                section(check, Path(folder))
            except Exception as error:  # the other sections are of interest, too
                check.expect(False, f"{title}: {type(error).__name__}: {error}")
    by = sorted(set(check.said))
    print(f"\nfingerprints were computed by: {', '.join(by)}")
    if check.is_gpu:
        check.expect(all(": triton" in line for line in by), "a GPU's tensors went past the kernel")
    print(f"{len(check.wrong)} wrong, {time.perf_counter() - begun:.0f} s")
    for what in check.wrong:
        print(f"  {what}")
    return 1 if check.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
