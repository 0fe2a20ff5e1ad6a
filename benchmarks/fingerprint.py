"""How fast each fingerprint engine is, beside x.sum() and torch.hash_tensor on the same memory.

Usage: python benchmarks/fingerprint.py [--quick]

Every figure is the best of several rounds in one process, the candidates taking turns, in CPU time of
the thread: waiting for other programs does not count, memory bandwidth shared with them does. Ratios
travel between machines better than GB/s do.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable

import numpy as np
import torch

from opdrift.errors import InvalidOptionError
from opdrift.fingerprint import ENGINES, LARGE, ROW, Engine, load_engine

SIZES = {"16 B": 16, "1 KB": 1 << 10, "64 KB": 1 << 16, "1 MB": 1 << 20, "16 MB": 1 << 24}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool)
ROUNDS = 7
Candidate = Callable[[], object]


def engines() -> dict[str, Engine]:
    found = {}
    for name in ENGINES:
        os.environ["OPDRIFT_FINGERPRINT"] = name
        try:
            found[name] = load_engine()
        except InvalidOptionError as error:
            print(f"without {name}: {error}")
    return found


def candidates(x: torch.Tensor, found: dict[str, Engine], row: int) -> dict[str, Candidate]:
    timed: dict[str, Candidate] = {"x.sum()": x.sum, "hash_tensor": lambda: torch.hash_tensor(x)}
    address, n = x.data_ptr(), x.numel()
    for name, engine in found.items():
        kind = engine.kinds[x.dtype]
        put = engine.put if n < LARGE else engine.put_large
        timed[f"{name} raw"] = lambda raw=engine.raw, kind=kind: raw(address, n, kind)
        timed[f"{name} all"] = lambda put=put, kind=kind: put(row, address, n, kind, 0)
    return timed


def best_times(timed: dict[str, Candidate], budget: float) -> dict[str, float]:
    """Seconds per call: the best of ROUNDS rounds, each candidate in turn within a round."""
    repeats = {}
    for name, call in timed.items():
        call()
        start = time.perf_counter()
        call()
        repeats[name] = max(1, int(budget / max(time.perf_counter() - start, 1e-6)))
    best = dict.fromkeys(timed, float("inf"))
    for _ in range(ROUNDS):
        for name, call in timed.items():
            start = time.thread_time()
            for _ in range(repeats[name]):
                call()
            best[name] = min(best[name], (time.thread_time() - start) / repeats[name])
    return best


def values(dtype: torch.dtype, n: int) -> torch.Tensor:
    x = torch.randn(n, generator=torch.Generator().manual_seed(0))
    return x > 0 if dtype is torch.bool else x.mul(1000).to(dtype)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--quick", action="store_true", help="float32 and bfloat16 only, shorter rounds"
    )
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    found = engines()
    rows = np.zeros(1, ROW)
    print(f"{platform.machine()}, torch {torch.__version__}, one thread; 'all' is the whole row")
    for dtype in DTYPES[:2] if quick else DTYPES:
        print(
            f"\n{str(dtype).removeprefix('torch.')}: GB/s (times the time of x.sum()); microseconds up to 1 KB"
        )
        table: dict[str, list[str]] = {}
        for size in SIZES.values():
            x = values(dtype, size // dtype.itemsize)
            best = best_times(candidates(x, found, rows.ctypes.data), 0.003 if quick else 0.02)
            for name, seconds in best.items():
                figure = (
                    f"{seconds * 1e6:.2f} us" if size <= 1024 else f"{size / seconds / 1e9:.1f}"
                )
                table.setdefault(name, []).append(f"{figure} ({seconds / best['x.sum()']:.1f}x)")
        print(f"{'':14}" + "".join(f"{size:>18}" for size in SIZES))
        for name, cells in table.items():
            print(f"{name:14}" + "".join(f"{cell:>18}" for cell in cells))


if __name__ == "__main__":
    main()
