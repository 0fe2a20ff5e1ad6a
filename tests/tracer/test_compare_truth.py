"""Sizes of differences against the truth, over many kinds of change: what is stated holds as often as it says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

torch = pytest.importorskip("torch")

from opdrift.compare import Difference, difference, is_cast  # noqa: E402
from opdrift.fingerprint import load_engine  # noqa: E402
from opdrift.tracefile.fingerprints import Fingerprint, FingerprintColumns  # noqa: E402
from opdrift.tracefile.schema import TABLES  # noqa: E402
from opdrift.tracefile.writer import fingerprint_columns  # noqa: E402

Array = npt.NDArray[np.float64]
ENGINE = load_engine()
SHAPES = ((64,), (1000,), (128, 64), (64, 64), (32, 512), (8, 7, 33), (16, 1024), (4, 40))
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


def stored(tensor: torch.Tensor) -> Fingerprint:
    """What a trace holds of a tensor's fingerprint."""
    rows = np.zeros(1, ENGINE.ROW)
    rows[0] = ENGINE.fingerprint(tensor)
    schema = TABLES["tensors"]
    columns = zip(fingerprint_columns(rows), schema.types, strict=True)
    table = pa.table([pa.array(c).cast(kind) for c, kind in columns], schema=schema)
    return FingerprintColumns(table)[0]


def content(make: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Normal numbers; four channels of a hidden dim are fifty times as large, as in transformers."""
    x = make.standard_normal(shape)
    if len(shape) > 1 and shape[-1] > 16:
        x[..., make.integers(0, shape[-1], 4)] *= 50
    return x


def at(x: Array, where: object, values: object) -> Array:
    copy = x.copy()
    copy[where] = values
    return copy


def elements(make: np.random.Generator, x: Array, count: int) -> Array:
    flat = x.reshape(-1)
    where = make.integers(0, flat.size, count)
    return at(flat, where, flat[where] + make.standard_normal(count)).reshape(x.shape)


Change = Callable[[np.random.Generator, Array], Array]
CHANGES: dict[str, Change] = {
    "noise": lambda make, x: x + 1e-3 * make.standard_normal(x.shape),
    "scaled": lambda make, x: x * 1.001,
    "offset": lambda make, x: x + 1e-3,
    "a row": lambda make, x: at(x, 0, x[0] + 1e-2 * make.standard_normal(x[0].shape)),
    "a channel": lambda make, x: at(x, (..., 3), x[..., 3] * 1.01),
    "a channel's offset": lambda make, x: at(x, (..., 3), x[..., 3] + 0.5),
    "two elements": lambda make, x: elements(make, x, 2),
    "ten elements": lambda make, x: elements(make, x, 10),
    "rows permuted": lambda make, x: x[make.permutation(len(x))],
    "half of it scaled": lambda make, x: at(x, slice(len(x) // 2, None), x[len(x) // 2 :] * 1.01),
    "a block's offset": lambda make, x: at(x, slice(0, 8), x[:8] + 0.1),
    "another draw": lambda make, x: content(make, x.shape),
}


@cache
def trials(change: str, left: str, right: str) -> list[tuple[float, Fingerprint, Fingerprint]]:
    """True relative differences, and what a trace holds of both sides."""
    make = np.random.default_rng(len(change))
    found = []
    for trial in range(120):
        x = content(make, SHAPES[trial % len(SHAPES)])
        y = CHANGES[change](make, x)
        a, b = torch.from_numpy(x).to(DTYPES[left]), torch.from_numpy(y).to(DTYPES[right])
        p, q = a.double().numpy(), b.double().numpy()
        truth = float(np.linalg.norm(p - q) / np.linalg.norm(p))
        if truth:
            found.append((truth, stored(a), stored(b)))
    assert found
    return found


def differences(
    change: str, left: str, right: str, *, sketch: bool
) -> list[tuple[float, Difference]]:
    """True relative differences, and what is stated of them."""
    return [
        (
            truth,
            difference(a, b)
            if sketch
            else difference(replace(a, sketch=None), replace(b, sketch=None)),
        )
        for truth, a, b in trials(change, left, right)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("float32", "float32"),
        ("bfloat16", "bfloat16"),
        ("float64", "float64"),
        ("bfloat16", "float32"),
    ],
)
def test_twice_the_stated_deviation_of_a_sketch_holds_in_95_of_100_trials(left, right, change):
    """Also for changes that lie in few buckets, and between bfloat16 and float32."""
    found = differences(change, left, right, sketch=True)
    held = [abs(d.relative - truth) <= 2 * d.uncertainty for truth, d in found]

    assert {d.how for _, d in found} <= {"sketch"}
    assert sum(held) >= 0.95 * len(held)


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_without_sketches_nothing_is_claimed_that_does_not_hold(dtype, change):
    """A lower bound is one; an extrapolation says how far it missed what is known."""
    found = differences(change, dtype, dtype, sketch=False)
    bounds = [d.relative <= truth * (1 + 1e-9) for truth, d in found if d.how == "statistics"]
    held = [abs(d.relative - truth) <= 2 * d.uncertainty for truth, d in found if d.how == "sample"]

    assert all(bounds)
    assert len(bounds) + len(held) == len(found)
    assert sum(held) >= 0.95 * len(held)
    assert all(d.caveat for _, d in found)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [*DTYPES, "float16", "int32", "int64", "uint8"])
def test_one_flipped_bit_is_located_wherever_and_whichever_it_is(dtype):
    """Index always; the mask too, because a flipped bit is a power of two. Ulps where the sign stays."""
    make = np.random.default_rng(5)
    kind = getattr(torch, dtype)
    width = kind.itemsize
    bits_type = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[width]
    for trial in range(40):
        n = int(make.choice([33, 500, 4097, 70_000]))
        x = torch.from_numpy(make.standard_normal(n) * 100).to(kind)
        y = x.clone()
        index, bit = int(make.integers(n)), int(make.integers(8 * width))
        flipped = (1 << bit) - (1 << 8 * width if bit == 8 * width - 1 and width > 1 else 0)
        y.view(bits_type)[index] ^= flipped
        found = difference(stored(x), stored(y))

        assert (found.changed_index, found.changed_bits) == (index, 1 << bit), trial
        a, b = x.double()[index].item(), y.double()[index].item()
        finite = np.isfinite(a) and np.isfinite(b)
        if finite:
            true = abs(a - b) / float(torch.linalg.vector_norm(x.double()))
            assert abs(found.relative - true) <= 2 * found.uncertainty + 1e-12 * true
        elif np.isfinite(a) != np.isfinite(b):
            assert found.nonfinite_changed


@pytest.mark.slow
def test_two_or_more_changes_are_never_taken_for_one():
    """Two flipped bits in two elements, many times, with the same deltas and with others."""
    make = np.random.default_rng(6)
    for _ in range(300):
        n = int(make.choice([40, 500, 4097]))
        x = torch.from_numpy(make.standard_normal(n)).float()
        y = x.clone()
        first, second = make.choice(n, 2, replace=False)
        bit = int(make.integers(31))
        y.view(torch.int32)[int(first)] ^= 1 << bit
        y.view(torch.int32)[int(second)] ^= 1 << int(make.choice([bit, make.integers(31)]))

        assert difference(stored(x), stored(y)).changed_index is None


@pytest.mark.slow
@pytest.mark.parametrize("to", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("source", ["float32", "float64", "bfloat16"])
def test_every_cast_of_torch_is_known_as_one_and_no_other_content_is(source, to):
    """With outliers, subnormal results and zeros; against noise of twice the rounding, and one changed element."""
    if source == to:
        pytest.skip("no cast")
    make = np.random.default_rng(8)
    target = getattr(torch, to)
    for trial in range(64):
        x = content(make, SHAPES[trial % len(SHAPES)]) * 10.0 ** make.integers(-6, 3)
        if trial % 4 == 0:
            x.reshape(-1)[make.integers(0, x.size, 5)] = 0.0
        a = torch.from_numpy(x).to(DTYPES[source])
        if to == "float16":
            a = a.clamp(-60000, 60000)
        assert is_cast(stored(a), stored(a.to(target))) is True, trial
        other = a.double() * (1 + 8 * torch.finfo(target).eps * torch.randn(a.shape).double())
        if torch.finfo(target).eps > torch.finfo(a.dtype).eps:
            assert is_cast(stored(a), stored(other.to(target))) is False, trial
