"""Families of changes that really happen, and that defeat weaker hashes: none may collide."""

import numpy as np
import pytest

from opdrift.fingerprint import load_engine
from opdrift.tfp1 import Code

N = 4096
RANDOM = np.random.default_rng(7)
NORMAL = RANDOM.standard_normal(N).astype(np.float32)


def changed(x: np.ndarray, *indices: int, xor: int = 0, add: int = 0) -> np.ndarray:
    """A copy whose bit patterns at the indices are xored and added to."""
    copy = x.copy()
    bits = copy.view({2: np.uint16, 4: np.uint32, 8: np.uint64, 1: np.uint8}[copy.itemsize])
    for i in indices:
        bits[i] = (int(bits[i]) ^ xor) + add
    return copy


def two(rng: np.random.Generator, n: int = N) -> tuple[int, int]:
    i, j = rng.choice(n, 2, replace=False)
    return int(i), int(j)


def swapped(x: np.ndarray, i: int, j: int) -> np.ndarray:
    copy = x.copy()
    copy[[i, j]] = x[[j, i]]
    return copy


def parity(levels: tuple[int, ...], n: int) -> np.ndarray:
    """0 and 1 by the parity of some bits of the index: what weights mod 2**64 cannot tell apart."""
    index = np.arange(n)
    return np.bitwise_xor.reduce([(index >> level) & 1 for level in levels])


def one_hot(i: int) -> np.ndarray:
    x = np.zeros(N, np.float32)
    x[i] = 1
    return x


DOUBLE = NORMAL.astype(np.float64)
BFLOAT = (NORMAL.view(np.uint32) >> 16).astype(np.uint16)
SQUARE = NORMAL.reshape(64, 64)
LOWER = np.tril(np.ones((64, 64), bool))
RANGE = np.arange(N)
FAMILIES = {
    "two sign flips": lambda: (
        (NORMAL, changed(NORMAL, *two(RANDOM), xor=1 << 31)) for _ in range(300)
    ),
    "two sign flips, odd": lambda: (
        (NORMAL, changed(NORMAL, 2 * i + 1, 2 * j + 1, xor=1 << 31))
        for i, j in (two(RANDOM, N // 2) for _ in range(300))
    ),
    "two sign flips, float64": lambda: (
        (DOUBLE, changed(DOUBLE, *two(RANDOM), xor=1 << 63)) for _ in range(300)
    ),
    "four sign flips, 16 bits": lambda: (
        (BFLOAT, changed(BFLOAT, *RANDOM.choice(N, 4, replace=False).tolist(), xor=1 << 15))
        for _ in range(300)
    ),
    "swaps": lambda: ((NORMAL, swapped(NORMAL, *two(RANDOM))) for _ in range(300)),
    "row permutations": lambda: ((SQUARE, SQUARE[RANDOM.permutation(64)]) for _ in range(100)),
    "column permutations": lambda: (
        (SQUARE, SQUARE[:, RANDOM.permutation(64)]) for _ in range(100)
    ),
    "transpose": lambda: [
        (SQUARE, SQUARE.T),
        (LOWER, LOWER.T),
        (RANGE.reshape(64, 64), RANGE.reshape(64, 64).T),
    ],
    "shifts": lambda: ((NORMAL, np.roll(NORMAL, k)) for k in range(1, 300)),
    "one ulp": lambda: (
        (NORMAL, changed(NORMAL, i, xor=1)) for i in RANDOM.choice(N, 300).tolist()
    ),
    "one ulp up, one down": lambda: (
        (NORMAL, changed(changed(NORMAL, i, add=1), j, add=-1))
        for i, j in (two(RANDOM) for _ in range(300))
    ),
    "bit flips": lambda: (
        (NORMAL, changed(NORMAL, i, xor=1 << bit))
        for i in RANDOM.choice(N, 12).tolist()
        for bit in range(32)
    ),
    "fills": lambda: (
        (np.full(N, a, np.float32), np.full(N, b, np.float32))
        for a, b in [(0, 1), (0, -0.0), (1, -1), (1, 2), (2, 4), (0, 3.14), (np.nan, np.inf)]
    ),
    "multiples": lambda: [
        (NORMAL, 2 * NORMAL),
        (NORMAL, -NORMAL),
        (NORMAL, 4 * NORMAL),
        (NORMAL, 0 * NORMAL),
    ],
    "repeats": lambda: (
        (
            np.tile(np.repeat([a, 1 - a], p), N // (2 * p)),
            np.tile(np.repeat([1 - a, a], p), N // (2 * p)),
        )
        for p in (1, 2, 4, 8, 64, 512, 2048)
        for a in (np.float32(0), np.float32(1))
    ),
    "masks": lambda: [
        (LOWER, ~LOWER),
        (LOWER, np.tril(LOWER, -1)),
        (np.eye(64, dtype=bool), np.eye(64, dtype=bool)[::-1]),
        (np.zeros(N, bool), np.ones(N, bool)),
    ],
    "one-hots": lambda: ((one_hot(i), one_hot(j)) for i, j in (two(RANDOM) for _ in range(300))),
    "ranges": lambda: [
        (RANGE, RANGE[::-1]),
        (RANGE, RANGE ^ 1),
        (RANGE, np.roll(RANGE, 1)),
        (RANGE, RANGE + 1),
    ],
    "Thue-Morse": lambda: (
        (t.astype(kind), (1 - t).astype(kind))
        for t in [parity(tuple(range(11)), 2048)]
        for kind in (np.int64, np.float32)
    ),
    "parity over powers of two": lambda: (
        (parity(levels, n) + np.float32(1.5), np.float32(2.5) - parity(levels, n))
        for levels, n in [
            ((10, 11), N),
            ((6, 7, 8, 9, 10, 11), N),
            ((15, 16), 1 << 17),
            ((13, 14, 15, 16), 1 << 17),
        ]
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_structured_changes_do_not_collide(family):
    """Pairs that defeat XOR sums and weights modulo 2**64: all of them get different digests."""
    engine = load_engine()
    pairs = collisions = 0
    for left, right in FAMILIES[family]():
        a, b = np.ascontiguousarray(left), np.ascontiguousarray(right)
        if a.tobytes() == b.tobytes():
            continue
        pairs += 1
        kind = {1: Code.U8, 2: Code.U16, 4: Code.F32, 8: Code.I64}[a.itemsize]
        collisions += engine.raw(a.ctypes.data, a.size, kind) == engine.raw(
            b.ctypes.data, b.size, kind
        )

    assert pairs > 0
    assert collisions == 0
