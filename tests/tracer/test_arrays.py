"""Numbers and texts to Arrow and back."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from opdrift.tracefile.arrays import array, numbers

KINDS = [pa.int64(), pa.uint64(), pa.uint32(), pa.uint16(), pa.uint8(), pa.int32(), pa.float64()]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("column", [[0, 3, 200], [], (7,), np.arange(9)[::2]], ids=repr)
def test_numbers_are_those_that_arrow_makes_of_them(kind, column):
    made = array(column, kind)

    made.validate(full=True)
    assert made.equals(pa.array(column, kind))
    assert numbers(made).tolist() == list(column)


@pytest.mark.parametrize("texts", [["a", "", "model.layers.0", "\u00fc\u20ac\n\0"], [], [""]])
def test_texts_are_those_that_arrow_makes_of_them(texts):
    made = array(texts, pa.string())

    made.validate(full=True)
    assert made.equals(pa.array(texts, pa.string()))


def test_a_part_of_an_array_has_the_numbers_of_the_part():
    assert numbers(pa.array([1, 2, 3, 4], pa.uint16())[1:3]).tolist() == [2, 3]


def test_the_largest_numbers_survive():
    largest = [2**64 - 1, 0]

    assert numbers(array(np.array(largest, np.uint64), pa.uint64())).tolist() == largest
