"""Values without a fingerprint are held against each other where both are one order of what has one."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opdrift.orders import _merged, _through
from opdrift.records import TensorMeta


def meta(array: np.ndarray) -> TensorMeta:
    strides = tuple(s // array.itemsize for s in array.strides)
    return TensorMeta(array.shape, strides, "int64", "cpu")


def elements(order: tuple[tuple[int, int], ...]) -> list[int]:
    """The number in the source of each element, in order."""
    found = np.zeros((), np.int64)
    for size, step in order:
        found = found[..., None] + np.arange(size) * step
    return found.ravel().tolist()


@st.composite
def layouts(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """Two arrays over all of one stretch of memory: each a reshape of it with its dims in some order."""
    factors = draw(st.lists(st.sampled_from([1, 2, 3, 4, 5]), min_size=1, max_size=5))
    memory = np.arange(math.prod(factors))
    found = []
    for _ in range(2):
        shape: list[int] = []
        for size in factors:
            if shape and draw(st.booleans()):
                shape[-1] *= size
            else:
                shape.append(size)
        array = memory.reshape(shape)
        found.append(array.transpose(draw(st.permutations(range(array.ndim)))))
    return found[0], found[1]


@given(layouts())
def test_an_order_says_where_each_element_is(arrays: tuple[np.ndarray, np.ndarray]):
    """Element k of the value is the element of the source that its order names, or no order is claimed."""
    value, whole = arrays
    start = _merged([(value.size, 1)])

    order = _through(start, meta(value), meta(whole))

    if order is not None:
        assert whole.ravel()[elements(order)].tolist() == value.ravel().tolist()


@pytest.mark.parametrize("axes", [(0, 2, 1, 3), (0, 1, 2, 3), (3, 0, 2, 1)])
def test_the_heads_of_attention_have_an_order(axes: tuple[int, ...]):
    """A transposed view of (batch, time, heads, width), read through a reshape of its memory."""
    memory = np.arange(2 * 3 * 4 * 5)
    value = memory.reshape(2, 3, 4, 5).transpose(axes)
    whole = memory.reshape(6, 20)

    order = _through(_merged([(value.size, 1)]), meta(value), meta(whole))

    assert order is not None
    assert whole.ravel()[elements(order)].tolist() == value.ravel().tolist()


def test_one_order_is_written_in_one_way():
    """Loops that run on in one another are one; a loop of one turn is none."""
    assert _merged([(2, 12), (1, 7), (3, 4), (4, 1)]) == ((24, 1),)
    assert _merged([(3, 1), (4, 3)]) != _merged([(4, 3), (3, 1)])
