"""How the host puts partial rows together: exact arithmetic, and sums in a fixed order."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opdrift import tfp1
from opdrift.fingerprint import partials
from opdrift.fingerprint.partials import PARTIAL, Ticket, finish
from opdrift.tfp1 import Code, P

below_p = st.integers(0, P - 1) | st.sampled_from(
    [0, 1, P - 1, P - 2, (1 << 31) - 1, 1 << 31, 1 << 60]
)


@given(st.lists(st.tuples(below_p, below_p), min_size=1, max_size=20))
def test_products_are_exact(pairs):
    """The product of two residues, in 64 bits, against Python's integers."""
    a, b = (np.array(side, np.uint64) for side in zip(*pairs, strict=True))

    assert partials._multiply(a, b).tolist() == [x * y % P for x, y in pairs]


@given(st.lists(st.integers(0, (1 << 64) - 1), min_size=1, max_size=20), st.integers(1, 60))
def test_reductions_and_turns_are_exact(numbers, by):
    """Any 64-bit number is reduced; a reduced one is multiplied by a power of two."""
    reduced = partials._reduce(np.array(numbers, np.uint64))

    assert reduced.tolist() == [x % P for x in numbers]
    assert partials._turn(reduced, np.uint64(by)).tolist() == [x * 2**by % P for x in numbers]


@given(st.lists(st.tuples(st.integers(0, 1 << 42), st.integers(0, 1 << 42)), min_size=1))
def test_halves_are_joined(halves):
    """Sums over lanes may exceed 32 bits by far."""
    low, high = (np.array(side, np.int64) for side in zip(*halves, strict=True))

    assert partials._join(low, high).tolist() == [(x + (y << 32)) % P for x, y in halves]


def part(raw: int = 0, upper: int = 0, **fields: object) -> np.ndarray:
    """One partial row."""
    row = np.zeros(1, PARTIAL)
    row["low"], row["high"] = raw & 0xFFFFFFFF, raw >> 32
    row["low_upper"], row["high_upper"] = upper & 0xFFFFFFFF, upper >> 32
    row["min"], row["max"] = np.inf, -np.inf
    for name, value in fields.items():
        row[name] = value
    return row


def test_parts_are_shifted_by_the_digits_before_them():
    """Part g starts at digit g * span, or twice that for components of 8 bytes."""
    parts = np.concatenate([part(5), part(7), part(11), part(5, 1), part(7, 2)])
    rows = finish(
        parts,
        [Ticket(1, Code.F32, 2500, 1, 3, 1000), Ticket(2, Code.I64, 1500, 1, 2, 1000)],
    )

    first = tfp1.compose([(5, 0), (7, 1000), (11, 2000)])
    second = tfp1.compose([(5, 0), (1, 1), (7, 2000), (2, 2001)])
    assert rows["raw"].tolist() == [first, second]
    assert rows["value"].tolist() == [1, 2]
    assert rows["n"].tolist() == [2500, 1500]


def test_statistics_of_parts_are_added_up_and_items_are_not_mixed():
    """Two items of two parts each: sums, counts, extremes; the sample is the first part's."""
    sample = np.arange(1, 33)
    rows = finish(
        np.concatenate(
            [
                part(sum=1.5, ssq=2.0, min=-3.0, max=1.0, zero=2, nan=1, sample=sample),
                part(sum=2.5, ssq=1.0, min=0.0, max=4.0, zero=3, sub=1, sample=9),
                part(sum=10.0, min=-0.0, max=-0.0, pinf=1, sample=sample + 1),
                part(ninf=2),
            ]
        ),
        [Ticket(4, Code.F32, 5000, 2, 2, 4096)],
    )

    assert rows["item"].tolist() == [0, 1]
    assert rows[["sum", "ssq", "min", "max", "absmax"]].tolist() == [
        (4.0, 3.0, -3.0, 4.0, 4.0),
        (10.0, 0.0, 0.0, 0.0, 0.0),
    ]
    assert np.signbit(rows["min"]).tolist() == [True, False]  # no negative zero
    assert rows[["nan", "pinf", "ninf", "zero", "sub"]].tolist() == [
        (1, 0, 0, 5, 1),
        (0, 1, 2, 0, 0),
    ]
    assert rows["sample"].tolist() == [sample.tolist(), (sample + 1).tolist()]


@pytest.mark.parametrize(("code", "stored"), [(Code.F32, np.float64), (Code.BF16, np.float32)])
def test_sketches_are_stored_by_width(code, stored):
    """32 folded buckets in float64, or all 64 in float32."""
    sketch = np.arange(64.0)
    rows = finish(
        np.concatenate([part(sketch=sketch), part(sketch=sketch)]),
        [Ticket(0, code, 5000, 1, 2, 4096)],
    )
    wanted = 2 * sketch if stored is np.float32 else 2 * (sketch[:32] + sketch[32:])

    assert rows["sketch"][0].view(stored).tolist() == wanted.tolist()


def test_what_a_type_has_no_use_for_may_hold_anything():
    """Rows are used again without being cleared: raw bytes have no statistics, short samples an end."""
    garbage = np.full(PARTIAL.itemsize, 0xFF, np.uint8).view(PARTIAL)
    garbage["low"], garbage["high"] = 17, 0
    (row,) = finish(garbage, [Ticket(0, Code.RAW, 3, 1, 1, 4096)])
    plain = finish(part(17), [Ticket(0, Code.RAW, 3, 1, 1, 4096)])[0]

    for name in ("raw", "flags", "min", "max", "sum", "nan", "zero"):
        assert row[name] == plain[name]
    assert not row["sketch"].any()
    assert row["sample"].tolist()[3:] == [0] * 29
    assert row["flags"] == 9


def test_no_tickets_no_rows():
    """A flush without launches."""
    assert len(finish(np.zeros(0, PARTIAL), [])) == 0
