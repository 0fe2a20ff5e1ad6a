"""How fast each fingerprint engine is, beside x.sum(), torch.hash_tensor and xxh3 on the same memory.

Usage: python benchmarks/fingerprint.py [--quick] [--markdown] [--engine NAME ...]

Every figure is the best of several rounds in one process, the candidates taking turns, in CPU time of
the thread: waiting for other programs does not count, memory bandwidth shared with them does. Ratios
travel between machines better than GB/s do. "hot" is the same tensor again and again, in the cache if it
fits; "cold" goes through tensors of together 768 MB, as a run does that makes each tensor once. xxh3 needs
`pip install xxhash`; it is left out without.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from opdrift.errors import InvalidOptionError
from opdrift.fingerprint import ENGINES, LARGE, ROW, Engine, load_engine

try:
    import xxhash
except ImportError:
    xxhash = None

HOT = {
    "16 B": 16,
    "1 KB": 1 << 10,
    "64 KB": 1 << 16,
    "1 MB": 1 << 20,
    "16 MB": 1 << 24,
    "128 MB": 1 << 27,
}
COLD = {"64 KB": 1 << 16, "1 MB": 1 << 20, "16 MB": 1 << 24}
COLD_MEMORY = 768 << 20
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool)
ROUNDS = 7
SLOW = 0.1  # a series of so many seconds is repeated once only
Candidate = Callable[[torch.Tensor], object]
Table = dict[str, list[str]]


def engines(wanted: Sequence[str]) -> dict[str, Engine]:
    found = {}
    for name in wanted:
        os.environ["OPDRIFT_FINGERPRINT"] = name
        try:
            found[name] = load_engine()
        except InvalidOptionError as error:
            print(f"without {name}: {error}")
    return found


def candidates(
    dtype: torch.dtype, n: int, found: dict[str, Engine], row: int
) -> dict[str, Candidate]:
    timed: dict[str, Candidate] = {"x.sum()": torch.sum, "torch.hash_tensor": torch.hash_tensor}
    if xxhash is not None:
        timed["xxh3_64"] = lambda x: xxhash.xxh3_64_intdigest(x.view(torch.uint8).numpy())
    for name, engine in found.items():
        kind = engine.kinds[dtype]
        put = engine.put if n < LARGE else engine.put_large
        timed[f"{name}, digest"] = lambda x, raw=engine.raw, kind=kind: raw(x.data_ptr(), n, kind)
        timed[f"{name}, everything"] = lambda x, put=put, kind=kind: put(
            row, x.data_ptr(), n, kind, 0
        )
    return timed


def best_times(
    timed: dict[str, Candidate], tensors: list[torch.Tensor], budget: float
) -> dict[str, float]:
    """Seconds per call: the best of ROUNDS rounds, each candidate in turn within a round."""
    repeats = {}
    for name, call in timed.items():
        call(tensors[0])
        start = time.perf_counter()
        call(tensors[0])
        took = max(time.perf_counter() - start, 1e-6)
        repeats[name] = max(
            1, min(int(budget / took), len(tensors) if len(tensors) > 1 else 1 << 20)
        )
    best = dict.fromkeys(timed, float("inf"))
    queue = itertools.cycle(tensors)
    for number in range(ROUNDS):
        for name, call in timed.items():
            if number > 1 and best[name] * repeats[name] > SLOW:
                continue
            chosen = list(itertools.islice(queue, repeats[name]))
            start = time.thread_time()
            for x in chosen:
                call(x)
            best[name] = min(best[name], (time.thread_time() - start) / repeats[name])
    return best


def values(dtype: torch.dtype, n: int) -> torch.Tensor:
    x = torch.randn(n, generator=torch.Generator().manual_seed(0))
    return x > 0 if dtype is torch.bool else x.mul(1000).to(dtype)


def measure(
    dtype: torch.dtype, found: dict[str, Engine], *, cold: bool, quick: bool
) -> tuple[list[str], Table]:
    """Sizes, and a line of figures for each candidate."""
    rows = np.zeros(1, ROW)
    table: Table = {}
    sizes = COLD if cold else HOT
    if quick:
        sizes = {name: size for name, size in sizes.items() if size <= 1 << 20}
    for size in sizes.values():
        n = size // dtype.itemsize
        x = values(dtype, n)
        tensors = [x] if not cold else [x.clone() for _ in range(COLD_MEMORY // size)]
        timed = candidates(dtype, n, found, rows.ctypes.data)
        best = best_times(timed, tensors, 0.003 if quick else 0.03)
        for name, seconds in best.items():
            figure = f"{seconds * 1e6:.2f} us" if size <= 1024 else f"{size / seconds / 1e9:.1f}"
            table.setdefault(name, []).append(f"{figure} ({seconds / best['x.sum()']:.1f}x)")
    return list(sizes), table


def show(title: str, sizes: list[str], table: Table, *, markdown: bool) -> None:
    if markdown:
        print(f"\n| {title} | " + " | ".join(sizes) + " |")
        print("|---" * (len(sizes) + 1) + "|")
        for name, cells in table.items():
            print(f"| {name} | " + " | ".join(cells) + " |")
        return
    print(f"\n{title}: GB/s (times the time of x.sum()); microseconds up to 1 KB")
    print(f"{'':24}" + "".join(f"{size:>18}" for size in sizes))
    for name, cells in table.items():
        print(f"{name:24}" + "".join(f"{cell:>18}" for cell in cells))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="float32 and bfloat16 up to 1 MB, shorter rounds"
    )
    parser.add_argument("--markdown", action="store_true", help="tables for the documentation")
    parser.add_argument("--engine", nargs="+", choices=ENGINES, default=ENGINES)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = engines(options.engine)
    print(
        f"{platform.machine()}, torch {torch.__version__}, one thread; 'everything' is the whole row"
    )
    for cold in (False, True):
        for dtype in DTYPES[:2] if options.quick or cold else DTYPES:
            sizes, table = measure(dtype, found, cold=cold, quick=options.quick)
            title = f"{str(dtype).removeprefix('torch.')}, {'cold' if cold else 'hot'}"
            show(title, sizes, table, markdown=options.markdown)


if __name__ == "__main__":
    main()
