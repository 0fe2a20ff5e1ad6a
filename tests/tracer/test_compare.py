"""Differences measured from fingerprints agree with those of the contents."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opdrift import tfp1
from opdrift.compare import Difference, describe, difference, dtype_epsilon, is_cast
from opdrift.records import Sides
from opdrift.testing.contents import fingerprint_row, rounded
from opdrift.tracefile.fingerprints import Fingerprint, FingerprintColumns
from opdrift.tracefile.schema import TABLES

Array = npt.NDArray[np.generic]


def stored(content: Array, dtype: str = "float32") -> Fingerprint:
    """The fingerprint as a trace holds it (sketch cut to its stored bits)."""
    rows = [fingerprint_row(1, content, dtype)]
    return FingerprintColumns(pa.Table.from_pylist(rows, schema=TABLES["tensors"]))[0]


def bfloat16(content: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Rounded to bfloat16, toward zero: enough for a test."""
    return (content.view("<u4") & np.uint32(0xFFFF0000)).view("<f4")


def noise(n: int, seed: int = 0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


def truth(left: Array, right: Array) -> float:
    a, b = left.astype(np.float64), right.astype(np.float64)
    return float(np.linalg.norm(a - b) / np.linalg.norm(a))


# ---- equality ------------------------------------------------------------------------------------------


def test_equal_contents_differ_by_nothing() -> None:
    found = difference(stored(noise(1000)), stored(noise(1000)))
    assert found.equal
    assert (found.relative, found.max_abs, found.ulp, found.how) == (0.0, 0.0, 0.0, "exact")
    assert describe(found) == "equal"


def test_contents_of_other_sizes_are_not_compared() -> None:
    found = difference(stored(noise(100)), stored(noise(99)))
    assert not found.equal
    assert not found.comparable
    assert found.relative is None
    assert describe(found) == "100 against 99 elements"


def test_an_upcast_is_not_equal_but_has_no_difference() -> None:
    """Values of different types are compared as numbers."""
    x = bfloat16(noise(1000))
    found = difference(stored(x, "bfloat16"), stored(x, "float32"))
    assert not found.equal
    assert found.relative == pytest.approx(0.0, abs=1e-7)
    assert found.max_abs == 0.0
    assert found.ulp == 0.0


# ---- sizes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1e-7, 1e-4, 1e-2])
@pytest.mark.parametrize("n", [64, 1000, 20_000])
def test_a_dense_difference_is_measured_within_its_uncertainty(n: int, size: float) -> None:
    """Sketches of 32 buckets err by 12.5 % on average; the stated deviation is larger, three of it always hold."""
    x = noise(n).astype(np.float64)
    y = x + size * noise(n, 1)
    found = difference(stored(x, "float64"), stored(y, "float64"))
    assert found.how == "sketch"
    assert found.relative is not None
    assert found.relative / 8 <= found.uncertainty < found.relative / 3
    assert abs(found.relative - truth(x, y)) < 3 * found.uncertainty
    assert found.sparsity is not None
    assert found.sparsity > 3
    assert found.changed_index is None


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=32),
    st.lists(st.floats(-1e3, 1e3, width=32), min_size=32, max_size=32),
)
def test_small_contents_are_compared_exactly(left: list[float], right: list[float]) -> None:
    """Up to 32 elements are in the fingerprint whole."""
    x = np.array(left, np.float32)
    y = np.array(right[: len(left)], np.float32)
    found = difference(stored(x), stored(y))
    delta = x.astype(np.float64) - y
    assert found.how == "exact"
    assert found.absolute_l2 == pytest.approx(float(np.linalg.norm(delta)))
    assert found.max_abs == pytest.approx(float(np.abs(delta).max()))
    assert found.uncertainty == 0.0


def test_a_bfloat16_content_is_compared_with_a_float32_one() -> None:
    """The 64 float32 buckets of one side fold onto the 32 of the other."""
    x = noise(4000)
    found = difference(stored(x), stored(bfloat16(x), "bfloat16"))
    assert found.how == "sketch"
    assert found.relative == pytest.approx(truth(x, bfloat16(x)), rel=0.4)
    assert found.ulp is not None
    assert 0 < found.ulp <= 1  # cut to bfloat16: less than one of its units


def test_differences_are_mirrored() -> None:
    """Left and right change places; only the norm that sizes are relative to does not."""
    x, y = noise(500), noise(500, 1) * 3
    there, back = difference(stored(x), stored(y)), difference(stored(y), stored(x))
    assert there.absolute_l2 == back.absolute_l2
    assert there.relative != back.relative
    assert (there.max_abs, there.ulp, there.sparsity) == (back.max_abs, back.ulp, back.sparsity)


@pytest.mark.parametrize("n", [20, 2000])
def test_a_difference_from_zero_is_infinite(n: int) -> None:
    found = difference(stored(np.zeros(n, np.float32)), stored(noise(n)))
    assert found.relative == math.inf


def test_integers_are_compared_as_numbers() -> None:
    x = np.arange(500)
    found = difference(stored(x, "int64"), stored(x + 1, "int64"))
    assert found.relative == pytest.approx(truth(x, x + 1), rel=0.5)
    assert found.max_abs == 1.0
    assert found.ulp is None


def test_huge_numbers_do_not_overflow_on_the_way() -> None:
    """Squares of float64 values can be infinite where their norm is not."""
    x = np.array([3e200, 4e200])
    left = replace(stored(np.zeros(2), "float64"), sample=x.view(np.uint64))
    right = replace(left, raw=1, sample=(2 * x).view(np.uint64))
    found = difference(left, right)
    assert found.absolute_l2 == pytest.approx(5e200)
    assert found.relative == pytest.approx(1.0)


# ---- units in the last place --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "kind"), [("float32", np.float32), ("float16", np.float16), ("float64", np.float64)]
)
def test_one_step_is_one_unit_in_the_last_place(dtype: str, kind: type[np.floating]) -> None:  # type: ignore[type-arg]
    x = noise(20).astype(kind)
    y = np.nextafter(x, kind(np.inf))
    assert difference(stored(x, dtype), stored(y, dtype)).ulp == 1.0


def test_distances_over_the_whole_range_of_float64_do_not_wrap() -> None:
    x, y = np.array([-1.7e308, 1.0]), np.array([1.7e308, 1.0])
    found = difference(stored(x / 1e160, "float64"), stored(y / 1e160, "float64"))
    assert found.ulp is not None
    assert found.ulp > 2.0**63


def test_units_of_the_coarser_type_count() -> None:
    """bfloat16 against float32: 1 + 2**-7 is one step of bfloat16, 65,536 of float32."""
    x, y = np.full(4, 1.0, np.float32), np.full(4, 1.0 + 2.0**-7, np.float32)
    assert difference(stored(x), stored(y, "bfloat16")).ulp == 1.0
    assert difference(stored(x), stored(y)).ulp == 65536.0


def test_subnormal_numbers_have_the_spacing_of_the_smallest_normal_one() -> None:
    x = np.array([0.0, 2.0**-149], np.float32)
    y = np.array([2.0**-149, 2.0**-148], np.float32)
    assert difference(stored(x), stored(y)).ulp == 1.0


@pytest.mark.parametrize(
    ("dtype", "epsilon"),
    [("float32", 2**-23), ("bfloat16", 2**-7), ("float16", 2**-10), ("int64", 0), ("bool", 0)],
)
def test_epsilon_is_the_step_above_one(dtype: str, epsilon: float) -> None:
    assert dtype_epsilon(dtype) == epsilon


# ---- one changed element -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("index", [0, 63, 1093, 4095])
def test_a_flipped_sign_is_located(dtype: str, index: int) -> None:
    """Index and bit follow from the digests, with the sketch as second witness."""
    x = noise(4096).astype({"float16": "f2", "float64": "f8"}.get(dtype, "f4"))
    x = bfloat16(x) if dtype == "bfloat16" else x
    y = x.copy()
    y[index] = -y[index]
    found = difference(stored(x, dtype), stored(y, dtype))
    width = {"float32": 32, "float64": 64}.get(dtype, 16)
    assert found.changed_index == index
    assert found.changed_bits == 1 << width - 1
    assert found.sparsity == pytest.approx(1.0)
    assert found.max_abs == pytest.approx(2 * abs(float(x[index])), rel=1e-5)
    assert describe(found).startswith(f"one element, index {index}, its sign bit, ")


def test_a_flipped_low_bit_is_located_though_its_size_drowns() -> None:
    """One unit in the last place of one element is below what a stored sketch resolves."""
    x = noise(4096)
    y = x.copy()
    y.view("<u4")[700] ^= 1
    found = difference(stored(x), stored(y))
    assert found.changed_index == 700
    assert found.changed_bits == 1
    assert found.ulp == 1.0
    assert describe(found).startswith("one element, index 700, bit 0, ")


def test_a_changed_sign_of_zero_is_located_though_no_number_changed() -> None:
    x = noise(3000)
    x[77] = 0.0
    y = x.copy()
    y[77] = -0.0
    found = difference(stored(x), stored(y))
    assert (found.changed_index, found.changed_bits) == (77, 1 << 31)
    assert found.relative == 0.0


@pytest.mark.parametrize("n", [8, 3000])
def test_two_changed_elements_are_not_taken_for_one(n: int) -> None:
    x = noise(n)
    y = x.copy()
    y[[2, 5]] += 1
    found = difference(stored(x), stored(y))
    assert found.changed_index is None
    assert "one element" not in describe(found)


def test_two_changes_in_one_bucket_are_not_taken_for_one() -> None:
    """The bucket looks like one changed element; the digest knows better."""
    slots = [tfp1.sketch_slot(i)[0] % 32 for i in range(3000)]
    first, second = [i for i, slot in enumerate(slots) if slot == 9][:2]
    x = noise(3000)
    y = x.copy()
    y[[first, second]] += 1
    found = difference(stored(x), stored(y))
    assert found.sparsity == pytest.approx(1.0)
    assert found.changed_index is None


def test_a_few_changed_elements_are_few() -> None:
    x = noise(3000)
    y = x.copy()
    y[[2, 900]] += 1
    found = difference(stored(x), stored(y))
    assert found.sparsity is not None
    assert found.sparsity < 3
    assert describe(found).startswith("a few elements, ")


# ---- what cannot be measured -------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [16, 900])
def test_nonfinite_values_are_counted_and_leave_the_sizes_finite(n: int) -> None:
    x = noise(n)
    y = x.copy()
    y[3], y[5] = np.nan, np.inf
    found = difference(stored(x), stored(y))
    assert found.nonfinite == Sides(0, 2)
    assert found.nonfinite_changed
    assert found.relative is not None
    assert math.isfinite(found.relative)
    assert (found.nan, found.pinf, found.ninf) == (Sides(0, 1), Sides(0, 1), Sides(0, 0))
    assert describe(found).endswith("NaN 0 against 1, +inf 0 against 1")


def test_without_a_sketch_the_samples_speak_for_a_dense_difference() -> None:
    """An overflowed sketch is no estimate; 32 of 5,000 elements are a rough one."""
    x, y = noise(5000), noise(5000, 1) * 2
    overflowed = replace(stored(y), sketch=np.full(32, np.inf))
    found = difference(stored(x), overflowed)
    assert found.how == "sample"
    assert found.relative == pytest.approx(truth(x, y), rel=0.5)
    assert found.relative / 2 <= found.uncertainty < found.relative
    assert found.caveat.startswith("from 32 of 5000 elements")
    assert found.sparsity is None


def test_without_a_sketch_the_statistics_give_a_lower_bound() -> None:
    """Norms, sums and extremes bound a difference from below that no sample shows."""
    x = noise(5000)
    y = x.copy()
    y[2] = 9.0
    left, right = (replace(stored(c), sketch=None) for c in (x, y))
    found = difference(left, right)
    assert found.how == "statistics"
    assert found.relative is not None
    assert 0.05 < found.relative <= truth(x, y)
    assert found.uncertainty == math.inf
    assert found.caveat.startswith("a lower bound")
    assert describe(found).startswith("one element, index 2, relative difference at least ")


def test_bits_without_a_number_in_them_have_no_size() -> None:
    """Quantised storage is hashed only."""
    bits = np.arange(40, dtype=np.uint64)
    left = replace(stored(noise(40)), code=int(tfp1.Code.RAW), sketch=None, sample=bits[:32])
    right = replace(left, raw=left.raw + 0x123456789ABC)
    found = difference(left, right)
    assert not found.equal
    assert found.relative is None
    assert found.how == "unavailable"
    assert found.caveat == "its bits have no number in them that is known here"
    assert describe(found) == "size unknown"


def test_one_changed_byte_of_bits_without_numbers_is_located() -> None:
    """Packed int4 weights have no sketch; digits of 8 bits need no second witness, and the samples agree."""
    bits = np.zeros(32, np.uint64)
    left = replace(stored(noise(1000)), code=int(tfp1.Code.RAW), sketch=None, sample=bits)
    right = replace(left, raw=left.raw + tfp1.compose([(0x40, 700)]))
    assert (difference(left, right).changed_index, difference(left, right).changed_bits) == (
        700,
        0x40,
    )
    # the sample holds element 28, and says that it did not change
    elsewhere = replace(left, raw=left.raw + tfp1.compose([(0x40, 28)]))
    assert difference(left, elsewhere).changed_index is None


@pytest.mark.parametrize("scale", [1e200, 1e-200])
def test_squares_that_leave_the_range_of_float64_leave_the_sketch(scale: float) -> None:
    """Their sums are inf or 0, which is no norm: it is estimated from the sketch, as the difference is."""
    x = noise(2000).astype(np.float64)
    y = x + 1e-3 * noise(2000, 1)
    with np.errstate(over="ignore"):
        found = difference(stored(x * scale, "float64"), stored(y * scale, "float64"))
    assert found.how == "sketch"
    assert found.relative is not None
    assert found.uncertainty is not None
    assert abs(found.relative - truth(x, y)) < 2 * found.uncertainty
    assert "leave the range of float64" in found.caveat


def test_without_norm_and_sketch_the_size_is_unknown() -> None:
    x = replace(stored(noise(100).astype(np.float64), "float64"), ssq=math.inf, sketch=None)
    found = difference(x, replace(x, raw=0x123456789ABC))
    assert found.relative is None
    assert found.how == "unavailable"
    assert found.caveat == "the squares leave the range of float64"


# ---- what changed among non-finite values --------------------------------------------------------------


@pytest.mark.parametrize("n", [16, 900])
def test_a_nan_that_became_an_infinity_is_a_change(n: int) -> None:
    """The number of non-finite values is the same; of which kind they are is not."""
    x, y = noise(n), noise(n)
    x[3], y[3] = np.nan, -np.inf
    found = difference(stored(x), stored(y))
    assert found.nonfinite == Sides(1, 1)
    assert found.nonfinite_changed
    assert describe(found).endswith("NaN 1 against 0, -inf 0 against 1")


def test_a_nan_that_moved_is_a_change_where_the_sample_sees_it() -> None:
    x, y = noise(16), noise(16)
    x[3], y[4] = np.nan, np.nan
    found = difference(stored(x), stored(y))
    assert (found.nan, found.nonfinite_moved, found.nonfinite_changed) == (Sides(1, 1), True, True)
    assert describe(found).endswith("NaN or infinite elsewhere")


def test_another_payload_of_a_nan_is_no_change_among_nonfinite_values() -> None:
    x = noise(16)
    x[3] = np.nan
    y = x.copy()
    y.view("<u4")[3] ^= 1
    found = difference(stored(x), stored(y))
    assert not found.equal
    assert not found.nonfinite_changed
    assert (found.changed_index, found.changed_bits) == (3, 1)
    assert "same numbers in other bits" in describe(found)


# ---- types whose numbers take more to know -------------------------------------------------------------


def fp8(values: list[int], name: str) -> Fingerprint:
    """A fingerprint of fp8 bytes, without statistics."""
    raw = tfp1.raw_of(values, 1)
    bits = np.array(values, np.uint64)
    return replace(
        stored(noise(8)), raw=raw, n=len(values), code=4, sketch=None, sample=bits, fp8=name
    )


@pytest.mark.parametrize("name", tfp1.FP8_FORMATS)
def test_fp8_is_compared_as_numbers_of_its_format(name: str) -> None:
    """One step in each number is one unit in the last place; the size is that of the numbers."""
    bits = [0x38, 0x41, 0x3F, 0x52]
    steps = [b + 1 for b in bits]
    found = difference(fp8(bits, name), fp8(steps, name))
    a, b = (np.array([tfp1.fp8_values(name)[x] for x in side]) for side in (bits, steps))
    assert (found.how, found.ulp) == ("exact", 1.0)
    assert found.relative == pytest.approx(truth(a, b))


def test_the_same_bytes_in_another_fp8_format_are_other_numbers() -> None:
    found = difference(fp8([0x38], "float8_e4m3fn"), fp8([0x38], "float8_e5m2"))
    assert not found.equal
    assert found.relative == pytest.approx(0.5)


@pytest.mark.parametrize("dtype", ["int64"])
def test_integers_beyond_2_to_the_53_are_compared_exactly(dtype: str) -> None:
    x = np.array([1 << 60, 5])
    y = np.array([(1 << 60) + 1, 5])
    found = difference(stored(x, dtype), stored(y, dtype))
    assert (found.max_abs, found.absolute_l2, found.changed_index) == (1.0, 1.0, 0)


# ---- casts ---------------------------------------------------------------------------------------------


def to_bfloat16(content: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Rounded to nearest, ties to even."""
    return rounded(content, "bfloat16")


@pytest.mark.parametrize("n", [20, 3000])
def test_a_cast_is_told_from_another_content(n: int) -> None:
    """Digests differ in any case; numbers agree up to the rounding."""
    x = noise(n)
    assert is_cast(stored(x), stored(to_bfloat16(x), "bfloat16")) is True
    assert is_cast(stored(x), stored(x.astype(np.float16), "float16")) is True
    assert is_cast(stored(x), stored(x.astype(np.float64), "float64")) is True
    assert is_cast(stored(to_bfloat16(x), "bfloat16"), stored(to_bfloat16(x))) is True
    other = x.copy()
    other[n // 2] += 1.0
    assert is_cast(stored(x), stored(to_bfloat16(other), "bfloat16")) is False
    assert is_cast(stored(x), stored(bfloat16(x), "bfloat16")) is False  # cut, not rounded
    assert is_cast(stored(x), stored(noise(n, 1).astype(np.float16), "float16")) is False
    assert is_cast(stored(x), stored(x[:-1].astype(np.float16), "float16")) is False
    assert is_cast(stored(x), stored(x)) is True


def test_a_cast_that_cannot_be_judged_is_not() -> None:
    """Without sketches, to integers, and where infinities came of it."""
    x = noise(3000)
    left, right = stored(x), stored(x.astype(np.float16), "float16")
    assert is_cast(replace(left, sketch=None), right) is None
    assert is_cast(left, stored(x.astype(np.int64), "int64")) is None
    x[7] = 1e6
    with np.errstate(over="ignore"):
        overflowed = stored(x.astype(np.float16), "float16")
    assert is_cast(stored(x), overflowed) is None


@given(st.integers(100, 600), st.integers(1, 6), st.floats(1e-6, 10))
@settings(max_examples=30, deadline=None)
def test_the_statistics_never_claim_more_than_the_truth(n: int, changed: int, size: float) -> None:
    x = noise(n).astype(np.float64)
    y = x.copy()
    y[:changed] += size
    found: Difference = difference(
        replace(stored(x, "float64"), sketch=None), replace(stored(y, "float64"), sketch=None)
    )
    assert found.how == "statistics"
    assert found.relative is not None
    assert found.relative <= truth(x, y) * (1 + 1e-9)
